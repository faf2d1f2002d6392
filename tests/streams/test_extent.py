"""How many events a range has: told without reading them, never too few."""

from __future__ import annotations

from typing import Any

import weft
from weft.project import Project
from workers import declare, drain, log_of, rowids


def test_extent(streams: Project, system: Any) -> None:
    orders = declare(fields={"n": "int64"})
    weft.publish_sync(orders, [{"n": n} for n in range(10)])
    weft.publish_sync(orders, [{"n": n} for n in range(5)])
    offsets, log = rowids(drain(orders)), log_of(orders)
    assert log.extent(0, log.head(), 1000) == 15
    assert log.extent(offsets[9], log.head(), 1000) == 5
    assert log.extent(offsets[2], offsets[6], 1000) == 4
    assert log.extent(log.head(), log.head(), 1000) == 0
    assert log.extent(0, log.head(), 3) == 15
    assert log.extent(offsets[0], log.head(), 3) == (3 if system.kind == "redis" else 14)
    weft.trim_sync(orders, before=offsets[4])
    assert log.extent(0, log.head(), 1000) == 11
