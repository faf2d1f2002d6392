"""Joins of pipelines whose driver is killed at any step: each pair is in each table once, and so is each row without a
partner."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import weft
from engine.streaming.conftest import STATE_PLACE, declare, rows, rows_in_lake, run_killed
from engine.streaming.test_join_pipelines import at, order, payment

PROGRAM = """
import sys

import weft
from weft.engine.streaming.spark_engine import SparkEngine
from weft.operate.run_options import Running
from weft.operate.supervisor import supervise
from weft.pipelines.streaming.declare import make

orders = weft.stream(name="orders", fields={"id": "int64", "item": "string", "at": "timestamp"})(lambda: None)
payments = weft.stream(name="payments", fields={"order_id": "int64", "at": "timestamp"})(lambda: None)
place, folder = sys.argv[1:]
"""
PROGRAM += STATE_PLACE
PROGRAM += """
pipeline = make(
    name="paid",
    **state,
    sources=[weft.Source(query=orders, max_rows=20), weft.Source(query=payments, max_rows=20)],
    targets=[weft.Target(connection=target, table="paid"), weft.Target(connection=target, table="copies")],
    join=weft.Join(
        kind="full_outer",
        left_source="orders",
        right_source="payments",
        left_keys="id",
        right_keys="order_id",
        left_event_time_column="at",
        right_event_time_column="at",
        time_window_ms=60_000,
    ),
    watermark=weft.Watermark(lateness_ms=300_000),
)
supervise(SparkEngine(pipeline), Running(once=True))
"""


@pytest.mark.timing
@pytest.mark.timeout(4 * 3600)  # sixty kills, each of which takes up to a minute with Delta beside other work
@pytest.mark.parametrize("place", ["same", "two", "files", pytest.param("delta", marks=pytest.mark.delta)])
@pytest.mark.parametrize("system", ["sqlite", "postgres"], indirect=True)
@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "streams")
def test_the_driver_killed_at_each_step(place: str, project: Path, count: Callable[..., int]) -> None:
    declare("orders", id="int64", item="string", at="timestamp")
    declare("payments", order_id="int64", at="timestamp")
    points = [("begun", 2), ("stored", 1), ("stored", 3), ("loaded", 1), ("loaded", 2), ("done", 2)]
    chosen = points * count(10, 1) if count(10, 1) > 1 else [("stored", 1), ("loaded", 1)]
    expected: list[tuple[int | None, int | None]] = []
    for number, (step, times) in enumerate(chosen):
        numbers = [(number * 50 + n, number * 300 + n * 5, n % 3 != 0) for n in range(50)]
        weft.publish_sync("orders", [{"id": own, "at": at(second)} for own, second, _ in numbers])
        paid = [{"order_id": own, "at": at(second + (30 if pairs else 90))} for own, second, pairs in numbers]
        weft.publish_sync("payments", paid)
        for own, _, pairs in numbers:
            expected += [(own, own)] if pairs else [(own, None), (None, own)]
        ended = run_killed(PROGRAM, step, times, place, str(project))
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    order(-1, len(chosen) * 300 + 1000)
    payment(-1, len(chosen) * 300 + 1000)
    ended = run_killed(PROGRAM, "none", 0, place, str(project))
    assert ended.returncode == 0, ended.stderr
    wanted = sorted([*expected, (-1, -1)], key=repr)
    for table in ("paid", "copies"):
        if place == "delta":
            assert rows_in_lake(table, "left_id", "right_order_id") == wanted
        else:
            assert rows(table, "left_id, right_order_id") == wanted
