-- Give a member entries that are as they were listed, or that are its own by this very request, whose reply was lost.
-- What others did meanwhile stays as it is. Replies id, fields and deliveries of each, and how many were deleted.
-- KEYS: the stream. ARGV: the group, the member, the least milliseconds since the last delivery, 1 if this one counts;
-- then id, holder and deliveries of each.

local group, member, idle, counts = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local taken, deleted = {}, 0
for i = 5, #ARGV, 3 do
  local id, holder, before = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local held = call('XPENDING', KEYS[1], group, id, id, 1)[1]
  local as_listed = held and held[2] == holder and held[4] == before and held[3] >= idle
  if as_listed or (held and held[2] == member and held[4] == before + counts) then
    local entry = call('XCLAIM', KEYS[1], group, member, 0, id, 'RETRYCOUNT', before + counts)[1]
    if entry then
      taken[#taken + 1] = {id, entry[2], before + counts}
    else
      call('XACK', KEYS[1], group, id)
      deleted = deleted + 1
    end
  end
end
return {taken, deleted}
