-- At most how many entries retention removed after an id. KEYS: meta, trims. ARGV: the id.
local total = tonumber(call('HGET', KEYS[1], 'removed') or 0)
local trims = call('ZREVRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for i = 1, #trims, 2 do
  if not is_before(ARGV[1], trims[i]) then return total - tonumber(trims[i + 1]) end
end
return total
