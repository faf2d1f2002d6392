-- Add fields where nobody added others meanwhile. KEYS: fields. ARGV: how many there were, then names and types.
-- Gives 1, or 0 where there are others.
if call('HLEN', KEYS[1]) ~= tonumber(ARGV[1]) then return 0 end
for i = 2, #ARGV, 2 do
  call('HSETNX', KEYS[1], ARGV[i], string.format('%d %s', ARGV[1] + i / 2 - 1, ARGV[i + 1]))
end
return 1
