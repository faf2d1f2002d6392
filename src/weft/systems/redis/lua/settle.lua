-- Acknowledge entries or give them back, all or none.
-- KEYS: stream, meta, books. ARGV: group, token or '', member or '', action ('ack', 'again', 'nack' or 'empty'),
-- delay in microseconds, 1 with a reason, the reason, 1 if nobody saw them, ids. 'empty' gives back whatever the token holds
-- between two ids.
-- Gives how many, or {why, detail, ids} where it is refused.

local stream, meta, book = KEYS[1], KEYS[2], books(3)
local group, token, member, action = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local again = action == 'again'
if again then action = 'ack' end
local now = now_micros()
local state = group_of(stream, group)
if not state then return {'never', '', {}} end

local ids = {}
if action == 'empty' then
  for id, held in pairs(map_of(call('HGETALL', book.held))) do
    local is_inside = not is_before(id, ARGV[9]) and not is_before(ARGV[10], id)
    if is_inside and string.match(held, '^%S+') == token then ids[#ids + 1] = id end
  end
else
  for i = 9, #ARGV do ids[#ids + 1] = ARGV[i] end
end

local settled, counts, unread, gone = {}, {}, {}, {}
local refused = nil

local function refuse(why, detail, id)
  refused = refused or {why, detail, {}}
  table.insert(refused[3], id)
end

local function look(id, held)
  if held then
    local lease, ends = string.match(held, '^(%S+) (%S+)$')
    local holder = holder_of(book, lease)
    if (token ~= '' and lease ~= token) or (token == '' and member ~= '' and holder ~= member) then
      return refuse('other', holder or '', id)
    elseif tonumber(ends) <= now then
      return refuse('late', tostring((now - tonumber(ends)) / 1000000), id)
    end
    counts[lease] = (counts[lease] or 0) + 1
  elseif call('ZSCORE', book.returned, id) then
    return refuse('returned', '', id)
  else
    local entry = call('XPENDING', stream, group, id, id, 1)[1]
    if not entry then
      table.insert(is_before(state['last-delivered-id'], id) and unread or gone, id)
      return
    end
    -- Nobody has a lease on it. It may be the caller's own all the same, where somebody removed our books.
    local owner = member ~= '' and member or holder_of(book, token)
    if owner and entry[2] ~= owner then return refuse('other', entry[2], id) end
    if token ~= '' then return refuse('gone', '', id) end
  end
  settled[#settled + 1] = id
end

in_chunks({'HMGET', book.held}, ids, function(reply, start)
  for i, held in ipairs(reply) do look(ids[start + i - 1], held) end
end)
if refused then return refused end
if #unread > 0 then return {'unread', '', unread} end
-- Without a token nobody can tell a repeated ack from a late one; what is acknowledged stays so. With one nobody else had
-- them while its lease lasts: the ack is repeated, if the caller may do that.
local function lasts()
  local epoch, ends = string.match(token, '^%x+%.(%d+)%.(%d+)$')
  return epoch == (call('HGET', meta, 'epoch:' .. group) or '0') and tonumber(ends) > now
end
if #gone > 0 and (action ~= 'ack' or (token ~= '' and not (again and lasts()))) then return {'gone', '', gone} end

for lease, count in pairs(counts) do release(book, lease, count) end
in_chunks({'HDEL', book.held}, settled)
if action == 'ack' then
  in_chunks({'XACK', stream, group}, settled)
  if call('EXISTS', book.reasons) == 1 then in_chunks({'HDEL', book.reasons}, settled) end
  return #settled
end

if ARGV[8] == '1' then -- nobody saw them: this delivery does not count
  for _, id in ipairs(settled) do
    local entry = call('XPENDING', stream, group, id, id, 1)[1]
    local deliveries = entry and math.max(entry[4] - 1, 0) or 0
    call('XCLAIM', stream, group, NOBODY, 0, id, 'RETRYCOUNT', deliveries, 'JUSTID')
  end
end
local due = string.format('%d', now + tonumber(ARGV[5]))
local kept, scores, reasons = {}, {}, {}
in_chunks({'XCLAIM', stream, group, NOBODY, 0}, settled, function(reply)
  for _, id in ipairs(reply) do
    kept[id] = true
    scores[#scores + 1], scores[#scores + 2] = due, id
    reasons[#reasons + 1], reasons[#reasons + 2] = id, ARGV[7]
  end
end, {'JUSTID'})
-- CHUNK is even, so that pairs stay together.
in_chunks({'ZADD', book.returned}, scores)
if ARGV[6] == '1' then in_chunks({'HSET', book.reasons}, reasons) end
-- What was removed meanwhile can be acknowledged, but not delivered again.
local lost = 0
for _, id in ipairs(settled) do
  if not kept[id] then
    lost = lost + 1
    call('HDEL', book.reasons, id)
  end
end
if lost > 0 then
  call('HINCRBY', meta, 'lost:' .. group, lost)
  call('HINCRBY', meta, 'untold:' .. group, lost)
end
return #settled
