"""Record batches made of bytes are those that are made of values."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import weft
from weft.project import Project
from weft.systems.log import META_TYPES
from weft.systems.redis import arrow
from workers import declare, log_of

FIELDS = {
    "n": "int32",
    "big": "int64",
    "small": "float32",
    "amount": "float64",
    "price": "decimal(20,4)",
    "ok": "bool",
    "day": "date",
    "at": "timestamp",
    "raw": "bytes",
    "note": "string",
}
EVENTS: list[dict[str, Any]] = [
    {
        "n": -(2**31),
        "big": 2**63 - 1,
        "small": 0.1,
        "amount": 1e-300,
        "price": Decimal("-0.0001"),
        "ok": True,
        "day": date(1, 1, 1),
        "at": datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        "raw": b"\x00\xff\r\n$3\r\n",
        "note": "",
    },
    {
        "n": 0,
        "big": -(2**63),
        "small": -3.4e38,
        "amount": 1.7976931348623157e308,
        "price": Decimal("1234567890123456.7890"),
        "ok": False,
        "day": date(9999, 12, 31),
        "at": datetime(1, 1, 1, tzinfo=UTC),
        "raw": b"",
        "note": "é\r\n\x00",
    },
    {"n": None, "big": 1},
    {"n": 7},
]


def both(log: Any, columns: list[str] | None = None) -> tuple[pa.Table, pa.Table]:
    """What is read, and the same by values."""
    types = {**log.fields(), **META_TYPES}
    wanted = {name: types[name] for name in (columns or types)}
    schema = pa.schema([(name, kind.arrow) for name, kind in wanted.items()])
    batch = log._batch(log._range(1, None, 1000), wanted, schema)
    return pa.Table.from_batches(log.read_arrow(0, log.head(), columns), schema), pa.Table.from_batches([batch])


@pytest.fixture
def by_bytes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each page was made of bytes."""
    found: list[bool] = []
    batch_of = arrow.batch_of

    def noting(*given: Any) -> pa.RecordBatch | None:
        batch = batch_of(*given)
        found.append(batch is not None)
        return batch

    monkeypatch.setattr(arrow, "batch_of", noting)
    return found


@pytest.mark.parametrize("system", ["redis", "redis-cluster"], indirect=True)
@pytest.mark.parametrize("events", [EVENTS[:1] * 20, EVENTS], ids=["alike", "with nulls"])
def test_what_weft_wrote(streams: Project, by_bytes: list[bool], events: list[dict[str, Any]]) -> None:
    declare(fields=FIELDS)
    weft.publish_sync("orders", events)
    found, expected = both(log_of("orders"))
    assert found.equals(expected)
    assert found.num_rows == len(events)
    found, expected = both(log_of("orders"), ["note", "_weft_rowid"])
    assert found.equals(expected)
    assert by_bytes == [True, True]


@pytest.mark.parametrize(
    "entry",
    [
        {"n": "7"},
        {"n": "x", "_weft_publish_id": "p"},
        {"n": "7", "other": "1", "_weft_publish_id": "p"},
        {"n": "7", "_weft_extra": '{"a": 1}', "_weft_publish_id": "p"},
        {"note": b"\xff", "_weft_publish_id": "p"},
        {"n": "7", "_weft_publish_id": b"\xff"},
    ],
)
def test_what_others_wrote(streams: Project, client: Any, by_bytes: list[bool], entry: dict[str, Any]) -> None:
    declare(fields=FIELDS)
    weft.publish_sync("orders", EVENTS)
    client.xadd("orders", entry)
    found, expected = both(log_of("orders"))
    assert found.equals(expected)
    assert by_bytes == [False]


def test_an_entry_without_an_offset(streams: Project, client: Any) -> None:
    declare(fields=FIELDS)
    client.xadd("orders", {"n": "1", "_weft_publish_id": "p"}, id="5-1048576")
    client.xadd("orders", {"n": "2", "_weft_publish_id": "p"})
    log = log_of("orders")
    with pytest.raises(weft.SchemaError, match="Entry 5-1048576"):
        list(log.read_arrow(0, log.head()))


def test_a_key_that_is_no_stream_any_more(streams: Project, client: Any) -> None:
    declare(fields=FIELDS)
    weft.publish_sync("orders", [{"n": 1}])
    log = log_of("orders")
    batches = log.read_arrow(0, log.head())
    client.delete("orders")
    client.set("orders", "text")
    with pytest.raises(weft.WeftError, match="WRONGTYPE"):
        list(batches)


def test_a_range_is_bounded_by_the_entries_that_it_has(client: Any) -> None:
    """Also where a value looks like an entry that is still to come: its id is taken for the last one of a page."""
    declare(fields={"n": "int64", "note": "string"})
    liar = "\r\n*2\r\n$15\r\n9999999999999-0\r\n*2\r\n"
    events = [{"n": n, "note": liar if n % 5000 == 4999 else "plain"} for n in range(30_000)]
    weft.publish_sync("orders", events)
    log = log_of("orders")
    floor, head = log.floor(), log.head()
    for most in (1, 9_999, 10_000, 10_001, 23_456, 29_999):
        bound = log.bound(floor, head, most)
        rows = [row for batch in log.read_arrow(floor, bound, ["n"]) for row in batch.column("n").to_pylist()]
        assert rows == list(range(most))
    assert log.bound(floor, head, 30_000) == head
    assert log.bound(log.bound(floor, head, 15_000), head, 20_000) == head
