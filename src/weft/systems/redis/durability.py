"""What a server keeps when it stops."""

from __future__ import annotations

from weft.systems.redis import client


def warning(opened: client.Client) -> str | None:
    """What to know about a server that would lose acknowledged events; `None` where it keeps them."""
    found = []
    if str(client.info(opened, "persistence").get("aof_enabled")) != "1":
        found.append(
            "This Redis server has no append-only file: events that it acknowledged are gone when it stops. "
            "Set appendonly yes, and appendfsync always where not even the last second may be lost."
        )
    memory = client.info(opened, "memory")
    policy = str(memory.get("maxmemory_policy"))
    if int(memory.get("maxmemory", 0)) > 0 and policy.startswith("allkeys-"):  # the others spare keys without an end
        found.append(
            f"This Redis server removes keys when its memory is full ({policy}), whole streams among them. "
            "Set maxmemory-policy noeviction."
        )
    return " ".join(found) or None
