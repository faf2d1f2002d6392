"""Keeps a claim while its run works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from weft.operate.records import Run
from weft.operate.runlog import RunLog

# An unreachable database must not hold up the end of a run.
_JOIN_SECONDS = 5.0


class Heartbeat:
    """Renews the claim of a run three times per lease, in a thread.

    `is_lost` is true once another process has taken the claim; `on_lost` is then called once, in that thread.
    """

    def __init__(self, log: RunLog, run: Run, *, on_lost: Callable[[], object] | None = None) -> None:
        self._log, self._run, self._on_lost = log, run, on_lost
        self._stop = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"weft heartbeat of {run.pipeline}", daemon=True)

    @property
    def is_lost(self) -> bool:
        """Whether the claim is somebody else's."""
        return self._lost.is_set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_JOIN_SECONDS)

    def _beat(self) -> None:
        while not self._stop.wait(self._run.lease_seconds / 3):
            if not self._log.heartbeat(self._run):
                self._lost.set()
                if self._on_lost is not None:
                    self._on_lost()
                return
