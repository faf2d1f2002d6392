"""A process that applies changes, killed (-9) at each step of the transaction: the next one finishes its work."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.streaming.conftest import run_killed
from systems.tables.test_changes import mirror, row
from weft.systems.sql.tables import SqlTables

pytestmark = pytest.mark.timing

# Twenty batches: a key is created, changed and deleted by turns, and each batch repeats the one before.
PROGRAM = """
import weft

sys.path.insert(0, sys.argv[2])
from systems.tables.test_changes import apply, change, row
from weft.systems.base import system_for

connection = weft.connect(url=sys.argv[1])
tables = system_for(connection.kind).load_tables()(connection)
batches = [[]]
for number in range(20):
    key, step = number % 4, number // 4 % 3
    values = row(key, f"{number}", number)
    made = change("d", values, None, number) if step == 2 else change("u" if step else "c", None, values, number)
    batches.append([*batches[-1][-1:], made])
for number, batch in enumerate(batches[1:]):
    apply(tables, batch, key=f"killed {number}")
"""
STEPS = ("begun", "claimed", "staged", "moved", "recorded", "committed")


@pytest.mark.full
def test_the_mirror_after_a_crash(tables: SqlTables, database_url: str, count: Callable[..., int]) -> None:
    tests = str(Path(__file__).parents[2])
    if tables.one_host:
        tables.close()
    for turn in range(count(10, 1)):
        for number, step in enumerate(STEPS):
            ended = run_killed(PROGRAM, step, 2 + turn + number, database_url, tests)
            assert ended.returncode in (-signal.SIGKILL, 0), ended.stderr
    ended = run_killed(PROGRAM, "none", 0, database_url, tests)
    assert ended.returncode == 0, ended.stderr
    # The numbers 12 to 15 created rows again, and 16 to 19 changed them.
    assert mirror(tables) == [row(number % 4, f"{number}", number) for number in range(16, 20)]
