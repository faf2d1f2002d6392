-- Pending entries: id, holder, milliseconds since, deliveries. The same for every client, which XPENDING is not.
-- KEYS: the stream. ARGV: what XPENDING takes.

return call('XPENDING', KEYS[1], unpack(ARGV))
