-- KEYS: stream, meta. Gives the last id that was given out, the last id that retention removed, and how many entries there
-- are.
local stream = stream_of(KEYS[1])
return {last_of(stream, KEYS[2]), call('HGET', KEYS[2], 'floor') or '0-0', stream and stream['length'] or 0}
