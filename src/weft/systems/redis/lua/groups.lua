-- Every group of a stream. KEYS: stream, meta. ARGV: what the keys of leases begin with.
-- Gives the last id, how many entries were ever added, and for each group {name, position, pending, lost, lag or false
-- where it must be counted, leases}; of the leases each member and when its last one ends.
local stream, meta = KEYS[1], KEYS[2]
local state = stream_of(stream)
if not state then return {'0-0', 0, {}} end
local first, added = state['first-entry'], state['entries-added']

local function lag_of(name, position)
  -- Others may have trimmed what the group had not read: a lease says so.
  if not first or is_before(position, first[1]) then return state['length'] end
  local read = noted_read(meta, name, position)
  -- Not where somebody deleted entries that are still to be read.
  return read and not is_before(position, state['max-deleted-entry-id']) and added - read or false
end

local results = {}
for _, flat in ipairs(call('XINFO', 'GROUPS', stream)) do
  local group = map_of(flat)
  local name, ends, leases = group['name'], {}, {}
  local expires = map_of(call('ZRANGE', ARGV[1] .. 'ends:' .. name, 0, -1, 'WITHSCORES'))
  for lease, text in pairs(map_of(call('HGETALL', ARGV[1] .. 'leases:' .. name))) do
    local holder = string.match(text, '^%d+ %S+ %S+ (.*)$')
    ends[holder] = math.max(ends[holder] or 0, tonumber(expires[lease] or 0))
  end
  for holder, moment in pairs(ends) do leases[#leases + 1] = {holder, string.format('%d', moment)} end
  local lost = tonumber(call('HGET', meta, 'lost:' .. name) or 0)
  local lag = lag_of(name, group['last-delivered-id'])
  results[#results + 1] = {name, group['last-delivered-id'], group['pending'], lost, lag, leases}
end
return {state['last-generated-id'], added, results}
