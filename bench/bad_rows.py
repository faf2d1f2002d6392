"""Rows of which one in a hundred is bad, against as many good ones: into each database, and through SQL that fails."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import count, cycle
from pathlib import Path
from typing import Any

import servers
import weft
from bench.engine_loads import Job, _folder, _with_reset
from bench.harness import Case
from bench.streaming import Inbox, Target
from weft.systems.base import system_for
from weft.systems.sql.tables import SqlTables

_numbers = count()
# Each hundredth row breaks one of them in turn.
_KINDS = ("check", "null", "range", "key", "unique")


def _rows(scale: float) -> int:
    return max(10_000, int(100_000 * scale))


def _table(rows: int, *, bad: bool) -> Any:
    import pyarrow as pa

    made = [{"id": i, "name": f"n{i}", "n": i % 100, "parent": i % 50, "small": i % 1000} for i in range(rows)]
    if bad:
        for at, kind in zip(range(37, rows, 100), cycle(_KINDS), strict=False):
            made[at] |= {
                "check": {"n": 500},
                "null": {"n": None},
                "range": {"small": 1_000_000},
                "key": {"parent": 1_000 + at},
                "unique": {"name": f"n{at - 1}"},
            }[kind]
    return pa.Table.from_pylist(made)


class Database:
    """A database, and targets in it that refuse some rows."""

    def __init__(self, kind: str) -> None:
        if kind in ("sqlite", "duckdb"):
            url = f"{kind}:///{tempfile.mkdtemp(dir=_folder.name)}/bench.db"
        else:
            url = servers.shared(kind).create_database(f"bench_bad_{next(_numbers)}")
        self.connection = weft.connect(url=url)
        self.tables: SqlTables = system_for(self.connection.kind).load_tables()(self.connection)
        parents = ", ".join(f"({i})" for i in range(50))
        self.run("CREATE TABLE parents (id BIGINT PRIMARY KEY)", f"INSERT INTO parents VALUES {parents}")

    def run(self, *statements: str) -> None:
        with self.tables.driver.session("publish") as session:
            for statement in statements:
                session.run(statement)

    def job(self, table: str, rows: Any, **options: Any) -> Job:
        """A load that finds its table empty, and puts bad rows aside."""
        small = "INTEGER_16" if self.tables.dialect == "sqlite" else "SMALLINT"
        columns = (
            "id BIGINT PRIMARY KEY, name VARCHAR(20) UNIQUE, n BIGINT NOT NULL CHECK (n < 100), "
            f"parent BIGINT, small {small}, FOREIGN KEY (parent) REFERENCES parents (id)"
        )

        def run() -> int:
            weft.load(rows, target=table, connection=self.connection, on_bad_rows="quarantine", **options)
            return int(rows.num_rows)

        return _with_reset(
            run,
            lambda: self.run(
                f"DROP TABLE IF EXISTS {table}",
                f"DROP TABLE IF EXISTS {table}__quarantine",
                f"CREATE TABLE {table} ({columns})",
            ),
        )


def _into(kind: str, **options: Any) -> Callable[[float], tuple[Job, Job]]:
    def prepare(scale: float) -> tuple[Job, Job]:
        rows, database = _rows(scale), Database(kind)
        return (
            database.job("ours", _table(rows, bad=True), **options),
            database.job("theirs", _table(rows, bad=False), **options),
        )

    return prepare


def _through_sql(scale: float) -> tuple[Job, Job]:
    """A streaming pipeline whose SQL fails for texts that are no numbers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, jobs = _rows(scale), []
    for table, is_bad in (("ours", True), ("theirs", False)):
        target, folder = Target(rows), Path(tempfile.mkdtemp(dir=_folder.name))
        texts = ["x" if is_bad and i % 100 == 37 else str(i % 100) for i in range(rows)]
        made = {"id": range(rows), "name": texts, "amount": [1.5] * rows}
        pq.write_table(pa.table({name: list(values) for name, values in made.items()}), folder / "rows.parquet")
        inbox = Inbox(
            target,
            "parquet",
            table,
            transform_sql="SELECT id, name, amount, CAST(name AS INT) AS n FROM source",
            transform_on_error="dlq",
            dead_letter_path=str(folder.with_suffix(".dead")),
        )
        good = rows - texts.count("x")
        target._reset(table)
        inbox.fill(folder, good)
        jobs.append(target.job(table, lambda inbox=inbox, folder=folder, good=good: inbox.fill(folder, good)))
    return jobs[0], jobs[1]


_NONE = "the same rows, none bad"
_NAMES = {"sqlite": "SQLite", "postgres": "PostgreSQL", "mysql": "MariaDB", "duckdb": "DuckDB"}


def _case(kind: str, mode: str, **options: Any) -> Case:
    needs = None if kind in ("sqlite", "duckdb") else kind
    name = f"{mode} of 100k rows, 1% bad, {_NAMES[kind]} (time)"
    return Case(name, _NONE, 5, _into(kind, mode=mode, **options), at_most=True, rounds=3, needs=needs)


CASES = [
    *(_case(kind, "append") for kind in _NAMES),
    *(_case(kind, "merge", keys=["id"]) for kind in _NAMES),
    Case("SQL over 100k rows, 1% fail (time)", _NONE, 5, _through_sql, at_most=True, needs="postgres"),
]
