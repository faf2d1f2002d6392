"""The columns of the table decide about the values of messages, not what most messages of a batch have; without Spark
and databases."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import weft
from weft.columns import hinted
from weft.engine.streaming.cdc.debezium_types import typed
from weft.engine.streaming.cdc.envelopes import OpenedChanges, opened
from weft.engine.streaming.cdc.json_rows import StoredTable
from weft.engine.streaming.cdc.newest import newest
from weft.engine.streaming.cdc.routes import resolved
from weft.engine.streaming.cdc.routing import well_formed
from weft.pipelines.streaming.declare import make
from weft.project import Project, use
from weft.systems.changes import KEY
from weft.systems.codecs.json import JsonCodec

CDC: dict[str, Any] = {"envelope": "debezium", "key_field": "after.id"}
COLUMNS = [
    pa.field("id", pa.int64()),
    pa.field("name", pa.string()),
    pa.field("n", pa.int32()),
    pa.field("day", pa.date32()),
    pa.field("at", pa.timestamp("us")),
    hinted("doc", "json"),
]
TABLE = StoredTable({each.name: each for each in COLUMNS})
LAKE = StoredTable({each.name: each for each in COLUMNS}, refuses_rows=False)


def test_a_lake_by_its_path_is_a_table_too(tmp_path: Path) -> None:
    with use(Project()):
        broker = weft.KafkaConnection(name="broker", bootstrap_servers="nowhere:9092")
        lake = weft.DeltaLocalConnection(name="lake", path=str(tmp_path))
        cdc = weft.CDC(envelope="debezium", route={"public.t": "shop/t"}, key_field="id")
        (source,) = resolved(make(name="m", source=broker, source_query="t", target=lake, cdc=cdc)).sources
    assert {"before", "after"} <= source.columns.keys()


def read(cdc: weft.CDC, rows: list[dict[str, Any]], form: str, table: StoredTable = TABLE) -> OpenedChanges:
    """Messages with these rows, as a pipeline reads them."""
    messages = [{"op": "c", "after": row, "source": {"lsn": number}} for number, row in enumerate(rows)]
    if form == "wrapped":
        messages = [{"schema": {"type": "struct"}, "payload": each} for each in messages]
    with use(Project()):
        broker = weft.KafkaConnection(name="broker", bootstrap_servers="nowhere:9092")
        mirror = weft.SQLiteConnection("mirror.db", name="mirror")
        declared = make(name="m", source=broker, source_query="t", target=mirror, target_table="mirror", cdc=cdc)
        (source,) = resolved(declared).sources
    assert {"before", "after"} <= source.columns.keys()
    known = {name: pa.json_() for name in source.columns}
    parsed = JsonCodec().decoder(known).parse(pa.array([json.dumps(each).encode() for each in messages]))
    assert not parsed.bad
    return opened(pa.table(parsed.columns), cdc, lambda: [table])


def stored(found: OpenedChanges) -> list[dict[str, Any]]:
    table = typed(pa.table({**found.keys, **found.columns}), found.meanings, COLUMNS)
    return [{name: each for name, each in row.items() if each is not None} for row in table.to_pylist()]


@pytest.mark.parametrize("form", ["plain", "wrapped"])
def test_each_value_is_what_it_is_alone(form: str) -> None:
    """Whatever other messages the batch has."""
    rows: list[dict[str, Any]] = [
        {"id": 1, "name": 5, "n": 7, "day": 19782, "doc": {"a": 1}},
        {"id": 2, "name": 6.5, "n": "8", "day": "2024-02-29", "at": 1_770_000_000_000},
        {"id": 3, "name": "x", "n": 9.0, "doc": [1, 2.5], "at": "2026-02-02T02:40:00Z"},
        {"id": 4, "name": {"b": 1}, "doc": {"c": 2.50}},
        {"id": 5, "name": True, "doc": 5},
    ]
    cdc = weft.CDC(**CDC)
    together = stored(read(cdc, rows, form))
    assert together == [one for row in rows for one in stored(read(cdc, [row], form))]
    assert [each.get("name") for each in together] == ["5", "6.5", "x", '{"b":1}', "true"]
    assert [each.get("doc") for each in together] == ['{"a":1}', None, "[1,2.5]", '{"c":2.5}', "5"]
    assert [each.get("n") for each in together] == [7, 8, 9, None, None]
    assert together[0]["day"] == together[1]["day"]
    assert together[1]["at"] == together[2]["at"]


@pytest.mark.parametrize("form", ["plain", "wrapped"])
def test_a_value_that_does_not_fit_makes_its_message_a_bad_one_alone(form: str) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 1, "n": 1, "day": 19782},
        {"id": 1, "n": "a lot", "day": 19783},
        {"id": 2, "n": 1.5},
        {"id": 3, "n": {"much": 1}},
        {"id": "three", "n": 3},
        {"id": 4, "n": 1 << 40, "day": "2024-02-29"},
        {"id": 5, "day": "soon"},
    ]
    found = read(weft.CDC(**CDC), rows, form)
    assert list(found.bad) == [1, 2, 3, 4]
    assert "Its 'n' is a lot, which the table cannot have as int32" in found.bad[1]
    # A database knows more than we do of its dates, and of the width of its numbers. A lake would refuse the batch.
    assert list(read(weft.CDC(**CDC), rows, form, LAKE).bad) == [1, 2, 3, 4, 5, 6]


def test_a_value_that_is_not_said_fits() -> None:
    field = pa.field("codes", pa.list_(pa.date32()))
    table = StoredTable({"id": COLUMNS[0], "codes": field}, refuses_rows=False)
    rows = [{"id": 1, "codes": ["__debezium_unavailable_value"]}, {"id": 2, "codes": ["2024-02-29"]}]
    assert not read(weft.CDC(**CDC), rows, "plain", table).bad


def test_a_route_and_one_table_are_read_in_one_way() -> None:
    rows = [{"id": 1, "name": 5, "n": "x"}, {"id": 2, "name": "b", "n": "4"}]
    alone = read(weft.CDC(**CDC), rows, "plain")
    source = {"schema": "public", "table": "t"}
    messages = [{"op": "c", "after": json.dumps(row), "source": {"lsn": at, **source}} for at, row in enumerate(rows)]
    cdc = weft.CDC(envelope="debezium", route={"public.t": "mirror"}, key_field="id")
    led = well_formed(pa.Table.from_pylist(messages), cdc, lambda table: [TABLE]).by_table["mirror"].opened
    assert (led.bad, stored(led)) == (alone.bad, stored(alone))


def test_columns_of_messages_have_types_for_streams_and_sql() -> None:
    with use(Project()):
        broker = weft.KafkaConnection(name="broker", bootstrap_servers="nowhere:9092")
        mirror = weft.SQLiteConnection("mirror.db", name="mirror")
        declared: dict[str, Any] = {"name": "m", "source": broker, "source_query": "t"}
        topic = weft.Target(connection=broker, stream="clean")
        for more in (
            {"targets": [topic, weft.Target(connection=mirror, table="mirror")], "cdc": weft.CDC(**CDC)},
            {"target": mirror, "target_table": "t", "cdc": weft.CDC(**CDC, row_sql="SELECT * FROM source")},
        ):
            (source,) = resolved(make(**declared, **more)).sources
            assert not source.columns


LONG = "12345678901234567890.123456789"


def numbers(
    text: str, columns: list[pa.Field], *others: StoredTable, form: str = "plain", second: str = "null", **options: Any
) -> OpenedChanges:
    """Two messages, of which the first has this number as `n`, as a pipeline reads them."""
    cdc = weft.CDC(**CDC, **options)
    bodies = [
        f'{{"op":"c","after":{{"id":{key},"n":{n}}},"source":{{"lsn":{key}}}}}' for key, n in ((1, text), (2, second))
    ]
    if form == "wrapped":
        bodies = [f'{{"schema":{{"type":"struct"}},"payload":{each}}}' for each in bodies]
    known = dict.fromkeys(("before", "after", "schema", "payload"), pa.json_())
    parsed = JsonCodec().decoder(known).parse(pa.array([each.encode() for each in bodies]))
    assert not parsed.bad
    table = StoredTable({each.name: each for each in columns})
    return opened(pa.table(parsed.columns), cdc, lambda: [table, *others] if columns else [])


@pytest.mark.parametrize("form", ["plain", "wrapped"])
@pytest.mark.parametrize(
    ("column", "text", "stored"),
    [
        (pa.field("n", pa.decimal128(38, 18)), LONG, Decimal(LONG)),
        (pa.field("n", pa.decimal128(10, 2)), "1.50", Decimal("1.50")),
        # The table decides about more digits than it has, and gets them all.
        (pa.field("n", pa.decimal128(10, 2)), "1.505", "1.505"),
        (pa.field("n", pa.decimal128(38, 18)), "0.12345678901234567890123", "0.12345678901234567890123"),
        (pa.field("n", pa.decimal128(38, 18)), "1e-40", "0.0000000000000000000000000000000000000001"),
        (pa.field("n", pa.list_(pa.decimal128(38, 18))), f"[{LONG}]", [Decimal(LONG)]),
        (pa.field("n", pa.int64()), "9007199254740993.0", 9007199254740993),
        (pa.field("n", pa.string()), LONG, LONG),
        (hinted("n", "json"), f'{{"a":[{LONG},1]}}', f'{{"a":[{LONG},1]}}'),
    ],
)
def test_no_number_loses_a_digit(column: pa.Field, text: str, stored: Any, form: str) -> None:
    columns = [COLUMNS[0], column]
    found = numbers(text, columns, form=form)
    assert not found.bad
    table = typed(pa.table({**found.keys, **found.columns}), found.meanings, columns)
    assert table["n"].to_pylist()[0] == stored


def keyed(column: pa.Field | None, *keys: str) -> OpenedChanges:
    """Changes of these keys, in their order: of "old>new" one that changes the key."""
    bodies = []
    for lsn, key in enumerate(keys, 1):
        old, _, new = key.rpartition(">")
        before = f'{{"id":{old}}}' if old else "null"
        bodies.append(f'{{"op":"u","before":{before},"after":{{"id":{new},"n":1}},"source":{{"lsn":{lsn}}}}}')
    known = dict.fromkeys(("before", "after"), pa.json_())
    parsed = JsonCodec().decoder(known).parse(pa.array([each.encode() for each in bodies]))
    tables = [] if column is None else [StoredTable({"id": column, "n": COLUMNS[2]})]
    return opened(pa.table(parsed.columns), weft.CDC(**CDC), lambda: tables)


@pytest.mark.parametrize("kind", [pa.decimal128(38, 18), pa.string()])
def test_no_key_loses_a_digit(kind: pa.DataType) -> None:
    """Two keys that one float is nearest to are two."""
    column, long = pa.field("id", kind), "12345678901234567.{}".format
    found = keyed(column, long(1), "1.5", long(2), f"{long(1)}>{long(3)}", "1e10", "9007199254740993.0>7")
    assert not found.bad
    numbers = [long(1), "1.5", long(2), long(1), long(3), "10000000000", "9007199254740993", "7"]
    rows = typed(pa.table(found.keys), {}, [column])
    assert [Decimal(each) for each in rows["id"].to_pylist()] == [Decimal(each) for each in numbers]
    # A key has the same text in a batch of floats, by which later changes of it are known.
    assert {"1.5", "10000000000"} < {*texts_of(found)}
    assert texts_of(keyed(column, "1.50")) == ["1.5"]
    assert texts_of(keyed(column, "1e10")) == texts_of(keyed(column, "10000000000")) == ["10000000000"]


def texts_of(changes: OpenedChanges) -> list[str]:
    found: list[str] = newest(changes).rows[KEY].to_pylist()
    return found


@pytest.mark.parametrize("column", [None, pa.field("id", pa.float64()), pa.field("id", pa.int64())])
def test_a_key_that_no_table_keeps_apart_is_refused(column: pa.Field | None) -> None:
    found = keyed(column, "12345678901234567.1", "12345678901234568", "12345678901234567.1>5")
    assert list(found.bad) == [0, 2]


@pytest.mark.parametrize(
    ("text", "is_bad"),
    [
        (LONG, True),
        ("0.1000000000000000000000000000001", True),
        (f'{{"a":[1,{LONG}]}}', True),
        ("0.30000000000000004", False),
        ("0.10000000000000001", False),
    ],
)
def test_a_number_that_is_no_float_is_refused_where_no_table_has_a_decimal(text: str, is_bad: bool) -> None:
    found = numbers(text, [])
    assert list(found.bad) == [0] * is_bad
    # Where no table decides, none can be created with a decimal.
    assert all("than a float holds. Send the number as a text" in each for each in found.bad.values())
    # A column that the table lacks is left out, or it is added.
    assert not numbers(text, COLUMNS[:1]).bad
    assert list(numbers(text, COLUMNS[:1], schema_evolution="evolve").bad) == [0] * is_bad
    missing = numbers(text, COLUMNS[:1], StoredTable({}))
    assert list(missing.bad) == [0] * is_bad
    assert all("Create the column of the table as" in each for each in missing.bad.values())


DECIMALS = [COLUMNS[0], pa.field("n", pa.decimal128(38, 18))]


@pytest.mark.parametrize(
    ("other", "stored"),
    [
        ([], Decimal("1234567890123456.789012")),
        ([pa.field("n", pa.float64())], 1234567890123456.789012),
        ([pa.field("n", pa.string())], "1234567890123456.789012"),
    ],
)
def test_each_of_two_tables_gets_what_it_can_hold(other: list[pa.Field], stored: Any) -> None:
    text = "1234567890123456.789012"
    found = numbers(text, DECIMALS, StoredTable({each.name: each for each in (COLUMNS[0], *other)}))
    assert not found.bad
    rows = pa.table({**found.keys, **found.columns})
    assert typed(rows, found.meanings, DECIMALS)["n"].to_pylist() == [Decimal(text), None]
    assert typed(rows, found.meanings, other)["n"].to_pylist() == [stored, None]


def test_a_fraction_that_no_float_has_is_one() -> None:
    assert list(numbers("5.00000000000000000001", COLUMNS, second="5.0").bad) == [0]


def test_a_whole_number_for_a_decimal_and_an_integer() -> None:
    whole = StoredTable({each.name: each for each in COLUMNS[:3]})
    assert list(numbers("1.5", DECIMALS, whole, second="2.0").bad) == [0]


@pytest.mark.parametrize("second", ["1.5", "1e-50"])
def test_what_the_decimal_of_a_new_table_cannot_hold_is_refused_alone(second: str) -> None:
    """Also where a number is too long for any decimal, so that all are read as texts."""
    found = numbers("1e-20", [DECIMALS[0], pa.field("n", pa.decimal128(38, 30))], StoredTable({}), second=second)
    assert list(found.bad) == [0, 1][: 1 + (second != "1.5")]
    assert "Create the column of the table as a decimal" in found.bad[0]
    rows = typed(pa.table({**found.keys, **found.columns}), found.meanings)
    assert second != "1.5" or rows["n"].type == pa.decimal128(38, 18)


def test_a_list_with_more_digits_than_its_column_is_refused_alone() -> None:
    columns = [COLUMNS[0], pa.field("n", pa.list_(pa.decimal128(10, 2)))]
    found = numbers("[1.239,null]", columns, second="[1.25]")
    assert list(found.bad) == [0]
    assert "is [1.239,null], which" in found.bad[0]
    rows = typed(pa.table({**found.keys, **found.columns}), found.meanings, columns)
    assert rows["n"].to_pylist() == [[Decimal("1.25")]]
    # A number that is too long for any decimal does not make floats of the others.
    assert list(numbers("[1.239]", columns, second="[1e-50]").bad) == [0, 1]
