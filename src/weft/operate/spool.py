"""What a run log could not record, in a file of the project, until the log can be written again."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from weft.operate import claims
from weft.operate.records import Attempt
from weft.operate.run_store import LockedPipeline, RunStore

_log = logging.getLogger("weft.operate")
FILE = ".weft/run-log-spool.jsonl"
_MOST_BYTES = 20 * 1024 * 1024


class Unrecorded(msgspec.Struct):
    """An attempt that has ended, and the log that does not know it."""

    log: str
    attempt: Attempt


class Spool:
    """The attempts that wait for one run log."""

    def __init__(self, root: Path, log: str) -> None:
        self._file, self._log = root / FILE, log

    def add(self, attempts: list[Attempt]) -> None:
        """Keep attempts for later. Where that fails too, nothing more can be done."""
        try:
            with self._locked() as known:
                self._write([*known, *(Unrecorded(self._log, each) for each in attempts)])
        except Exception as error:  # the run has ended, and must not fail by this
            _log.warning("What the run log could not record cannot be kept either: %s", error)

    def waiting(self) -> list[Attempt]:
        """Return what waits for this log."""
        if self.is_empty:
            return []
        with self._locked() as known:
            return [each.attempt for each in known if each.log == self._log]

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits, for any log."""
        return not self._file.exists()

    def deliver(self, store: RunStore, *, most_seconds: float | None = None) -> int:
        """Record what waits for this log; return how many attempts it did not know. With `most_seconds` the rest is
        left for the next call, and everything where another process uses the file."""
        if self.is_empty:
            return 0
        count = done = 0
        until = None if most_seconds is None else time.monotonic() + most_seconds
        with self._locked(wait=until is None) as known:
            mine = [each for each in known if each.log == self._log]
            try:
                for each in mine:
                    count += store.locked(each.attempt.pipeline, partial(record, attempt=each.attempt))
                    done += 1
                    if until is not None and time.monotonic() >= until:
                        break
            finally:
                if done:
                    self._write([*(each for each in known if each.log != self._log), *mine[done:]])
        return count

    @contextmanager
    def _locked(self, *, wait: bool = True) -> Iterator[list[Unrecorded]]:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with open(self._file.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            entries = []
            for line in self._file.read_bytes().splitlines() if self._file.exists() else ():
                try:
                    entries.append(msgspec.json.decode(line, type=Unrecorded))
                except msgspec.MsgspecError:
                    _log.warning("A line of %s is damaged, and left out.", self._file)
            yield entries

    def _write(self, entries: list[Unrecorded]) -> None:
        lines = [msgspec.json.encode(each) + b"\n" for each in entries]
        if not lines:
            self._file.unlink(missing_ok=True)
            return
        while sum(map(len, lines)) > _MOST_BYTES:
            _log.warning("%s is full: its oldest entry is left out.", self._file)
            del lines[0]
        new = self._file.with_suffix(".new")
        with open(new, "wb") as file:
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._file)


def record(records: LockedPipeline, attempt: Attempt) -> bool:
    """Record how an attempt ended; `False` if the log knows it, or knows that its run succeeded."""
    claim = records.claim
    known = {each.attempt: each for each in records.attempts_at(attempt.run_id, attempt.slot)}
    if any(each.status == "succeeded" for each in known.values()):
        return False
    present = known.get(attempt.attempt)
    if present is not None and present.owner != attempt.owner:
        # The attempt of this number is another process's, which did not know of ours either.
        attempt, present = replace(attempt, attempt=max(known) + 1), None
    values = {name: getattr(attempt, name) for name in Attempt.__slots__}
    if present is None:
        records.add({name: value for name, value in values.items() if value is not None})
    elif present.status in ("running", "interrupted"):
        records.end(attempt.run_id, attempt.attempt, values, present.status)
    else:
        return False
    last = [] if claim.run_id is None else records.attempts_at(claim.run_id)
    is_last = (claim.run_id, claim.attempt) == (attempt.run_id, attempt.attempt)
    if not is_last and (claim.is_live or (last and last[-1].started_at > attempt.started_at)):
        return True  # what came after it says how the pipeline stands
    changes: dict[str, Any] = {"run_id": attempt.run_id, "attempt": attempt.attempt}
    if attempt.status == "succeeded":
        changes |= {"failures": 0, "succeeded_at": attempt.finished_at}
    else:
        changes |= {"failures": claim.failures + 1}
    if attempt.slot is not None:
        changes |= {"slot_run_id": attempt.run_id, "slot_attempt": attempt.attempt}
    claims.release(records, changes)
    return True
