"""The outside systems that Weft talks to, one folder each. Packages add theirs by the entry point `weft.systems`."""

from weft.systems.base import Connection, System, system_for, system_for_url, systems

__all__ = ["Connection", "System", "system_for", "system_for_url", "systems"]
