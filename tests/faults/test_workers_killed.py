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

AT_ONCE, PIPELINES = 4, 8
# A run has more steps, and a worker that is not killed in one goes on with the next: most are killed.
STEPS, SECONDS = 12, (0.0, 0.4)
MODULE = f"""
for number in range({PIPELINES}):

    @weft.pipeline(
        name=f"load_{{number}}", target="slots", mode="append", schedule="0 * * * *", retry={{"max_attempts": 2}}
    )
    def load(number=number):
        return [{{"pipeline": number, "at": os.environ["TEST_CLOCK"]}}]
"""


@pytest.fixture
def place(
    request: pytest.FixtureRequest, project: Path, shared_server: Callable[[str], servers.Server]
) -> Iterator[Place]:
    """A project with a run log of the kind that the parameter names, and rows in SQLite."""
    for url in url_of(request.param, project, shared_server):
        database: Any = None
        made = Place(project, database, url, {"WEFT_RUN_LOG": url})
        made.declare(MODULE)
        yield made


@pytest.mark.full
@pytest.mark.parametrize("place", LOGS, indirect=True)
def test_every_run_ends(place: Place, commands: Commands, count: Repeat) -> None:
    """Half of the workers are killed at a step, half at any moment."""
    wanted, killed, slots = count(1000), 0, 0
    while killed < wanted:
        place.at(slots)
        for turn in range(20):
            chance: dict[str, Any] = {"after": SECONDS} if turn % 2 else {"at": random.randrange(STEPS)}
            commands.start(place, "run-due", processes=AT_ONCE, **chance)
            ended = commands.ended()
            assert {each.code for each in ended} <= {0, -9}, ended
            killed += sum(each.code == -9 for each in ended)
            if all("Nothing is due" in each.out for each in ended):
                break
        # Whatever was left is done now, or given up.
        assert commands.run(place, "run-due").code == 0
        slots += 1
    attempts = [each for each in place.runs() if each.status != "skipped"]
    attempts.sort(key=lambda each: (each.pipeline, each.slot, each.attempt))
    runs = [list(group) for _, group in groupby(attempts, key=lambda each: (each.pipeline, each.slot))]
    assert len(runs) == slots * PIPELINES
    for of_run in runs:
        assert [each.attempt for each in of_run] == list(range(1, len(of_run) + 1))
        assert len({each.run_id for each in of_run}) == 1
        *before, last = (each.status for each in of_run)
        assert set(before) <= {"interrupted"} and last in ("succeeded", "failed")
        assert all(each.finished_at is not None and each.host and each.pid for each in of_run)
    ends = Counter(each.status for each in attempts)
    print(f"{killed} killed in {slots} slots of {PIPELINES} pipelines: {dict(ends)}")
    assert 0 < ends["interrupted"] + ends["failed"] <= killed
    with closing(sqlite3.connect(place.folder / ".weft" / "weft.db")) as database:
        rows = Counter(database.execute("SELECT 'load_' || pipeline, at FROM slots"))
    succeeded = {
        (each.pipeline, str(each.slot.timestamp() + 300))
        for each in attempts
        if each.status == "succeeded" and each.slot
    }
    # One that was given up may have committed before it was killed.
    assert rows.keys() >= succeeded and set(rows.values()) == {1}
