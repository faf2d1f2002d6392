"""How much a stream takes up: told where the system knows, never by a scan of all of it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.project import Project
from workers import declare, log_of


@pytest.mark.every_system
def test_about_how_many_bytes_a_stream_takes_up(streams: Project, system: Any) -> None:
    orders = declare(fields={"text": "string"})
    weft.publish_sync(orders, [{"text": f"{number:1000}"} for number in range(500)])
    # The statistics of MariaDB may be those of the empty table, which has a page.
    assert (log_of(orders).size() or 0) >= (16_000 if system.kind == "mysql" else 100_000)


@pytest.mark.parametrize("system", ["sqlite"], indirect=True)
@pytest.mark.parametrize("kind", ["short", "long", "numbers"])
def test_on_sqlite_it_is_estimated_by_a_few_events(streams: Project, system: Any, tmp_path: Path, kind: str) -> None:
    orders = declare(fields={"a": "string", "b": "float64", "c": "int64"})
    assert log_of(orders).size() == 0
    text = {"short": "x" * 30, "long": "ø" * 20_000, "numbers": None}[kind]
    few = 300 if kind == "long" else 3000
    weft.publish_sync(orders, [{"a": text, "b": n / 7, "c": n} for n in range(few)])
    size = log_of(orders).size()
    file = sqlite3.connect(tmp_path / "test.db")
    with closing(file):
        sql = "SELECT sum(pgsize) FROM dbstat WHERE name = ?"
        try:
            (exact,) = file.execute(sql, (f"{orders.schema}.{orders.name}",)).fetchone()
        except sqlite3.OperationalError:
            pytest.skip("this SQLite has no dbstat, which counts every page")
    assert size is not None
    assert exact * 0.8 < size < exact * 1.2


@pytest.mark.parametrize("system", ["sqlite"], indirect=True)
def test_on_sqlite_gaps_of_offsets_are_not_counted(streams: Project, system: Any, tmp_path: Path) -> None:
    """Offsets have gaps where somebody purged a quarantine."""
    orders = declare(fields={"a": "string"})
    weft.publish_sync(orders, [{"a": "x" * 100} for _ in range(10)])
    file = tmp_path / "test.db"
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE sqlite_sequence SET seq = ?", (1 << 50,))
    weft.publish_sync(orders, {"a": "x" * 100})
    size = log_of(orders).size()
    assert size is not None
    assert 1000 < size < 3000
