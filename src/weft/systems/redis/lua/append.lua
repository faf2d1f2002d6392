-- Append batches to streams, all or nothing.
-- KEYS: for each batch its stream, meta and idempotency keys, or the stream again where it has none. ARGV: for each batch a MessagePack list of
-- {names, columns, publish ids, their counts, whether there are no nulls, extra or nil, keys or nil, horizon in
-- microseconds, an id that was given out}.
-- Gives for each batch whether the server knows the stream (it may have been flushed), 1 where it went back to an earlier
-- state, and for each publish: first id, last id, how many were stored.

-- The low 20 bits of an offset hold an id's sequence, the others its milliseconds.
local SEQUENCES, MILLISECONDS = 1048576, 8796093022208

local now = now_micros()

-- The millisecond of the next entries, and how many can have it. One for all of a commit, whatever the clock does
-- meanwhile; not before the last entry's, nor at or before an id that was given out: the stream may have been deleted, or
-- the server went back to an earlier state, which is told.
local function place_in(key, meta, given_out)
  local stream, ms = stream_of(key), math.floor(now / 1000)
  local last, head = stream and stream['last-generated-id'] or '0-0', last_of(stream, meta)
  local went_back = is_before(head, given_out)
  if went_back then head = given_out end
  local last_ms, last_seq = parts(last)
  if is_before(last, head) then last_ms, last_seq = parts(head) + 1, -1 end
  if last_ms >= ms then return last_ms, SEQUENCES - 1 - last_seq, went_back end
  return ms, SEQUENCES, went_back
end

-- Before anything is written: nothing may fail after that.
local KINDS = {'stream', 'hash', 'zset'}
for i = 1, #KEYS do
  local kind, wanted = call('TYPE', KEYS[i])['ok'], KINDS[(i - 1) % 3 + 1]
  if kind ~= 'none' and kind ~= wanted and KEYS[i] ~= KEYS[i - 2] then
    return redis.error_reply('NOTSTORED ' .. KEYS[i] .. ' is a ' .. kind .. ', not a ' .. wanted)
  end
  -- With room for all that one call can bring.
  if i % 3 == 2 and place_in(KEYS[i - 1], KEYS[i], '0-0') > MILLISECONDS - 1000 then
    return redis.error_reply('NOTSTORED the last id of ' .. KEYS[i - 1] .. ' leaves no offset for another entry')
  end
end

-- XADD of many rows in which nothing is missing, each word an argument of its own: a table of them, unpacked for each
-- row, takes a fourth longer. For as many columns as a function can hold.
local function adder(key, names, columns)
  local width = #names
  if width == 0 or width > 25 then return end
  local locals, words, values = {}, {}, {}
  for c = 1, width do
    locals[2 * c - 1], locals[2 * c] = 'n' .. c, 'c' .. c
    words[c] = 'n' .. c .. ', c' .. c .. '[row]'
    values[2 * c - 1], values[2 * c] = names[c], columns[c]
  end
  local source = 'local call, key, ' .. table.concat(locals, ', ') .. ' = ...\n'
    .. 'return function(id, first, last, publish)\n'
    .. '  local from, to\n'
    .. '  for row = first, last do\n'
    .. "    to = call('XADD', key, id, " .. table.concat(words, ', ') .. ", '_weft_publish_id', publish)\n"
    .. '    from = from or to\n'
    .. '  end\n'
    .. '  return from, to, last - first + 1\n'
    .. 'end'
  return loadstring(source)(call, key, unpack(values))
end

local results = {}
for b = 1, #ARGV do
  local key, meta, seen = KEYS[3 * b - 2], KEYS[3 * b - 1], KEYS[3 * b]
  local names, columns, publishes, counts, is_full, extra, keys, horizon, given_out =
    unpack(cmsgpack.unpack(ARGV[b]), 1, 9)
  local ms, room, went_back = place_in(key, meta, given_out)
  local words = {'XADD', key, string.format('%d-*', ms)}
  local width = #names
  local add = is_full and not extra and not keys and adder(key, names, columns)
  local row, answers, head = 0, {}, nil
  for p = 1, #publishes do
    local first, last, stored = false, false, 0
    if add and counts[p] > 0 and counts[p] <= room then
      first, last, stored = add(words[3], row + 1, row + counts[p], publishes[p])
      row, room = row + stored, room - stored
    else
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
          for c = 1, width do
            local value = columns[c][row]
            if value then
              words[at + 1], words[at + 2] = names[c], value
              at = at + 2
            end
          end
          if extra and extra[row] then
            words[at + 1], words[at + 2] = '_weft_extra', extra[row]
            at = at + 2
          end
          words[at + 1], words[at + 2] = '_weft_publish_id', publishes[p]
          if room == 0 then
            ms, room = ms + 1, SEQUENCES
            words[3] = string.format('%d-*', ms)
          end
          room = room - 1
          last = call(unpack(words, 1, at + 2))
          first = first or last
          stored = stored + 1
        end
      end
    end
    answers[p], head = {first, last, stored}, last or head
  end
  if head then call('HSET', meta, 'head', head) end
  results[b] = {call('HEXISTS', meta, 'floor'), went_back and 1 or 0, answers}
end
return results
