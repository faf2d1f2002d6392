-- KEYS: stream, meta. Gives the last id, the last id that retention removed, and how many entries there are.
local stream = stream_of(KEYS[1])
local floor = call('HGET', KEYS[2], 'floor') or '0-0'
if not stream then return {floor, floor, 0} end
local last = stream['last-generated-id']
if is_before(last, floor) then last = floor end
return {last, floor, stream['length']}
