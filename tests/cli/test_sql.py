"""`weft sql`: what it prints, writes and refuses."""

from __future__ import annotations

import gc
import json
import os
import signal
import sqlite3
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import weft
from servers import wait_until
from weft.engine import session
from weft.project import Project

Call = Callable[..., Any]


@pytest.fixture
def shop(local: Project) -> None:
    weft.register_connection(weft.SQLiteConnection("shop.db", name="shop"))
    with sqlite3.connect("shop.db") as database:
        database.execute("CREATE TABLE cities (id INTEGER, name TEXT)")
        database.executemany("INSERT INTO cities VALUES (?, ?)", [(1, "Oslo"), (2**60, 'a "b"'), (3, None)])
    database.close()


SQL = "SELECT * FROM shop.cities ORDER BY id"


def test_ctrl_c(call: Call, local: Project, plain_spark: Any) -> None:
    """While a job runs Spark's client fails with an error of its own."""
    before = signal.signal(signal.SIGINT, session._interrupt)
    jobs = plain_spark.sparkContext.statusTracker()

    def interrupt() -> None:
        wait_until(jobs.getActiveJobsIds, "a job", 60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        # PySpark does not close the socket from which it reads a result if it is interrupted there.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            done = call("sql", "SELECT count(*) FROM range(1000000000000)", code=130)
            gc.collect()
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert (done.stdout, done.stderr) == ("", "\n")


def test_file_that_is_there(call: Call, shop: None) -> None:
    """It is replaced as by a redirection of a shell: links are followed, and the mode stays."""
    Path("there").mkdir()
    real, link = Path("there/real.csv"), Path("link.csv")
    real.write_text("before")
    real.chmod(0o640)
    link.symlink_to(real)
    call("sql", SQL, "--pushdown", "--output", link)
    assert link.is_symlink() and real.read_text().startswith("id,name\n1,Oslo\n")
    assert real.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in real.parent.iterdir()] == ["real.csv"]
    new = Path("new.csv")
    (dangling := Path("dangling.csv")).symlink_to(new)
    call("sql", SQL, "--pushdown", "--output", dangling)
    assert new.exists() and dangling.is_symlink()
    os.mkfifo("pipe.csv")
    assert "is no file" in call("sql", SQL, "--pushdown", "--output", "pipe.csv", code=1).stderr


@pytest.mark.brief("pushdown")
@pytest.mark.parametrize("way", [[], ["--pushdown"]], ids=["spark", "pushdown"])
def test_formats(call: Call, shop: None, plain_spark: Any, way: list[str]) -> None:
    shown = call("sql", SQL, *way)
    assert [line.split() for line in shown.stdout.splitlines()] == [
        ["id", "name"],
        ["1", "Oslo"],
        ["3"],
        [str(2**60), "a", '"b"'],
    ]
    assert shown.stderr == "3 rows\n"
    rows = [{"id": 1, "name": "Oslo"}, {"id": 3, "name": None}, {"id": 2**60, "name": 'a "b"'}]
    assert json.loads(call("sql", SQL, "--format", "json", *way).stdout) == rows
    lines = call("sql", SQL, "--format", "ndjson", "--limit", 2, *way).stdout.splitlines()
    assert list(map(json.loads, lines)) == rows[:2]
    assert call("sql", "-", "--format", "csv", *way, stdin=SQL).stdout == f'id,name\n1,Oslo\n3,\n{2**60},"a ""b"""\n'
    done = call("sql", SQL, "--output", "r.parquet", *way)
    assert (done.stdout, done.stderr) == ("", "3 rows in r.parquet\n")
    assert pq.read_table("r.parquet").to_pylist() == rows
    assert call("sql", SQL, "--limit", 2, *way).stderr == (
        "the first 2 rows; more with --limit, all with --output FILE\n"
    )
    where = "SELECT name FROM shop.cities WHERE id = :id OR name = :name ORDER BY 1"
    found = call("sql", where, "--param", "id=3", "--param", "name=Oslo", "--format", "csv", *way).stdout
    assert found == "name\n\nOslo\n"
    twins = "SELECT a.id, b.id FROM shop.cities a JOIN shop.cities b ON a.id = b.id WHERE a.id = 1"
    if not way:
        assert call("sql", twins).stdout.splitlines() == ["id  id:1", " 1     1"]


def test_what_is_refused(call: Call, shop: None) -> None:
    assert "Only queries are run here" in call("sql", "DROP TABLE shop.cities", code=1).stderr
    assert "Did you mean shop.cities?" in call("sql", "SELECT * FROM shop.city", "--pushdown", code=1).stderr
    assert "says no format" in call("sql", SQL, "--output", "x.xlsx", code=1).stderr
    assert "NAME=VALUE" in call("sql", SQL, "--param", "x", code=2).stderr
    assert not Path("x.xlsx").exists()


def test_values_of_parameters() -> None:
    from decimal import Decimal

    from weft.cli.sql import _values

    assert _values(["a=1", "b=1.50", "c=true", "d=null", 'e="1"', "f=x=y", "g=", "h=01", "i=[1]", "j=NaN"]) == {
        "a": 1,
        "b": Decimal("1.50"),
        "c": True,
        "d": None,
        "e": "1",
        "f": "x=y",
        "g": "",
        "h": "01",
        "i": "[1]",
        "j": "NaN",
    }
