"""The worker builds what is stale, in the order of the models, and no more often than it is asked to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import weft
from servers import wait_until
from tests.engine.models.built import query
from weft.engine.models.build import ModelRun
from weft.engine.models.freshness import Freshness, freshness_of
from weft.engine.models.inputs import Observer
from weft.errors import ConnectionFailedError
from weft.operate.alerts import Alert, Alerter, Alerters
from weft.operate.logs import log_file
from weft.operate.model_worker import ModelWorker
from weft.operate.runlog import open_run_log
from weft.operate.runner import Outcome, Runner
from weft.pipelines.models import models
from weft.project import Project, use


class Bench:
    """A worker of all declared models, whose time the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.step = 0.0
        """Seconds that pass each time the worker asks for the time."""
        self.threads = 4
        self.outcomes: list[Outcome] = []
        self.log = open_run_log(None)
        self.observer = Observer()
        self.runner = Runner(self.log, _execution)
        self._worker: ModelWorker | None = None

    @property
    def worker(self) -> ModelWorker:
        if self._worker is None:
            self._worker = ModelWorker(
                self.runner,
                list(models().values()),
                lambda each: freshness_of(each, self.observer),
                threads=self.threads,
                built=self.outcomes.append,
                clock=self.clock,
            )
        return self._worker

    def clock(self) -> float:
        self.now += self.step
        return self.now

    def round(self, seconds: float = 0.0) -> list[str]:
        """Let time pass, and return the models that were built then, with how that ended."""
        self.now += seconds
        before = len(self.outcomes)
        self.worker.start_due()
        self.worker.join()
        return [
            each.pipeline if each.status == "succeeded" else f"{each.pipeline} {each.status}"
            for each in self.outcomes[before:]
        ]

    def rounds(self, count: int, seconds: float = 0.0) -> list[str]:
        return [name for _ in range(count) for name in self.round(seconds)]

    def close(self) -> None:
        self.worker.stop()
        self.worker.run()
        self.observer.close()
        self.log.close()


def _execution(pipeline: Any, key: str, moment: datetime, *, keep: Callable[[], None]) -> ModelRun:
    return ModelRun(pipeline, key, moment, keep=keep)


@pytest.fixture
def bench(project: Path) -> Iterator[Bench]:
    with use(Project()) as fresh:
        weft.stream(name="orders", fields={"id": "int64"})(lambda: None)
        made = Bench()
        yield made
        made.close()
        weft.streams.close(fresh)


def chain() -> None:
    @weft.model
    def first(orders):  # type: ignore[no-untyped-def]
        return orders.select("id")

    @weft.model
    def second(first):  # type: ignore[no-untyped-def]
        return first.aggregate(rows=first.count())


def test_models_are_built_after_their_inputs(bench: Bench) -> None:
    chain()

    assert bench.round() == ["first"]
    assert bench.round() == ["second"]
    assert bench.rounds(2, seconds=5) == []
    weft.publish_sync("orders", [{"id": 1}, {"id": 2}])
    assert bench.rounds(3) == ["first", "second"]
    assert query("SELECT rows FROM second") == [(2,)]


@pytest.mark.full
def test_burst_is_few_builds_and_the_last_is_complete(bench: Bench) -> None:
    chain()
    bench.rounds(3)
    bench.now += 60
    built = []
    for number in range(50):
        weft.publish_sync("orders", {"id": number})
        built += bench.round(0.1)

    assert built.count("first") <= 6
    bench.rounds(4, seconds=1)
    assert query("SELECT rows FROM second") == [(50,)]


def test_debounce_waits_for_quiet_and_no_longer_than_max_staleness(bench: Bench) -> None:
    @weft.model(debounce=2, max_staleness=5)
    def calm(orders):  # type: ignore[no-untyped-def]
        return orders.select("id")

    assert bench.rounds(2) == []
    assert bench.round(2) == ["calm"]
    weft.publish_sync("orders", {"id": 1})
    assert bench.rounds(1) == []
    for number in range(4):
        weft.publish_sync("orders", {"id": number})
        assert bench.round(1) == []
    weft.publish_sync("orders", {"id": 9})
    assert bench.round(1) == ["calm"]


def test_failing_model_holds_back_its_dependents_alone(bench: Bench) -> None:
    is_broken = True

    @weft.model
    def broken(orders):  # type: ignore[no-untyped-def]
        if is_broken:
            raise RuntimeError("not today")
        return orders.select("id")

    @weft.model
    def after(broken):  # type: ignore[no-untyped-def]
        return broken

    @weft.model
    def other(orders):  # type: ignore[no-untyped-def]
        return orders.select("id")

    assert sorted(bench.rounds(2)) == ["broken failed", "other"]
    assert bench.round(1) == []
    assert bench.round(1.1) == ["broken failed"]
    assert bench.round(2.1) == []
    is_broken = False
    assert bench.round(2) == ["broken"]
    assert bench.rounds(2) == ["after"]


def test_attempts_end_until_something_changes(bench: Bench) -> None:
    @weft.model(retry={"max_attempts": 2, "backoff_seconds": 1})
    def broken(orders):  # type: ignore[no-untyped-def]
        raise RuntimeError("not today")

    assert bench.rounds(10, seconds=10) == ["broken failed"] * 2
    weft.publish_sync("orders", {"id": 1})
    assert bench.rounds(10, seconds=10) == ["broken failed"] * 2


def test_model_that_is_built_by_hand(bench: Bench) -> None:
    @weft.model(trigger="manual")
    def by_hand(orders):  # type: ignore[no-untyped-def]
        return orders.select("id")

    @weft.model
    def after(by_hand):  # type: ignore[no-untyped-def]
        return by_hand

    assert bench.round() == ["after failed"]
    assert bench.runner.run(models()["by_hand"]).status == "succeeded"
    assert bench.rounds(2, seconds=60) == ["after"]


def test_model_that_another_worker_builds(bench: Bench) -> None:
    @weft.model
    def shared(orders):  # type: ignore[no-untyped-def]
        return orders.select("id")

    claimed = bench.log.claim("shared")
    assert bench.round() == ["shared refused"]
    from weft.operate.records import ClaimedRun

    assert isinstance(claimed, ClaimedRun)
    bench.log.finish(claimed, "succeeded")
    assert bench.rounds(2, seconds=1) == ["shared"]


def test_load_into_a_declared_table_triggers(bench: Bench) -> None:
    @weft.pipeline(target="items", mode="append")
    def load_items():  # type: ignore[no-untyped-def]
        return [{"item": "pen"}]

    @weft.model
    def counted(items):  # type: ignore[no-untyped-def]
        return items.aggregate(rows=items.count())

    from weft.engine.run import PipelineRun

    runs = Runner(bench.log, lambda pipeline, key, moment, *, keep: PipelineRun(pipeline, key, moment, keep=keep))
    for number in (1, 2):
        runs.run(weft.project.current().pipelines["load_items"])
        assert bench.rounds(2, seconds=2) == ["counted"]
        assert query("SELECT rows FROM counted") == [(number,)]
    assert bench.rounds(2, seconds=2) == []


def test_build_that_ends_while_the_worker_looks_is_not_repeated(bench: Bench) -> None:
    chain()
    weft.publish_sync("orders", {"id": 1})
    look_as_it_is = bench.worker.look

    def slow(each: Any) -> Any:
        found = look_as_it_is(each)
        # Now the builds of before end.
        bench.worker.join()
        bench.now += 10
        return found

    bench.worker.look = slow
    bench.worker.run_once()

    assert [each.pipeline for each in bench.outcomes] == ["first", "second"]
    bench.worker._threads = ThreadPoolExecutor(1)


def test_input_that_vanished_fails_and_heals(bench: Bench) -> None:
    from tests.engine.models.built import run

    weft.load([{"item": "pen"}], target="items")

    @weft.model(dependencies=["items", "orders"])
    def counted(items, orders):  # type: ignore[no-untyped-def]
        return items

    assert bench.rounds(2) == ["counted"]
    run("DROP TABLE items")
    weft.publish_sync("orders", {"id": 1})
    assert bench.round(2) == ["counted failed"]
    assert "items" in str(bench.outcomes[-1].error)
    assert query("SELECT item FROM counted") == [("pen",)]
    weft.load([{"item": "ink"}], target="items")
    assert bench.rounds(2, seconds=60) == ["counted"]


def test_failures_and_recovery_are_reported(bench: Bench) -> None:
    is_broken = True

    @weft.model
    def shaky(orders):  # type: ignore[no-untyped-def]
        if is_broken:
            raise RuntimeError("not today")
        return orders.select("id")

    told: list[str] = []

    class Told(Alerter):
        shown = "told"
        is_local = True

        def deliver(self, event: Alert) -> None:
            told.append(f"{event.event} {event.pipeline}")

    bench.runner.alerters = Alerters([Told()])
    assert len(bench.rounds(5, seconds=60)) == 5
    is_broken = False
    bench.rounds(2, seconds=60)

    # Of attempts 1, 2 and 4.
    assert told == ["failed shaky"] * 3 + ["recovered shaky"]


def test_build_that_never_ends_holds_up_its_dependents_alone(bench: Bench) -> None:
    released = threading.Event()

    @weft.model
    def endless(orders):  # type: ignore[no-untyped-def]
        released.wait(60)
        return orders.select("id")

    @weft.model
    def after(endless):  # type: ignore[no-untyped-def]
        return endless

    @weft.model
    def other(orders):  # type: ignore[no-untyped-def]
        return orders.select("id")

    bench.worker.start_due()
    wait_until(lambda: [each.pipeline for each in bench.outcomes] == ["other"], "the first build")
    for number in range(3):
        weft.publish_sync("orders", {"id": number})
        bench.now += 1
        bench.worker.start_due()
        wait_until(lambda: len(bench.outcomes) == number + 2, "another build")  # noqa: B023
    assert {each.pipeline for each in bench.outcomes} == {"other"}
    released.set()
    bench.worker.join()
    # What was published meanwhile causes another build.
    assert bench.rounds(3, seconds=2) == ["endless", "after"]
    assert query("SELECT count(*) FROM after") == [(3,)]


def test_worker_does_not_spin_while_all_threads_are_busy(bench: Bench) -> None:
    released = threading.Event()

    @weft.model
    def endless(orders):  # type: ignore[no-untyped-def]
        released.wait(60)
        return orders.select("id")

    @weft.model
    def other(orders):  # type: ignore[no-untyped-def]
        return orders.select("id")

    bench.threads = 1
    bench.worker.start_due()
    bench.now += 5
    assert bench.worker.start_due() == 1.0
    released.set()
    # The build that ends wakes it, and is done then.
    assert bench.worker._wake.wait(30)
    assert [each.done() for each in bench.worker._running.values()] == [True]
    assert bench.rounds(2) == ["other"]


def test_build_is_done_when_it_wakes_the_worker(bench: Bench) -> None:
    chain()
    told = bench.worker.built

    def slow(outcome: Outcome) -> None:
        assert not bench.worker._wake.is_set()
        told(outcome)

    bench.worker.built = slow
    assert bench.rounds(1) == ["first"]


def test_database_that_is_away_is_told_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    chain()
    as_it_is = bench.worker.look

    def away(what: str) -> Callable[[Any], list[Freshness]]:
        return lambda every: [Freshness(each, what, problem=ConnectionFailedError(what)) for each in every]

    bench.worker.look = away("Nobody listens.")
    assert bench.rounds(3, seconds=1) == []
    bench.worker.look = away("The host is gone.")
    assert bench.rounds(3, seconds=1) == []
    bench.worker.look = as_it_is
    assert bench.rounds(3, seconds=1) == ["first", "second"]
    assert [each.getMessage() for each in caplog.records if each.name == "weft.worker"] == [
        "Nobody listens. Until it answers, these models wait: first, second",
        "The host is gone. Until it answers, these models wait: first, second",
        "the database of second answers again",
    ]


def test_look_that_fails_is_told_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    chain()
    as_it_is = bench.worker.look

    def fail(every: Any) -> Any:
        raise ConnectionFailedError("Nobody listens.")

    bench.worker.look = fail
    assert bench.rounds(3, seconds=1) == []
    bench.worker.look = as_it_is
    assert bench.rounds(2, seconds=1) == ["first", "second"]
    assert [each.getMessage() for each in caplog.records if each.name == "weft.worker"] == [
        "the models cannot be looked at, and are in a moment: Nobody listens.",
        "the models can be looked at again",
    ]


def test_once_returns_what_failed_or_is_stale(bench: Bench) -> None:
    bench.step = 1

    @weft.model
    def broken(orders):  # type: ignore[no-untyped-def]
        raise RuntimeError("not today")

    @weft.model
    def after(broken):  # type: ignore[no-untyped-def]
        return broken

    @weft.model
    def other(orders):  # type: ignore[no-untyped-def]
        return orders.select("id")

    @weft.model(trigger="manual")
    def by_hand(orders):  # type: ignore[no-untyped-def]
        return orders.select("id")

    assert bench.worker.run_once() == ["broken", "after"]


def test_once_returns_nothing_where_all_are_fresh(bench: Bench) -> None:
    bench.step = 1
    chain()
    assert bench.worker.run_once() == []
    assert [each.pipeline for each in bench.outcomes] == ["first", "second"]


def test_once_does_not_wait_for_a_database(bench: Bench) -> None:
    bench.step = 1

    @weft.model(debounce=30)
    def calm(orders):  # type: ignore[no-untyped-def]
        return orders.select("id")

    as_it_is, looks = bench.worker.look, []

    def away_later(every: Any) -> Any:
        looks.append(1)
        if len(looks) > 20:
            bench.worker.stop()
        if len(looks) == 1:
            bench.worker.wake()
            return as_it_is(every)
        return [Freshness(each, "away", problem=ConnectionFailedError("away")) for each in every]

    bench.worker.look = away_later
    assert bench.worker.run_once() == ["calm"]
    assert len(looks) == 2


def test_once_leaves_a_model_that_another_worker_builds(bench: Bench) -> None:
    chain()
    bench.log.claim("first")
    assert bench.worker.run_once() == ["first", "second"]
    assert [each.status for each in bench.outcomes] == ["refused"]


def test_once_that_is_stopped_returns_what_is_left(bench: Bench) -> None:
    @weft.model
    def first(orders):  # type: ignore[no-untyped-def]
        bench.worker.stop()
        return orders.select("id")

    @weft.model
    def second(first):  # type: ignore[no-untyped-def]
        return first

    assert bench.worker.run_once() == ["second"]
    assert [each.status for each in bench.outcomes] == ["succeeded"]


def test_each_build_has_a_log_of_its_own(bench: Bench) -> None:
    together = threading.Barrier(2, timeout=30)

    def declare(name: str) -> None:
        def model(orders):  # type: ignore[no-untyped-def]
            together.wait()
            logging.getLogger("mine").warning("said by %s", name)
            together.wait()
            return orders.select("id")

        weft.model(name=name)(model)

    declare("one")
    declare("two")
    assert sorted(bench.round()) == ["one", "two"]
    for outcome in bench.outcomes:
        text = log_file(Path.cwd(), str(outcome.run_id), 1).read_text()
        assert [line for line in text.splitlines() if "said by" in line][-1].endswith(f"said by {outcome.pipeline}")
        assert text.count("said by") == 1
