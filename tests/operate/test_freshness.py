"""`expect_within`: somebody is told once that nothing came in time, now and then while that lasts, and once that it is
over."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.errors import DeclarationError
from weft.operate import freshness
from weft.operate.alerts import Alert, Alerter, Alerters
from weft.operate.freshness import check, expected, late_by, streaming_key
from weft.operate.records import ClaimedRun
from weft.operate.runlog import RunLog, open_run_log
from weft.project import Project, current, use

HOUR = timedelta(hours=1)
WITHIN = 2 * HOUR.total_seconds()


class Told(Alerter):
    """Remembers."""

    shown = "told"
    is_local = True

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.texts: list[str] = []

    def deliver(self, event: Alert) -> None:
        self.events.append((event.event, event.pipeline))
        self.texts.append(str(event))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def fresh_project(project: Path) -> Iterator[Project]:
    with use(Project()) as made:
        yield made


def succeed(log: RunLog, name: str) -> None:
    claimed = log.claim(name)
    assert isinstance(claimed, ClaimedRun)
    log.finish(claimed, "succeeded")


def let_pass(log: RunLog, name: str, passed: timedelta) -> None:
    """Move all that the log has of a pipeline into the past."""
    state = log.latest([name])[name]
    moments = {each: getattr(state, each) for each in ("succeeded_at", "watched_at", "stale_at")}
    changes = {each: moment - passed for each, moment in moments.items() if moment is not None}
    log._book.locked(name, lambda records: records.change(changes))


def look(log: RunLog, told: Told, name: str = "orders") -> list[tuple[str, str]]:
    before = len(told.events)
    check(log, {name: WITHIN}, log.latest([name]), Alerters([told]))
    return told.events[before:]


@pytest.mark.brief("sqlite", "postgres", "mysql", "s3")
def test_told_when_late_and_when_over(log: RunLog, told: Told) -> None:
    succeed(log, "orders")
    assert look(log, told) == []
    let_pass(log, "orders", 3 * HOUR)
    assert look(log, told) == [("stale", "orders")]
    assert told.texts[-1].startswith("orders had no success for 3:0")
    assert told.texts[-1].endswith("; one is expected within 2:00:00")
    assert look(log, told) == []
    let_pass(log, "orders", 2 * HOUR)
    assert look(log, told) == []
    # It was told after 3 hours, so it is again after 6.
    let_pass(log, "orders", 2 * HOUR)
    assert look(log, told) == [("stale", "orders")]
    let_pass(log, "orders", 5 * HOUR)
    assert look(log, told) == []
    succeed(log, "orders")
    assert look(log, told) == [("recovered", "orders")]
    assert told.texts[-1] == "orders is fresh again"
    assert look(log, told) == []


@pytest.mark.brief("sqlite")
def test_never_run_is_late_from_the_first_look_on(log: RunLog, told: Told) -> None:
    assert look(log, told) == []
    assert look(log, told) == []
    let_pass(log, "orders", 3 * HOUR)
    assert look(log, told) == [("stale", "orders")]


@pytest.mark.brief("sqlite")
def test_one_of_several_processes_tells(log: RunLog, told: Told) -> None:
    succeed(log, "orders")
    let_pass(log, "orders", 3 * HOUR)
    seen = log.latest(["orders"])
    for _ in range(2):  # both have looked before either has told
        check(log, {"orders": WITHIN}, seen, Alerters([told]))
    assert told.events == [("stale", "orders")]
    succeed(log, "orders")
    seen = log.latest(["orders"])
    for _ in range(2):
        check(log, {"orders": WITHIN}, seen, Alerters([told]))
    assert told.events == [("stale", "orders"), ("recovered", "orders")]


@pytest.mark.brief("sqlite")
def test_late_again_after_a_success_that_nobody_saw(log: RunLog, told: Told) -> None:
    succeed(log, "orders")
    let_pass(log, "orders", 3 * HOUR)
    assert look(log, told) == [("stale", "orders")]
    let_pass(log, "orders", HOUR)
    succeed(log, "orders")
    let_pass(log, "orders", 3 * HOUR)
    assert look(log, told) == [("stale", "orders")]


@pytest.mark.brief("sqlite")
def test_paused_is_not_late_nor_right_after(log: RunLog, told: Told) -> None:
    succeed(log, "orders")
    log.pause("orders")
    let_pass(log, "orders", 3 * HOUR)
    assert look(log, told) == []
    log.resume("orders")
    assert look(log, told) == []
    let_pass(log, "orders", 3 * HOUR)
    assert look(log, told) == [("stale", "orders")]


@pytest.mark.brief("sqlite")
def test_resumed_is_not_fresh_until_it_succeeds(log: RunLog, told: Told) -> None:
    succeed(log, "orders")
    let_pass(log, "orders", 3 * HOUR)
    assert look(log, told) == [("stale", "orders")]
    log.pause("orders")
    assert look(log, told) == []
    log.resume("orders")
    assert look(log, told) == []
    assert log.latest(["orders"])["orders"].stale_at is None
    let_pass(log, "orders", 3 * HOUR)
    assert look(log, told) == [("stale", "orders")]
    let_pass(log, "orders", HOUR)
    succeed(log, "orders")
    assert look(log, told) == [("recovered", "orders")]


@pytest.mark.brief("sqlite")
def test_new_pipelines_are_watched_a_few_at_a_time(log: RunLog, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freshness, "_NEW_AT_ONCE", 2)
    names = ["a", "b", "c"]
    for watched in (2, 3):
        check(log, dict.fromkeys(names, WITHIN), log.latest(names), Alerters([told]))
        assert sum(each.watched_at is not None for each in log.latest(names).values()) == watched


def test_a_log_of_before_tells_nothing(project: Path, told: Told) -> None:
    with open_run_log("sqlite://runs.db") as log, log._book.session("publish") as session:
        session.run(f"ALTER TABLE {log._book.claims} DROP COLUMN stale_at")
    with open_run_log("sqlite://runs.db?create_tables=false") as log:
        assert look(log, told) == []


def test_declared_everywhere(fresh_project: Project, numbers: Any) -> None:
    @weft.pipeline(target="t", expect_within="2h")
    def orders():  # type: ignore[no-untyped-def]
        return []

    @weft.pipeline(target="u")
    def never():  # type: ignore[no-untyped-def]
        return []

    @weft.model(expect_within=timedelta(days=1))
    def counted(orders):  # type: ignore[no-untyped-def]
        return orders

    @weft.streaming_pipeline(source=numbers, target="warehouse", target_table="n", expect_within="90s")
    def orders_too():  # type: ignore[no-untyped-def]
        return None

    assert expected(current()) == {"orders": 7200, "counted": 86_400, streaming_key("orders_too"): 90}


@pytest.mark.parametrize("value", ["2", "soon", "100ms", 7200, 0, "-1h", "400d"])
def test_what_is_no_time(fresh_project: Project, value: Any) -> None:
    with pytest.raises(DeclarationError, match="expect_within"):
        weft.pipeline(target="t", expect_within=value)(list)


def test_late_by_needs_a_clock(project: Path) -> None:
    with open_run_log("memory://") as log:
        assert late_by(log.latest(["new"])["new"], 1) is None
