"""States for tests of what keeps one, each case with a database of its own: one with thousands of tables is slow."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import weft
from weft.engine.readers import open_tables
from weft.engine.streaming import stateful
from weft.systems import remembered_state
from weft.systems.remembered_state import RememberedState
from weft.systems.sql.state_store import SqlState

CLOCK_MS = 7_300_000_000_000
"""What the clock says in all cases, which are of the years 1900, 1970 and 2200."""
RESTARTS = [1, 1, 3, 1000]
"""One of so many batches begins, and ends, with a restart: a choice for each case."""


class Clock:
    """A clock that a test moves, in seconds. Its time of day is the real one."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time()


@contextmanager
def moved_clock() -> Iterator[Clock]:
    """Have windows and joins ask a clock of the test whether a source is idle."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(stateful, "time", clock)
        yield clock


def sql_state(name: str, number: int = 0) -> SqlState:
    """A state in a file of the test's folder: of SQLite, and of one number in twenty of DuckDB, which opens slowly."""
    is_duck = number % 20 == 19
    file = weft.DuckDBConnection(f"{name}.duckdb") if is_duck else weft.SQLiteConnection(f"{name}.db")
    return SqlState(open_tables(file), name, name)


def remembered(name: str, number: int = 0) -> RememberedState:
    """The same, of which a process remembers rows."""
    return RememberedState(sql_state(name, number))


def choose_limits(chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of before are read, or asked of the database until they are gone; some states are too large."""
    monkeypatch.setattr(remembered_state, "_FEW_ROWS", chance.choice([0, 0, 5, 1000]))
    monkeypatch.setattr(remembered_state, "_MOST_PARTS", chance.choice([2, 64]))
    monkeypatch.setattr(remembered_state, "MOST_BYTES", chance.choice([300, 1 << 20, 1 << 20, 1 << 20]))
