"""Consumers of streams entry by entry, alone or in a group: on Redis, and on every database that holds streams."""
