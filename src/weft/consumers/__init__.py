"""Consumers of streams entry by entry, alone or as members of a group: on Redis, and on every database that holds
streams."""
