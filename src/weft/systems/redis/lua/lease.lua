-- Lease events to a member: its own first, then those whose lease ran out, then new ones.
-- KEYS: stream, meta, books. ARGV: group, member, limit, microseconds, most deliveries or 0, token.
-- Gives {lost, epoch, spans, exhausted}; a span is {first, last, events, deliveries, reason or false}.

local stream, meta, book = KEYS[1], KEYS[2], books(3)
local group, member, token = ARGV[1], ARGV[2], ARGV[6]
local limit, micros, most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_micros()
local expires = string.format('%d', now + micros)
local floor = call('HGET', meta, 'floor') or '0-0'

local state = group_of(stream, group)
if not state then
  forget(book)
  create_group(stream, meta, group, floor)
  state = group_of(stream, group)
end
local epoch = tonumber(call('HGET', meta, 'epoch:' .. group) or 0)

-- Pending entries of a range, a page at a time, for which `is_wanted` is true.
local function pending(first, last, consumer, room, is_wanted, found)
  local from = first
  while room > 0 do
    local page = call('XPENDING', stream, group, from, last, 1000, consumer)
    for _, entry in ipairs(page) do
      if room > 0 and is_wanted(entry) then
        found[#found + 1] = {id = entry[1], consumer = entry[2], deliveries = entry[4]}
        room = room - 1
      end
    end
    if #page < 1000 then return end
    from = '(' .. page[#page][1]
  end
end

local function is_held_by(id, lease)
  local held = call('HGET', book.held, id)
  return held and string.match(held, '^%S+') == lease
end

-- Whether the member could have a pending entry now.
local function is_free(entry)
  if entry[2] == member then return true end
  local held = call('HGET', book.held, entry[1])
  if held then return tonumber(string.match(held, '%S+$')) <= now end
  local due = call('ZSCORE', book.returned, entry[1])
  if due then return tonumber(due) <= now end
  -- Given back, and somebody removed the note of until when; or of a client without leases.
  return entry[2] == NOBODY or entry[3] * 1000 >= micros
end

-- Forget an entry that is not in the stream any more.
local function drop(id)
  local held = call('HGET', book.held, id)
  if held then release(book, string.match(held, '^%S+'), 1) end
  call('XACK', stream, group, id)
  call('HDEL', book.held, id)
  call('ZREM', book.returned, id)
  call('HDEL', book.reasons, id)
end

-- What retention removed and nobody can acknowledge any more is told in one piece.
local gone = 0
if state['pending'] > 0 and floor ~= '0-0' then
  local from = '-'
  while true do
    local page = call('XPENDING', stream, group, from, floor, 1000)
    for _, entry in ipairs(page) do
      if is_free(entry) then
        drop(entry[1])
        gone = gone + 1
      end
    end
    if #page < 1000 then break end
    from = '(' .. page[#page][1]
  end
end

local candidates = {}
if state['pending'] == gone then
  forget(book) -- whatever it says: nobody holds anything
else
  pending('-', '+', member, limit, function() return true end, candidates)
  local others = {}
  local room = limit - #candidates
  if room > 0 then
    for _, ended in ipairs(call('ZRANGEBYSCORE', book.ends, '-inf', now, 'LIMIT', 0, 1000)) do
      local lease = call('HGET', book.leases, ended)
      local first, last, holder = string.match(lease or '', '^%d+ (%S+) (%S+) (.*)$')
      if holder ~= member and #others < room then
        local before = #others
        if first then
          pending(first, last, holder, room - before, function(e) return is_held_by(e[1], ended) end, others)
        end
        if #others == before then -- a client without leases acknowledged them
          call('HDEL', book.leases, ended)
          call('ZREM', book.ends, ended)
          for id, held in pairs(map_of(call('HGETALL', book.held))) do
            if string.match(held, '^%S+') == ended then call('HDEL', book.held, id) end
          end
        end
      end
    end
    local due = {}
    for _, id in ipairs(call('ZRANGEBYSCORE', book.returned, '-inf', now)) do due[id] = true end
    if next(due) then
      local before, seen = #others, {}
      pending('-', '+', NOBODY, room, function(e)
        seen[e[1]] = true
        return due[e[1]]
      end, others)
      if #others - before < room then -- all were looked at
        for id in pairs(due) do
          if not seen[id] then
            call('ZREM', book.returned, id)
            call('HDEL', book.reasons, id)
          end
        end
      end
    end
    -- What our books do not have: clients without leases were given it and left it idle for as long as a lease is, or
    -- the books are gone. Looked through in parts: there may be many that are busy.
    local is_unknown = state['pending'] - gone > call('HLEN', book.held) + call('ZCARD', book.returned)
    if is_unknown or call('HLEN', book.leases) > call('ZCARD', book.ends) then
      local found = {}
      for _, each in ipairs(others) do found[each.id] = true end
      local cursor = call('HGET', meta, 'scan:' .. group) or '-'
      local page = call('XPENDING', stream, group, cursor, '+', 1000)
      for _, entry in ipairs(page) do
        if entry[2] ~= member and not found[entry[1]] and is_free(entry) then
          others[#others + 1] = {id = entry[1], consumer = entry[2], deliveries = entry[4]}
        end
      end
      call('HSET', meta, 'scan:' .. group, #page == 1000 and '(' .. page[#page][1] or '-')
    end
    table.sort(others, function(a, b) return is_before(a.id, b.id) end)
    for i = 1, math.min(room, #others) do candidates[#candidates + 1] = others[i] end
  end
end

-- XCLAIM to who has them already tells which are still there, and forgets the others.
local untold = tonumber(call('HGET', meta, 'untold:' .. group) or 0)
if #candidates > 0 then
  local by_consumer, there = {}, {}
  for _, each in ipairs(candidates) do
    by_consumer[each.consumer] = by_consumer[each.consumer] or {}
    table.insert(by_consumer[each.consumer], each.id)
  end
  for consumer, ids in pairs(by_consumer) do
    in_chunks({'XCLAIM', stream, group, consumer, 0}, ids, function(reply)
      for _, id in ipairs(reply) do there[id] = true end
    end, {'JUSTID'})
  end
  local left = {}
  for _, each in ipairs(candidates) do
    if there[each.id] then left[#left + 1] = each else drop(each.id) end
  end
  local deleted = #candidates - #left
  candidates = left
  if deleted > 0 and #left > 0 then -- by hand: what is left of them comes first
    call('HINCRBY', meta, 'lost:' .. group, deleted)
    call('HINCRBY', meta, 'untold:' .. group, deleted)
  else
    gone = gone + deleted
  end
end
if gone > 0 then
  call('HINCRBY', meta, 'lost:' .. group, gone)
  untold = untold + gone
end
if untold > 0 then
  call('HDEL', meta, 'untold:' .. group)
  return {untold, epoch, {}, {}}
end

local spans, exhausted = {}, {}
local taken = {} -- ids
local claims = {} -- ids by their new number of deliveries
local has_reasons = call('EXISTS', book.reasons) == 1
local previous = nil
local following, at = {}, 1 -- entries after the previous one, a page at a time

local function is_next(id)
  if #following == 0 or at > #following or following[at][1] ~= id then
    following, at = call('XRANGE', stream, '(' .. previous, '+', 'COUNT', 100), 1
  end
  at = at + 1
  return following[at - 1] ~= nil and following[at - 1][1] == id
end

-- Choose an entry, as part of the last span where it follows it.
local function take(each, list, deliveries)
  local reason = has_reasons and call('HGET', book.reasons, each.id)
  local span = list[#list]
  if span and span[4] == deliveries and span[5] == reason and is_before(previous, each.id) and is_next(each.id) then
    span[2], span[3] = each.id, span[3] + 1
  else
    list[#list + 1] = {each.id, each.id, 1, deliveries, reason}
    following, at = {}, 1 -- what was looked up followed another entry
  end
  previous = each.id
  taken[#taken + 1] = each.id
  claims[deliveries] = claims[deliveries] or {}
  table.insert(claims[deliveries], each.id)
end

local room = limit
for _, each in ipairs(candidates) do
  if room <= 0 then break end
  local final = most > 0 and each.deliveries >= most
  -- The last attempt goes alone: when it fails, its neighbours are not dead-lettered with it.
  local alone = most > 1 and each.deliveries == most - 1
  -- What is exhausted goes alone too: while it cannot be moved away, nothing else may use up its deliveries.
  if (#spans > 0 and (alone or final)) or (#exhausted > 0 and not final) then break end
  if final then take(each, exhausted, each.deliveries) else take(each, spans, each.deliveries + 1) end
  room = alone and 0 or room - 1
end

-- What was chosen becomes the member's.
local first, last = nil, nil
for deliveries, ids in pairs(claims) do
  in_chunks({'XCLAIM', stream, group, member, 0}, ids, nil, {'RETRYCOUNT', deliveries, 'JUSTID'})
end
for lease, count in pairs(tokens_of(book, taken)) do release(book, lease, count) end
in_chunks({'ZREM', book.returned}, taken)
for _, id in ipairs(taken) do
  if not first or is_before(id, first) then first = id end
  if not last or is_before(last, id) then last = id end
end

if room > 0 and #exhausted == 0 then
  local reply = call('XREADGROUP', 'GROUP', group, member, 'COUNT', room, 'STREAMS', stream, '>')
  if reply then
    local entries = reply[1][2]
    local count = #taken
    for i = 1, #entries do taken[count + i] = entries[i][1] end
    first, last = first or entries[1][1], entries[#entries][1]
    spans[#spans + 1] = {entries[1][1], last, #entries, 1, false}
    local read, position = string.match(call('HGET', meta, 'read:' .. group) or '', '^(%d+) (.*)$')
    if position == state['last-delivered-id'] then note_read(meta, group, read + #entries, last) end
  end
end

if #taken > 0 then
  local words, value = {}, token .. ' ' .. expires
  for i = 1, #taken do
    words[2 * i - 1], words[2 * i] = taken[i], value
  end
  in_chunks({'HSET', book.held}, words)
  call('HSET', book.leases, token, #taken .. ' ' .. first .. ' ' .. last .. ' ' .. member)
  call('ZADD', book.ends, expires, token)
end
return {0, epoch, spans, exhausted}
