-- KEYS: stream. Gives about how many bytes it takes up, or false. By pcall: some servers have no such command, and some users may
-- not give it.
local size = redis.pcall('MEMORY', 'USAGE', KEYS[1])
return type(size) == 'number' and size
