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

from weft.systems.log import META_TYPES, Batch
from weft.systems.postgres.store import PostgresStore, array_literal
from weft.types import FieldType

FLOAT32_MAX = struct.unpack("f", bytes.fromhex("ffff7f7f"))[0]
LARGEST = "9" * 20 + "." + "9" * 18
VALUES: dict[str, list[Any]] = {
    "string": [
        "",
        " ",
        "null",
        "NULL",
        "{a,b}",
        '"',
        "\\",
        '\\"',
        "\\n",
        "\n\t\r\b\f\x01\x1f\x7f",
        "ß€😀\u2028",
        "a" * 70_000,
    ],
    "bool": [True, False],
    "int32": [0, -(2**31), 2**31 - 1],
    "int64": [0, -(2**63), 2**63 - 1],
    "float32": [0.0, -0.0, 0.5, FLOAT32_MAX, -FLOAT32_MAX, 2.0**-149, struct.unpack("f", struct.pack("f", 0.1))[0]],
    "float64": [0.0, -0.0, 0.1, 1e16, 1.7976931348623157e308, 5e-324, -2.2250738585072014e-308],
    "decimal(38,18)": [Decimal("0E-18"), Decimal("-1.5" + "0" * 17), Decimal(LARGEST), Decimal("-" + LARGEST)],
    "decimal(5,0)": [Decimal(0), Decimal(-99999)],
    "decimal(38,38)": [Decimal("0." + "9" * 38)],
    "date": [date.min, date(1969, 12, 31), date(2026, 2, 28), date.max],
    "timestamp": [
        datetime.min.replace(tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC),
        datetime(2026, 1, 31, 12, tzinfo=UTC),
        datetime.max.replace(tzinfo=UTC),
    ],
    "json": [
        '{"a":[1,null,"\\u0000\\n\\"",{}],"b":1.0,"ä":1234567890123456789012345678901234567890}',
        "[]",
        '"x"',
        "null",
        "0",
    ],
    "bytes": [b"", b"\x00", bytes(range(256)), b"\\x00"],
    "uuid": [UUID(int=0), UUID(int=2**128 - 1)],
}


def strict(value: object) -> object:
    """A value that equals only what is the same: 0.0 is not -0.0, and 1 is not True."""
    return type(value), repr(value)


def test_every_type(store: PostgresStore) -> None:
    fields = {name: FieldType.parse(name) for name in VALUES}
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


def test_arrow_ranges(store: PostgresStore) -> None:
    log = store.open("events", "t", {"n": FieldType("int64")})
    assert list(log.read_arrow(0, 100)) == []
    count = 100_000
    store.append([Batch(log, [("p", count)], ("n",), [list(range(1, count + 1))])])

    def read(*range_: int) -> list[int]:
        return [n for batch in log.read_arrow(*range_, ["n"]) for n in batch.column("n").to_pylist()]

    assert read(0, 2**62) == list(range(1, count + 1))
    assert read(10, 12) == [11, 12]
    assert read(12, 12) == []
    log.trim(50)
    assert read(0, 52) == [51, 52]
    (batch,) = log.read_arrow(50, 51)
    assert dict(zip(batch.schema.names, batch.schema.types, strict=True)) == {
        "n": FieldType("int64").arrow,
        **{name: kind.arrow for name, kind in META_TYPES.items()},
    }


def test_batches_of_one_transaction_keep_their_order_and_their_ids(store: PostgresStore) -> None:
    log = store.open("events", "t", {"n": FieldType("int64")})
    publishes = [("p0", 3), ("p0", 1), ("p1", 4), ("p1", 1), ("p2", 5)]
    values = iter(range(14))
    batches = [
        Batch(log, group, ("n",), [[next(values) for _, size in group for _ in range(size)]])
        for group in (publishes[:2], publishes[2:3], publishes[3:])
    ]
    stored = [each for batch in store.append(batches) for each in batch]
    assert [(each.first, each.last) for each in stored] == [(1, 3), (4, 4), (5, 8), (9, 9), (10, 14)]
    page = log.read(0, 100, 100)
    assert list(page.columns[0]) == list(range(14))
    assert "".join(page.columns[page.names.index("_weft_publish_id")]) == "p0" * 4 + "p1" * 5 + "p2" * 5


def test_events_without_fields(store: PostgresStore) -> None:
    log = store.open("events", "t", {})
    assert store.append([Batch(log, [("p", 2)], (), [])])[0][0].last == 2
    assert store.append([Batch(log, [("p", 1)], (), [], ['{"a":1}']), Batch(log, [("q", 1)], (), [])])[1][0].last == 4
    page = log.read(0, 10, 10)
    assert list(page.columns[page.names.index("_weft_extra")]) == [None, None, {"a": 1}, None]


@pytest.fixture(scope="module")
def unescape(shared_server: Any) -> Any:
    with shared_server("postgres").connect() as connection:
        yield lambda text: connection.execute("SELECT %s::text[]", (text,)).fetchone()[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.none() | st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]))))
def test_any_text_in_an_array(unescape: Any, values: list[str | None]) -> None:
    assert unescape(array_literal(values, FieldType("string"))) == values
