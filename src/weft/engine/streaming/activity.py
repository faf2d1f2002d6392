"""What a streaming pipeline has done, in a file of its checkpoint: the process that runs it writes, others read.

The counts go on after a restart and begin again with another checkpoint. A crash loses those of the last seconds: they
are for people who look at the pipeline, and nothing is decided by them.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from weft.engine.streaming.checkpoint import Checkpoint
from weft.pipelines.streaming.execution import Lag, Report

NAME = "activity.json"
_COUNTS = ("batches", "rows_in", "rows_out", "busy_ms", "dead_letters")
_CDC_COUNTS = ("creates", "updates", "deletes", "skipped", "idempotent_skipped")
_SECONDS = 2.0
# The oldest of so many is written too: who reads it once knows the rates of the last ten seconds.
_FLOW, _READINGS = ("rows_in", "rows_out"), 6
# Some sources read what waits to count it.
_LAG_SECONDS = 10.0
_END_SECONDS = 5.0
_MOST_BYTES = 1024 * 1024


def read_activity(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return what was last written; `None` where nothing is, and of a checkpoint at a URL."""
    path = _file(checkpoint)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            activity = json.loads(file.read(_MOST_BYTES))
        activity["at"] = datetime.fromisoformat(activity["at"])
        return {"failure": None, "before": None} | dict(activity) | {name: int(activity[name]) for name in _COUNTS}
    except (OSError, ValueError, KeyError, TypeError):  # not there; or a power cut left half of it
        return None


def _file(checkpoint: Checkpoint) -> Path | None:
    return None if checkpoint.is_url else checkpoint.path / NAME


class Activity:
    """Counts what the batches of a pipeline did."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._path = checkpoint, _file(checkpoint)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._known: dict[str, Any] = {}
        self._readings: deque[dict[str, Any]] = deque(maxlen=_READINGS)

    @contextmanager
    def kept(self, lag: Lag) -> Iterator[None]:
        """Write it every few seconds during the block, in a thread of its own, and at the end."""
        if self._path is None:
            yield
            return
        nothing: dict[str, Any] = {"lag": {}, "last": None, "windows": None, "cdc": None, "failure": None}
        self._known = nothing | dict.fromkeys(_COUNTS, 0) | (read_activity(self._checkpoint) or {})
        self._readings.clear()
        self._ended.clear()
        thread = threading.Thread(target=self._keep, args=(lag,), name="weft activity", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(_END_SECONDS)  # a source that is asked for its lag may hang
            with self._lock:
                self._known["lag"] = {}  # it grows from now on, and nobody counts
            self._write()

    def note_failure(self, error: str) -> None:
        """Say why the pipeline failed, since when and how often, until a batch is done or a run ends well."""
        at = datetime.now(UTC).isoformat()
        with self._lock:
            before = self._known["failure"] or {}
            since, times = before.get("since", at), before.get("times", 0) + 1
            self._known["failure"] = {"at": at, "error": error, "since": since, "times": times}

    def note_success(self) -> None:
        """Note that a run ended well."""
        with self._lock:
            self._known["failure"] = None

    def note(self, report: Report) -> None:
        """Count a batch."""
        with self._lock:
            self._known["failure"] = None
            known, last = self._known, self._known.get("last")
            if report.replayed and last is not None and last["batch"] == report.batch_id:
                return  # it was counted before the crash
            out = sum(report.written.values())
            counts = {"batches": 1, "rows_in": report.consumed, "rows_out": out, "dead_letters": report.dead}
            for name, more in {**counts, "busy_ms": round(report.seconds * 1000)}.items():
                known[name] = known.get(name, 0) + more
            known["last"] = {
                "batch": report.batch_id,
                "rows_in": report.consumed,
                "rows_out": out,
                "seconds": report.seconds,
                "ended_at": report.ended_at.isoformat(),
            }
            if report.windows is not None:
                before = known.get("windows") or {}
                totals = {name: before.get(name, 0) + getattr(report.windows, name) for name in ("emitted", "late")}
                known["windows"] = asdict(report.windows) | totals
            if report.cdc is not None:
                before = known.get("cdc") or {}
                totals = {name: before.get(name, 0) + getattr(report.cdc, name) for name in _CDC_COUNTS}
                lag = report.cdc.lag_seconds
                known["cdc"] = totals | {"lag_seconds": before.get("lag_seconds") if lag is None else lag}

    def _keep(self, lag: Lag) -> None:
        asked_at = float("-inf")
        while not self._ended.wait(_SECONDS):
            self._write()
            if time.monotonic() - asked_at >= _LAG_SECONDS:
                asked_at = time.monotonic()
                with suppress(Exception):  # whatever it is: what is missing is a point of a chart
                    behind = dict(lag.now())
                    with self._lock:
                        if not self._ended.is_set():
                            self._known["lag"] = behind

    def _write(self) -> None:
        """Without a wait for the disk: what a power cut loses is counted again."""
        assert self._path is not None
        with self._lock:
            if not (self._known.get("batches") or self._known.get("failure")):
                return
            now = {"at": datetime.now(UTC).isoformat(), **{name: self._known.get(name, 0) for name in _FLOW}}
            self._readings.append(now)
            text = json.dumps({**self._known, "at": now["at"], "before": self._readings[0]})
            draft = self._path.with_name(f".{NAME}.{os.getpid()}")
            with suppress(OSError):  # the checkpoint is not there yet or no more, or its disk is full
                draft.write_text(text)
                os.replace(draft, self._path)
