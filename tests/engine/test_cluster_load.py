"""Loads on a real cluster, with a worker killed in the middle: all of it is there once, or a re-run makes it so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

import servers
from tests.engine.cluster import STARTUP_SECONDS, Cluster
from tests.engine.conftest import Python, finish

# Each is a start of a cluster.


@pytest.fixture
def urls(shared_server: Callable[[str], servers.Server]) -> Iterator[tuple[str, str]]:
    """Two empty databases."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(shared_server("postgres").database()) for _ in range(2))
        yield first, second


def ask(url: str, sql: str) -> list[Any]:
    with psycopg.connect(url) as driver:
        return driver.execute(sql).fetchall()


PROGRAM = """
    source, target = (weft.connect(url=url) for url in sys.argv[1:3])
    weft.spark().sparkContext.parallelize(range(2), 2).map(str).collect()  # both executors are there
    print("running", flush=True)
    if sys.argv[3] == "one task":
        data = "SELECT * FROM slow_orders"
        more = {"source": source}
    else:
        data, more = weft.read("SELECT * FROM slow_orders", source=source, partitions=8, partition_by="id"), {}
    for attempt in range(3):
        try:
            result = weft.load(data, target="orders", connection=target, mode="merge", keys=["id"],
                               commit_key="once", **more)
            break
        except weft.WeftError as error:
            print("again:", error, file=sys.stderr)
    print(result.rows_read, result.inserted, result.replayed, result.engine)
"""


# Whoever reads one of the rows waits as long as somebody holds the lock: a load is over in a moment else.
WAITING = """
    CREATE FUNCTION waiting(name TEXT) RETURNS TEXT LANGUAGE plpgsql VOLATILE AS $$
    BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN name; END $$
"""


@pytest.mark.full
# One of the two works on the one task.
@pytest.mark.timing
@pytest.mark.parametrize(("way", "killed"), [("one task", 0), ("one task", 1), ("many tasks", 0)])
def test_a_worker_is_killed_during_a_load(
    cluster: Cluster,
    python: Python,
    project: Path,
    urls: tuple[str, str],
    count: Callable[[int], int],
    way: str,
    killed: int,
) -> None:
    source, target = urls
    rows = count(1_000_000)
    with psycopg.connect(source) as driver:
        driver.execute(
            "CREATE TABLE orders AS SELECT i AS id, 'customer ' || i AS name, i * 1.5 AS total "
            f"FROM generate_series(1, {rows}) AS i"
        )
        driver.execute(WAITING)
        # Near the end of what the last of eight tasks reads.
        driver.execute(
            f"CREATE VIEW slow_orders AS SELECT id, CASE id WHEN {rows - rows // 100} THEN waiting(name) ELSE name END "
            "AS name, total FROM orders"
        )
    (project / "weft.toml").write_text(cluster.settings)
    try:
        with psycopg.connect(source) as holding:
            holding.execute("SELECT pg_advisory_lock(1)")
            process = python(PROGRAM, source, target, way, WEFT_SPARK_MASTER="")
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            servers.wait_until(lambda: _waits(source), "a task that reads", STARTUP_SECONDS)
            cluster.kill(killed)
        lines = finish(process)
    finally:
        cluster.restore()
    assert lines == [f"{rows} {rows} False spark"]
    assert ask(target, "SELECT count(*), count(DISTINCT id), sum(id) FROM orders") == [
        (rows, rows, rows * (rows + 1) // 2)
    ]
    assert ask(target, "SELECT tablename FROM pg_tables WHERE tablename LIKE 'stage%'") == []


def _waits(url: str) -> bool:
    """Whether a task waits for a row."""
    return bool(ask(url, "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))
