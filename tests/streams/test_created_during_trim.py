"""A consumer that is created while retention removes events: it begins before them or after them, never among them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

import weft
from marks import on_tables
from weft import EventsLostError
from weft.project import Project
from weft.systems.sql import leases
from weft.systems.sql.log import SqlLog
from workers import declare

pytestmark = pytest.mark.timing

TOTAL = 20


class Pause:
    """Holds up whoever calls a function inside a transaction, after the call and before the commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        really = getattr(owner, name)

        def paused(*arguments: Any) -> Any:
            result = really(*arguments)
            self.reached.set()
            assert self.go_on.wait(60)
            return result

        monkeypatch.setattr(owner, name, paused)


def consume() -> tuple[list[dict[str, Any]], int]:
    """The next two events, and how many were lost before them."""
    lost = 0
    while True:
        try:
            return weft.consume_sync("orders", "new", batch_size=2, member="m"), lost
        except EventsLostError as error:
            lost += error.lost


@pytest.mark.brief(
    "0-trim-sqlite", "0-consume-postgres", "0-trim-mysql", "1-consume-sqlite", "1-trim-postgres", "1-consume-mysql"
)
@on_tables
@pytest.mark.parametrize("held_up", ["trim", "consume"])
@pytest.mark.parametrize("others", [0, 1])
def test_nothing_is_missing_untold(
    streams: Project, monkeypatch: pytest.MonkeyPatch, held_up: str, others: int
) -> None:
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(TOTAL)])
    for other in range(others):
        weft.consume_sync("orders", f"other {other}")
    pause = Pause(monkeypatch, *((leases, "pass_over") if held_up == "trim" else (SqlLog, "take")))
    with ThreadPoolExecutor(2) as pool:
        try:
            calls = {
                "trim": lambda: weft.trim_sync("orders", max_rows=5),
                "consume": consume,
            }
            jobs = {held_up: pool.submit(calls.pop(held_up))}
            assert pause.reached.wait(60)
            jobs |= {name: pool.submit(call) for name, call in calls.items()}
            wait(jobs.values(), timeout=0.5)  # the second waits for the first, unless it gets through
        finally:
            pause.go_on.set()
        assert jobs["trim"].result() == TOTAL - 5
        events, lost = jobs["consume"].result()
    seen = []
    while events:
        seen += [event["n"] for event in events]
        assert weft.ack_sync("orders", "new", events) == len(events)
        events, more = consume()
        lost += more
    if seen != list(range(TOTAL))[-5:] or lost:  # it began before the events went
        assert len(seen) + lost == TOTAL
        assert seen[-5:] == list(range(TOTAL))[-5:]
    (group,) = [each for each in weft.groups_sync("orders") if each["consumer"] == "new"]
    assert (group["lost"], group["lag"], group["pending"]) == (lost, 0, 0)
