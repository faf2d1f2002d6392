"""Windows of pipelines whose driver is killed at any step: each window is in each table once."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.streaming.conftest import STATE_PLACE, declare, rows, rows_in_lake, run_killed
from engine.streaming.test_window_pipelines import START, publish

PROGRAM = """
import sys

import weft
from weft.engine.streaming.spark_engine import SparkEngine
from weft.operate.run_options import Running
from weft.operate.supervisor import supervise
from weft.pipelines.streaming.declare import make

kind, place, folder = sys.argv[1:]
events = weft.stream(name="events", fields={"user": "string", "at": "timestamp"})(lambda: None)
common = {
    "group_by": "user",
    "event_time_column": "at",
    "aggregations": [weft.Aggregation(agg="count", as_="n")],
}
window, how = weft.Window(kind="tumbling", duration_ms=60_000, **common), {}
if kind == "session":
    more = {"late_data": "reopen", "allowed_lateness_ms": 86_400_000}
    window = weft.Window(kind="session", gap_ms=40_000, max_session_duration_ms=86_400_000, **common, **more)
    how = {"mode": "merge", "primary_key": ["user", "session_id"]}
"""
PROGRAM += STATE_PLACE
PROGRAM += """
pipeline = make(
    name="per_minute",
    source=weft.Source(query=events, max_rows=20),
    targets=[weft.Target(connection=target, table=each, **how) for each in ("counts", "copies")],
    window=window,
    **state,
)
supervise(SparkEngine(pipeline), Running(once=True))
"""


@pytest.mark.timing
@pytest.mark.timeout(4 * 3600)  # sixty kills, each of which takes up to a minute with Delta beside other work
@pytest.mark.parametrize("place", ["same", "two", "files", pytest.param("delta", marks=pytest.mark.delta)])
@pytest.mark.parametrize("kind", ["tumbling", "session"])
@pytest.mark.parametrize("system", ["sqlite", "postgres"], indirect=True)
@pytest.mark.brief("sqlite-session-two")
@pytest.mark.usefixtures("plain_spark", "streams")
def test_the_driver_killed_at_each_step(kind: str, place: str, project: Path, count: Callable[..., int]) -> None:
    events = declare(user="string", at="timestamp")
    arguments = (kind, place, str(project))
    points = [("begun", 2), ("stored", 1), ("stored", 3), ("loaded", 1), ("loaded", 2), ("done", 2)]
    chosen = points * count(10, 1) if count(10, 1) > 1 else [("stored", 1), ("loaded", 1)]
    seen: dict[str, list[float]] = {}
    for number, (step, times) in enumerate(chosen):
        # Those of a session come in disorder, so that late ones make one of two.
        order = range(60) if kind == "tumbling" else [*range(0, 60, 2), *range(1, 60, 2)]
        at = [(f"user {n % 7}", number * 300 + n * 5.0) for n in order]
        publish(events, *at)
        for user, second in at:
            seen.setdefault(user, []).append(second)
        ended = run_killed(PROGRAM, step, times, *arguments)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    publish(events, ("last", len(chosen) * 300 + 100))
    ended = run_killed(PROGRAM, "none", 0, *arguments)
    assert ended.returncode == 0, ended.stderr
    wanted: list[tuple[Any, ...]] = []
    if kind == "tumbling":
        in_minutes = Counter((int(each // 60), user) for user, times in seen.items() for each in times)
        wanted = [(user, minute * 60, minute * 60 + 60, n) for (minute, user), n in in_minutes.items()]
    for user, times in seen.items() if kind == "session" else ():
        session: list[float] = []
        for each in [*sorted(times), float("inf")]:
            if session and each > session[-1] + 40:
                wanted.append((user, session[0], session[-1] + 40, len(session)))
                session = []
            session.append(each)
    for table in ("counts", "copies"):
        found = [
            (user, (start - START).total_seconds(), (end - START).total_seconds(), n)
            for start, end, *_, user, n in (rows_in_lake(table) if place == "delta" else rows(table))
        ]
        assert sorted(found) == sorted(wanted)
