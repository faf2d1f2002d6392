"""Every field type goes in and comes out as it was, by `read` and by `read_arrow`."""

from __future__ import annotations

import json
import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.systems.log import Batch
from weft.systems.mysql import arrow
from weft.systems.mysql.store import MySQLStore
from weft.systems.sql.log import SqlLog
from weft.types import BASES, FieldType

FLOAT32_MAX = struct.unpack("f", bytes.fromhex("ffff7f7f"))[0]
LARGEST = "9" * 20 + "." + "9" * 18
# -0.0 is not among them: MariaDB stores it as 0.0.
VALUES: dict[str, list[Any]] = {
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
    "bool": [True, False],
    "int32": [0, -(2**31), 2**31 - 1],
    "int64": [0, -(2**63), 2**63 - 1],
    "float32": [0.0, 0.5, FLOAT32_MAX, -FLOAT32_MAX, 2.0**-149, struct.unpack("f", struct.pack("f", 0.1))[0]],
    "float64": [0.0, 0.1, 1e15, 1e16, 1.7976931348623157e308, 5e-324, -2.2250738585072014e-308],
    "decimal(38,18)": [Decimal("0E-18"), Decimal("-1E-18"), Decimal(LARGEST), Decimal("-" + LARGEST)],
    "decimal(5,0)": [Decimal(0), Decimal(-99999)],
    "date": [date.min, date(1969, 12, 31), date(2026, 2, 28), date.max],
    "timestamp": [
        datetime.min.replace(tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC),
        datetime(2026, 1, 31, 12, tzinfo=UTC),
        datetime.max.replace(tzinfo=UTC),
    ],
    "json": [
        '{"a":[1,null,"\\u0000\\n\\"",{}],"b":1.0,"ä":1234567890123456789012345678901234567890}',
        "[" * 200 + "]" * 200,
        '"x"',
        "null",
    ],
    "bytes": [b"", b"\x00", bytes(range(256)), b"\\u0041\\n", bytes(range(256)) * 4_000],
    "uuid": [UUID(int=0), UUID(int=2**128 - 1)],
}


def strict(value: object) -> object:
    """A value that equals only what is the same: 1 is not True, and 1.0 is not 1.00."""
    return type(value), repr(value)


def test_every_type(store: MySQLStore) -> None:
    fields = {name: FieldType.parse(name) for name in VALUES}
    assert {kind.base for kind in fields.values()} == set(BASES)
    size = max(map(len, VALUES.values())) + 1
    columns = [values + [None] * (size - len(values)) for values in VALUES.values()]
    log = store.open("events", "t", fields)
    assert log.fields(fresh=True) == fields
    assert store.append([Batch(log, [("p", size)], tuple(fields), columns)])[0][0].last == size

    page = log.read(0, size, size)
    (batch,) = log.read_arrow(0, size)
    assert batch.schema.names == list(page.names)
    for name, given_values in zip(fields, columns, strict=True):
        at = page.names.index(name)
        is_json = fields[name].base == "json"
        canonical = [json.loads(v) if is_json and v is not None else v for v in given_values]
        assert list(map(strict, page.columns[at])) == list(map(strict, canonical)), name
        assert batch.schema.field(name).type == fields[name].arrow
        found = batch.column(at).to_pylist()
        if fields[name].base == "timestamp":
            found = [None if v is None else v.astimezone(UTC) for v in found]
        if fields[name].base == "uuid":
            found = [None if v is None else UUID(v) for v in found]
        assert list(map(strict, found)) == list(map(strict, given_values)), name


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


def test_arrow_in_order_whatever_the_server_does(store: MySQLStore, monkeypatch: pytest.MonkeyPatch) -> None:
    log = store.open("events", "t", {"n": FieldType("int64")})
    store.append([Batch(log, [("p", 3)], ("n",), [[1, 2, 3]])])
    parse = arrow._parse
    monkeypatch.setattr(arrow, "_parse", lambda lines, types: parse(b"\n".join(lines.split(b"\n")[::-1]), types))
    (batch,) = log.read_arrow(0, 3, ["n"])
    assert batch.column("n").to_pylist() == [1, 2, 3]
