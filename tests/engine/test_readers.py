"""A stream that is read while retention removes events: whoever reads it is told, and never gets fewer in silence."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

import weft
from weft.engine import reader_frames, session
from weft.engine.readers import StreamReader, stream_reader
from weft.errors import EventsLostError
from weft.project import Project
from weft.systems.base import system_for
from weft.systems.load import Load
from weft.systems.sql import commit as sql_commit


@pytest.fixture
def clicks(streams: Project) -> weft.Stream:
    @weft.stream(name="clicks", fields={"n": "int64", "text": "string"})
    def clicks() -> None:
        pass

    return clicks


def publish(stream: weft.Stream, count: int, width: int = 1) -> StreamReader:
    weft.publish_sync(stream, [{"n": n, "text": "x" * width} for n in range(count)])
    return stream_reader(stream)


def read(reader: StreamReader) -> list[int]:
    (part,), _ = reader.parts(1)
    return [n for batch in reader.read(part) for n in batch.column("n").to_pylist()]


def test_all_of_it(clicks: weft.Stream) -> None:
    assert read(stream_reader(clicks)) == []
    assert read(publish(clicks, 100)) == list(range(100))
    # What is gone before is no loss.
    weft.trim_sync(clicks, max_rows=40)
    assert read(stream_reader(clicks)) == list(range(60, 100))
    weft.trim_sync(clicks, max_rows=0)
    assert read(stream_reader(clicks)) == []


@pytest.mark.parametrize("left", [40, 0])
def test_events_that_go_before_they_are_read(clicks: weft.Stream, left: int, tmp_path: Path) -> None:
    reader = publish(clicks, 100)
    weft.trim_sync(clicks, max_rows=left)
    with pytest.raises(EventsLostError, match="'clicks' lost up to") as caught:
        read(reader)
    assert caught.value.lost == 100 - left
    # A load of them writes nothing.
    connection = weft.connect(url=f"sqlite:///{tmp_path / 'target.db'}")
    tables = system_for(connection.kind).load_tables()(connection)
    planned = Load.declare(target="t")
    sql_commit.prepare(tables, planned, reader.schema)
    (part,), _ = reader.parts(1)
    with pytest.raises(EventsLostError):
        sql_commit.commit(tables, planned, sql_commit.BatchedRows(reader.schema, reader.read(part)))
    with tables.driver.session("read") as session:
        assert session.rows("SELECT count(*) FROM t") == [(0,)]
    tables.close()


def test_events_that_go_in_the_middle(clicks: weft.Stream) -> None:
    """All of them, or an error: what was read ahead before they went is there."""
    count = 40_000
    reader = publish(clicks, count, width=200)
    (part,), _ = reader.parts(1)
    batches = reader.read(part)
    found = [n for batch in islice(batches, 1) for n in batch.column("n").to_pylist()]
    assert 0 < len(found) < count
    weft.trim_sync(clicks, max_rows=10)
    try:
        found += [n for batch in batches for n in batch.column("n").to_pylist()]
    except EventsLostError as error:
        assert 0 < error.lost < count
    else:
        assert found == list(range(count))


def test_events_that_go_after_they_were_read(clicks: weft.Stream) -> None:
    reader = publish(clicks, 100)
    (part,), _ = reader.parts(1)
    batches = reader.read(part)
    found = next(batches).column("n").to_pylist()
    weft.trim_sync(clicks, max_rows=0)
    assert found + [n for batch in batches for n in batch.column("n").to_pylist()] == list(range(100))


@pytest.mark.brief("sqlite")
@pytest.mark.usefixtures("plain_spark")
def test_a_frame_whose_name_is_used_again(clicks: weft.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session holds no more sources than there are names, and each frame has its own rows."""
    monkeypatch.setattr(reader_frames, "_numbers", itertools.cycle(["again", "and_again"]))
    spark, reader = session.spark().newSession(), publish(clicks, 5)
    made = [reader_frames.from_reader(spark, replace(reader, upto=reader.after + number)) for number in range(1, 6)]
    assert [frame.count() for frame in made] == [1, 2, 3, 4, 5]
    assert [len(frame.collect()) for frame in made] == [1, 2, 3, 4, 5]
    known = spark._jsparkSession.sessionState().dataSourceManager()
    held = known.getClass().getDeclaredField("runtimeDataSourceBuilders")
    held.setAccessible(True)
    assert sorted(held.get(known).keySet()) == ["weft_again", "weft_and_again"]
