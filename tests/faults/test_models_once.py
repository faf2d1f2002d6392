"""No model is built twice at once, while workers are killed (-9), or stand still (SIGSTOP) until their leases are over.

Each build notes in the database when its function began and ended, by the clock of the database. A build whose process
was killed or stopped ended before the signal was sent."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import warm_python
import weft
from commands import Commands
from servers import wait_until
from tests.engine.models.built import query, run
from weft.errors import WeftError
from weft.operate.runlog import open_run_log
from weft.project import Project

pytestmark = pytest.mark.timing

PATIENCE = 120
MODELS = """
import os
import time
import psycopg
import pyarrow
import weft

@weft.stream(fields={"id": "int64"})
def orders(): ...

def noted(model, rows):
    with psycopg.connect(os.environ["WEFT_DSN"], autocommit=True) as notes:
        said = "INSERT INTO builds (model, pid, began) VALUES (%s, %s, clock_timestamp()) RETURNING id"
        (number,) = notes.execute(said, (model, os.getpid())).fetchone()
        while notes.execute("SELECT is_closed FROM gate").fetchone()[0]:
            time.sleep(0.01)
        notes.execute("SELECT pg_sleep(0.02)")
        notes.execute("UPDATE builds SET ended = clock_timestamp() WHERE id = %s", (number,))
    return rows

@weft.model(materialise="incremental")
def kept(orders: pyarrow.Table):
    return noted("kept", orders.select(["id"]))

@weft.model
def everything(orders: pyarrow.Table):
    return noted("everything", orders.select(["id"]))
"""
TWICE = """
SELECT a.*, b.* FROM builds a JOIN builds b ON a.model = b.model AND a.id <> b.id
WHERE a.began <= b.began AND b.began < coalesce(a.signalled, a.ended, 'infinity')
"""


def expire() -> None:
    """Let the leases of all claims be over, as if their time had passed."""
    with open_run_log() as log, log._book.session("publish") as session:
        book = log._book
        book.update(session, book.claims, {"expires_at": datetime(2000, 1, 1, tzinfo=UTC)}, "owner IS NOT NULL", ())


@dataclass
class Worker:
    """`weft worker` in a process of its own."""

    folder: Path
    process: Any = None

    def start(self) -> None:
        self.process = warm_python.Popen(
            [sys.executable, "-m", "weft", "worker", "--format", "json"],
            cwd=self.folder,
            env=dict(os.environ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def signal(self, number: int) -> None:
        """Send a signal that ends or stops it. Its builds count until now: the next may begin as soon as it is sent."""
        (now,) = query("SELECT clock_timestamp()")[0]
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()
        run(
            f"UPDATE builds SET signalled = greatest(began, '{now}') "
            f"WHERE pid = {self.process.pid} AND signalled IS NULL AND coalesce(ended, 'infinity') > '{now}'"
        )


@dataclass
class Published:
    """What was published."""

    ids: list[int] = field(default_factory=list)

    def publish(self, events: int = 1) -> None:
        new = range(len(self.ids), len(self.ids) + events)
        weft.publish_sync("orders", [{"id": each} for each in new])
        self.ids += new

    def is_built(self) -> bool:
        try:
            return all(sorted(query(f"SELECT id FROM {each}")) == self.rows for each in ("kept", "everything"))
        except WeftError:
            return False

    @property
    def rows(self) -> list[tuple[int]]:
        return [(each,) for each in self.ids]


@pytest.fixture
def published(streams: Project, project: Path) -> Published:
    (project / "shop.py").write_text(MODELS)
    (project / "weft.toml").write_text('modules = ["shop"]\n')
    weft.stream(name="orders", fields={"id": "int64"})(lambda: None)
    return Published()


@pytest.fixture
def workers(published: Published, project: Path) -> Iterator[list[Worker]]:
    moment = "timestamptz"
    run(
        f"CREATE TABLE builds (id bigserial PRIMARY KEY, model text, pid int, began {moment}, ended {moment}, "
        f"signalled {moment})"
    )
    run("CREATE TABLE gate (is_closed boolean)")
    run("INSERT INTO gate VALUES (false)")
    made = [Worker(project), Worker(project)]
    for each in made:
        each.start()
    yield made
    for each in made:
        each.process.send_signal(signal.SIGKILL)
        each.process.wait()


def close_gate(is_closed: bool) -> None:
    run(f"UPDATE gate SET is_closed = {is_closed}")


def stand_still(published: Published, workers: list[Worker]) -> None:
    """Stop a worker in its build of `kept`, until another one has built it and more."""
    close_gate(True)
    open_builds = "SELECT pid FROM builds WHERE model = 'kept' AND ended IS NULL AND signalled IS NULL"
    published.publish()
    wait_until(lambda: bool(query(open_builds)), "a build", PATIENCE)
    ((pid,),) = query(open_builds)
    (stopped,) = (each for each in workers if each.process.pid == pid)
    stopped.signal(signal.SIGSTOP)
    expire()
    close_gate(False)
    try:
        wait_until(published.is_built, "the builds of the other worker", PATIENCE)
        published.publish()
    finally:
        stopped.process.send_signal(signal.SIGCONT)


@pytest.mark.full
@pytest.mark.parametrize("system", ["postgres"], indirect=True)
def test_no_model_is_built_twice_at_once(
    published: Published, workers: list[Worker], count: Callable[..., int]
) -> None:
    choose = random.Random(7)
    for _ in range(count(20, 2)):
        published.publish(choose.randrange(1, 20))
        killed = workers[choose.randrange(2)]
        before = len(query("SELECT id FROM builds"))
        wait_until(lambda: len(query("SELECT id FROM builds")) > before, "a build", PATIENCE)  # noqa: B023
        killed.signal(signal.SIGKILL)
        killed.start()
        stand_still(published, workers)
        wait_until(published.is_built, "the tables", PATIENCE)
    assert query(TWICE) == []
    assert query("SELECT count(*) FROM builds WHERE signalled IS NOT NULL")[0][0] >= 1
    for table in ("kept", "everything"):
        assert sorted(query(f"SELECT id FROM {table}")) == published.rows


# ------------------------------------------------------------------------------------------------- at each of its steps

PLAIN = """
import weft

@weft.stream(fields={"id": "int64"})
def orders(): ...

@weft.model(materialise="incremental")
def kept(orders):
    return "SELECT id FROM orders"
"""


@dataclass
class Place:
    folder: Path
    environment: dict[str, str]


@pytest.fixture
def place(published: Published, project: Path) -> Place:
    (project / "shop.py").write_text(PLAIN)
    return Place(project, {"WEFT_DSN": os.environ["WEFT_DSN"]})


@pytest.fixture(scope="session")
def other_commands() -> Iterator[Commands]:
    """Those of another process, while one of the first is stopped."""
    made = Commands()
    yield made
    made.close()


@pytest.mark.full
def test_stopped_at_each_step_of_the_first_build(
    published: Published, place: Place, commands: Commands, other_commands: Commands, stopped: list[int]
) -> None:
    """Another worker takes over. The one that wakes adds no row, and the model still knows what it has read."""
    worker = ("worker", "--once", "--threads", "1")
    published.publish(3)
    tables = {"WEFT_TEST_LOGGERS": "weft.tables"}
    steps = commands.run(place, *worker, **tables).steps
    # Where no transaction is open: in one, the other would wait for its locks.
    safe = [number for number, step in enumerate(steps) if not step.startswith("commit")]
    assert "tables missing" in steps
    for at in safe:
        run("DROP TABLE kept")
        commands.start(place, *worker, at=at, signal="SIGSTOP", **tables)
        stopped.append(commands.answer()["stopped"])
        expire()
        published.publish()
        ended = other_commands.run(place, *worker)
        assert ended.code == 0, (steps[at], ended)
        os.kill(stopped.pop(), signal.SIGCONT)
        commands.ended()
        assert sorted(query("SELECT id FROM kept")) == published.rows, steps[at]
        published.publish()
        ended = other_commands.run(place, *worker)
        assert ended.code == 0, (steps[at], ended)
        assert sorted(query("SELECT id FROM kept")) == published.rows, steps[at]
