"""The events of a micro-batch, before Spark has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import weft
from engine.streaming.conftest import declare
from weft.engine.readers import stream_reader
from weft.engine.streaming.log_source import EventRows
from weft.streams.runtime import open_stream
from weft.systems.stream_source import EVENT_TIME


@pytest.mark.parametrize("system", ["sqlite", "postgres", "mysql", "redis"], indirect=True)
def test_few_events_are_read_once(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though some have values that do not fit, or that came before their column."""
    del streams
    events = declare(n="int64", text="string")
    many = {f"k{number:02}": number for number in range(25)}
    for event in ({"n": 1, "text": "a"}, {"n": "two"}, {"n": 3, **many}, {"n": 4, **many}):
        weft.publish_sync(events, event)
    reader = replace(stream_reader(events), time_column=EVENT_TIME)
    log, reads = open_stream(events, None, to_read=True).log, []
    read_arrow = type(log).read_arrow

    def counted(*arguments: Any) -> Iterator[pa.RecordBatch]:
        reads.append(arguments)
        return read_arrow(*arguments)

    monkeypatch.setattr(type(log), "read_arrow", counted)
    few = EventRows("events", reader, 4, log=log).split()
    assert few.gather().select(["n", "k00", "k24"]).to_pylist() == [
        {"n": 1, "k00": None, "k24": None},
        {"n": 3, "k00": 0, "k24": 24},
        {"n": 4, "k00": 0, "k24": 24},
    ]
    assert len(reads) == 1
    assert few.size == 3
    # As tasks read them, and as many are read.
    for rows in (replace(few, gathered=None), EventRows("events", reader, None, log=log).split()):
        assert rows.gather().equals(few.gather())
        assert rows.bad == few.bad


def test_each_batch_looks_at_its_own_late_values(streams: Any) -> None:
    del streams
    reader = stream_reader(declare(n="int64"))

    class Late(tuple[Any, ...]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("all of them are looked at")

    late = replace(reader, late=Late((offset, "n", -offset) for offset in range(10, 1000, 10)))
    offsets = pa.array(range(95, 111))
    rows = late.mended(pa.record_batch({"n": offsets}), offsets)
    assert rows["n"].to_pylist() == [-n if n % 10 == 0 else n for n in range(95, 111)]
