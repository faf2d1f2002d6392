"""What the tests of runs share: a project whose pipeline they run by commands that meet signals."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipelines.conftest import Database
from weft.operate.records import Attempt
from weft.operate.runlog import open_run_log

# Behind what the clocks of databases say, so that whatever they let wait is due.
FIRST_SLOT = datetime(2060, 3, 1, 9, tzinfo=UTC)


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


Repeat = Callable[..., int]


def picked(place: Place, steps: list[str], count: Repeat, turn: int) -> list[int]:
    """The steps at which a run is disturbed: all with --full. Else some, other ones for each `turn`: of SQLite and of
    the two servers together every third, of DuckDB, which opens its file for each transaction, one."""
    first, every = {"sqlite": (turn, 9), "postgres": (turn, 18), "mysql": (turn + 9, 18), "duckdb": (4 + 7 * turn, 32)}[
        place.database.tables.dialect
    ]
    return list(range(len(steps))) if count(10) > 1 else list(range(first, len(steps), every))
