"""Types and values survive the way from every database to every database, read and written by one Spark task, and
through Spark SQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import date
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import servers
import weft
from systems.tables import values
from systems.tables.conftest import FILES, KINDS
from weft.columns import hint_of, is_nested
from weft.engine.load import open_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_numbers = count()
NUMBER = pa.field("n", pa.int64())

# What reads knows nothing of what writes: each reads, and each writes, for two others or itself.


@pytest.fixture
def database(
    tmp_path: Path, shared_server: Callable[[str], servers.Server]
) -> Iterator[Callable[[str], weft.systems.Connection]]:
    """`database(kind)` is a connection to an empty database."""
    with ExitStack() as stack:

        def make(kind: str) -> Any:
            if kind in FILES:
                return weft.connect(url=f"{kind}:///{tmp_path / f'{next(_numbers)}.db'}")
            return weft.connect(url=stack.enter_context(shared_server(kind).database()))

        yield make


def column_values(connection: Any, table: str, schema: pa.Schema) -> dict[str, list[Any]]:
    tables = open_tables(connection)
    try:
        found = values.read_all(tables, f"SELECT * FROM {tables.table(None, table)}").sort_by("n")
        return {field.name: [values.plain(value, field) for value in found[field.name].to_pylist()] for field in schema}
    finally:
        tables.close()


def check(source: Any, target: Any, data: pa.Table, **options: Any) -> None:
    first, second = f"t{next(_numbers)}", f"t{next(_numbers)}"
    assert weft.load(data, target=first, connection=source).inserted == data.num_rows
    tables = open_tables(source)
    sql = f"SELECT * FROM {tables.table(None, first)}"
    tables.close()
    result = weft.load(sql, source=source, target=second, connection=target, engine="spark", **options)
    assert (result.rows_read, result.inserted, result.engine) == (data.num_rows, data.num_rows, "spark")
    expected = {
        field.name: [values.plain(value, field) for value in data[field.name].to_pylist()] for field in data.schema
    }
    assert column_values(target, second, data.schema) == expected
    if "transform_sql" not in options:
        check_types(target, second, data.schema)


def check_types(target: Any, table: str, schema: pa.Schema) -> None:
    tables = open_tables(target)
    found = tables.describe(f"SELECT * FROM {tables.table(None, table)}")
    tables.close()
    for wanted in schema:
        if is_nested(wanted.type) or pa.types.is_integer(wanted.type):
            continue
        assert found.field(wanted.name).type == wanted.type
        assert hint_of(found.field(wanted.name)) == hint_of(wanted)


def both(source: str, target: str) -> str:
    """The dialect that can hold less."""
    return "mysql" if "mysql" in (source, target) else "sqlite" if "sqlite" in (source, target) else source


def every_edge(dialect: str) -> pa.Table:
    fields = list(values.FIELDS.values())
    columns = {field.name: [None, *values.edges(field, dialect), *[None] * 12][:12] for field in fields}
    return pa.table({**columns, "n": list(range(12))}, schema=pa.schema([*fields, NUMBER]))


@pytest.mark.brief("sqlite-sqlite", "sqlite-mysql", "postgres-sqlite", "mysql-postgres", "mysql-duckdb", "duckdb-mysql")
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_every_type(plain_spark: SparkSession, database: Callable[[str], Any], source: str, target: str) -> None:
    check(database(source), database(target), every_edge(both(source, target)))


@pytest.mark.brief("duckdb-sqlite")
@pytest.mark.parametrize(("source", "target"), list(zip(KINDS, [*KINDS[1:], KINDS[0]], strict=True)))
def test_every_type_through_spark_sql(
    plain_spark: SparkSession, database: Callable[[str], Any], source: str, target: str
) -> None:
    check(database(source), database(target), every_edge(both(source, target)), transform_sql="SELECT * FROM source")


@pytest.mark.brief("sqlite-postgres")
@settings(suppress_health_check=list(HealthCheck), max_examples=max(3, settings.get_profile("weft").max_examples // 30))
@given(data=st.data())
@pytest.mark.parametrize(("source", "target"), [("sqlite", "postgres"), ("postgres", "mysql"), ("mysql", "duckdb")])
def test_any_values(
    plain_spark: SparkSession, database: Callable[[str], Any], source: str, target: str, data: st.DataObject
) -> None:
    dialect = both(source, target)
    names = data.draw(st.lists(st.sampled_from(list(values.FIELDS)), min_size=1, max_size=6, unique=True))
    fields = [values.FIELDS[name] for name in names]
    rows = data.draw(st.lists(st.tuples(*(values.strategy(field, dialect) for field in fields)), max_size=12))
    numbered = [dict(zip(names, row, strict=True), n=number) for number, row in enumerate(rows)]
    check(database(source), database(target), pa.Table.from_pylist(numbered, pa.schema([*fields, NUMBER])))


@pytest.mark.brief("mysql")
@pytest.mark.parametrize("kind", KINDS)
def test_filters_mean_the_same_wherever_they_are_applied(
    plain_spark: SparkSession, database: Callable[[str], Any], kind: str
) -> None:
    connection = database(kind)
    fields = [values.FIELDS[name] for name in ("int64", "decimal(10,2)", "date", "string", "float64")]
    rows = [
        (9, Decimal("9.00"), date(2026, 1, 9), "a", 1.5),
        (10, Decimal("10.50"), date(2026, 10, 1), "A", -1.5),
        (None, None, None, None, None),
    ]
    names = [field.name for field in fields]
    numbered = [dict(zip(names, row, strict=True), n=number) for number, row in enumerate(rows)]
    weft.load(pa.Table.from_pylist(numbered, pa.schema([*fields, NUMBER])), target="t", connection=connection)
    frame = weft.read("SELECT * FROM t", source=connection)
    for condition, expected in {
        "int64 > 9": [1],
        "int64 IN (9, 11)": [0],
        "int64 IS NULL": [2],
        "NOT (int64 = 9)": [1],
        "`decimal(10,2)` < 10": [0],
        "`decimal(10,2)` = 10.5": [1],
        "date >= DATE '2026-02-01'": [1],
        "string = 'a'": [0],
        "float64 < 0": [1],
    }.items():
        assert [row.n for row in frame.filter(condition).collect()] == expected, condition
    # Each scan of a query has its own.
    both = frame.filter("int64 > 9").union(frame.filter("int64 <= 9"))
    assert sorted(row.n for row in both.collect()) == [0, 1]
