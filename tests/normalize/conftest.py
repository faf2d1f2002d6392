"""Normalizers are run for real: by each database, and by Spark.

def test_something(runner):                       runs on each of them (-k sqlite: on that one)
    runner.dialect                                "sqlite", "postgres", …, "spark"
    runner([trim()], [" a "], pa.string())        ["a"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
DIALECTS = (*DATABASES, "spark")
COLUMN = 'a "Column"`s'


class Runner:
    """Runs normalizers over values; a subclass says where."""

    dialect: str

    def __call__(self, normalizers: Sequence[Normalizer], values: Sequence[Any], kind: pa.DataType) -> list[Any]:
        sql, made = expression(normalizers, COLUMN, self.dialect, kind=kind)
        given = pa.table({"n": range(len(values)), COLUMN: pa.array(values, kind)})
        found = self.select(given, sql, made)
        assert found.schema.field("y").type == made
        return found.sort_by("n")["y"].to_pylist()

    def select(self, given: pa.Table, sql: str, made: pa.DataType) -> pa.Table:
        raise NotImplementedError


class DatabaseRunner(Runner):
    def __init__(self, tables: SqlTables) -> None:
        self.tables = tables
        self.dialect = tables.dialect
        self.made: set[str] = set()

    def select(self, given: pa.Table, sql: str, made: pa.DataType) -> pa.Table:
        schema = pa.schema([pa.field("n", pa.int64()), pa.field("y", made)])
        return pa.Table.from_batches(self.tables.read(Slice(self._query(given, sql)), schema), schema)

    def rejects(self, normalizers: Sequence[Normalizer], values: Sequence[Any], kind: pa.DataType) -> bool:
        """Whether a load would take what happens for a value that was refused."""
        sql, _ = expression(normalizers, COLUMN, self.dialect, kind=kind)
        query = self._query(pa.table({"n": range(len(values)), COLUMN: pa.array(values, kind)}), sql)
        try:
            with self.tables.driver.session("publish") as session:
                self.tables.create_temporary_as(session, "copied", query)
        except Exception as error:
            return self.tables.is_rejection(error)
        return False

    def _query(self, given: pa.Table, sql: str) -> str:
        tables = self.tables
        name = f"given {given.schema.field(COLUMN).type}"
        table = tables.table(None, name)
        with tables.driver.session("publish") as session:
            if name not in self.made:
                columns = ", ".join(f"{tables.quote(field.name)} {tables.sql_type(field)}" for field in given.schema)
                session.run(f"CREATE TABLE {table} ({columns})")
                self.made.add(name)
            session.run(f"DELETE FROM {table}")
            tables.copy_in(session, table, given.schema, given.to_batches())
        return f"SELECT {tables.quote('n')}, {sql} AS {tables.quote('y')} FROM {table}"


class SparkRunner(Runner):
    dialect = "spark"

    def __init__(self, spark: Any) -> None:
        self.spark = spark

    def select(self, given: pa.Table, sql: str, made: pa.DataType) -> pa.Table:
        from weft.columns import canonical_batch, canonical_schema

        found = self.spark.createDataFrame(given).selectExpr("n", f"{sql} AS y").toArrow()
        schema = canonical_schema(found.schema)
        return pa.Table.from_batches([canonical_batch(batch, schema) for batch in found.to_batches()], schema)


@pytest.fixture(params=DIALECTS)
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
