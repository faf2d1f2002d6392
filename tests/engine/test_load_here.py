"""A process without Spark copies rows between databases itself: it would start a JVM for one task."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.engine.conftest import Python, finish

_CONNECTED = """
from weft.engine import session
weft.connect(url="sqlite:///raw.db", name="raw")
weft.connect(url="sqlite:///warehouse.db", name="warehouse")
"""


@pytest.fixture(autouse=True)
def raw(project: Path) -> None:
    with closing(sqlite3.connect("raw.db")) as database, database:
        database.execute("CREATE TABLE orders (id BIGINT, name TEXT)")
        database.executemany("INSERT INTO orders VALUES (?, ?)", [(number, f"n{number}") for number in range(100)])


def test_rows_are_copied_without_spark(python: Python) -> None:
    process = python(
        _CONNECTED
        + """
copied = dict(source="raw", target="orders", connection="warehouse", mode="merge", keys="id")
for _ in range(2):
    done = weft.load("SELECT * FROM orders WHERE id < 60", commit_key="monday", **copied)
    print(done.engine, done.rows_read, done.inserted, done.replayed)
done = weft.load("SELECT id, 'new' AS name FROM orders WHERE id >= 50", **copied)
print(done.inserted, done.updated)
stream = weft.stream(name="events", fields={"n": "int64"}, connection="raw")(lambda: None)
weft.publish_sync("events", [{"n": 1}, {"n": 2}])
done = weft.load(stream, target="copies", connection="warehouse")
print(done.engine, done.inserted, session.running())
""",
        WEFT_ENGINE="0",
    )
    assert finish(process) == ["process 60 60 False", "process 0 0 True", "40 10", "process 2 None"]


def test_source_that_fails_on_the_way_leaves_nothing(python: Python) -> None:
    process = python(
        _CONNECTED
        + """
from weft.errors import WeftError
weft.load("SELECT id FROM orders WHERE id = 0", source="raw", target="orders", connection="warehouse")
bad = "SELECT CASE WHEN id = 90 THEN abs(-9223372036854775808) ELSE id END AS id FROM orders"
try:
    weft.load(bad, source="raw", target="orders", connection="warehouse")
except WeftError as error:
    print("overflow" in error.what)
""",
        WEFT_ENGINE="0",
    )
    assert finish(process) == ["True"]
    with closing(sqlite3.connect("warehouse.db")) as database:
        assert database.execute("SELECT id FROM orders").fetchall() == [(0,)]


def test_killed_on_the_way_it_leaves_nothing(python: Python) -> None:
    process = python(
        _CONNECTED
        + """
import logging, signal
class Kill(logging.Handler):
    def emit(self, record):
        if record.getMessage() == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGKILL)
logging.getLogger("weft.commit").addHandler(Kill())
logging.getLogger("weft.commit").setLevel(logging.DEBUG)
weft.load("SELECT id FROM orders", source="raw", target="orders", connection="warehouse", commit_key="monday")
""",
        "recorded",
        WEFT_ENGINE="0",
    )
    process.wait(120)
    assert process.returncode == -9
    with closing(sqlite3.connect("warehouse.db")) as database:
        assert database.execute("SELECT count(*) FROM orders").fetchall() == [(0,)]
    again = python(
        _CONNECTED
        + """
done = weft.load("SELECT id FROM orders", source="raw", target="orders", connection="warehouse", commit_key="monday")
print(done.inserted, done.replayed)
""",
        WEFT_ENGINE="0",
    )
    assert finish(again) == ["100 False"]
