"""A refused ack says of every event that it did not acknowledge, not only of the one that it was refused for."""

from __future__ import annotations

import pytest

import weft


def test_all_events_of_the_delivery_are_named() -> None:
    with weft.testing.project():

        @weft.stream
        def jobs() -> None: ...

        weft.publish_sync("jobs", [{"id": 1}, {"id": 2}, {"id": 3}])
        events = weft.consume_sync("jobs", "worker")
        weft.nack_sync("jobs", "worker", events[1])
        for refused in (weft.ack_sync, weft.nack_sync):
            with pytest.raises(weft.LeaseLostError, match="given back") as caught:
                refused("jobs", "worker", events)
            assert caught.value.rowids == (1, 2, 3)
        assert weft.ack_sync("jobs", "worker", [events[0], events[2]]) == 2
