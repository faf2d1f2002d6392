"""What a pipeline has done, in a file of its checkpoint: counted by batch, kept over restarts. No Spark runs here."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from servers import wait_until
from weft.engine.streaming import activity
from weft.engine.streaming.activity import NAME, Activity, read_activity
from weft.engine.streaming.checkpoint import Checkpoint
from weft.pipelines.streaming.execution import CdcReport, Report, WindowReport


class Behind:
    """A source that is so far behind, or does not say."""

    lag = 7

    def now(self, *, fresh: bool = False) -> dict[str, int]:
        if self.lag < 0:
            raise OSError("no answer")
        return {"orders": self.lag}

    def in_words(self) -> dict[str, str]:
        return {}


def report(batch: int, rows: int, **more: Any) -> Report:
    details = {"dead": 0, "replayed": False, "seconds": 0.5, "ended_at": datetime.now(UTC)} | more
    return Report("loader", batch, rows, {"clean": rows, "other": 1}, **details)


@pytest.fixture
def checkpoint(project: Path) -> Checkpoint:
    found = Checkpoint("loader", str(project / "checkpoint"))
    found.path.mkdir()
    return found


def test_batches_are_counted_over_restarts(checkpoint: Checkpoint) -> None:
    assert read_activity(checkpoint) is None
    first = Activity(checkpoint)
    with first.kept(Behind()):
        first.note(report(0, 5))
        first.note(report(1, 3, dead=2))
    second = Activity(checkpoint)
    with second.kept(Behind()):
        # What was counted before a crash comes again; what was not is counted.
        second.note(report(1, 3, replayed=True))
        second.note(report(2, 4, replayed=True))
    found: Any = read_activity(checkpoint)
    counts = {name: found[name] for name in ("batches", "rows_in", "rows_out", "busy_ms", "dead_letters")}
    assert counts == {"batches": 3, "rows_in": 12, "rows_out": 15, "busy_ms": 1500, "dead_letters": 2}
    assert (found["last"]["batch"], found["last"]["rows_in"]) == (2, 4)
    assert (found["windows"], found["cdc"]) == (None, None)


def test_why_it_failed_stays_until_it_goes_on(checkpoint: Checkpoint) -> None:
    def failure(activity: Activity) -> Any:
        activity._write()
        return (read_activity(checkpoint) or {}).get("failure")

    first = Activity(checkpoint)
    with first.kept(Behind()):
        first.note_failure("no such table")
        assert failure(first)["error"] == "no such table"
    second = Activity(checkpoint)
    with second.kept(Behind()):
        before = failure(second)
        assert (before["error"], before["since"], before["times"]) == ("no such table", before["at"], 1)
        second.note_failure("still none")
        again = failure(second)
        assert (again["error"], again["since"], again["times"]) == ("still none", before["at"], 2)
        assert again["at"] > again["since"]
        second.note(report(0, 5))
        assert failure(second) is None
        second.note_failure("away")
        assert (failure(second)["error"], failure(second)["times"]) == ("away", 1)
        second.note_success()
    assert failure(second) is None


def test_it_is_written_while_the_pipeline_runs(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_SECONDS", 0.01)
    monkeypatch.setattr(activity, "_LAG_SECONDS", 0.0)
    behind, running = Behind(), Activity(checkpoint)

    def lag() -> Any:
        return (read_activity(checkpoint) or {}).get("lag")

    with running.kept(behind):
        running.note(report(0, 5))
        wait_until(lambda: lag() == {"orders": 7}, "the lag to be written")
        behind.lag = -1  # the last one stays
        before: Any = read_activity(checkpoint)
        wait_until(lambda: (read_activity(checkpoint) or before)["at"] > before["at"], "it to be written again")
        behind.lag = 9
        wait_until(lambda: lag() == {"orders": 9}, "the lag to be written")
    # Its rates are known by one look.
    found: Any = read_activity(checkpoint)
    assert (found["before"]["rows_in"], found["before"]["at"] < found["at"].isoformat()) == (5, True)


def test_windows_and_changes(checkpoint: Checkpoint) -> None:
    counted = Activity(checkpoint)
    with counted.kept(Behind()):
        for number in range(2):
            windows = WindowReport(3, 4, 9, 1, "drop", 1_000_000 * number, {"orders": 5})
            counted.note(report(number, 1, windows=windows, cdc=CdcReport(1, 2, 3, 4, 5, 0.25 if not number else None)))
    found: Any = read_activity(checkpoint)
    assert found["windows"] == {
        "emitted": 6,
        "open": 4,
        "groups": 9,
        "late": 2,
        "policy": "drop",
        "watermark": 1_000_000,
        "sources": {"orders": 5},
    }
    changes = {"creates": 2, "updates": 4, "deletes": 6, "skipped": 8, "idempotent_skipped": 10}
    assert found["cdc"] == changes | {"lag_seconds": 0.25}


def test_what_cannot_be_read_is_counted_anew(checkpoint: Checkpoint) -> None:
    file = checkpoint.path / NAME
    for broken in ("", "{", "[]", "null", '{"at": 3}', '{"batches": 3}', '{"at": "2026-01-01"}'):
        file.write_text(broken)
        assert read_activity(checkpoint) is None
    counted = Activity(checkpoint)
    with counted.kept(Behind()):
        counted.note(report(7, 2))
    found: Any = read_activity(checkpoint)
    assert (found["batches"], found["rows_in"]) == (1, 2)


def test_a_checkpoint_that_is_gone_fails_nothing(checkpoint: Checkpoint) -> None:
    counted = Activity(checkpoint)
    with counted.kept(Behind()):
        counted.note(report(0, 1))
        checkpoint.path.rmdir()
    assert not checkpoint.path.exists()


def test_nothing_is_written_into_a_bucket() -> None:
    bucket = Checkpoint("loader", "s3://bucket/loader")
    counted = Activity(bucket)
    with counted.kept(Behind()):
        counted.note(report(0, 1))
    assert read_activity(bucket) is None
