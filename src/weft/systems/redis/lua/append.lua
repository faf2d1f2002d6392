-- Append batches to streams, all or nothing.
-- KEYS: for each batch its stream, meta and idempotency keys, or the stream again where it has none.
-- ARGV: for each batch a MessagePack list of {names, publish ids, their counts, whether there are no nulls, horizon in
-- microseconds, an id that was given out, the bytes of each column, whether it is joined, the key of a publish and that of
-- the publish with its events}, and behind it the columns: values one after the other, MessagePack or, of one that is
-- joined, texts that end with a zero byte. There is a column for each name, and one more where there are keys.
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

-- A key of a publish that comes again with other events.
local function is_seen(seen, key, horizon)
  local score = call('ZSCORE', seen, key)
  return score and tonumber(score) >= now - horizon
end
local keyed = {}
for b = 1, #ARGV do
  local seen = KEYS[3 * b]
  if seen ~= KEYS[3 * b - 2] then
    local _, header = cmsgpack.unpack_limit(ARGV[b], 1, 0)
    local horizon, used, same = header[5], unpack(header[9], 1, 2)
    local earlier = used and keyed[seen .. used]
    if earlier and earlier ~= same
      or used and is_seen(seen, used, horizon) and not is_seen(seen, same, horizon) then
      return redis.error_reply('NOTSTORED an idempotency key came again with other events')
    end
    if used then keyed[seen .. used] = same end
  end
end

-- So many rows are read at a time: straight from a column to Lua's stack, which has no room for all.
local ROWS = 1000

-- So many values of a column, from the second on, and where the next ones are.
local function take(data, is_joined, start, rows)
  if is_joined then
    local values = {0, struct.unpack(string.rep('s', rows), data, start + 1)}
    return values, values[rows + 2] - 1
  end
  local values = {cmsgpack.unpack_limit(data, rows, start)}
  return values, values[1]
end

-- XADD of many rows in which nothing is missing, each word an argument of its own: a table of them, unpacked for each
-- row, takes a fourth longer. For as many columns as a function can hold, and more rows than it takes time to make.
local function adder(width, rows)
  if width == 0 or width > 50 or rows < 50 then return end
  local names, columns, words = {}, {}, {}
  for c = 1, width do
    names[c], columns[c] = 'n' .. c, 'c' .. c
    words[c] = 'n' .. c .. ', c' .. c .. '[row]'
  end
  return loadstring('local call, key, id, publish, first, last, names, columns = ...\n'
    .. 'local ' .. table.concat(names, ', ') .. ' = unpack(names)\n'
    .. 'local ' .. table.concat(columns, ', ') .. ' = unpack(columns)\n'
    .. 'local from, to\n'
    .. 'for row = first, last do\n'
    .. "  to = call('XADD', key, id, " .. table.concat(words, ', ') .. ", '_weft_publish_id', publish)\n"
    .. '  from = from or to\n'
    .. 'end\n'
    .. 'return from, to')
end

local results = {}
for b = 1, #ARGV do
  local key, meta, seen, data = KEYS[3 * b - 2], KEYS[3 * b - 1], KEYS[3 * b], ARGV[b]
  local at, header = cmsgpack.unpack_limit(data, 1, 0)
  local names, publishes, counts, is_full, horizon, given_out, sizes, joined = unpack(header, 1, 8)
  for _, key in ipairs(header[9]) do
    if not is_seen(seen, key, horizon) then call('ZADD', seen, string.format('%d', now), key) end
  end
  local starts, columns, width, unread = {}, {}, #names, 0
  for c = 1, #sizes do starts[c], at = at, at + sizes[c] end
  for p = 1, #publishes do unread = unread + counts[p] end
  local ms, room, went_back = place_in(key, meta, given_out)
  local words = {'XADD', key, string.format('%d-*', ms)}
  local add = is_full and #sizes == width and adder(width, unread)
  local row, upto, answers, head = 1, 0, {}, nil
  for p = 1, #publishes do
    local first, last, stored, left = false, false, 0, counts[p]
    while left > 0 do
      if row > upto then
        local rows = math.min(unread, ROWS)
        for c = 1, #sizes do
          columns[c], starts[c] = take(data, joined[c], starts[c], rows)
        end
        row, upto, unread = 2, rows + 1, unread - rows
      end
      local rows = math.min(left, upto - row + 1)
      if add and rows <= room then
        local from, to = add(call, key, words[3], publishes[p], row, row + rows - 1, names, columns)
        first, last, stored, room = first or from, to, stored + rows, room - rows
      else
        for r = row, row + rows - 1 do
          local wanted = true
          local unique = #sizes > width and columns[width + 1][r]
          if unique then
            wanted = not is_seen(seen, unique, horizon)
            if wanted then call('ZADD', seen, string.format('%d', now), unique) end
          end
          if wanted then
            local n = 3
            for c = 1, width do
              local value = columns[c][r]
              if value then
                words[n + 1], words[n + 2] = names[c], value
                n = n + 2
              end
            end
            words[n + 1], words[n + 2] = '_weft_publish_id', publishes[p]
            if room == 0 then
              ms, room = ms + 1, SEQUENCES
              words[3] = string.format('%d-*', ms)
            end
            room = room - 1
            last = call(unpack(words, 1, n + 2))
            first = first or last
            stored = stored + 1
          end
        end
      end
      row, left = row + rows, left - rows
    end
    answers[p], head = {first, last, stored}, last or head
  end
  if head then call('HSET', meta, 'head', head) end
  results[b] = {call('HEXISTS', meta, 'floor'), went_back and 1 or 0, answers}
end
return results
