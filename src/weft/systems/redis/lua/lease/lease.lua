-- The lease itself.

local floor = call('HGET', meta, 'floor') or '0-0'
local epoch = call('HGET', meta, 'epoch:' .. group)
local state = group_of(stream, group)
if not state then
  forget(book)
  create_group(stream, meta, group, floor)
  state = group_of(stream, group)
  -- Somebody destroyed it: what is delivered again is not what was delivered before, also in the dead letters.
  if epoch then epoch = call('HINCRBY', meta, 'epoch:' .. group, 1) end
end
if not epoch then
  epoch = first_epoch()
  call('HSET', meta, 'epoch:' .. group, epoch)
end

-- It says when its lease ends, and before which reset it began.
token = string.format('%s.%d.%d', token, tonumber(epoch), now + micros)

local position = state['last-delivered-id']
local info = stream_of(stream)
local read = noted_read(meta, group, position)

-- How many others trimmed that the group had not read, with XTRIM or XADD MAXLEN.
local function trimmed_unread()
  local first = info['first-entry']
  if not read or (first and not is_before(position, first[1])) then return 0 end
  local trimmed = math.max(info['entries-added'] - info['length'] - read, 0)
  if trimmed > 0 then
    read = read + trimmed
    note_read(meta, group, read, position)
  end
  return trimmed
end

-- The last id that can be deleted: others delete any entry, and trim the first ones.
local function last_deleted()
  local first, deleted = info['first-entry'], info['max-deleted-entry-id']
  if not first or is_before(deleted, first[1]) then return first and first[1] or '+' end
  return deleted
end

local gone = 0
if state['pending'] > 0 and floor ~= '0-0' then gone = drop_deleted('-', floor) end
local entries, missing = existing(find(state['pending'] - gone))
sort_by_id(missing, function(id) return id end)
local deleted = #missing
if deleted > 0 then deleted = deleted + drop_deleted(missing[1], last_deleted()) end
-- Of what was deleted by hand, what is left comes first.
local later = #entries > 0 and deleted or 0
local lost = gone + deleted + trimmed_unread()
local untold = tonumber(call('HGET', meta, 'untold:' .. group) or 0) + lost
if lost > 0 then call('HINCRBY', meta, 'lost:' .. group, lost) end
if untold > later then
  call('HDEL', meta, 'untold:' .. group)
  return {untold, tonumber(epoch), {}, {}, token}
elseif later > 0 then
  call('HSET', meta, 'untold:' .. group, later)
end

-- Nothing new instead of what was deleted: more that was delivered before may wait, and comes first.
local room = choose(entries) - #missing
claim()
local new = read_new(room)
note_lease(new)
if new > 0 and read then
  if is_before(position, info['max-deleted-entry-id']) then
    call('HDEL', meta, 'read:' .. group) -- some of them are deleted, and nobody knows how many: counted when asked for
  else
    note_read(meta, group, read + new, taken[#taken])
  end
end
return {0, tonumber(epoch), spans, exhausted, token}
