"""Tables that a pipeline's SQL joins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

import weft
from engine.streaming.conftest import declare, rows, run_once
from servers import wait_until
from weft.engine.frames import from_memory
from weft.engine.inputs import Memory
from weft.engine.streaming.query import Query
from weft.errors import WeftError
from weft.pipelines.streaming.declare import make

pytestmark = pytest.mark.usefixtures("plain_spark", "here")


SQL = "SELECT s.n, u.name FROM source s LEFT JOIN users u ON s.n = u.id"


@pytest.mark.brief("driver-lookup0", "tasks-lookup1")
@pytest.mark.parametrize("lookup", [{"table": "users"}, {"query": "SELECT id, name FROM users WHERE id < 9"}])
def test_rows_are_enriched(lookup: dict[str, Any], way: str) -> None:
    events = declare(n="int64")
    weft.load([{"id": 1, "name": "Ann"}, {"id": 2, "name": "Bob"}], target="users")
    weft.publish_sync(events, [{"n": 1}, {"n": 2}, {"n": 3}])
    run_once(
        name="names",
        source=events,
        target_table=(None, "named"),
        transform_sql=SQL,
        lookups={"users": weft.Lookup(**lookup)},
    )
    assert rows("named") == [(1, "Ann"), (2, "Bob"), (3, None)]


@contextmanager
def named(refresh_interval_ms: int) -> Iterator[Any]:
    """A stream whose events a running pipeline has begun to name, the first by a user who has another name then."""
    events = declare(n="int64")
    weft.load([{"id": 1, "name": "Ann"}], target="users", mode="merge", keys=["id"])
    pipeline = make(
        name="names",
        source=events,
        target="default",
        target_table=(None, "named"),
        transform_sql=SQL,
        lookups={"users": weft.Lookup(table="users", refresh_interval_ms=refresh_interval_ms)},
    )
    query = Query(pipeline)
    query.start()
    try:
        weft.publish_sync(events, {"n": 1})
        wait_until(lambda: _named() >= {"Ann"}, "the first name")
        weft.load([{"id": 1, "name": "Anna"}], target="users", mode="merge", keys=["id"])
        yield events
    finally:
        query.stop()
        query.wait(60)


@pytest.mark.full
@pytest.mark.timing
def test_a_lookup_is_read_again() -> None:
    with named(refresh_interval_ms=1) as events:

        def is_renamed() -> bool:
            weft.publish_sync(events, {"n": 1})
            return "Anna" in _named()

        wait_until(is_renamed, "the new name")


@pytest.mark.timing
def test_a_lookup_is_fresh_after_a_rest() -> None:
    """The first batch after a time without any joins the table as it is, not as it was before."""
    with named(refresh_interval_ms=1000) as events:
        time.sleep(1.1)
        weft.publish_sync(events, {"n": 1})
        wait_until(lambda: len(rows("named")) == 2, "the second row")
        assert _named() == {"Ann", "Anna"}


def test_a_lookup_that_is_not_there_is_an_error() -> None:
    events = declare(n="int64")
    weft.load([{"id": 1}], target="persons")
    with pytest.raises(WeftError, match="people") as caught:
        run_once(
            name="names",
            source=events,
            target_table=(None, "named"),
            transform_sql=SQL,
            lookups={"users": weft.Lookup(table="people")},
        )
    assert caught.value.__notes__ == ["lookup users", "pipeline names"]


@pytest.mark.full
def test_a_query_names_a_stream_by_its_own_name() -> None:
    events, users = declare(n="int64"), declare("users", id="int64", name="string")
    weft.publish_sync(users, {"id": 1, "name": "Ann"})
    weft.publish_sync(events, {"n": 1})
    lookup = weft.Lookup(query="SELECT id, name FROM events.users")
    run_once(name="names", source=events, target_table="named", transform_sql=SQL, lookups={"users": lookup})
    assert rows("named") == [(1, "Ann")]


def _named() -> set[str | None]:
    try:
        return {name for _, name in rows("named")}
    except WeftError:
        return set()


def test_a_column_of_lists_in_a_table_without_rows(plain_spark: Any) -> None:
    schema = pa.schema([("id", pa.int64()), ("tags", pa.list_(pa.int32()))])
    assert from_memory(plain_spark, Memory(schema, [])).dtypes == [("id", "bigint"), ("tags", "array<int>")]
