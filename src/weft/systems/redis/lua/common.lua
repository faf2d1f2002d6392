-- What the scripts share; put before each of them. A stream's keys have one hash tag, so that a cluster keeps them
-- together. Offsets are entries' ids here, "ms-seq"; moments are microseconds.

local call = redis.call
-- Lua can pass this many arguments at once, with room to spare.
local CHUNK = 5000
-- Holds what was given back until somebody takes it.
local NOBODY = 'weft:given-back'

local function now_micros()
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

-- The epoch of a group that begins: a token of one of its name that was removed must not be one of it.
local function first_epoch()
  return string.format('%d', now_micros())
end

-- RESP2 gives maps as lists.
local function map_of(flat)
  local found = {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end

local function parts(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end

local function is_before(a, b)
  local a_ms, a_seq = parts(a)
  local b_ms, b_seq = parts(b)
  return a_ms < b_ms or (a_ms == b_ms and a_seq < b_seq)
end

-- Sort what has ids.
local function sort_by_id(list, id_of)
  local ms, seq = {}, {}
  for _, each in ipairs(list) do ms[each], seq[each] = parts(id_of(each)) end
  table.sort(list, function(a, b) return ms[a] < ms[b] or (ms[a] == ms[b] and seq[a] < seq[b]) end)
end

-- XINFO STREAM, or nil where there is no such key.
local function stream_of(key)
  if call('EXISTS', key) == 0 then return nil end
  return map_of(call('XINFO', 'STREAM', key))
end

-- The last id that was given out, also where the stream was deleted; `stream` is its XINFO, or nil.
local function last_of(stream, meta)
  local last = stream and stream['last-generated-id'] or '0-0'
  for _, id in ipairs({call('HGET', meta, 'floor') or '0-0', call('HGET', meta, 'head') or '0-0'}) do
    if is_before(last, id) then last = id end
  end
  return last
end

-- The last id that readers may see. Where somebody deleted the stream and others add entries with lower ids, these are the
-- stream: a reader that waited at the end of the old one is told.
local function end_of(stream, meta)
  if not stream or stream['length'] == 0 then return last_of(stream, meta) end
  local last, floor = stream['last-generated-id'], call('HGET', meta, 'floor') or '0-0'
  return is_before(last, floor) and floor or last
end

local function group_of(key, name)
  if call('EXISTS', key) == 0 then return nil end
  for _, flat in ipairs(call('XINFO', 'GROUPS', key)) do
    local group = map_of(flat)
    if group['name'] == name then return group end
  end
  return nil
end

-- A command with a long list of arguments, in as many calls as it takes; `each` gets the replies.
local function in_chunks(words, list, each, ending)
  for start = 1, #list, CHUNK do
    local command = {unpack(words)}
    local at = #command
    for i = start, math.min(start + CHUNK - 1, #list) do
      at = at + 1
      command[at] = list[i]
    end
    for _, word in ipairs(ending or {}) do
      at = at + 1
      command[at] = word
    end
    local reply = call(unpack(command))
    if each then each(reply, start) end
  end
end

-- The ids of the first entries of a range. Entries come with their values, so that few are looked at together.
local function first_ids(key, from, to, most)
  local ids = {}
  while #ids < most do
    local wanted = math.min(most - #ids, 100)
    local page = call('XRANGE', key, from, to, 'COUNT', wanted)
    for i = 1, #page do ids[#ids + 1] = page[i][1] end
    if #page < wanted then break end
    from = '(' .. ids[#ids]
  end
  return ids
end

-- How many entries a group has read, and up to where. Redis counts them too, but forgets that in a restart (7.0).
local function note_read(meta, name, count, position)
  call('HSET', meta, 'read:' .. name, string.format('%d %s', count, position))
end

-- How many it has read up to a position; nil where that is not known, because another client read on.
local function noted_read(meta, name, position)
  local read, upto = string.match(call('HGET', meta, 'read:' .. name) or '', '^(%d+) (.*)$')
  return upto == position and tonumber(read) or nil
end

-- Create a group that goes on after `position`.
local function create_group(key, meta, name, position)
  call('XGROUP', 'CREATE', key, name, position, 'MKSTREAM')
  call('HDEL', meta, 'read:' .. name, 'untold:' .. name, 'scan:' .. name)
  local stream = stream_of(key)
  local first = stream['first-entry']
  if not first or is_before(position, first[1]) then
    note_read(meta, name, stream['entries-added'] - stream['length'], position)
  end
end

-- What one consumer's bookkeeping is in; KEYS begin with stream and meta, then these.
local function books(from)
  return {
    held = KEYS[from], -- hash: id -> "token expires"
    leases = KEYS[from + 1], -- hash: token -> "left first last member"
    ends = KEYS[from + 2], -- sorted set: token by expires
    returned = KEYS[from + 3], -- sorted set: id by when it can be had again
    reasons = KEYS[from + 4], -- hash: id -> why it was given back
  }
end

local function forget(book)
  call('DEL', book.held, book.leases, book.ends, book.returned, book.reasons)
end

-- The tokens that hold some ids, and how many of them each.
local function tokens_of(book, ids)
  local counts = {}
  in_chunks({'HMGET', book.held}, ids, function(reply)
    for _, held in ipairs(reply) do
      local token = held and string.match(held, '^%S+')
      if token then counts[token] = (counts[token] or 0) + 1 end
    end
  end)
  return counts
end

-- So many events of a token were settled or taken over; without any left the lease is gone.
local function release(book, token, count)
  local lease = call('HGET', book.leases, token)
  if not lease then return end
  local left, rest = string.match(lease, '^(%d+) (.*)$')
  left = tonumber(left) - count
  if left > 0 then
    call('HSET', book.leases, token, left .. ' ' .. rest)
  else
    call('HDEL', book.leases, token)
    call('ZREM', book.ends, token)
  end
end

local function holder_of(book, token)
  local lease = call('HGET', book.leases, token)
  return lease and string.match(lease, '^%d+ %S+ %S+ (.*)$')
end
