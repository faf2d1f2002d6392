"""Every field type goes in and comes out as it was, by `read` and by `read_arrow`."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from systems import field_types
from systems.field_types import check_every_type
from weft.systems.log import META_TYPES, Batch
from weft.systems.postgres.store import PostgresStore, array_literal
from weft.types import FieldType

VALUES: dict[str, list[Any]] = {
    **field_types.VALUES,
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
    "float32": [-0.0, *field_types.VALUES["float32"]],
    "float64": [-0.0, *field_types.VALUES["float64"]],
    "decimal(38,38)": [Decimal("0." + "9" * 38)],
    "bytes": [b"", b"\x00", bytes(range(256)), b"\\x00"],
}


def test_every_type(store: PostgresStore) -> None:
    check_every_type(store, VALUES)


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
