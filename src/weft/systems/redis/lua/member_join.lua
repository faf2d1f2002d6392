-- Where a group begins, the stream's last id, what the group was given last (nil without a group), and whether it had
-- to be created.
-- KEYS: the stream. ARGV: the group, where it begins, the stream's last id as it was known before, whether to create it.

local stream = stream_of(KEYS[1])
local last = stream and stream['last-generated-id'] or '0-0'
local start = ARGV[2]
if is_before(last, ARGV[3]) then
  start = '0-0' -- the stream itself began anew
elseif start == '$' then
  start = last
end
local group = group_of(KEYS[1], ARGV[1])
if group then return {start, last, group['last-delivered-id'], 0} end
if ARGV[4] == '0' then return {start, last, false, 0} end
call('XGROUP', 'CREATE', KEYS[1], ARGV[1], start, 'MKSTREAM')
return {start, last, start, 1}
