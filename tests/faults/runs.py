"""What the tests of runs share: commands as processes that meet signals, and a project whose pipeline they run.

ended = commands.run(place, "run-due", at=3)             killed (-9) at its fourth step
ended = commands.run(place, "run-due", processes=8)      eight at once; gives a list
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipelines.conftest import Database
from weft.operate.records import Attempt
from weft.operate.runlog import open_run_log

# Behind what the clocks of databases say, so that whatever they let wait is due.
FIRST_SLOT = datetime(2060, 3, 1, 9, tzinfo=UTC)


@dataclass
class Ended:
    """How a command ended: its exit code, or minus the number of the signal that ended it."""

    code: int
    out: str
    err: str
    steps: list[str]
    pid: int


class Commands:
    """A process that forks one for each command."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("run_process.py")
        self.server = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(
        self,
        place: Place,
        *arguments: str,
        at: int | None = None,
        signal: str = "SIGKILL",
        processes: int = 1,
        **environment: str,
    ) -> None:
        """Start a command. The signal comes at step `at`."""
        job = {"folder": str(place.folder), "arguments": arguments, "at": at, "signal": signal, "processes": processes}
        assert self.server.stdin
        home = {"HOME": os.environ["HOME"]}
        job["environment"] = {**home, **place.environment, **environment}
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()

    def answer(self) -> Any:
        """What the process says next: that it is stopped, or how all ended."""
        assert self.server.stdout
        return json.loads(self.server.stdout.readline())

    def ended(self) -> list[Ended]:
        """How the commands that were started ended."""
        return [Ended(**each) for each in self.answer()]

    def run(self, place: Place, *arguments: str, **options: Any) -> Ended:
        """Run a command to its end."""
        self.start(place, *arguments, **options)
        (ended,) = self.ended()
        return ended

    def close(self) -> None:
        """End it."""
        self.server.communicate(timeout=60)


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    made = Commands()
    yield made
    made.close()


@pytest.fixture(scope="session")
def other_commands() -> Iterator[Commands]:
    """Those of another process, while one of the first is stopped."""
    made = Commands()
    yield made
    made.close()


MODULE = """
import os
import weft
from weft.project import current

moment = float(os.environ["TEST_CLOCK"])
current().clock = lambda: moment
"""


@dataclass
class Place:
    """A project in the current folder, on a database, with a run log on the same server or in a file."""

    folder: Path
    database: Database
    log: str
    environment: dict[str, str] = field(default_factory=dict)

    def declare(self, text: str) -> None:
        """Write the module that declares the project's pipelines, with a clock that the test sets."""
        (self.folder / "work.py").write_text(MODULE + text)
        (self.folder / "weft.toml").write_text('modules = ["work"]\n')

    def at(self, slot: int, minutes: int = 5) -> None:
        """Set the clock: some minutes after an hour."""
        moment = FIRST_SLOT + timedelta(hours=slot, minutes=minutes)
        self.environment["TEST_CLOCK"] = str(moment.timestamp())

    def runs(self, pipeline: str | None = None) -> list[Attempt]:
        """What the run log has, the oldest first."""
        with open_run_log(self.log, self.folder) as log:
            found = log.runs(pipeline, limit=100_000)
        return sorted(found, key=lambda each: (each.started_at, each.attempt))


@pytest.fixture
def place(database: Database, project: Path) -> Place:
    kind, url = database.tables.dialect, os.environ["WEFT_DSN"]
    log = url if kind in ("postgres", "mysql") else "sqlite://runs.db"
    made = Place(project, database, log, {"WEFT_DSN": url, "WEFT_RUN_LOG": log})
    made.at(0)
    return made


Repeat = Callable[[int], int]


def picked(place: Place, steps: list[str], count: Repeat, turn: int) -> list[int]:
    """The steps at which a run is disturbed: all with --full. Else every third, by turns: on SQLite, and once more on
    the two servers together. DuckDB, whose file is opened anew for each transaction, has one or two."""
    first, every = {"sqlite": (turn, 3), "postgres": (turn, 6), "mysql": (turn + 3, 6), "duckdb": (4 + 7 * turn, 16)}[
        place.database.tables.dialect
    ]
    return list(range(len(steps))) if count(10) > 1 else list(range(first, len(steps), every))
