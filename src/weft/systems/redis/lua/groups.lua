-- Every group of a stream. KEYS: stream, meta. ARGV: what the keys of leases begin with.
-- Gives {name, position, lag, pending, lost, members}; a member is {name, pending, expires, deliveries}.
local stream, meta = KEYS[1], KEYS[2]
if call('EXISTS', stream) == 0 then return {} end
local now = now_micros()

local function count_after(id)
  local count, from = 0, '(' .. id
  while true do
    local page = call('XRANGE', stream, from, '+', 'COUNT', 1000)
    count = count + #page
    if #page < 1000 then return count end
    from = '(' .. page[#page][1]
  end
end

local state = stream_of(stream)

local function lag_of(name, position)
  local read, upto = string.match(call('HGET', meta, 'read:' .. name) or '', '^(%d+) (.*)$')
  -- Not where another client read on, or somebody deleted entries that are still to be read.
  if upto ~= position or is_before(position, state['max-deleted-entry-id']) then
    read = state['entries-added'] - count_after(position)
    note_read(meta, name, read, position)
  end
  return state['entries-added'] - read
end

local results = {}
for _, flat in ipairs(call('XINFO', 'GROUPS', stream)) do
  local group = map_of(flat)
  local name = group['name']
  local members, order = {}, {}
  local from = '-'
  while group['pending'] > 0 do
    local page = call('XPENDING', stream, name, from, '+', 1000)
    for _, entry in ipairs(page) do
      local holder = members[entry[2]]
      if not holder then
        holder = {entry[2], 0, now - entry[3] * 1000, 0}
        members[entry[2]] = holder
        if entry[2] ~= NOBODY then order[#order + 1] = holder end
      end
      holder[2] = holder[2] + 1
      holder[4] = math.max(holder[4], entry[4])
    end
    if #page < 1000 then break end
    from = '(' .. page[#page][1]
  end
  local leases = map_of(call('HGETALL', ARGV[1] .. 'leases:' .. name))
  local ends = map_of(call('ZRANGE', ARGV[1] .. 'ends:' .. name, 0, -1, 'WITHSCORES'))
  for lease, text in pairs(leases) do
    local holder = members[string.match(text, '^%d+ %S+ %S+ (.*)$')]
    if holder and ends[lease] then holder[3] = math.max(holder[3], tonumber(ends[lease])) end
  end
  for _, holder in ipairs(order) do holder[3] = string.format('%d', holder[3]) end
  local lag = lag_of(name, group['last-delivered-id'])
  local lost = tonumber(call('HGET', meta, 'lost:' .. name) or 0)
  results[#results + 1] = {name, group['last-delivered-id'], lag, group['pending'], lost, order}
end
return results
