-- Lease events to a member: its own first, then those whose lease ran out, then new ones.
-- KEYS: stream, meta, books. ARGV: group, member, limit, microseconds, most deliveries or 0, a random text.
-- Gives {lost, epoch, spans, exhausted, token}; a span is {first, last, events, deliveries, reason or false}.
--
-- After it, the spans read exactly the entries that the token holds, those entries are pending for the member, and no
-- other token holds them.
--
-- Who has what is said twice: by Redis' pending entries, and by our books. Where they differ, Redis is right:
--   no longer pending: somebody else acknowledged it, and the books forget it;
--   not in held: it is taken once it is idle for as long as a lease is, as from a client without leases;
--   given back and not in returned: it can be had at once;
--   leases or ends gone: it is found in held, when its end has come.

local stream, meta, book = KEYS[1], KEYS[2], books(3)
local group, member, token = ARGV[1], ARGV[2], ARGV[6]
local limit, micros, most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_micros()
-- So many pending entries are looked at together, and fewer of a stream's, which come with their values.
local PAGE, VALUES_PAGE = 1000, 100
-- So many pages of pending entries are looked through for deleted ones.
local MOST_PAGES = 100
