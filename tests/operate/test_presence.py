"""Who lives: services, workers and schedulers hold places in the run log."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from typing import Any

import warm_python
from servers import wait_until
from weft.operate.claims import SILENT_DAYS
from weft.operate.presence import processes
from weft.operate.run_store import LockedPipeline
from weft.operate.runlog import RunLog, open_run_log

LIVES = """
import sys
from weft.operate.presence import present
from weft.operate.runlog import open_run_log

with present(sys.argv[2], lambda: open_run_log(sys.argv[1])):
    sys.stdin.read()
"""


def start(kind: str, url: str) -> Any:
    return warm_python.Popen([sys.executable, "-c", LIVES, url, kind], stdin=subprocess.PIPE)


def standing(log: RunLog) -> list[tuple[str, int, bool]]:
    return [(each["kind"], each["pid"], each["lives"]) for each in processes(log)]


def test_who_was_killed_is_silent_until_another_comes(log_url: str) -> None:
    with open_run_log(log_url) as log:
        first, second = start("worker", log_url), start("worker", log_url)
        both = [("worker", first.pid, True), ("worker", second.pid, True)]
        wait_until(lambda: sorted(standing(log)) == sorted(both), "both to be known")
        first.kill()
        first.communicate()
        assert sorted(standing(log)) == sorted([("worker", first.pid, False), ("worker", second.pid, True)])
        # It comes instead of the one that was killed, also where a place before that is free.
        third = start("worker", log_url)
        both = [("worker", third.pid, True), ("worker", second.pid, True)]
        wait_until(lambda: sorted(standing(log)) == sorted(both), "both to be known")
        for each in (second, third):
            each.communicate()
            assert each.returncode == 0
        assert processes(log) == []
        assert log.runs() == []


def test_who_is_silent_for_days_is_forgotten(log: RunLog) -> None:
    assert log.attend("process:service:1")

    def age(records: LockedPipeline) -> None:
        old = records.claim.now - timedelta(days=SILENT_DAYS, minutes=1)
        records.change({"owner": "other:7:1:a machine", "expires_at": old})

    def silence(records: LockedPipeline) -> None:
        records.change({"expires_at": records.claim.now - timedelta(seconds=1)})

    log._book.locked("process:service:1", age)
    assert standing(log) == []
    # On another host nobody knows whether it ended: its place is another's only once it is forgotten.
    assert log.attend("process:service:1")
    log._book.locked("process:service:1", age)
    log._book.locked("process:service:1", silence)
    assert standing(log) == [("service", 7, False)]
    assert not log.attend("process:service:1")
    log.leave("process:service:1")
    assert standing(log) == [("service", 7, False)]
