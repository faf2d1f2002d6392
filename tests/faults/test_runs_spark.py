"""A run between two databases, whose rows a Spark task writes, killed (-9) at each of its steps: the next one does what
is left, and each row is there once.

The steps of the commit are the task's, in a process of its own. Where the run's process dies, the task may die with it
or go on, and commit what nobody waits for any more.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from commands import Commands
from faults.runs import Place, Repeat, place  # noqa: F401 - fixtures
from lent_session import lent_session
from pipelines.conftest import database  # noqa: F401 - fixture

pytestmark = pytest.mark.timing

PIPELINE = """
with open("driver.pid", "w") as file:
    file.write(str(os.getpid()))
weft.connect("sqlite:///raw.db", name="raw_db")


@weft.pipeline(
    schedule="0 * * * *", target="copies", source_connection="raw_db", incremental_column="id", engine="spark"
)
def copy(conn):
    return "SELECT id, name FROM raw"
"""

# Every Python process runs this when it starts: those of Spark's tasks, too.
AT_START = """
import logging, os, signal


class Killer(logging.Handler):
    def emit(self, record):
        if record.getMessage() == os.environ["TASK_STEP"] and not os.path.exists("killed"):
            open("killed", "x").close()
            os.kill(int(open("driver.pid").read()), signal.SIGKILL)
            if os.environ["TASK_ENDS"] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)


if "TASK_STEP" in os.environ:
    steps = logging.getLogger("weft.commit")
    steps.setLevel(logging.DEBUG)
    steps.addHandler(Killer())
"""
STEPS = ("claimed", "produced", "loaded", "executed", "recorded")
TASK_STEPS = ("begun", "claimed", "staged", "moved", "recorded", "committed")


@dataclass
class Copy:
    """The pipeline, its source, and the runs of it."""

    place: Place
    commands: Commands
    source: sqlite3.Connection
    slot: int = 0
    ids: list[int] = field(default_factory=list)

    def add(self) -> None:
        """Two more rows in the source."""
        for _ in range(2):
            self.ids.append(len(self.ids))
            self.source.execute("INSERT INTO raw VALUES (?, ?)", (self.ids[-1], f"n{self.ids[-1]}"))
        self.source.commit()

    def loaded(self) -> list[int]:
        return sorted(row["id"] for row in self.place.database.rows("copies"))

    def interrupted(self, *, at: int | None = None, is_last: bool = False, **environment: str) -> None:
        """A run that is killed, and its repetition."""
        self.slot += 1
        self.place.at(self.slot)
        self.add()
        wanted = list(self.ids)
        Path("killed").unlink(missing_ok=True)
        ended = self.commands.run(self.place, "run-due", at=at, **environment)
        assert ended.code == -9, ended
        # What comes meanwhile is read by this run or by the next.
        self.add()
        self.place.at(self.slot, 20)
        with lent_session() as variables:
            ended = self.commands.run(self.place, "run-due", **variables)
        assert ended.code == 0, ended
        found = self.loaded()
        assert found in (wanted, self.ids)
        *_, first, second = self.place.runs("copy")
        if is_last:
            assert second.status == "succeeded"
        else:
            assert [(each.attempt, each.status) for each in (first, second)] == [(1, "interrupted"), (2, "succeeded")]
            assert first.run_id == second.run_id


@pytest.fixture
def copy(place: Place, commands: Commands, project: Path, plain_spark: Any) -> Iterator[Copy]:  # noqa: F811
    place.declare(PIPELINE)
    (project / "sitecustomize.py").write_text(AT_START)
    path = os.pathsep.join(filter(None, (str(project), os.environ.get("PYTHONPATH"))))
    place.environment |= {name: os.environ[name] for name in ("WEFT_CACHE", "WEFT_SPARK_MASTER")}
    place.environment["PYTHONPATH"] = path
    with closing(sqlite3.connect(project / "raw.db")) as source:
        source.execute("CREATE TABLE raw (id INTEGER, name TEXT)")
        made = Copy(place, commands, source)
        made.add()
        yield made


@pytest.mark.full
@pytest.mark.parametrize("database", ["postgres", "mysql"], indirect=True)
def test_killed_at_each_step(copy: Copy, count: Repeat) -> None:
    if copy.place.database.tables.dialect == "mysql" and count(10) == 1:
        pytest.skip("in full: the run is the same for every target")
    rounds = count(10)
    for number in range(rounds):
        # Each is a start of Spark: in brief one, of what a run without Spark does not have (test_runs_killed).
        for at, step in enumerate(STEPS if rounds > 1 else ()):
            copy.interrupted(at=at, is_last=step == STEPS[-1])
        for turn, step in enumerate(TASK_STEPS):
            if rounds == 1 and step != "committed":
                continue
            ends = "dies" if (turn + number) % 2 else "goes on"
            copy.interrupted(TASK_STEP=step, TASK_ENDS=ends)
    if rounds == 1:
        return
    copy.slot += 1
    copy.place.at(copy.slot)
    ended = copy.commands.run(copy.place, "run-due")
    assert ended.code == 0, ended
    assert "(spark)" in ended.out
    assert ended.steps == [f"run {step}" for step in STEPS]
    assert copy.loaded() == copy.ids
