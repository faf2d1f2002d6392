-- Remove some entries; groups that had not seen them are told. KEYS: stream, meta. ARGV: their ids.
-- Gives how many there were.
local stream, meta = KEYS[1], KEYS[2]
if call('EXISTS', stream) == 0 then return 0 end
local gone = {}
for _, id in ipairs(ARGV) do
  if call('XDEL', stream, id) == 1 then gone[#gone + 1] = id end
end
for _, flat in ipairs(call('XINFO', 'GROUPS', stream)) do
  local group, lost = map_of(flat), 0
  local name, position = group['name'], group['last-delivered-id']
  for _, id in ipairs(gone) do
    if is_before(position, id) then lost = lost + 1 end
  end
  if lost > 0 then
    call('HINCRBY', meta, 'lost:' .. name, lost)
    call('HINCRBY', meta, 'untold:' .. name, lost)
    -- Else its next lease would find once more that these are missing.
    local read = noted_read(meta, name, position)
    if read then note_read(meta, name, read + lost, position) end
  end
end
return #gone
