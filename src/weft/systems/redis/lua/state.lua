-- KEYS: stream, meta. Gives the last id that was given out, the last id that retention removed, and how many entries there
-- are.
local stream = stream_of(KEYS[1])
local noted = call('HMGET', KEYS[2], 'floor', 'head')
local last, floor = stream and stream['last-generated-id'] or '0-0', noted[1] or '0-0'
for _, id in ipairs({floor, noted[2] or '0-0'}) do
  if is_before(last, id) then last = id end
end
return {last, floor, stream and stream['length'] or 0}
