-- The id of the n-th entry from the end, from the nearer end. KEYS: stream. ARGV: n.
local length, n = call('XLEN', KEYS[1]), tonumber(ARGV[1])
if length < n then return false end
local command, from, to, steps = 'XREVRANGE', '+', '-', n
if length - n + 1 < n then command, from, to, steps = 'XRANGE', '-', '+', length - n + 1 end
while true do
  local page = call(command, KEYS[1], from, to, 'COUNT', math.min(steps, 1000))
  steps = steps - #page
  if steps <= 0 then return page[#page][1] end
  from = '(' .. page[#page][1]
end
