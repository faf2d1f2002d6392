"""How much a stream takes up: told where the system knows, never by a scan."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from weft.project import Project
from workers import declare, log_of


@pytest.mark.every_system
def test_about_how_many_bytes_a_stream_takes_up(streams: Project, system: Any) -> None:
    orders = declare(fields={"text": "string"})
    weft.publish_sync(orders, [{"text": f"{number:1000}"} for number in range(500)])
    size = log_of(orders).size()
    if system.kind == "sqlite":
        assert size is None
    else:
        # The statistics of MariaDB may be those of the empty table, which has a page.
        assert size is not None
        assert size >= (16_000 if system.kind == "mysql" else 100_000)
