"""States for tests of what keeps one, each case with a database of its own: one with thousands of tables is slow."""

from __future__ import annotations

import random

import pytest

import weft
from weft.engine.readers import open_tables
from weft.systems import remembered_state
from weft.systems.remembered_state import RememberedState
from weft.systems.sql.state_store import SqlState

CLOCK_MS = 7_300_000_000_000
"""What the clock says in all cases, which are of the years 1900, 1970 and 2200."""


def sql_state(name: str) -> SqlState:
    """A state in a file of the test's folder."""
    return SqlState(open_tables(weft.SQLiteConnection(f"{name}.db")), name, name)


def remembered(name: str) -> RememberedState:
    """The same, of which a process remembers rows."""
    return RememberedState(sql_state(name))


def choose_limits(chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of before are read, or asked of the database until they are gone; some states are too large."""
    monkeypatch.setattr(remembered_state, "_FEW_ROWS", chance.choice([0, 0, 5, 1000]))
    monkeypatch.setattr(remembered_state, "_MOST_PARTS", chance.choice([2, 64]))
    monkeypatch.setattr(remembered_state, "MOST_BYTES", chance.choice([300, 1 << 20, 1 << 20, 1 << 20]))
