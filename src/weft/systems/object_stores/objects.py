"""Objects that change only under a condition.

A put creates an object that is not there, or replaces the version that was read. If several processes change an object
at once, one put succeeds and the others return `None`.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from weft.errors import ConnectionFailedError

TIMEOUT_SECONDS = 15
_CLOCK = "clock"
# How long the store's clock is reckoned from one look at it.
_CLOCK_SECONDS = 600.0
_LOOKS, _PROMPT_SECONDS = 3, 1.0


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as it was read."""

    data: bytes
    version: str


@dataclass(frozen=True, slots=True)
class ListedObject:
    key: str
    version: str
    modified: datetime


class Objects(ABC):
    """The objects of a bucket or container whose names begin with a prefix."""

    _refusals: tuple[type[Exception], ...]
    """What the client raises where there is no such bucket, or the credentials may not use it."""

    def __init__(self, shown: str, prefix: str) -> None:
        self.shown, self._prefix = shown, f"{prefix}/" if prefix else ""
        self._looked_at: tuple[datetime, float] | None = None

    @abstractmethod
    def get(self, key: str) -> StoredObject | None:
        """Return an object; `None` where there is none."""

    @abstractmethod
    def put(self, key: str, data: bytes, over: str | None) -> str | None:
        """Create an object, or replace its version `over`, and return the new version; `None` where another process
        was faster. A failure on the way may also answer `None` for a put that took effect."""

    @abstractmethod
    def overwrite(self, key: str, data: bytes) -> None:
        """Put an object, whatever is there."""

    @abstractmethod
    def delete(self, key: str) -> None: ...

    @abstractmethod
    def listing(self, prefix: str) -> list[ListedObject]:
        """Return the objects whose keys begin with a prefix, in the order of their keys."""

    @abstractmethod
    def _modified(self, key: str) -> datetime: ...

    def now(self) -> datetime:
        """Return the time by the store's clock, which is the same for all hosts."""
        if self._looked_at is None or _running() - self._looked_at[1] > _CLOCK_SECONDS:
            self._looked_at = self._look_at_clock()
        then, at = self._looked_at
        return then + timedelta(seconds=_running() - at)

    def _look_at_clock(self) -> tuple[datetime, float]:
        """Return the time by the store's clock, and that of this host's at the same moment."""
        looks = []
        for _ in range(_LOOKS):
            began = _running()
            self.overwrite(_CLOCK, b"")
            moment = self._modified(_CLOCK).astimezone(UTC)
            took = _running() - began
            looks.append((took, moment, began))
            # A store that answers late, or a process that was stopped in between: the moment is any of that time.
            if took < _PROMPT_SECONDS:
                break
        _, moment, began = min(looks)
        return moment, began

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a client raises
            text = " ".join(str(error).split())[:300]
            raise ConnectionFailedError(
                f"The object store {self.shown} did not do what was asked: {type(error).__name__}: {text}",
                hint="Check the bucket, the region or endpoint, and the credentials of the environment.",
                is_transient=not isinstance(error, self._refusals),
            ) from None


def _running() -> float:
    """Return the seconds since this host started, by a clock that never jumps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
