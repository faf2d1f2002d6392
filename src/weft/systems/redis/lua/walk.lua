-- Go so many entries on from an id, or back; a part of the way, as everybody waits for a script.
-- KEYS: stream. ARGV: XRANGE or XREVRANGE, where to begin, where to end, how many at most.
-- Gives how many there were and the last id, or false.
local left, count, from, last = math.min(tonumber(ARGV[4]), 10000), 0, ARGV[2], false
while left > 0 do
  local wanted = math.min(left, 100)
  local page = call(ARGV[1], KEYS[1], from, ARGV[3], 'COUNT', wanted)
  count, left = count + #page, left - #page
  if #page > 0 then last = page[#page][1] end
  if #page < wanted then break end
  from = '(' .. last
end
return {count, last}
