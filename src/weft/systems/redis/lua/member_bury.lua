-- Move an entry that is still a member's to the dead letters, and acknowledge it.
-- KEYS: the stream, the dead letters. ARGV: the group, the member, the id, its deliveries.

if not call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])[1] then return end
local entry = call('XRANGE', KEYS[1], ARGV[3], ARGV[3])[1]
if entry then
  -- The stack of a script has room for so many names and values; the entry itself stays where it is, whole.
  call('XADD', KEYS[2], '*', '_stream', KEYS[1], '_group', ARGV[1], '_id', ARGV[3], '_deliveries', ARGV[4],
    unpack(entry[2], 1, math.min(#entry[2], 7000)))
end
call('XACK', KEYS[1], ARGV[1], ARGV[3])
