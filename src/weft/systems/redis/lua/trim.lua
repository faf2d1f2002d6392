-- Remove the entries up to an id, or the first so many of them; groups that had not seen them are told.
-- KEYS: stream, meta, trims. ARGV: the id, how many at most where somebody has to be told, and 1 where what a group has
-- not seen is to stay. Gives how many went, and 1 where there may be more.
local stream, meta, upto, step = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2])
if call('EXISTS', stream) == 0 then return {0, 0} end
local groups = {}
for _, flat in ipairs(call('XINFO', 'GROUPS', stream)) do
  groups[#groups + 1] = map_of(flat)
  local seen = groups[#groups]['last-delivered-id']
  if ARGV[3] == '1' and is_before(seen, upto) then upto = seen end
end
local first = call('XRANGE', stream, '-', upto, 'COUNT', 1)[1]
if not first then return {0, 0} end

local behind = {}
for _, group in ipairs(groups) do
  if is_before(group['last-delivered-id'], upto) then behind[#behind + 1] = group end
end
local cut, more = upto, 0
if #behind > 0 then
  local ids = first_ids(stream, '-', upto, step)
  cut, more = ids[#ids], #ids == step and 1 or 0
  for _, group in ipairs(behind) do
    group['lost'] = 0
    for i = #ids, 1, -1 do
      if not is_before(group['last-delivered-id'], ids[i]) then break end
      group['lost'] = group['lost'] + 1
    end
  end
else
  cut = call('XREVRANGE', stream, upto, '-', 'COUNT', 1)[1][1]
end

-- First of all that writes: a server whose memory is full takes nothing else before it.
local ms, seq = parts(cut)
local removed = call('XTRIM', stream, 'MINID', '=', string.format('%d-%d', ms, seq + 1))
local state = stream_of(stream)
for _, group in ipairs(behind) do
  if group['lost'] > 0 then
    call('HINCRBY', meta, 'lost:' .. group['name'], group['lost'])
    call('HINCRBY', meta, 'untold:' .. group['name'], group['lost'])
  end
  if is_before(group['last-delivered-id'], cut) then
    call('XGROUP', 'SETID', stream, group['name'], cut)
    note_read(meta, group['name'], state['entries-added'] - state['length'], cut)
  end
end
local floor = call('HGET', meta, 'floor') or '0-0'
if is_before(floor, cut) then call('HSET', meta, 'floor', cut) end
-- Subscribers have no group: how many went up to where tells them how many they can have lost.
call('ZADD', KEYS[3], call('HINCRBY', meta, 'removed', removed), cut)
call('ZREMRANGEBYRANK', KEYS[3], 0, -1001)
return {removed, more}
