"""A run log in an object store: its archive, its clock, and a store that fails on the way."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from weft.errors import ConnectionFailedError
from weft.operate.records import ClaimedRun, RefusedClaim
from weft.operate.runlog import RunLog, open_run_log
from weft.operate.runlog_objects import RunObjects
from weft.systems.object_stores import objects as objects_module
from weft.systems.object_stores.objects import Objects, StoredObject

SLOT = datetime(2025, 6, 1, 2, tzinfo=UTC)


@pytest.fixture
def log(log_url: str) -> Iterator[RunLog]:
    with open_run_log(log_url) as opened:
        yield opened


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents and pages of a few attempts."""
    monkeypatch.setattr("weft.operate.runlog_objects._KEPT", 6)
    monkeypatch.setattr("weft.operate.runlog_objects._PAGE", 4)


pytestmark = pytest.mark.parametrize(
    "log_url",
    ["s3", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("azure", "gcs", "seaweed"))],
    indirect=True,
)


def objects_of(log: RunLog) -> Objects:
    assert isinstance(log._book, RunObjects)
    return log._book._objects


def run_once(log: RunLog, pipeline: str, slot: datetime | None = None) -> str:
    run = log.claim(pipeline, slot=slot)
    assert isinstance(run, ClaimedRun)
    assert log.finish(run, "succeeded")
    return run.run_id


def test_old_runs_are_in_the_archive(log: RunLog, small: None) -> None:
    slots = [SLOT + timedelta(hours=hour) for hour in range(15)]
    ids = [run_once(log, "orders", slot) for slot in slots]
    newest_first = ids[::-1]
    assert [each.run_id for each in log.runs("orders", limit=5)] == newest_first[:5]
    assert [each.run_id for each in log.runs("orders", limit=1000)] == newest_first
    assert [each.run_id for each in log.runs(limit=1000)] == newest_first
    assert len(objects_of(log).listing("archive/")) == 3
    for run_id, slot in zip(ids, slots, strict=True):
        assert [(each.slot, each.status) for each in log.run(run_id)] == [(slot, "succeeded")]
    for slot in slots:
        refused = log.claim("orders", slot=slot)
        assert isinstance(refused, RefusedClaim) and refused.why == "succeeded"
    assert log.latest(None).keys() == {"orders"}


def test_old_runs_are_forgotten_in_the_archive_too(log: RunLog, small: None) -> None:
    first = run_once(log, "orders", SLOT)
    for _ in range(12):
        run_once(log, "orders")
    log.forget("orders", 2)
    kept = log.runs("orders", limit=1000)
    assert [each.run_id for each in kept[2:]] == [first]
    refused = log.claim("orders", slot=SLOT)
    assert isinstance(refused, RefusedClaim) and refused.why == "succeeded"
    assert {each.key for each in objects_of(log).listing("runs/")} == {f"runs/{each.run_id}" for each in kept}


@pytest.mark.full
def test_a_page_of_runs_reads_the_documents_that_changed_last(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        run_once(log, f"pipeline {number}")
    objects = objects_of(log)
    read: list[str] = []
    get = objects.get

    def counted(key: str) -> StoredObject | None:
        read.append(key)
        return get(key)

    monkeypatch.setattr(objects, "get", counted)
    listing = objects.listing

    def dated(prefix: str) -> list[Any]:
        """As if a minute had gone by between any two."""
        found = sorted(listing(prefix), key=lambda each: int(each.key.split("_")[1].split("-")[0]))
        now = datetime.now(UTC)
        return [type(each)(each.key, each.version, now - timedelta(minutes=40 - at)) for at, each in enumerate(found)]

    monkeypatch.setattr(objects, "listing", dated)
    assert [each.pipeline for each in log.runs(limit=3)] == ["pipeline 39", "pipeline 38", "pipeline 37"]
    assert len(read) == 16
    read.clear()
    assert len(log.latest(None)) == 40 and len(read) == 40
    read.clear()
    assert len(log.latest(None)) == 40 and read == []


def test_a_put_that_took_effect_and_failed(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer was lost, the client asked again and was told that somebody was faster: it was itself."""
    objects = objects_of(log)
    put = objects.put

    def lost(key: str, data: bytes, over: str | None) -> str | None:
        put(key, data, over)
        return None

    with monkeypatch.context() as patch:
        patch.setattr(objects, "put", lost)
        run = log.claim("orders", slot=SLOT)
        assert isinstance(run, ClaimedRun) and run.fence == 1
        assert log.heartbeat(run)
        assert log.finish(run, "succeeded")
    assert [each.status for each in log.run(run.run_id)] == ["succeeded"]


def test_two_clocks_of_hosts(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is the store's, whatever a host takes for it."""
    monkeypatch.setattr("weft.systems.object_stores.objects.datetime", None)
    run = log.claim("orders", slot=SLOT)
    assert isinstance(run, ClaimedRun)
    assert abs(run.started_at - datetime.now(UTC)) < timedelta(minutes=5)


def test_a_look_at_the_clock_that_takes_long(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be stopped between its own clock and the store's: with a clock of its own, it would take over what
    others hold."""
    objects, stopped = objects_of(log), [100.0, 0.0]
    real, overwrite = objects_module._running, objects.overwrite
    ahead = 0.0

    def slow(key: str, data: bytes) -> None:
        nonlocal ahead
        ahead += stopped.pop(0) if stopped else 0.0
        overwrite(key, data)

    monkeypatch.setattr(objects_module, "_running", lambda: real() + ahead)
    monkeypatch.setattr(objects, "overwrite", slow)
    monkeypatch.setattr(objects, "_looked_at", None)
    assert abs(objects.now() - datetime.now(UTC)) < timedelta(seconds=50)
    assert stopped == []


def test_a_store_that_is_away(log: RunLog, log_url: str, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = "s3://no-such-bucket/a?" + log_url.partition("?")[2]
    with pytest.raises(ConnectionFailedError, match=r"s3://no-such-bucket/a[\s\S]*Check the bucket"):
        open_run_log(nowhere)
    with open_run_log(nowhere, or_memory=True) as own:
        assert run_once(own, "orders")
    assert "this process keeps its own" in caplog.text and "hunter2" not in caplog.text
