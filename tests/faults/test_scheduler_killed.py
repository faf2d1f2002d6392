"""Schedulers that are killed (-9), and cron beside them: every slot is run, and none twice."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import warm_python
from servers import wait_until
from weft.operate.runlog import open_run_log

pytestmark = pytest.mark.timing

FIRST = datetime(2060, 3, 1, 9, 0, 30, tzinfo=UTC)
MODULE = """
import pathlib
import weft
from weft.project import current

current().clock = lambda: float(pathlib.Path("clock").read_text())

@weft.pipeline(target="slots", mode="append", schedule="* * * * *")
def tick():
    return [{"at": pathlib.Path("clock").read_text()}]
"""


@pytest.fixture
def folder(project: Path) -> Path:
    (project / "work.py").write_text(MODULE)
    (project / "weft.toml").write_text('modules = ["work"]\n')
    set_clock(project, 0)
    return project


def set_clock(folder: Path, slot: int) -> None:
    new = folder / "clock.new"
    new.write_text(str((FIRST + timedelta(minutes=slot)).timestamp()))
    new.rename(folder / "clock")  # at once: nobody reads half a number


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Any]]:
    made: list[subprocess.Popen[bytes]] = []

    def started(*arguments: str) -> subprocess.Popen[bytes]:
        with (folder / "output").open("a") as output:
            process = warm_python.Popen(
                [sys.executable, "-m", "weft", *arguments], cwd=folder, stdout=output, stderr=output
            )
        made.append(process)
        return process

    yield started
    for each in made:
        each.kill()
        each.wait()


def slots(folder: Path) -> int:
    try:
        with closing(sqlite3.connect(folder / ".weft" / "weft.db")) as database:
            return int(database.execute("SELECT count(*) FROM slots").fetchone()[0])
    except sqlite3.OperationalError:  # it is not there yet
        return 0


def test_every_slot_once(folder: Path, start: Callable[..., Any], count: Callable[..., int]) -> None:
    options = ("scheduler", "--poll-interval", "0.2", "--lease-seconds", "3")
    schedulers = [start(*options), start(*options)]
    wanted = count(200, 3)
    for slot in range(wanted):
        set_clock(folder, slot)
        if slot % 3 == 1:
            start("run-due")
        try:
            wait_until(lambda: slots(folder) == slot + 1, f"slot {slot}")  # noqa: B023
        except TimeoutError:
            print((folder / "output").read_text()[-5000:])
            raise
        killed = random.randrange(2)
        schedulers[killed].send_signal(signal.SIGKILL if slot % 2 else signal.SIGTERM)
        schedulers[killed].wait()
        schedulers[killed] = start(*options)
    for each in schedulers:
        each.send_signal(signal.SIGTERM)
        assert each.wait(60) in (0, -signal.SIGTERM)  # it may have begun only now
    assert slots(folder) == wanted
    with open_run_log(None, folder) as log:
        done = Counter(each.slot for each in log.runs("tick", limit=10_000) if each.status == "succeeded")
    assert sorted(done.values()) == [1] * wanted
