"""What a server keeps when it stops."""

from __future__ import annotations

from weft.systems.redis import client


def warning(opened: client.Client) -> str | None:
    """What to know about a server that would lose acknowledged events; `None` where its disk has them."""
    kept = client.info(opened, "persistence")
    if str(kept.get("aof_enabled")) == "1":
        return None
    return (
        "This Redis server has no append-only file: events that it acknowledged are gone when it stops. "
        "Set appendonly yes, and appendfsync always where not even the last second may be lost."
    )
