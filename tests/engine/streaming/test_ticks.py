"""Sources that become idle: what they held up is emitted without new rows, once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import weft
from engine.streaming import test_joins, test_windows
from engine.streaming.conftest import declare, rows
from engine.streaming.join_oracle import Row
from engine.streaming.states import Clock, moved_clock
from engine.streaming.test_window_pipelines import minutes, publish, window
from engine.streaming.window_oracle import SECOND, Case, Event
from weft.engine.streaming import query
from weft.engine.streaming.joins import Joins
from weft.engine.streaming.sessions import Sessions
from weft.engine.streaming.spark_engine import SparkEngine
from weft.engine.streaming.targets import Targets
from weft.engine.streaming.windows import Windows
from weft.pipelines.streaming.declare import make
from weft.systems.state_in_memory import InMemoryState


@pytest.fixture
def clock() -> Iterator[Clock]:
    with moved_clock() as clock:
        yield clock


def check(step: Any, batches: list[list[tuple[str, Any]]], clock: Clock, spark: Any) -> list[Any]:
    """Run two batches, the second of source b alone, 50 seconds later; return what a tick after 20 seconds emits."""
    for number, batch in enumerate(batches):
        assert not step.begin(number)
        step.add(number, step.reduce(batch), spark)
        step.emission(spark)
        clock.now += 50 if number == 0 else 20
        assert number == 1 or not step.tick(spark)
    assert step.tick(spark)
    return [step.emission(spark), *(step.emission(spark) if not step.tick(spark) else "twice" for _ in range(1))]


@pytest.mark.full
@pytest.mark.usefixtures("here")
def test_a_window_closes(clock: Clock, plain_spark: Any) -> None:
    case = Case(1, 60 * SECOND, 60 * SECOND, 0, 0, "drop", ("a", "b"))
    step = Windows(test_windows.pipeline_of(case), InMemoryState())
    step._watermark = weft.Watermark()

    def of(*seconds: int) -> Any:
        return test_windows.frame_of(plain_spark, [Event("", second * SECOND, "x", 1) for second in seconds])

    once, again = check(step, [[("a", of(1)), ("b", of(2, 100))], [("b", of(130))]], clock, plain_spark)
    assert sorted(row["n"] for row in once.to_pylist()) == [1, 2]
    assert again.to_pylist() == once.to_pylist()  # as after a crash
    assert not step.begin(2)
    step.add(2, step.reduce([("a", of(131)), ("b", of(190))]), plain_spark)
    assert step.emission(plain_spark) is None


@pytest.mark.full
@pytest.mark.usefixtures("here")
def test_a_session_ends(clock: Clock, plain_spark: Any) -> None:
    own = weft.Window(
        kind="session",
        gap_ms=10_000,
        max_session_duration_ms=1_000_000,
        group_by=("key",),
        aggregations=test_windows.AGGREGATIONS,
        event_time_column="at",
    )
    sources = [weft.Source(query=declare(name, at="timestamp")) for name in ("a", "b")]
    step = Sessions(make(name="s", sources=sources, target="default", target_table="t", window=own), InMemoryState())

    def of(**seconds: int) -> Any:
        return test_windows.frame_of(plain_spark, [Event("", at * SECOND, key, 1) for key, at in seconds.items()])

    once, again = check(step, [[("a", of(x=1, y=40)), ("b", of(x=2, z=100))], [("b", of(z=105))]], clock, plain_spark)
    assert sorted((row["key"], row["n"]) for row in once.to_pylist()) == [("y", 1)]
    assert again.to_pylist() == once.to_pylist()


@pytest.mark.usefixtures("here")
def test_a_row_of_a_join_is_alone(clock: Clock, plain_spark: Any) -> None:
    case = test_joins.Case(1, "left_outer", -5 * SECOND, 5 * SECOND, 0, 0, "drop")
    step = Joins(test_joins.pipeline_of(case), InMemoryState())
    step._watermark = weft.Watermark()

    def of(side: int, **numbers: int) -> Any:
        return test_joins.frame_of(plain_spark, [Row(side, at * SECOND, key, at) for key, at in numbers.items()])

    batches = [[("a", of(0, x=1, y=40)), ("b", of(1, x=2, z=100))], [("b", of(1, z=105))]]
    once, again = check(step, batches, clock, plain_spark)
    assert test_joins.emitted(once) == test_joins.emitted(again) == Counter({(40, None): 1})


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`running(engine)` runs a pipeline until the test ends; it looks for idle sources all the time."""
    monkeypatch.setattr(query, "_MOST_TICK_SECONDS", 0.05)
    monkeypatch.setattr(query, "_LEAST_TICK_SECONDS", 0.05)
    started: list[SparkEngine] = []

    def start(engine: SparkEngine) -> threading.Semaphore:
        committed = threading.Semaphore(0)
        engine.start(once=False, committed=committed.release, report=None, idle=None)
        started.append(engine)
        return committed

    yield start
    for each in started:
        each.stop()


def wait(committed: threading.Semaphore) -> None:
    assert committed.acquire(timeout=60)


@pytest.mark.usefixtures("plain_spark", "here")
def test_a_pipeline_whose_target_fails_at_first(clock: Clock, running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = (declare(name, user="string", at="timestamp") for name in ("left", "right"))
    sources = [weft.Source(query=left), weft.Source(query=right)]
    options: dict[str, Any] = {"name": "per_minute", "sources": sources, "target": "default", "target_table": "counts"}
    publish(left, ("ann", 1))
    publish(right, ("ann", 2), ("bob", 100))
    loads, failures = Targets.load, threading.Semaphore(0)

    def load(*arguments: Any) -> Any:
        if failures.acquire(blocking=False):
            raise RuntimeError("the target is away")
        return loads(*arguments)

    monkeypatch.setattr(Targets, "load", load)
    committed = running(SparkEngine(make(**options, window=window())))
    wait(committed)
    clock.now += 50
    publish(right, ("bob", 130))
    wait(committed)
    assert not weft.read("SELECT name FROM sqlite_master WHERE name = 'counts'", source="default").count()
    failures.release()
    clock.now += 20
    wait(committed)
    assert minutes() == [(0, "ann", 2), (1, "bob", 1)]
    publish(left, ("cid", 131))
    publish(right, ("cid", 140))
    wait(committed)
    assert rows("counts", "count(*)") == [(2,)]


@pytest.mark.usefixtures("plain_spark", "here")
def test_no_tick_before_targets_have_the_batch(clock: Clock, running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = (declare(name, user="string", at="timestamp") for name in ("left", "right"))
    sources = [weft.Source(query=left), weft.Source(query=right)]
    pipeline = make(name="p", sources=sources, target="default", target_table="counts", window=window())
    publish(left, ("ann", 61))
    publish(right, ("ann", 2))
    loads, fails = Targets.load, True

    def load(*arguments: Any) -> Any:
        if fails:
            clock.now += 20  # by now the left source is idle
            raise RuntimeError("the target is away")
        return loads(*arguments)

    monkeypatch.setattr(Targets, "load", load)
    engine = SparkEngine(pipeline)
    wait(running(engine))
    clock.now += 50
    publish(right, ("bob", 130))
    with pytest.raises(RuntimeError, match="away"):
        engine.wait()
    batches = engine._query._batches
    assert batches is not None
    assert batches.tick(engine._query.spark, "any") is None
    fails = False
    wait(running(SparkEngine(pipeline)))
    assert minutes() == [(0, "ann", 1)]


@pytest.mark.usefixtures("plain_spark", "here")
def test_a_tick_is_finished_after_a_restart(clock: Clock, running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = (declare(name, user="string", at="timestamp") for name in ("left", "right"))
    sources = [weft.Source(query=left), weft.Source(query=right)]
    pipeline = make(name="p", sources=sources, target="default", target_table="counts", window=window())
    publish(left, ("ann", 1))
    publish(right, ("ann", 2), ("bob", 100))
    loads, tried, fails = Targets.load, threading.Event(), True

    def load(*arguments: Any) -> Any:
        tried.set()
        if fails:
            raise RuntimeError("the target is away")
        return loads(*arguments)

    monkeypatch.setattr(Targets, "load", load)
    engine = SparkEngine(pipeline)
    committed = running(engine)
    wait(committed)
    clock.now += 50
    publish(right, ("bob", 130))
    wait(committed)
    clock.now += 20
    assert tried.wait(60)
    engine.stop()
    engine.wait()
    fails = False
    wait(running(SparkEngine(pipeline)))  # without new rows
    assert minutes() == [(0, "ann", 2), (1, "bob", 1)]
