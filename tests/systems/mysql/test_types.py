"""Every field type goes in and comes out as it was, by `read` and by `read_arrow`."""

from __future__ import annotations

from datetime import UTC
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from systems import field_types
from systems.field_types import check_every_type
from weft.systems.log import Batch
from weft.systems.mysql.store import MySQLStore
from weft.systems.sql.log import SqlLog
from weft.types import FieldType

VALUES: dict[str, list[Any]] = {
    # -0.0 is not among the floats: MariaDB stores it as 0.0.
    **field_types.VALUES,
    "string": [
        "",
        " trailing spaces  ",
        "null",
        '"',
        "\\",
        "'`],[\n]\n[%s ?",
        "\\u0041\\f\\\\f",
        "".join(map(chr, range(128))),
        "ß€😀\u2028\uffff",
        "a" * 1_000_000,
    ],
    "bytes": [b"", b"\x00", bytes(range(256)), b"\\u0041\\n", bytes(range(256)) * 4_000],
}


def test_every_type(store: MySQLStore) -> None:
    check_every_type(store, VALUES)


@pytest.fixture
def anything(store: MySQLStore) -> SqlLog:
    kinds = ("string", "bytes", "float64", "timestamp")
    return store.open("events", "anything", {kind: FieldType(kind) for kind in kinds})


EVENTS = st.lists(
    st.tuples(
        st.none() | st.text(st.characters(exclude_categories=["Cs"])),
        st.none() | st.binary(),
        st.none() | st.floats(allow_nan=False, allow_infinity=False).map(lambda value: value + 0.0),
        st.none() | st.datetimes(timezones=st.just(UTC)),
    ),
    min_size=1,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS)
def test_any_values(anything: SqlLog, events: list[tuple[Any, ...]]) -> None:
    columns = [list(column) for column in zip(*events, strict=True)]
    ((stored,),) = anything.store.append([Batch(anything, [("p", len(events))], tuple(anything.fields()), columns)])
    assert stored.last is not None
    before = stored.last - len(events)
    page = anything.read(before, stored.last, len(events))
    assert [list(column) for column in page.columns[:4]] == columns
    (batch,) = anything.read_arrow(before, stored.last, list(anything.fields()))
    assert [column.to_pylist() for column in batch.columns] == columns


def test_arrow_ranges(store: MySQLStore) -> None:
    log = store.open("events", "t", {"n": FieldType("int64")})
    assert list(log.read_arrow(0, 100)) == []
    count = 100_000
    store.append([Batch(log, [("p", count)], ("n",), [list(range(1, count + 1))])])

    def read(*range_: int) -> list[int]:
        return [n for batch in log.read_arrow(*range_, ["n"]) for n in batch.column("n").to_pylist()]

    assert read(0, 2**62) == list(range(1, count + 1))
    assert read(10, 12) == [11, 12]
    assert read(12, 12) == []
    assert sum(batch.num_rows for batch in log.read_arrow(0, count, [])) == count
    log.trim(50)
    assert read(0, 52) == [51, 52]
