"""A scheduler has the models built that follow their inputs, while it leads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import pytest

import warm_python
import weft
from servers import wait_until
from tests.engine.models.built import query
from weft.engine.models.build import ModelRun
from weft.engine.models.freshness import freshness_of
from weft.engine.models.inputs import Observer
from weft.operate.executors import Dispatch
from weft.operate.model_dispatch import ModelDispatch, _Dispatches
from weft.operate.records import ClaimedRun
from weft.operate.runlog import RunLog, open_run_log
from weft.operate.runner import Runner
from weft.operate.scheduler import Scheduler
from weft.pipelines.models import models
from weft.project import Project, current, use

PATIENCE = 120


class Inline:
    """An executor that builds at once, in this process."""

    tells_end = True

    def __init__(self, log: RunLog) -> None:
        self.log = log
        self.started: list[str] = []
        self.error: Exception | None = None

    def start(self, dispatch: Dispatch) -> Any:
        self.started.append(dispatch.pipeline)
        if self.error is not None:
            raise self.error
        Runner(self.log, _execution).run(current().pipelines[dispatch.pipeline], by_hand=False)
        return self

    def ended(self) -> int:
        return 0


def _execution(pipeline: Any, key: str, moment: datetime, *, keep: Callable[[], None]) -> ModelRun:
    return ModelRun(pipeline, key, moment, keep=keep)


@pytest.fixture
def log(project: Path) -> Iterator[RunLog]:
    with use(Project()) as fresh:
        weft.stream(name="orders", fields={"id": "int64"})(lambda: None)

        @weft.model
        def copies(orders):  # type: ignore[no-untyped-def]
            return orders.select("id")

        with open_run_log(None) as opened:
            yield opened
        weft.streams.close(fresh)


def dispatching(made: Scheduler, observer: Observer) -> ModelDispatch:
    return ModelDispatch(made, list(models().values()), lambda each: freshness_of(each, observer))


def ids() -> list[int]:
    return [each for (each,) in query("SELECT id FROM copies ORDER BY id")]


def test_what_changed_is_built_by_the_leader_alone(log: RunLog) -> None:
    runs = Inline(log)
    made = Scheduler(log, runs, poll_seconds=0.05)
    weft.publish_sync("orders", [{"id": 1}])
    with Observer() as observer, dispatching(made, observer):
        assert runs.started == []  # it does not lead yet
        assert made.tick() == []
        wait_until(lambda: log.latest(["copies"])["copies"].status == "succeeded", "the first build", PATIENCE)
        assert ids() == [1]
        weft.publish_sync("orders", [{"id": 2}])
        wait_until(lambda: len(log.runs("copies")) == 2, "the next build", PATIENCE)
        wait_until(lambda: log.latest(["copies"])["copies"].status == "succeeded", "its end", PATIENCE)
        assert ids() == [1, 2]
    assert runs.started == ["copies", "copies"]
    weft.publish_sync("orders", [{"id": 3}])
    assert made.tick() == [] and runs.started == ["copies", "copies"]  # by the thread alone, which has ended


def test_room_and_lease_are_asked_for_first(log: RunLog) -> None:
    runs = Inline(log)
    model = models()["copies"]
    made = Scheduler(log, runs, most_running=1)
    assert made.start_build(model) is None  # it does not lead
    made.tick()
    made._building["another"] = 0.0
    assert made.start_build(model) is None
    made.build_ended("another")
    with open_run_log(None) as other:  # another scheduler takes over
        claimed = made.lease
        assert claimed is not None
        other.finish(claimed, "succeeded")
        assert Scheduler(other, runs)._is_leader()
        assert made.start_build(model) is None and made.lease is None
    assert runs.started == []


def test_what_is_paused_or_built_by_others_is_left_alone(log: RunLog) -> None:
    runs = Inline(log)
    made = Scheduler(log, runs)
    made.tick()
    dispatches, model = _Dispatches(made, threading.Event()), models()["copies"]
    log.pause("copies")
    assert dispatches.run(model).status == "refused"
    log.resume("copies")
    claimed = log.claim("copies")
    assert isinstance(claimed, ClaimedRun)
    assert dispatches.run(model).status == "refused"
    assert runs.started == []
    log.finish(claimed, "succeeded")
    assert dispatches.run(model).status == "succeeded"
    assert runs.started == ["copies"] and made._building == {}


def test_an_executor_that_fails_is_asked_less_often(log: RunLog) -> None:
    now, runs = 1000.0, Inline(log)
    runs.error = OSError("no room")
    made = Scheduler(log, runs, clock=lambda: now)
    made.tick()
    model = models()["copies"]
    assert made.start_build(model) is None and made.start_build(model) is None
    assert len(runs.started) == 1
    now += 6
    assert made.start_build(model) is None and len(runs.started) == 2
    now += 6
    assert made.start_build(model) is None and len(runs.started) == 2  # it waits for 10 seconds now
    now += 6
    runs.error = None
    assert made.start_build(model) is not None
    made.build_ended("copies")
    assert made._running == {} and ids() == []


class Ending:
    """An executor whose builds end with a code; they record nothing, or how they ended."""

    tells_end = True

    def __init__(self, log: RunLog, code: int, status: Literal["succeeded", "interrupted"] | None = None) -> None:
        self.log, self.code, self.status = log, code, status
        self.starts = 0

    def start(self, dispatch: Dispatch) -> Any:
        self.starts += 1
        if self.status is not None:
            claimed = self.log.claim(dispatch.pipeline, resume=False)
            assert isinstance(claimed, ClaimedRun)
            self.log.finish(claimed, self.status)
        return self

    def ended(self) -> int:
        return self.code


@pytest.mark.parametrize(("code", "status"), [(0, None), (-9, None), (143, "interrupted")])
def test_a_build_without_a_result_is_no_failure_and_is_started_again_later(
    log: RunLog,
    code: int,
    status: Literal["interrupted"] | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("weft.operate.model_dispatch._LOOK_SECONDS", 0.01)
    now, runs = 1000.0, Ending(log, code, status)
    made = Scheduler(log, runs, clock=lambda: now)
    made.tick()
    dispatches, model = _Dispatches(made, threading.Event()), models()["copies"]
    starts = []
    for seconds in (0, 4, 2, 6, 5):
        now += seconds
        assert dispatches.run(model).status == "refused"
        starts.append(runs.starts)
    assert starts == [1, 1, 2, 2, 3]
    assert ("copies ended with code" in caplog.text) is (code != 0)
    now, runs.code, runs.status = now + 20, 0, "succeeded"
    assert dispatches.run(model).status == "succeeded"
    assert (made._building, made._running, made._unclaimed) == ({}, {}, {})


def test_a_lease_that_was_won_meanwhile_stays(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Scheduler(log, Inline(log))
    made.tick()
    lapsed, renew = made.lease, log.renew
    assert lapsed is not None
    log.finish(lapsed, "succeeded")

    def slow(claimed: ClaimedRun) -> bool:
        monkeypatch.setattr(log, "renew", renew)
        made.tick()  # by the main thread, while one that starts a build asks for its lease
        return renew(claimed)

    monkeypatch.setattr(log, "renew", slow)
    assert made.start_build(models()["copies"]) is None
    assert made.lease is not None and made.lease is not lapsed


@pytest.mark.timing
def test_the_command_builds_models(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_DSN", raising=False)
    Path("weft.toml").write_text('modules = ["shop"]\n')
    Path("shop.py").write_text(
        "import weft\n"
        "@weft.stream(fields={'id': 'int64'})\n"
        "def orders(): pass\n"
        "@weft.model\n"
        "def copies(orders):\n"
        "    return orders.select('id')\n"
        "@weft.model(trigger='manual')\n"
        "def asked(orders):\n"
        "    return orders.select('id')\n"
    )
    path = os.pathsep.join((str(Path(warm_python.launcher()).parent), os.environ["PATH"]))
    options = ("--executor", "subprocess://", "--poll-interval", "0.2")
    with open("output", "w") as output:
        process = warm_python.Popen(
            [sys.executable, "-m", "weft", "scheduler", *options],
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        with open_run_log(None, project) as log:
            for count in (1, 2):
                with use(Project()) as fresh:
                    stream = weft.stream(name="orders", fields={"id": "int64"})(lambda: None)
                    weft.publish_sync(stream, [{"id": count}])
                    weft.streams.close(fresh)
                wait_until(lambda: _rows() == [*range(1, count + 1)], f"build {count}", PATIENCE)  # noqa: B023
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0, Path("output").read_text()
            assert {each.status for each in log.runs("copies")} == {"succeeded"}
            assert log.runs("asked") == []
    finally:
        process.kill()
        process.wait()


def _rows() -> list[int]:
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(".weft/weft.db")) as database:
        try:
            return [each for (each,) in database.execute("SELECT id FROM copies ORDER BY id")]
        except sqlite3.OperationalError:  # it is not there yet
            return []
