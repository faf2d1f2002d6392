-- Put entries that are still a member's where all members look; how many. They seem idle for a day, so that clients of
-- others that claim idle entries have them too.
-- KEYS: the stream. ARGV: the group, the member, by how much deliveries are less than counted; then ids.

local given = 0
for i = 4, #ARGV do
  local held = call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])[1]
  if held then
    call('XCLAIM', KEYS[1], ARGV[1], NOBODY, 0, ARGV[i],
      'IDLE', 86400000, 'RETRYCOUNT', math.max(0, held[4] - ARGV[3]), 'JUSTID')
    given = given + 1
  end
end
return given
