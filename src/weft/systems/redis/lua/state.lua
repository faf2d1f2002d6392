-- KEYS: stream, meta. Gives the last id that was given out, the last id that retention removed, how many entries there
-- are, how many were ever added up to that last id (false where the stream is another than the one it was given out in), and
-- the first entry's id or false.
local stream = stream_of(KEYS[1])
local last, floor = end_of(stream, KEYS[2]), call('HGET', KEYS[2], 'floor') or '0-0'
if not stream then return {last, floor, 0, false, false} end
local added = last == stream['last-generated-id'] and stream['entries-added']
local first = stream['first-entry']
return {last, floor, stream['length'], added, first and first[1]}
