-- Forget what a group's members hold, and let it go on after a position.
-- KEYS: stream, meta, books. ARGV: group, position.
local group = ARGV[1]
if group_of(KEYS[1], group) then call('XGROUP', 'DESTROY', KEYS[1], group) end
forget(books(3))
create_group(KEYS[1], KEYS[2], group, ARGV[2])
call('HSETNX', KEYS[2], 'epoch:' .. group, first_epoch())
call('HINCRBY', KEYS[2], 'epoch:' .. group, 1)
