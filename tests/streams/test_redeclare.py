"""A stream that is declared again, as by a reloaded module or a notebook's cell, has its new options at once."""

from __future__ import annotations

import weft


def declare(max_deliveries: int | None) -> None:
    @weft.stream(max_deliveries=max_deliveries)
    def jobs() -> None: ...


def test_new_options_count_where_the_stream_is_open() -> None:
    with weft.testing.project() as project:
        declare(None)
        weft.publish_sync("jobs", {"id": 1})
        declare(1)
        weft.nack_sync("jobs", "worker", weft.consume_sync("jobs", "worker"))
        assert weft.consume_sync("jobs", "worker") == []
        assert len(project.events("jobs__dead_letter")) == 1
