-- Who holds pending entries, of a part of them. KEYS: stream. ARGV: group, the id to begin at.
-- Gives how many there were, the last id or false, and members: {name, pending, the moment of the first, deliveries}.
local now, page, members, results = now_micros(), {}, {}, {}
if group_of(KEYS[1], ARGV[1]) then -- somebody may have removed it by now
  page = call('XPENDING', KEYS[1], ARGV[1], ARGV[2], '+', 10000)
end
for _, entry in ipairs(page) do
  local holder = members[entry[2]]
  if not holder then
    holder = {entry[2], 0, string.format('%d', now - entry[3] * 1000), 0}
    members[entry[2]] = holder
    if entry[2] ~= NOBODY then results[#results + 1] = holder end
  end
  holder[2] = holder[2] + 1
  holder[4] = math.max(holder[4], entry[4])
end
return {#page, #page > 0 and page[#page][1], results}
