-- Remove a group and what is noted of it. KEYS: stream, meta, books. ARGV: group. Gives 1 where there was one.
local group = ARGV[1]
forget(books(3))
local fields = {'read:', 'lost:', 'untold:', 'scan:', 'epoch:'}
for i, field in ipairs(fields) do fields[i] = field .. group end
call('HDEL', KEYS[2], unpack(fields))
if not group_of(KEYS[1], group) then return 0 end
return call('XGROUP', 'DESTROY', KEYS[1], group)
