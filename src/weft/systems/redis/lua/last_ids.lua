-- The last ids of streams. KEYS: for each its stream and meta. Gives for each its last id, or false where it is no stream.
local found = {}
for i = 1, #KEYS, 2 do
  local kind = call('TYPE', KEYS[i])['ok']
  local is_stream = kind == 'stream' or kind == 'none'
  found[#found + 1] = is_stream and end_of(stream_of(KEYS[i]), KEYS[i + 1])
end
return found
