"""What is reported of a streaming pipeline, by an engine without Spark."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from operate.scripted_engine import Lag, ScriptedEngine
from servers import wait_until
from weft.errors import NotFoundError, SettingsError
from weft.operate import streaming_alerts
from weft.operate.alerts import Alert, Alerter, Alerters
from weft.operate.freshness import streaming_key
from weft.operate.records import ClaimedRun
from weft.operate.run_options import Running
from weft.operate.runlog import RunLog, open_run_log
from weft.operate.streaming_alerts import AlertLimits, StreamingAlerts, reported
from weft.operate.supervisor import Supervisor
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.execution import Report
from weft.project import Project, use
from weft.settings import read_project_file

KEY = streaming_key("copies")
REPORT = Report("copies", 0, 10, {"copies": 10}, 0, False, 0.01, datetime(2026, 1, 1, tzinfo=UTC))


class Told(Alerter):
    """Remembers."""

    shown = "told"
    is_local = True

    def __init__(self) -> None:
        self.events: list[str] = []
        self.texts: list[str] = []

    def deliver(self, event: Alert) -> None:
        self.events.append(event.event)
        self.texts.append(str(event))


@pytest.fixture
def log(project: Path) -> Iterator[RunLog]:
    with open_run_log() as opened:
        yield opened


def play(log: RunLog, told: Told, *scripts: list[Any], restarts: int = 0, **options: Any) -> None:
    """Run a pipeline as one process does."""
    running = Running(once=True, restart_on_error=restarts > 0, max_restarts=restarts, min_backoff_ms=0)
    with StreamingAlerts("copies", log, Alerters([told]), **options) as listener, suppress(RuntimeError):
        Supervisor(ScriptedEngine(*scripts), running, [listener]).run()
    # Leaving waits for some seconds only: where disks are slow, the thread would change the log behind the test's back.
    listener._thread.join(300)
    assert not listener._thread.is_alive()


def test_process_that_is_started_again_and_again_tells_it_a_few_times(log: RunLog) -> None:
    told = Told()
    for _ in range(5):
        play(log, told, [RuntimeError("no disk")])
    assert told.events == ["gave_up"] * 3  # of 1, 2 and 4
    assert told.texts[0].startswith("copies failed, and has ended: RuntimeError: no disk")
    play(log, told, [10])
    play(log, told, [10])
    assert told.events[3:] == ["recovered"]
    assert told.texts[3] == "copies has rows again, after 5 failures"


def test_restarts_are_told_by_their_number(log: RunLog) -> None:
    told, fails = Told(), [RuntimeError("no disk")]
    play(log, told, fails, fails, [10], restarts=9, limits=AlertLimits(restarts=3))
    assert told.events == []
    play(log, told, *[fails] * 7, [10], restarts=9, limits=AlertLimits(restarts=3))
    assert told.events == ["failed", "failed", "recovered"]  # of 3 and 6
    assert told.texts[1].startswith("copies failed 6 times in a row, and is started again: RuntimeError")


def test_giving_up_is_always_told(log: RunLog) -> None:
    told = Told()
    play(log, told, [RuntimeError("no disk")], restarts=2)
    assert told.events == ["gave_up"]


def test_lag_over_its_limit(log: RunLog) -> None:
    told, lag = Told(), Lag()
    made = StreamingAlerts("copies", log, Alerters([told]), limits=AlertLimits(lag=100))
    made.started(lag)
    for behind in (100, 101, 99, 150, 51, 50, 50, 99, 500):
        lag.behind = behind
        made.look()
        made._events.get(timeout=120)()  # the answer
        made._asking.join(120)
    assert told.texts == [
        "copies is 101 behind in numbers; the limit is 100",
        "copies is 50 behind in numbers",
        "copies is 500 behind in numbers; the limit is 100",
    ]
    assert told.events == ["lag", "recovered", "lag"]


def test_dead_letters_over_their_limit_within_an_hour(log: RunLog) -> None:
    told, now = Told(), 0.0
    made = StreamingAlerts("copies", log, Alerters([told]), limits=AlertLimits(dead_letters=10), clock=lambda: now)
    for moment, dead in ((1, 6), (3000, 4), (3700, 5), (3800, 2), (3900, 50), (9000, 0)):
        now = float(moment)
        made._note_batch(replace(REPORT, dead=dead))
        made.look()
    assert told.texts == [
        "copies rejected 11 rows within an hour; the limit is 10",
        "copies rejected 0 rows within an hour",
    ]


def test_rows_that_do_not_come(log: RunLog) -> None:
    told = Told()
    play(log, told, [10], expect_within=3600.0)
    made = StreamingAlerts("copies", log, Alerters([told]), expect_within=3600.0)
    made.look()
    assert told.events == []
    moments = ("succeeded_at", "watched_at")
    log._book.locked(KEY, lambda each: each.change(dict.fromkeys(moments, each.claim.now - timedelta(hours=2))))
    made.look()
    made.look()
    assert len(told.texts) == 1 and told.texts[0].startswith("copies had no row for 2:0")
    assert told.texts[0].endswith("; one is expected within 1:00:00")
    made._note_batch(REPORT)
    state = log.latest([KEY])[KEY]
    assert state.succeeded_at >= state.stale_at
    # It may be the very moment in which it was told: the clock counts milliseconds.
    log._book.locked(KEY, lambda each: each.change({"succeeded_at": state.stale_at}))
    made.look()
    assert told.texts[1:] == ["copies is fresh again"]


def test_rows_are_noted_now_and_then(log: RunLog) -> None:
    now, noted = 0.0, []
    made = StreamingAlerts("copies", log, Alerters(), expect_within=100.0, clock=lambda: now)
    for moment in (1, 2, 9, 12, 13, 21, 24):
        now = float(moment)
        log._book.locked(KEY, lambda each: each.change({"succeeded_at": None}))
        made._note_batch(REPORT)
        if log.latest([KEY])[KEY].succeeded_at is not None:
            noted.append(moment)
    assert noted == [1, 12, 24]


def test_log_that_hangs_holds_up_no_batch(log: RunLog) -> None:
    released, asked = threading.Event(), threading.Event()

    class Hangs(RunLog):
        def note_rows(self, pipeline: str) -> int:
            asked.set()
            released.wait(120)
            return super().note_rows(pipeline)

    with StreamingAlerts("copies", Hangs(log._book), Alerters([Told()])) as listener:
        Supervisor(ScriptedEngine([1] * 50), Running(once=True), [listener]).run()
        assert asked.wait(120) and not released.is_set()
        released.set()


def test_slow_look_leaves_time_for_events(log: RunLog) -> None:
    """It takes longer than the time between two: what waits is handled all the same."""
    told, looks = Told(), threading.Semaphore(0)

    class Slow(StreamingAlerts):
        def look(self) -> None:
            looks.acquire(timeout=0.05)

    with Slow("copies", log, Alerters([told]), expect_within=0.001) as listener:
        listener.batch(REPORT)
        listener.failed(RuntimeError("no disk"), None)
        wait_until(lambda: told.events == ["gave_up"], "the alert", 120)
    assert log.latest([KEY])[KEY].succeeded_at is not None


def test_source_that_hangs_holds_up_no_alert(log: RunLog) -> None:
    told, released, asked = Told(), threading.Event(), threading.Event()

    class Hangs(Lag):
        def now(self, *, fresh: bool = False) -> dict[str, int]:
            asked.set()
            released.wait(120)
            return {}

    with StreamingAlerts("copies", log, Alerters([told]), limits=AlertLimits(lag=1), look_seconds=0.01) as listener:
        listener.started(Hangs())
        assert asked.wait(120)
        listener.failed(RuntimeError("no disk"), None)
        wait_until(lambda: told.events == ["gave_up"], "the alert", 120)
        assert not released.is_set()
        released.set()


def test_batches_leave_room_for_failures(log: RunLog) -> None:
    listener = StreamingAlerts("copies", log, Alerters([Told()]))
    for _ in range(streaming_alerts._MOST_WAITING + 5):
        listener.batch(REPORT)
    waiting = listener._events.qsize()
    listener.failed(RuntimeError("no disk"), None)
    assert listener._events.qsize() == waiting + 1


def test_log_that_is_away_at_the_start_is_opened_later(project: Path) -> None:
    told, now, away = Told(), 0.0, True

    def open_log() -> RunLog:
        if away:
            raise OSError("no route")
        return open_run_log()

    made = StreamingAlerts("copies", None, Alerters([told]), open_log=open_log, expect_within=100.0, clock=lambda: now)
    made._note_failure("no disk", None)
    assert told.events == ["gave_up"]
    made._note_batch(REPORT)
    made.look()
    assert told.events == ["gave_up", "recovered"]
    away = False
    made.look()  # too early
    with open_run_log() as log:
        assert log.latest([KEY])[KEY].succeeded_at is None
        now = 60.0
        made.look()
        assert log.latest([KEY])[KEY].succeeded_at is not None
    assert told.events == ["gave_up", "recovered"]


def test_log_that_goes_away_is_opened_again(project: Path) -> None:
    told, now = Told(), 0.0
    log = open_run_log()
    made = StreamingAlerts("copies", log, Alerters([told]), open_log=open_run_log, clock=lambda: now)
    made._note_failure("no disk", 1.0)
    made._note_failure("no disk", 1.0)
    with log._book.session("publish") as session:
        session.run(f"ALTER TABLE {log._book.claims} RENAME TO elsewhere")
    made._note_failure("no disk", 1.0)
    assert told.events == ["failed"]
    made._note_batch(REPORT)
    assert told.texts[1] == "copies has rows again, after 3 failures"
    with sqlite3.connect(project / ".weft/runs.db") as database:
        database.execute('ALTER TABLE elsewhere RENAME TO "weft.claims"')
    now = 60.0
    made._note_batch(REPORT)
    with open_run_log() as again:
        assert again.latest([KEY])[KEY].failures == 0
    assert told.events == ["failed", "recovered"]


def test_delivers_what_the_log_missed(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = log.claim("orders")
    assert isinstance(claimed, ClaimedRun)
    with monkeypatch.context() as patch:
        patch.setattr(log._book, "locked", None)
        assert log.finish(claimed, "succeeded")
    assert log.latest(["orders"])["orders"].status == "running"
    StreamingAlerts("copies", log, Alerters()).look()
    assert log.latest(["orders"])["orders"].status == "succeeded"


def test_only_new_rows_are_rows(log: RunLog) -> None:
    made = StreamingAlerts("copies", log, Alerters(), expect_within=100.0)
    made._note_batch(replace(REPORT, consumed=0))
    made._note_batch(replace(REPORT, replayed=True))
    assert log.latest([KEY])[KEY].succeeded_at is None
    made._note_batch(REPORT)
    assert log.latest([KEY])[KEY].succeeded_at is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[alerts]\nlags = 5", "unknown key 'lags' in alerts"),
        ("[alerts]\nlag = 0", "lag in alerts is a whole number"),
        ("[alerts.pipelines.copies]\nrestarts = true", "restarts in alerts.pipelines.copies"),
        ("alerts = 5", "alerts must be a table"),
        ("[alerts.pipelines]\ncopies = 5", "alerts must be a table"),
    ],
)
def test_limits_that_are_wrong(project: Path, text: str, says: str) -> None:
    Path("weft.toml").write_text(text)
    with pytest.raises(SettingsError, match=says):
        read_project_file(project)


def test_limits_of_one_pipeline(project: Path) -> None:
    Path("weft.toml").write_text("[alerts]\nlag = 5\nrestarts = 7\n[alerts.pipelines.copies]\nlag = 9\n")
    settings = read_project_file(project)
    assert AlertLimits.of(settings, "copies") == AlertLimits(restarts=7, lag=9)
    assert AlertLimits.of(settings, "others") == AlertLimits(restarts=7, lag=5)
    assert AlertLimits.of({}, "others") == AlertLimits()


def test_who_is_told(project: Path) -> None:
    with use(Project()):
        quiet, watched = (
            make(name="copies", source="here", source_query="a", target="here", target_table="t", expect_within=each)
            for each in (None, "1h")
        )
        with reported(quiet) as listeners:
            assert listeners == []
        # Nothing was made for that.
        assert not Path(".weft/runs.db").exists()
        with reported(watched) as (listener,):
            listener.batch(REPORT)
        with open_run_log() as log:
            assert log.latest([KEY])[KEY].succeeded_at is not None
        Path("away.db").mkdir()
        with reported(watched, run_log="sqlite://away.db") as (listener,):
            assert isinstance(listener, StreamingAlerts) and listener._log is None
        Path("weft.toml").write_text('alerters = ["stdout://"]\n[alerts]\nlag = 5\n')
        with reported(quiet) as (listener,):
            assert isinstance(listener, StreamingAlerts) and listener.limits.lag == 5


def test_alerter_that_is_wrong_starts_nothing(project: Path) -> None:
    with use(Project()):
        made = make(name="copies", source="here", source_query="a", target="here", target_table="t")
        with pytest.raises(NotFoundError, match="slak://"), reported(made, ["slak://x"]):
            pass
