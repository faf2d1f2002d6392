-- What the member could have, and what nobody can have any more.

-- Pending entries of a range, a page at a time, for which `is_wanted` is true.
local function pending(first, last, consumer, room, is_wanted, found)
  local from = first
  while room > 0 do
    local page = call('XPENDING', stream, group, from, last, PAGE, consumer)
    for _, entry in ipairs(page) do
      if room > 0 and is_wanted(entry) then
        found[#found + 1] = entry
        room = room - 1
      end
    end
    if #page < PAGE then return end
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

-- Of leases that ended. One that holds nothing is forgotten: a client without leases acknowledged what it held.
local function find_ended(room, found)
  local stale, is_stale = {}, {}
  for _, ended in ipairs(call('ZRANGEBYSCORE', book.ends, '-inf', now, 'LIMIT', 0, 1000)) do
    if #found >= room then break end
    local first, last, holder = string.match(call('HGET', book.leases, ended) or '', '^%d+ (%S+) (%S+) (.*)$')
    local is_own, held = holder == member, {}
    if first then
      pending(first, last, holder, is_own and 1 or room - #found, function(e) return is_held_by(e[1], ended) end, held)
    end
    if #held == 0 then
      stale[#stale + 1], is_stale[ended] = ended, true
    elseif not is_own then -- the member's own are found already
      for _, entry in ipairs(held) do found[#found + 1] = entry end
    end
  end
  if #stale == 0 then return end
  call('HDEL', book.leases, unpack(stale))
  call('ZREM', book.ends, unpack(stale))
  local ids = {}
  for id, held in pairs(map_of(call('HGETALL', book.held))) do
    if is_stale[string.match(held, '^%S+')] then ids[#ids + 1] = id end
  end
  in_chunks({'HDEL', book.held}, ids)
end

-- Of what was given back, and whose delay is over, the first.
local function find_given_back(room, found)
  local due = call('ZRANGEBYSCORE', book.returned, '-inf', now, 'LIMIT', 0, math.max(room, PAGE))
  sort_by_id(due, function(id) return id end)
  for _, id in ipairs(due) do
    if #found >= room then return end
    local entry = call('XPENDING', stream, group, id, id, 1)[1]
    if entry and entry[2] == NOBODY then
      found[#found + 1] = entry
    else -- somebody else took or acknowledged it
      call('ZREM', book.returned, id)
      call('HDEL', book.reasons, id)
    end
  end
end

-- Of what the books do not have as it is. Looked through in parts: there may be many that are busy.
local function find_unknown(count, found)
  local is_unknown = count > call('HLEN', book.held) + call('ZCARD', book.returned)
  if not is_unknown and call('HLEN', book.leases) <= call('ZCARD', book.ends) then return end
  local is_found = {}
  for _, entry in ipairs(found) do is_found[entry[1]] = true end
  local page = call('XPENDING', stream, group, call('HGET', meta, 'scan:' .. group) or '-', '+', PAGE)
  for _, entry in ipairs(page) do
    if entry[2] ~= member and not is_found[entry[1]] and is_free(entry) then found[#found + 1] = entry end
  end
  call('HSET', meta, 'scan:' .. group, #page == PAGE and '(' .. page[#page][1] or '-')
end

-- Pending entries that the member can have, its own first; `count` are pending.
local function find(count)
  local own = {}
  if count == 0 then
    forget(book) -- whatever it says: nobody holds anything
    return own
  end
  pending('-', '+', member, limit, function() return true end, own)
  local room, others = limit - #own, {}
  if room > 0 then
    find_ended(room, others)
    find_given_back(room, others)
    find_unknown(count, others)
    sort_by_id(others, function(entry) return entry[1] end)
    for i = 1, math.min(room, #others) do own[#own + 1] = others[i] end
  end
  return own
end

-- Those that are still in the stream, and the ids of those that are not, which are dropped. XCLAIM to who has them
-- already forgets the latter; with their idle time, which others go by.
local function existing(entries)
  local alike, there = {}, {}
  for _, entry in ipairs(entries) do
    local key = entry[3] .. ' ' .. entry[2]
    alike[key] = alike[key] or {consumer = entry[2], idle = entry[3], ids = {}}
    table.insert(alike[key].ids, entry[1])
  end
  for _, each in pairs(alike) do
    in_chunks({'XCLAIM', stream, group, each.consumer, 0}, each.ids, function(reply)
      for _, id in ipairs(reply) do there[id] = true end
    end, {'IDLE', each.idle, 'JUSTID'})
  end
  local left, missing = {}, {}
  for _, entry in ipairs(entries) do
    if there[entry[1]] then
      left[#left + 1] = entry
    else
      drop(entry[1])
      missing[#missing + 1] = entry[1]
    end
  end
  return left, missing
end

-- Drop those of a range that are not in the stream and that nobody can acknowledge any more, so that all are told in one
-- error; gives how many. The server waits for it: among very many, the rest is for the next call.
local function drop_deleted(first, last)
  local gone, from = 0, first
  for _ = 1, MOST_PAGES do
    local page, free = call('XPENDING', stream, group, from, last, PAGE), {}
    for _, entry in ipairs(page) do
      if is_free(entry) then free[#free + 1] = entry end
    end
    local _, missing = existing(free)
    gone = gone + #missing
    if #page < PAGE then break end
    from = '(' .. page[#page][1]
  end
  return gone
end
