"""`weft scheduler status`: which scheduler leads."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from servers import wait_until
from weft.operate.runlog import open_run_log
from weft.operate.scheduler import LEADER


@pytest.mark.parametrize("before", [True, False], ids=["scheduler --run-log status", "scheduler status --run-log"])
def test_status(run: Any, start: Any, project: Path, before: bool) -> None:
    Path("work.py").write_text("import weft\nweft.pipeline(name='ones', target='t')(lambda: [])\n")
    Path("weft.toml").write_text('modules = ["work"]\n')
    url = ("--run-log", "sqlite://elsewhere.db")
    status = ("scheduler", *url, "status") if before else ("scheduler", "status", *url)
    done = run(*status)
    assert (done.returncode, done.stdout) == (0, "No scheduler has run with this log.\n")
    assert not Path("elsewhere.db").exists()
    scheduler = start("scheduler", *url)
    with open_run_log(url[1]) as log:
        wait_until(
            lambda: scheduler.poll() is not None or log.latest([LEADER])[LEADER].is_live, "the scheduler to lead", 120
        )
        (lease,) = log.runs(LEADER)
    found = json.loads(run(*status, "--format", "json").stdout)
    assert (found["leads"], found["host"], found["pid"]) == (True, socket.gethostname(), scheduler.pid)
    done = run("runs", "cancel", lease.run_id, *url)
    assert done.returncode == 1 and "is the lease of a scheduler, and no run" in done.stderr
    scheduler.terminate()
    assert scheduler.wait(120) == 0
    heads, row = run(*status).stdout.splitlines()
    assert heads.split() == ["leads", "host", "pid", "since"]
    assert row.startswith("no: it has ended") and str(scheduler.pid) in row
    assert run("scheduler", "status").stdout == "No scheduler has run with this log.\n"


def test_a_run_log_in_memory(run: Any, project: Path) -> None:
    """What it starts would never be known to have run, and be started again and again."""
    Path("work.py").write_text("import weft\nweft.pipeline(name='ones', target='t', schedule='@yearly')(lambda: [])\n")
    done = run("scheduler", "--module", "work", "--run-log", "memory://")
    assert done.returncode == 1 and "memory:// is of one process" in done.stderr
    assert not Path(".weft/weft.db").exists()
