"""The sizes of many streams at once, as the service samples them."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from weft.project import Project
from weft.streams.runtime import open_stream
from weft.systems.log import Store, StreamSample
from workers import declare


def store_of(stream: Any) -> Store:
    return open_stream(stream, to_read=True).hub.store


def test_sizes(streams: Project) -> None:
    one, two = declare("one"), declare("two")
    names = [("events", name) for name in ("one", "two", "never")]
    assert store_of(one).sample(names) == [StreamSample(0, 0, 0)] * 3  # nothing is made
    assert store_of(one).names() == []
    weft.publish_sync(one, [{"n": n} for n in range(10)])
    weft.publish_sync(two, {"n": 1})
    for consumer, count in (("slow", 2), ("fast", 9)):
        weft.consume_sync(one, consumer, count)
    assert store_of(one).sample(names) == [StreamSample(10, 10, 8), StreamSample(1, 1, 0), StreamSample(0, 0, 0)]
    weft.trim_sync(one, max_rows=4)
    assert store_of(one).sample(names)[0] == StreamSample(10, 4, 4)
    weft.trim_sync(one, max_rows=0)
    assert store_of(one).sample(names)[0] == StreamSample(10, 0, 0)


@pytest.mark.parametrize("system", ["sqlite", "postgres", "mysql"], indirect=True)
def test_many_take_few_statements_and_one_that_was_dropped_hides_no_other(
    streams: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.systems.sql.store._SAMPLED", 5)
    many = [declare(f"s{number}") for number in range(8)]
    for number, stream in enumerate(many):
        weft.publish_sync(stream, [{"n": n} for n in range(number + 1)])
    store: Any = store_of(many[0])
    names = [(stream.schema, stream.name) for stream in many]
    sessions = []
    session = store.session

    def counted(role: Any) -> Any:
        sessions.append(role)
        return session(role)

    with monkeypatch.context() as patch:
        patch.setattr(store, "session", counted)
        assert [size.published for size in store.sample(names)] == list(range(1, 9))
    assert sessions == ["read"] * 3
    with store.session("publish") as opened:
        opened.run(f"DROP TABLE {store.table(*names[2])}")
    sizes = [size and size.published for size in store.sample(names)]
    assert sizes[:2] + sizes[3:] == [1, 2, 4, 5, 6, 7, 8]
    assert sizes[2] == (None if store.dialect == "sqlite" else 3)


@pytest.mark.parametrize("system", ["postgres", "mysql"], indirect=True)
def test_a_locked_table_holds_up_nothing(streams: Project) -> None:
    stream = declare("one")
    weft.publish_sync(stream, {"n": 1})
    store: Any = store_of(stream)
    table = store.table("events", "one")
    with store.session("publish") as locking:
        if store.dialect == "postgres":
            locking.run(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        else:
            locking.run(f"LOCK TABLES {table} WRITE")
        try:
            assert store.sample([("events", "one")]) == [StreamSample(1, 1, 0)]
        finally:
            if store.dialect == "mysql":
                locking.run("UNLOCK TABLES")


@pytest.mark.parametrize("system", ["redis"], indirect=True)
def test_a_key_of_another_type_hides_no_other_stream(streams: Project) -> None:
    stream = declare("one")
    weft.publish_sync(stream, {"n": 1})
    store: Any = store_of(stream)
    store.command("SET", "two", "a text")
    assert store.sample([("events", "two"), ("events", "one")]) == [None, StreamSample(1, 1, 0)]
