"""A load that is killed (-9) at any step of its commit: afterwards nothing or all of it is there, and a re-run is
right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from engine import oracle
from systems.tables.conftest import database_url, tables  # noqa: F401 - fixtures
from systems.tables.test_modes import in_order, rows_of
from weft.systems.load import Load
from weft.systems.sql.tables import SqlTables

pytestmark = pytest.mark.timing

STEPS = ("begun", "claimed", "staged", "checked", "moved", "recorded", "committed")
DAY = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def forks() -> Iterator[Callable[[dict[str, Any]], dict[str, int]]]:
    """Carries out a job in a process of its own, and tells how that ended."""
    script = Path(__file__).with_name("load_process.py")
    command, env = [sys.executable, str(script)], {**os.environ, "PYTHONPATH": str(script.parents[1])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdin and server.stdout

        def run(job: dict[str, Any]) -> dict[str, int]:
            server.stdin.write(json.dumps(job, default=str) + "\n")
            server.stdin.flush()
            answer: dict[str, int] = json.loads(server.stdout.readline())
            return answer

        yield run
        server.stdin.close()


def _rows(first: int, last: int, name: str) -> list[dict[str, Any]]:
    return [{"id": i, "name": f"{name} {i % 3}", "at": DAY + timedelta(hours=i % 5)} for i in range(first, last)]


@pytest.mark.brief("postgres-scd2")
@pytest.mark.parametrize("mode", ["append", "truncate", "merge", "scd2"])
def test_killed_at_each_step(
    tables: SqlTables,  # noqa: F811
    database_url: str,  # noqa: F811
    forks: Callable[[dict[str, Any]], dict[str, int]],
    mode: str,
    count: Callable[[int], int],
) -> None:
    keys = ["id"] if mode in ("merge", "scd2") else []
    before, after = _rows(0, 120, "a"), _rows(60, 180, "b")
    killed = 0
    # A load that goes straight to its target has nothing to check.
    steps = [step for step in STEPS if keys or step != "checked"]
    for step in steps:
        for number in range(count(10)):
            name = f"t_{step}_{number}"

            def job(rows: list[dict[str, Any]], step: str, key: str, hour: int, name: str = name) -> dict[str, Any]:
                load = {"target": name, "mode": mode, "keys": keys, "commit_key": key}
                moment = DAY + timedelta(days=9, hours=hour)
                return {"url": database_url, "load": {**load, "moment": str(moment)}, "rows": rows, "step": step}

            assert forks(job(before, "", "first", 0))["code"] == 0
            ended = forks(job(after, step, "second", 1))
            killed += ended["signal"] == 9
            expected: list[dict[str, Any]] = []
            states = []
            for number_of_load, rows in enumerate((before, after)):
                moment = DAY + timedelta(days=9, hours=number_of_load)
                load = Load.declare(target=name, mode=mode, keys=keys, moment=moment)
                expected, _ = oracle.apply(expected, rows, load)
                states.append(in_order(expected))
            # What is there now: all of it or nothing.
            assert in_order(rows_of(tables, name)) == states[step == "committed"]
            assert forks(job(after, "", "second", 1))["code"] == 0
            assert in_order(rows_of(tables, name)) == states[1]
    assert killed == len(steps) * count(10)
    assert not [name for name in all_tables(tables) if name.startswith("_weft")]


@pytest.mark.brief("sqlite-append")
@pytest.mark.parametrize("mode", ["append", "truncate", "merge"])
def test_killed_while_bad_rows_are_put_aside(
    tables: SqlTables,  # noqa: F811
    database_url: str,  # noqa: F811
    forks: Callable[[dict[str, Any]], dict[str, int]],
    mode: str,
    count: Callable[[int], int],
) -> None:
    """The good rows, the bad ones and the ledger's entry: all of it or nothing, and once."""
    keys = ["id"] if mode == "merge" else []
    bad = {7, 30, 31}
    instant = tables.sql_type(pa.field("at", pa.timestamp("us", "UTC")))
    killed = 0
    for step in STEPS:
        for number in range(count(5)):
            name = f"t_{step}_{number}"
            with tables.driver.session("publish") as session:
                session.run(
                    f"CREATE TABLE {name} (id BIGINT CHECK (id NOT IN (7, 30, 31)), name VARCHAR(20), "
                    f"{tables.quote('at')} {instant})"
                )

            def job(step: str, name: str = name) -> dict[str, Any]:
                load = {"target": name, "mode": mode, "keys": keys, "commit_key": "monday", "moment": str(DAY)}
                load["on_bad_rows"] = "quarantine"
                return {"url": database_url, "load": load, "rows": _rows(0, 60, "a"), "step": step}

            killed += forks(job(step))["signal"] == 9
            good = [row for row in range(60) if row not in bad]
            is_done = step == "committed"
            assert sorted(row["id"] for row in rows_of(tables, name)) == (good if is_done else [])
            assert len(rows_of(tables, f"{name}__quarantine")) == (len(bad) if is_done else 0)
            assert forks(job(""))["code"] == 0
            assert sorted(row["id"] for row in rows_of(tables, name)) == good
            aside = rows_of(tables, f"{name}__quarantine")
            assert sorted(json.loads(row["payload"])["id"] for row in aside) == sorted(bad)
    assert killed == len(STEPS) * count(5)
    assert not [name for name in all_tables(tables) if name.startswith("_weft")]


def all_tables(tables: SqlTables) -> list[str]:  # noqa: F811
    """The name of every table that the database has, temporary ones too where they are listed."""
    lists = {
        "sqlite": "SELECT name FROM sqlite_master WHERE type = 'table'",
        "postgres": "SELECT relname FROM pg_class WHERE relkind = 'r'",
        "mysql": "SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE()",
        "duckdb": "SELECT table_name FROM duckdb_tables()",
    }
    with tables.driver.session("read") as session:
        return [str(row[0]) for row in session.rows(lists[tables.dialect])]
