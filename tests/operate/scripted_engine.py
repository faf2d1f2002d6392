"""An engine without Spark (`weft.pipelines.streaming.execution.StreamingEngine`): each start plays a script.

ScriptedEngine([10, error], [5])     ten rows and a failure; after the next start five rows, and no more until it stops
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from weft.errors import BusyError
from weft.pipelines.streaming.execution import Report

PATIENCE = 30


@dataclass(frozen=True)
class StartFails:
    """A step that no start comes past."""

    error: Exception


@dataclass(frozen=True)
class InHand:
    """A batch that has begun, and is done when the test says so."""

    rows: int
    begun: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


IDLE = object()
"""A look at the sources that finds nothing."""
Step = Any
"""Rows of a batch (0: a batch of nothing), an error to fail with, one of the above, or a function to call."""


class Lag:
    """So many events of one source wait."""

    behind = 7

    def now(self, *, fresh: bool = False) -> dict[str, int]:
        return {"numbers": self.behind}

    def in_words(self) -> dict[str, str]:
        return {"numbers": f"{self.behind} events"}


class ScriptedEngine:
    """Plays one script a start, in a thread of its own. The last one is played again by all further starts."""

    name, location = "copies", "memory"

    def __init__(self, *scripts: Sequence[Step]) -> None:
        self._scripts: Iterator[Sequence[Step]] = itertools.chain(scripts, itertools.repeat(scripts[-1]))
        self.lag = Lag()
        self.is_locked = False
        self.once: bool | None = None
        self.starts = self.batches = self.refused = 0
        self.forgotten: list[Exception] = []
        self.failures: list[str] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._batch = threading.Lock()

    @contextmanager
    def locked(self) -> Iterator[None]:
        if self.is_locked:
            self.refused += 1
            raise BusyError(f"The pipeline {self.name!r} runs already.")
        self.is_locked = True
        try:
            yield
        finally:
            self.is_locked = False

    def start(
        self,
        *,
        once: bool,
        committed: Callable[[], None],
        report: Callable[[Report], None] | None,
        idle: Callable[[], None] | None,
    ) -> None:
        assert self.is_locked
        self.starts += 1
        self.once, self._error = once, None
        script = next(self._scripts)
        for step in script:
            if isinstance(step, StartFails):
                raise step.error
        self._thread = threading.Thread(target=self._play, args=(script, once, committed, report, idle), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        assert self._thread is not None
        ends = time.monotonic() + PATIENCE
        while self._thread.is_alive():
            # A signal that arrives just before a join is handled after it.
            self._thread.join(0.05)
            assert time.monotonic() < ends
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopping.set()
        with self._batch:
            pass  # the batch in hand is done

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def note_failure(self, text: str) -> None:
        self.failures.append(text)

    def forget(self, error: Exception) -> None:
        self.forgotten.append(error)

    def _play(
        self,
        script: Iterable[Step],
        once: bool,
        committed: Callable[[], None],
        report: Callable[[Report], None] | None,
        idle: Callable[[], None] | None,
    ) -> None:
        for step in script:
            if self._stopping.is_set():
                return
            if isinstance(step, Exception):
                self._error = step
                return
            if step is IDLE:
                if idle is not None:
                    idle()
            elif callable(step):
                step()
            else:
                with self._batch:
                    rows = self._rows(step)
                committed()
                if rows and report is not None:
                    report(self._report(rows))
        if not once:
            self._stopping.wait(PATIENCE)

    def _rows(self, step: Step) -> int:
        self.batches += 1
        if isinstance(step, InHand):
            step.begun.set()
            assert step.released.wait(PATIENCE)
            return step.rows
        return int(step)

    def _report(self, rows: int) -> Report:
        return Report(
            pipeline=self.name,
            batch_id=self.batches - 1,
            consumed=rows,
            written={"copies": rows},
            dead=0,
            replayed=False,
            seconds=0.01,
            ended_at=datetime.now(UTC),
        )
