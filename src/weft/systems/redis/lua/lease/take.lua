-- What the member gets of it, as spans.

local spans, exhausted = {}, {}
local taken = {} -- ids
local claims = {} -- ids by their new number of deliveries
local has_reasons = call('EXISTS', book.reasons) == 1
local previous = nil
local following, at = {}, 1 -- entries after the previous one
local ahead = 2 -- how many of them are looked up: more where they are wanted

local function is_next(id)
  if at > #following or following[at] ~= id then
    following, at = {}, 1
    for i, entry in ipairs(call('XRANGE', stream, '(' .. previous, '+', 'COUNT', ahead)) do following[i] = entry[1] end
  end
  at = at + 1
  local found = following[at - 1] == id
  ahead = found and math.min(2 * ahead, VALUES_PAGE) or 2
  return found
end

-- Choose an entry, as part of the last span where it follows it.
local function take(id, list, deliveries)
  local reason = has_reasons and call('HGET', book.reasons, id)
  local span = list[#list]
  if span and span[4] == deliveries and span[5] == reason and is_before(previous, id) and is_next(id) then
    span[2], span[3] = id, span[3] + 1
  else
    list[#list + 1] = {id, id, 1, deliveries, reason}
    following, at = {}, 1 -- what was looked up followed another entry
  end
  previous = id
  taken[#taken + 1] = id
  claims[deliveries] = claims[deliveries] or {}
  table.insert(claims[deliveries], id)
end

-- Choose among pending entries; gives how many more there could be.
local function choose(entries)
  local room = limit
  for _, entry in ipairs(entries) do
    if room <= 0 then break end
    local deliveries = entry[4]
    local final = most > 0 and deliveries >= most
    -- The last attempt goes alone: when it fails, its neighbours are not dead-lettered with it.
    local alone = most > 1 and deliveries == most - 1
    -- What is exhausted goes alone too: while it cannot be moved away, nothing else may use up its deliveries.
    if (#spans > 0 and (alone or final)) or (#exhausted > 0 and not final) then break end
    if final then take(entry[1], exhausted, deliveries) else take(entry[1], spans, deliveries + 1) end
    room = alone and 0 or room - 1
  end
  return #exhausted > 0 and 0 or room
end

-- What was chosen becomes the member's.
local function claim()
  for deliveries, ids in pairs(claims) do
    in_chunks({'XCLAIM', stream, group, member, 0}, ids, nil, {'RETRYCOUNT', deliveries, 'JUSTID'})
  end
  for lease, count in pairs(tokens_of(book, taken)) do release(book, lease, count) end
  in_chunks({'ZREM', book.returned}, taken)
end

-- New entries, in one span; gives how many.
local function read_new(room)
  local before = #taken
  while room > 0 do
    local wanted = math.min(room, VALUES_PAGE)
    local reply = call('XREADGROUP', 'GROUP', group, member, 'COUNT', wanted, 'STREAMS', stream, '>')
    local entries = reply and reply[1][2] or {}
    for i = 1, #entries do taken[#taken + 1] = entries[i][1] end
    room = #entries == wanted and room - wanted or 0
  end
  local count = #taken - before
  if count > 0 then spans[#spans + 1] = {taken[before + 1], taken[#taken], count, 1, false} end
  return count
end

-- Note the lease of everything that was taken; the last so many are new, and in order.
local function note_lease(new)
  if #taken == 0 then return end
  local words, expires = {}, string.format('%d', now + micros)
  local value = token .. ' ' .. expires
  for i = 1, #taken do
    words[2 * i - 1], words[2 * i] = taken[i], value
  end
  local first, last = taken[1], taken[1]
  for i = 2, #taken - new do
    if is_before(taken[i], first) then first = taken[i] end
    if is_before(last, taken[i]) then last = taken[i] end
  end
  if new > 0 then last = taken[#taken] end
  in_chunks({'HSET', book.held}, words)
  call('HSET', book.leases, token, #taken .. ' ' .. first .. ' ' .. last .. ' ' .. member)
  call('ZADD', book.ends, expires, token)
end
