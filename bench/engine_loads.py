"""Loads between PostgreSQL databases, and between PostgreSQL and files, against the same work by hand."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import servers
import weft
from bench.harness import Case

Job = Callable[[], int]
_numbers = count()
_folder = tempfile.TemporaryDirectory(prefix="weft-bench-", ignore_cleanup_errors=True)
COLUMNS = "id bigint, name text, amount double precision, at timestamptz, n integer"
NAMES = "id, name, amount, at, n"
SELECT = f"SELECT {NAMES} FROM orders"


def _rows(scale: float) -> int:
    return max(10_000, int(1_000_000 * scale))


def fill(url: str, table: str, rows: int, constraint: str = "", change: str = "false") -> None:
    """A table of rows; where `change` holds, the amount is another."""
    import psycopg

    with psycopg.connect(url) as driver:
        driver.execute(f"CREATE TABLE {table} ({COLUMNS}{constraint})")
        driver.execute(
            f"INSERT INTO {table} SELECT i, 'customer ' || i % 1000, "
            f"i * 1.37 + CASE WHEN {change} THEN 1 ELSE 0 END, "
            "timestamptz '2026-01-01 00:00:00Z' + i * interval '1 second', i % 100 "
            f"FROM generate_series(1, {rows}) AS i"
        )
    with psycopg.connect(url, autocommit=True) as driver:
        driver.execute(f"VACUUM ANALYZE {table}")


class Pair:
    """Two databases on one server, and a Spark session that is warm."""

    def __init__(self, rows: int) -> None:
        server = servers.shared("postgres")
        self.rows = rows
        self.here = server.create_database(f"bench_{next(_numbers)}_a")
        self.there = server.create_database(f"bench_{next(_numbers)}_b")
        os.chdir(_folder.name)
        # A warm session that works for minutes.
        os.environ.setdefault("WEFT_SPARK_PROFILE", "throughput")
        # The user is called like the schema of our own tables: without this, names alone would lead there.
        self.execute("ALTER ROLE CURRENT_USER SET search_path = public")
        fill(self.here, "orders", rows)

    def load(self, table: str, data: object = SELECT, **options: Any) -> Any:
        """Our load into the second database."""
        options.setdefault("source", weft.connect(url=self.here) if isinstance(data, str) else None)
        return weft.load(data, target=("public", table), connection=weft.connect(url=self.there), **options)

    def execute(self, *statements: str, url: str | None = None) -> None:
        """Statements in one transaction."""
        import psycopg

        with psycopg.connect(url or self.there) as driver:
            for statement in statements:
                driver.execute(statement)

    def piped(self, table: str, *statements: str) -> None:
        """Binary COPY out of the first database into a table of the second, by psql (Python's driver hands over a row
        at a time), then statements, in one transaction."""
        before = [f"CREATE TEMP TABLE stage ({COLUMNS}) ON COMMIT DROP"] if table == "stage" else []
        into = [*before, f"COPY {table} ({NAMES}) FROM STDIN (FORMAT binary)", *statements]
        psql = ("psql", "-q", "-X", "-v", "ON_ERROR_STOP=1")
        out = subprocess.Popen(
            [*psql, self.here, "-c", f"COPY ({SELECT}) TO STDOUT (FORMAT binary)"], stdout=subprocess.PIPE
        )
        commands = [part for statement in into for part in ("-c", statement)]
        subprocess.run([*psql, "-1", self.there, *commands], stdin=out.stdout, stdout=subprocess.DEVNULL, check=True)
        assert out.wait() == 0

    def emptied(self, job: Callable[[], object], table: str) -> Job:
        """A job that finds an empty table each time."""

        def run() -> int:
            job()
            return self.rows

        return _with_reset(
            run, lambda: self.execute(f"DROP TABLE IF EXISTS {table}", f"CREATE TABLE {table} ({COLUMNS})")
        )


def _with_reset(job: Job, reset: Callable[[], object]) -> Job:
    """A job before each of whose rounds its target is made anew, outside the time that is taken."""
    job.reset = reset  # type: ignore[attr-defined]
    return job


def append_across(scale: float) -> tuple[Job, Job]:
    """Append from one database to another, nothing between."""
    pair = Pair(_rows(scale))
    return pair.emptied(lambda: pair.load("ours"), "ours"), pair.emptied(lambda: pair.piped("theirs"), "theirs")


def append_transformed(scale: float) -> tuple[Job, Job]:
    """The same through Spark SQL."""
    pair = Pair(_rows(scale))
    sql = "SELECT id, upper(name) AS name, amount * 2 AS amount, at, n FROM source WHERE id > 0"
    return (
        pair.emptied(lambda: pair.load("ours", transform_sql=sql), "ours"),
        pair.emptied(lambda: pair.piped("theirs"), "theirs"),
    )


def append_in_one(scale: float) -> tuple[Job, Job]:
    """Append inside one database."""
    pair = Pair(_rows(scale))
    pair.execute(f"CREATE TABLE orders ({COLUMNS})")
    pair.piped("orders")
    connection = weft.connect(url=pair.there)
    return (
        pair.emptied(lambda: weft.load(SELECT, target=("public", "ours"), connection=connection), "ours"),
        pair.emptied(lambda: pair.execute(f"INSERT INTO theirs ({NAMES}) {SELECT}"), "theirs"),
    )


MERGE = (
    "MERGE INTO theirs t USING stage s ON t.id = s.id WHEN MATCHED AND (t.name, t.amount, t.at, t.n) IS DISTINCT FROM "
    "(s.name, s.amount, s.at, s.n) THEN UPDATE SET name = s.name, amount = s.amount, at = s.at, n = s.n "
    f"WHEN NOT MATCHED THEN INSERT ({NAMES}) VALUES (s.id, s.name, s.amount, s.at, s.n)"
)


def _targets(pair: Pair, change: str) -> tuple[Callable[[], None], Callable[[], None]]:
    def reset(table: str) -> Callable[[], None]:
        def run() -> None:
            pair.execute(f"DROP TABLE IF EXISTS {table}")
            fill(pair.there, table, pair.rows, ", PRIMARY KEY (id)", change)

        return run

    return reset("ours"), reset("theirs")


def merge(change: str) -> Callable[[float], tuple[Job, Job]]:
    """Merge across databases into a table of as many rows."""

    def prepare(scale: float) -> tuple[Job, Job]:
        pair = Pair(_rows(scale))
        ours, theirs = _targets(pair, change)

        def job() -> int:
            pair.load("ours", mode="merge", keys=["id"])
            return pair.rows

        def by_hand() -> int:
            pair.piped("stage", "ANALYZE stage", MERGE)
            return pair.rows

        return _with_reset(job, ours), _with_reset(by_hand, theirs)

    return prepare


def merge_with_deletes(scale: float) -> tuple[Job, Job]:
    """Hard delete of a tenth, that is missing in the source, against the same merge without."""
    pair = Pair(_rows(scale))
    ours, theirs = _targets(pair, "false")
    select = f"{SELECT} WHERE id % 10 <> 0"

    def job() -> int:
        pair.load("ours", select, mode="merge", keys=["id"], handle_deletes="hard")
        return pair.rows

    def plain() -> int:
        pair.load("theirs", select, mode="merge", keys=["id"])
        return pair.rows

    return _with_reset(job, ours), _with_reset(plain, theirs)


SCD2 = (
    "CREATE TEMP TABLE changed ON COMMIT DROP AS SELECT s.*, t.id IS NOT NULL AS hit FROM stage s "
    "LEFT JOIN theirs t ON t.id = s.id AND t.is_current WHERE t.id IS NULL OR "
    "(t.name, t.amount, t.at, t.n) IS DISTINCT FROM (s.name, s.amount, s.at, s.n)",
    "UPDATE theirs t SET valid_to = now(), is_current = false FROM changed s "
    "WHERE s.hit AND t.id = s.id AND t.is_current",
    f"INSERT INTO theirs ({NAMES}, valid_from, is_current, row_hash) "
    "SELECT id, name, amount, at, n, now(), true, md5(ROW(name, amount, at, n)::text) FROM changed",
)


def scd2(change: str) -> Callable[[float], tuple[Job, Job]]:
    """scd2 across databases into a table of as many current versions."""

    def prepare(scale: float) -> tuple[Job, Job]:
        pair = Pair(_rows(scale))

        def reset(table: str) -> Callable[[], None]:
            def run() -> None:
                pair.execute(f"DROP TABLE IF EXISTS {table}")
                more = ", valid_from timestamptz NOT NULL DEFAULT '2026-01-01Z', valid_to timestamptz, "
                more += "is_current boolean NOT NULL DEFAULT true, row_hash text"
                _fill_scd2(pair, table, more, change)

            return run

        def job() -> int:
            pair.load("ours", mode="scd2", keys=["id"])
            return pair.rows

        def by_hand() -> int:
            pair.piped("stage", "ANALYZE stage", *SCD2)
            return pair.rows

        return _with_reset(job, reset("ours")), _with_reset(by_hand, reset("theirs"))

    return prepare


def _fill_scd2(pair: Pair, table: str, more: str, change: str) -> None:
    import psycopg

    pair.execute(
        f"CREATE TABLE {table} ({COLUMNS}{more})",
        f"INSERT INTO {table} ({NAMES}) SELECT i, 'customer ' || i % 1000, "
        f"i * 1.37 + CASE WHEN {change} THEN 1 ELSE 0 END, "
        "timestamptz '2026-01-01 00:00:00Z' + i * interval '1 second', i % 100 "
        f"FROM generate_series(1, {pair.rows}) AS i",
        f"CREATE INDEX ON {table} (id)",
    )
    with psycopg.connect(pair.there, autocommit=True) as driver:
        driver.execute(f"VACUUM ANALYZE {table}")


def from_parquet(scale: float) -> tuple[Job, Job]:
    """A Parquet file into PostgreSQL; the same rows as CSV by psql."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    pair = Pair(_rows(scale))
    folder = Path(tempfile.mkdtemp(dir=_folder.name))
    from weft.engine.load import open_tables
    from weft.systems.sql.tables import Slice

    tables = open_tables(weft.connect(url=pair.here))
    schema = tables.describe(SELECT)
    table = pa.Table.from_batches(tables.read(Slice(SELECT), schema))
    tables.close()
    pyarrow.parquet.write_table(table, folder / "orders.parquet")
    pyarrow.csv.write_csv(table, folder / "orders.csv")
    command = f"\\copy theirs ({NAMES}) FROM '{folder}/orders.csv' (FORMAT csv, HEADER)"
    return (
        pair.emptied(lambda: pair.load("ours", folder / "orders.parquet"), "ours"),
        pair.emptied(
            lambda: subprocess.run(["psql", "-q", pair.there, "-c", command], check=True, stdout=subprocess.DEVNULL),
            "theirs",
        ),
    )


def million_and_more(scale: float) -> tuple[Job, Job]:
    """Time per row of an append across databases, of ten times as many rows."""
    many, few = Pair(10 * _rows(scale)), Pair(_rows(scale))
    return many.emptied(lambda: many.load("ours"), "ours"), few.emptied(lambda: few.load("ours"), "ours")


COPY = "binary COPY to COPY"
# The first rounds still meet the checkpoints of the rows that were laid out, and a JVM that compiles: with few rounds
# they would be the median.
_MANY = 9
CASES = [
    Case("append across databases", COPY, 0.55, append_across, rounds=_MANY, needs="postgres"),
    Case(
        "append across databases, Spark SQL between",
        COPY,
        0.4,
        append_transformed,
        rounds=_MANY,
        needs="postgres",
    ),
    Case("append in one database", "INSERT … SELECT", 0.95, append_in_one, rounds=15, needs="postgres"),
    Case("merge across databases, unchanged", "COPY pipe + MERGE", 0.7, merge("false"), rounds=_MANY, needs="postgres"),
    Case(
        "merge across databases, 10% changed",
        "COPY pipe + MERGE",
        0.7,
        merge("i % 10 = 0"),
        rounds=_MANY,
        needs="postgres",
    ),
    Case(
        "scd2 across databases, unchanged",
        "COPY pipe + the same SQL",
        0.7,
        scd2("false"),
        rounds=_MANY,
        needs="postgres",
    ),
    Case(
        "scd2 across databases, 10% changed",
        "COPY pipe + the same SQL",
        0.7,
        scd2("i % 10 = 0"),
        rounds=_MANY,
        needs="postgres",
    ),
    Case("hard delete of 10%", "the same merge", 1.7, merge_with_deletes, at_most=True, needs="postgres"),
    Case("Parquet to PostgreSQL", "psql \\copy of CSV", 0.6, from_parquet, needs="postgres"),
    Case(
        "append of ten times the rows (time a row)",
        "append",
        1.2,
        million_and_more,
        at_most=True,
        rounds=3,
        needs="postgres",
    ),
]
