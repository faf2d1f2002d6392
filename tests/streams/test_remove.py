"""Events are removed from between others: readers go on with what is left, and consumers are told what they missed."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.project import Project
from weft.streams.events import read_on
from weft.streams.runtime import open_stream
from weft.systems.log import Leased, Log, StreamSample
from workers import declare, drain


def filled(count: int = 6) -> tuple[Log, list[int]]:
    """Return the log of a stream with so many events, and their offsets."""
    declare("numbers")
    weft.publish_sync("numbers", [{"n": n} for n in range(count)])
    log = open_stream("numbers").log
    page = log.read(0, log.head(), count)
    return log, list(page.columns[page.names.index("_weft_rowid")])


@pytest.mark.every_system
def test_those_and_no_others(streams: Project) -> None:
    log, offsets = filled()
    head, published = log.head(), log.published()
    assert log.remove([offsets[1], offsets[3], offsets[3], offsets[5], offsets[5] + 1]) == 3
    assert log.remove([offsets[1], offsets[5]]) == 0
    assert [event["n"] for event in drain("numbers")] == [0, 2, 4]
    assert (log.count(), log.floor()) == (3, 0)
    # Where the last one is removed the head stays: else a reader that had reached it would see it go back.
    assert (log.head(), log.published()) == (head, published)
    assert read_on(log, head, 10) == ([], None, 0)
    weft.publish_sync("numbers", {"n": 6})
    events, _, _ = read_on(log, head, 10)
    assert [event["n"] for event in events] == [6]
    assert log.head() == events[0]["_weft_rowid"] > head
    assert log.remove([]) == 0
    # Nor does it go back to the last one that was removed where retention removes all that came later.
    head = log.head()
    assert weft.trim_sync("numbers", max_rows=0) == 4
    assert log.head() == head


@pytest.mark.every_system
def test_consumers_are_told_of_what_they_had_not_read(streams: Project) -> None:
    log, offsets = filled()
    first = weft.consume_sync("numbers", "worker", 2, member="a")
    assert log.remove(offsets[1:4]) == 3
    with pytest.raises(weft.EventsLostError) as told:
        weft.consume_sync("numbers", "worker", member="b")
    assert told.value.lost == 2
    # What is leased may still be acknowledged.
    assert weft.ack_sync("numbers", "worker", first) == 2
    assert [event["n"] for event in weft.consume_sync("numbers", "worker", member="b")] == [4, 5]
    (group,) = weft.groups_sync("numbers")
    assert (group["lag"], group["pending"], group["lost"]) == (0, 2, 2)
    # From the beginning of the stream, too.
    weft.consume_sync("numbers", "later", 1, member="a")
    log.remove(offsets[:5])
    with pytest.raises(weft.EventsLostError) as told:
        weft.consume_sync("numbers", "later", member="b")
    assert told.value.lost == 1
    assert [event["n"] for event in weft.consume_sync("numbers", "later", member="b")] == [5]


@pytest.mark.every_system
def test_the_size_without_a_count(streams: Project) -> None:
    log, offsets = filled()
    weft.consume_sync("numbers", "worker", 6)

    def sizes() -> StreamSample | None:
        (sample,) = open_stream("numbers").hub.store.sample([("events", "numbers")])
        return sample

    log.remove([offsets[1], offsets[4], offsets[5]])
    assert sizes() == StreamSample(6, 3, 0)
    weft.trim_sync("numbers", before=offsets[2])
    assert sizes() == StreamSample(6, 2, 0)
    weft.trim_sync("numbers", max_rows=0)
    assert sizes() == StreamSample(6, 0, 0)
    weft.publish_sync("numbers", {"n": 6})
    assert sizes() == StreamSample(7, 1, 1)


def test_events_that_go_before_they_are_read_with_a_wide_gap_between_them(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their lease is given back, and not by a list of all offsets in the gap."""
    declare("numbers")
    log, gap = open_stream("numbers").log, 2_000_000
    weft.publish_sync("numbers", {"n": 1})
    with log.store.session("publish") as session:
        session.run("UPDATE sqlite_sequence SET seq = ? WHERE name = 'events.numbers'", (gap,))
    weft.publish_sync("numbers", {"n": 2})
    lease = log.lease

    def lease_and_remove(*arguments: Any, **named: Any) -> Leased:
        leased = lease(*arguments, **named)
        log.remove([1, gap + 1])
        return leased

    with monkeypatch.context() as patch:
        patch.setattr(log, "lease", lease_and_remove)
        tracemalloc.start()
        try:
            with pytest.raises(weft.EventsLostError) as told:
                weft.consume_sync("numbers", "worker")
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert (told.value.lost, weft.groups_sync("numbers")[0]["pending"]) == (2, 0)
    assert most < 16 << 20
