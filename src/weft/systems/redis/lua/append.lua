-- Append batches to streams, all or nothing.
-- KEYS: for each batch its stream and its idempotency keys. ARGV: for each batch a MessagePack list of
-- {names, columns, publish ids, their counts, whether there are no nulls, extra or nil, keys or nil, horizon in
-- microseconds}.
-- Gives for each batch, for each publish: first id, last id, how many were stored.

-- The low 20 bits of an offset hold an id's sequence.
local SEQUENCES = 1048576

-- Before anything is written: nothing may fail after that.
for i = 1, #KEYS, 2 do
  local kind = call('TYPE', KEYS[i])['ok']
  if kind ~= 'none' and kind ~= 'stream' then
    return redis.error_reply('WRONGTYPE ' .. KEYS[i] .. ' is a ' .. kind .. ', not a stream')
  end
end

-- How many entries can still have the millisecond of the last one, and the next one's.
local function room_of(key)
  local stream = stream_of(key)
  local time = math.floor(now_micros() / 1000)
  if not stream then return SEQUENCES, time + 1 end
  local ms, seq = parts(stream['last-generated-id'])
  if ms < time then return SEQUENCES, time + 1 end
  return SEQUENCES - 1 - seq, ms + 1
end

local now = now_micros()
local results = {}
for b = 1, #ARGV do
  local key, seen = KEYS[2 * b - 1], KEYS[2 * b]
  local names, columns, publishes, counts, is_full, extra, keys, horizon = unpack(cmsgpack.unpack(ARGV[b]), 1, 8)
  local words = {'XADD', key, '*'}
  local width = #names
  for c = 1, width do words[2 + 2 * c] = names[c] end
  local room, next_ms = room_of(key)
  local row, answers = 0, {}
  for p = 1, #publishes do
    local first, last, stored = false, false, 0
    for _ = 1, counts[p] do
      row = row + 1
      local wanted = true
      local unique = keys and keys[row]
      if unique then
        local score = call('ZSCORE', seen, unique)
        wanted = not score or tonumber(score) < now - horizon
        if wanted then call('ZADD', seen, string.format('%d', now), unique) end
      end
      if wanted then
        local at = 3
        if is_full then
          for c = 1, width do words[3 + 2 * c] = columns[c][row] end
          at = 3 + 2 * width
        else
          for c = 1, width do
            local value = columns[c][row]
            if value then
              words[at + 1], words[at + 2] = names[c], value
              at = at + 2
            end
          end
        end
        if extra and extra[row] then
          words[at + 1], words[at + 2] = '_weft_extra', extra[row]
          at = at + 2
        end
        words[at + 1], words[at + 2] = '_weft_publish_id', publishes[p]
        if room > 0 then
          room, words[3] = room - 1, '*'
        else
          words[3] = string.format('%d-0', next_ms)
          room, next_ms = SEQUENCES - 1, next_ms + 1
        end
        last = call(unpack(words, 1, at + 2))
        first = first or last
        stored = stored + 1
      end
    end
    answers[p] = {first, last, stored}
  end
  results[b] = answers
end
return results
