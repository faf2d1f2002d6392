"""Normalizers are run for real: by each database, and by Spark.

def test_something(runner):                       runs on each of them (-k sqlite: on that one)
    runner.dialect                                "sqlite", "postgres", …, "spark"
    runner([trim()], [" a "], pa.string())        ["a"]
    runner.together({"a": Column([trim()], [" a "], pa.string()), …})     {"a": ["a"], …}, in one statement
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import servers
import weft
from weft.normalize import Normalizer, expression
from weft.systems.base import system_for
from weft.systems.sql.tables import Slice, SqlTables

DATABASES = ("sqlite", "duckdb", "postgres", "mysql")

COLUMN = 'a "Column"`s'


@dataclass(frozen=True)
class Column:
    """Normalizers, and the values of a column to run them over."""

    normalizers: Sequence[Normalizer]
    values: Sequence[Any]
    kind: pa.DataType


class Runner:
    """Runs normalizers over values; a subclass says where."""

    dialect: str

    def __call__(self, normalizers: Sequence[Normalizer], values: Sequence[Any], kind: pa.DataType) -> list[Any]:
        return self.together({COLUMN: Column(normalizers, values, kind)})[COLUMN]

    def together(self, columns: Mapping[str, Column]) -> dict[str, list[Any]]:
        """What becomes of the values of several columns, in one statement. Shorter columns are filled with nulls."""
        count = max(len(each.values) for each in columns.values())
        source: dict[str, Any] = {"n": range(count)}
        selected, results = [], [pa.field("n", pa.int64())]
        for number, (name, column) in enumerate(columns.items()):
            sql, kind = expression(column.normalizers, name, self.dialect, kind=column.kind)
            filled = [*column.values, *[None] * (count - len(column.values))]
            source[name] = pa.array(filled, column.kind)
            selected.append(f"{sql} AS y{number}")
            results.append(pa.field(f"y{number}", kind))
        selection = self.select(pa.table(source), selected, pa.schema(results)).sort_by("n")
        assert selection.schema.types == pa.schema(results).types
        return {
            name: selection[f"y{number}"].to_pylist()[: len(column.values)]
            for number, (name, column) in enumerate(columns.items())
        }

    def select(self, source: pa.Table, selected: Sequence[str], results: pa.Schema) -> pa.Table:
        raise NotImplementedError


class DatabaseRunner(Runner):
    def __init__(self, tables: SqlTables) -> None:
        self.tables = tables
        self.dialect = tables.dialect
        self.created: set[str] = set()

    def select(self, source: pa.Table, selected: Sequence[str], results: pa.Schema) -> pa.Table:
        query = self._query(source, ", ".join(selected))
        return pa.Table.from_batches(self.tables.read(Slice(query), results), results)

    def rejects(self, normalizers: Sequence[Normalizer], values: Sequence[Any], kind: pa.DataType) -> bool:
        """Whether a load would take what happens for a value that was refused."""
        sql, _ = expression(normalizers, COLUMN, self.dialect, kind=kind)
        source = pa.table({"n": range(len(values)), COLUMN: pa.array(values, kind)})
        query = self._query(source, f"{sql} AS y0")
        try:
            with self.tables.driver.session("publish") as session:
                self.tables.create_temporary_as(session, "copied", query)
        except Exception as error:
            return self.tables.is_rejection(error)
        return False

    def _query(self, source: pa.Table, selected: str) -> str:
        tables = self.tables
        name = f"source {len(source.schema)} {source.schema.types[-1]}"
        table = tables.table(None, name)
        with tables.driver.session("publish") as session:
            if name not in self.created:
                columns = ", ".join(f"{tables.quote(field.name)} {tables.sql_type(field)}" for field in source.schema)
                session.run(f"CREATE TABLE {table} ({columns})")
                self.created.add(name)
            session.run(f"DELETE FROM {table}")
            tables.copy_in(session, table, source.schema, source.to_batches())
        return f"SELECT {tables.quote('n')}, {selected} FROM {table}"


class SparkRunner(Runner):
    dialect = "spark"

    def __init__(self, spark: Any) -> None:
        self.spark = spark

    def select(self, source: pa.Table, selected: Sequence[str], results: pa.Schema) -> pa.Table:
        from weft.columns import canonical_batch, canonical_schema

        found = self.spark.createDataFrame(source).selectExpr("n", *selected).toArrow()
        schema = canonical_schema(found.schema)
        return pa.Table.from_batches([canonical_batch(batch, schema) for batch in found.to_batches()], schema)


@pytest.fixture(params=[*DATABASES, pytest.param("spark", marks=pytest.mark.spark)])
def runner(
    request: pytest.FixtureRequest, tmp_path: Path, shared_server: Callable[[str], servers.Server]
) -> Iterator[Runner]:
    kind = request.param
    if kind == "spark":
        yield SparkRunner(request.getfixturevalue("spark"))
        return
    if kind == "duckdb":
        # A file would be opened anew for every statement.
        yield from _on(weft.DuckDBConnection(":memory:", name=str(tmp_path)))
    elif kind == "sqlite":
        yield from _on(weft.SQLiteConnection(str(tmp_path / "tables.db")))
    else:
        with shared_server(kind).database() as url:
            yield from _on(weft.connect(url=url))


def _on(connection: Any) -> Iterator[Runner]:
    tables: SqlTables = system_for(connection.kind).load_tables()(connection)
    yield DatabaseRunner(tables)
    tables.close()
