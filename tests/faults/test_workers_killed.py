"""Workers that are killed (-9) at random: every run ends as succeeded or failed, with its attempts recorded."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import servers
from commands import Commands
from faults.runs import Place, Repeat
from faults.schedulers import LOGS
from operate.conftest import url_of

pytestmark = pytest.mark.timing

AT_ONCE = 4
# A run has fewer: some are not killed.
STEPS = 28
PIPELINE = """
@weft.pipeline(target="slots", mode="append", schedule="0 * * * *", retry={"max_attempts": 2})
def load():
    return [{"at": os.environ["TEST_CLOCK"]}]
"""


@pytest.fixture
def place(
    request: pytest.FixtureRequest, project: Path, shared_server: Callable[[str], servers.Server]
) -> Iterator[Place]:
    """A project with a run log of the kind that the parameter names, and rows in SQLite."""
    for url in url_of(request.param, project, shared_server):
        database: Any = None
        made = Place(project, database, url, {"WEFT_RUN_LOG": url})
        made.declare(PIPELINE)
        yield made


@pytest.mark.full
@pytest.mark.parametrize("place", LOGS, indirect=True)
def test_every_run_ends(place: Place, commands: Commands, count: Repeat) -> None:
    wanted, killed, slots = count(1000), 0, 0
    while killed < wanted:
        place.at(slots)
        for _ in range(10):
            commands.start(place, "run-due", at=random.randrange(STEPS), processes=AT_ONCE)
            ended = commands.ended()
            assert {each.code for each in ended} <= {0, -9}, ended
            killed += (now := sum(each.code == -9 for each in ended))
            if not now:
                break
        # Whatever was left is done now, or given up.
        assert commands.run(place, "run-due").code == 0
        slots += 1
    attempts = [each for each in place.runs("load") if each.status != "skipped"]
    attempts.sort(key=lambda each: (each.slot, each.attempt))
    by_slot = {slot: list(group) for slot, group in groupby(attempts, key=lambda each: each.slot)}
    assert len(by_slot) == slots
    for of_slot in by_slot.values():
        assert [each.attempt for each in of_slot] == list(range(1, len(of_slot) + 1))
        assert len({each.run_id for each in of_slot}) == 1
        *before, last = (each.status for each in of_slot)
        assert set(before) <= {"interrupted"} and last in ("succeeded", "failed")
        assert all(each.finished_at is not None and each.host and each.pid for each in of_slot)
    lost = sum(each.status != "succeeded" for each in attempts)
    assert 0 < lost <= killed
    with closing(sqlite3.connect(place.folder / ".weft" / "weft.db")) as database:
        rows = Counter(at for (at,) in database.execute("SELECT at FROM slots"))
    succeeded = {str(each.slot.timestamp() + 300) for each in attempts if each.status == "succeeded" and each.slot}
    # One that was given up may have committed before it was killed.
    assert rows.keys() >= succeeded and set(rows.values()) == {1}
