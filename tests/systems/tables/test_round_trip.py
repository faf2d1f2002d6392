"""Every canonical type goes into a new table and comes back as it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from systems.tables import values
from weft.columns import hint_of, is_nested
from weft.systems.sql.tables import Slice, SqlTables

pytestmark = pytest.mark.every_system

_numbers = itertools.count()
NUMBER = pa.field("n", pa.int64())


def check(tables: SqlTables, data: pa.Table, *, rows: int | None = None) -> None:
    """The table comes back from the database as it is. It has a column `n` that numbers its rows."""
    table = values.create(tables, f"types {next(_numbers)}", data.schema)
    values.copy_in(tables, table, data, rows)
    found = values.read_all(tables, f"SELECT * FROM {table}").sort_by("n")
    assert found.schema.names == data.schema.names
    assert found.num_rows == data.num_rows
    for field in data.schema:
        same_type(found.schema.field(field.name), field)
        before = [values.plain(value, field) for value in data[field.name].to_pylist()]
        after = [values.plain(value, field) for value in found[field.name].to_pylist()]
        assert after == before, field


def same_type(found: pa.Field, wanted: pa.Field) -> None:
    if is_nested(wanted.type):
        assert hint_of(found) == "json" or found.type == wanted.type
    elif pa.types.is_integer(wanted.type):
        # Not every database has the small ones.
        assert pa.types.is_integer(found.type) and found.type.bit_width >= wanted.type.bit_width
    else:
        assert found.type == wanted.type
        assert hint_of(found) == hint_of(wanted)


@settings(suppress_health_check=list(HealthCheck), max_examples=max(10, settings.get_profile("weft").max_examples // 5))
@given(data=st.data())
def test_any_values(tables: SqlTables, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(list(values.FIELDS)), min_size=1, max_size=6, unique=True))
    fields = [values.FIELDS[name] for name in names]
    rows = data.draw(st.lists(st.tuples(*(values.strategy(field, tables.dialect) for field in fields)), max_size=12))
    numbered = [dict(zip(names, row, strict=True), n=number) for number, row in enumerate(rows)]
    check(tables, pa.Table.from_pylist(numbered, pa.schema([*fields, NUMBER])), rows=5)


def every_edge(dialect: str, rows: int) -> pa.Table:
    """All types side by side, each turning over its edges and null."""
    columns: dict[str, list[Any]] = {}
    for name, field in values.FIELDS.items():
        found = [None, *values.edges(field, dialect)]
        columns[name] = [found[number % len(found)] for number in range(rows)]
    schema = pa.schema([*values.FIELDS.values(), NUMBER])
    return pa.table({**columns, "n": list(range(rows))}, schema=schema)


def test_edges(tables: SqlTables) -> None:
    check(tables, every_edge(tables.dialect, 60))
    check(tables, every_edge(tables.dialect, 60).slice(7, 20), rows=3)


def test_lone_columns(tables: SqlTables, count: Callable[..., int]) -> None:
    for name, field in values.FIELDS.items():
        found = values.edges(field, tables.dialect)
        for column in (found, [None, *found, None], [None] * 3)[-count(3, 2) :]:
            made = pa.table({name: pa.array(column, field.type)}, schema=pa.schema([field]))
            table = values.create(tables, f"types {next(_numbers)}", made.schema)
            values.copy_in(tables, table, made)
            read = values.read_all(tables, f"SELECT * FROM {table}")
            same_type(read.schema.field(name), field)
            assert shown(read[name].to_pylist(), field) == shown(column, field), field


def shown(column: list[Any], field: pa.Field) -> list[str]:
    """In no order, and zero without a sign."""
    return sorted(repr(values.plain(value, field)).replace("-0.0", "0.0") for value in column)


def test_negative_zero(tables: SqlTables) -> None:
    made = pa.table({"x": pa.array([-0.0], pa.float64())})
    table = values.create(tables, "zeros", made.schema)
    values.copy_in(tables, table, made)
    (found,) = values.read_all(tables, f"SELECT * FROM {table}")["x"].to_pylist()
    # SQLite keeps a whole number as an integer, and that has no sign; MySQL prints none.
    assert str(found) == ("0.0" if tables.dialect in ("sqlite", "mysql") else "-0.0")


@pytest.mark.full
def test_more_rows_than_are_encoded_at_once(tables: SqlTables) -> None:
    count = 70_001
    numbers = pa.array(range(count), pa.int64())
    texts = pa.array([None if number % 7 == 0 else f"row {number}" for number in range(count)])
    check(tables, pa.table({"text": texts, "n": numbers, "half": numbers.cast(pa.float64())}))


def test_some_columns_in_another_order_and_none(tables: SqlTables) -> None:
    made = every_edge(tables.dialect, 5).select(["string", "int64", "bool", "n"])
    table = values.create(tables, "some", made.schema)
    values.copy_in(tables, table, made)
    sql = f"SELECT * FROM {table} -- all of it"
    found = values.read_all(tables, sql, ["bool", "string"])
    assert found.schema.names == ["bool", "string"]
    assert sorted(map(str, found.to_pylist())) == sorted(map(str, made.select(["bool", "string"]).to_pylist()))
    assert sum(batch.num_rows for batch in tables.read(Slice(sql), tables.describe(sql), [])) == 5


def test_an_empty_table(tables: SqlTables) -> None:
    check(tables, every_edge(tables.dialect, 0))
