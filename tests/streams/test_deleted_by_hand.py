"""Somebody deletes rows of a stream's table by hand: consumers go on with what is left."""

from __future__ import annotations

import pytest

import weft
from weft.streams.runtime import open_stream


def _delete(stream: weft.Stream, first: int, last: int) -> None:
    log = open_stream(stream).log
    if hasattr(log, "keys"):  # on Redis
        for entry in log._range(first, last, 100):
            log.store.command("XDEL", log.keys.stream, entry[0])
        return
    with log.store.session("publish") as session:
        session.run(f"DELETE FROM {log.table} WHERE {log.rowid} >= ? AND {log.rowid} <= ?", (first, last))


def test_a_leased_range_that_is_gone_is_given_up(streams):
    @weft.stream(fields={"n": "int64"}, max_deliveries=2)
    def numbers(): ...

    first = weft.publish_sync(numbers, [{"n": n} for n in range(5)])["first_rowid"]
    assert len(weft.consume_sync(numbers, "worker", member="a")) == 5
    _delete(numbers, first, first + 4)
    weft.publish_sync(numbers, {"n": 5})
    with pytest.raises(weft.EventsLostError) as told:
        weft.consume_sync(numbers, "worker", member="a")
    assert told.value.lost == 5
    assert [event["n"] for event in weft.consume_sync(numbers, "worker", member="a")] == [5]


def test_what_is_left_of_a_leased_range_is_delivered(streams):
    @weft.stream(fields={"n": "int64"})
    def numbers(): ...

    first = weft.publish_sync(numbers, [{"n": n} for n in range(5)])["first_rowid"]
    weft.consume_sync(numbers, "worker", member="a")
    _delete(numbers, first + 1, first + 3)
    events = weft.consume_sync(numbers, "worker", member="a")
    assert [event["n"] for event in events] == [0, 4]
    assert weft.ack_sync(numbers, "worker", events) == 2


def test_new_events_follow_a_range_that_has_a_hole(streams):
    """The lease ends where the range does: its missing events are lost, and no lease is left behind its end."""

    @weft.stream(fields={"n": "int64"})
    def numbers(): ...

    first = weft.publish_sync(numbers, [{"n": n} for n in range(6)])["first_rowid"]
    weft.consume_sync(numbers, "worker", member="a")
    _delete(numbers, first + 1, first + 3)
    received, lost = [], 0
    for number in range(6, 10):
        try:
            events = weft.consume_sync(numbers, "worker", member="a", batch_size=4)
        except weft.EventsLostError as error:
            lost += error.lost
        else:
            received += [event["n"] for event in events]
            weft.ack_sync(numbers, "worker", events)
        weft.publish_sync(numbers, {"n": number})
    assert (received[:3], lost) == ([0, 4, 5], 3)
    assert received[3:] == list(range(6, 6 + len(received[3:]))) != []
