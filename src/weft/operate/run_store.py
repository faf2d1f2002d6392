"""Where a run log keeps its records: what every kind of store can do, be it a database or a bucket of objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

from weft.operate.records import CLOCK_ERROR, Attempt, PipelineState, Status
from weft.systems import process

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Claim:
    """What a store has of a pipeline: who runs it, and which attempt is its last."""

    pipeline: str
    fence: int
    run_id: str | None
    attempt: int | None
    owner: str | None
    expires_at: datetime | None
    failures: int
    now: datetime
    """By the store's clock."""
    paused_at: datetime | None = None
    cancelled: str | None = None
    """The attempt that is to end, as `attempt_text` writes it."""
    watched_at: datetime | None = None
    stale_at: datetime | None = None
    lease_seconds: float | None = None
    """How long its owner holds it from a renewal on; `None` where that is not known."""

    @property
    def is_live(self) -> bool:
        return is_live(self.owner, self.expires_at, self.now)


def is_live(owner: str | None, expires_at: datetime | None, now: datetime) -> bool:
    """Return whether a lease has time left and its process still runs."""
    return owner is not None and expires_at is not None and expires_at > now and not process.has_ended(owner)


def is_too_long(expires_at: datetime | None, now: datetime, lease_seconds: float) -> bool:
    """Return whether a lease ends later than one that is renewed now: the clock was set back since it was."""
    return expires_at is not None and expires_at - now > timedelta(seconds=lease_seconds) + CLOCK_ERROR


def attempt_text(run_id: str | None, attempt: int | None) -> str:
    """Return how a store names an attempt."""
    return f"{run_id} {attempt}"


class LockedPipeline(ABC):
    """The records of one pipeline inside a change that takes effect as a whole or not at all."""

    claim: Claim

    @abstractmethod
    def attempts_at(self, run_id: str, since: datetime | None = None) -> list[Attempt]:
        """Return all attempts at a run of this pipeline, the first one first. Those at a slot began `since` then."""

    @abstractmethod
    def add(self, values: Mapping[str, Any]) -> None:
        """Add an attempt, or a skip: those of its fields that are not `None`."""

    @abstractmethod
    def end(self, run_id: str, attempt: int, values: Mapping[str, Any], was: Status = "running") -> None:
        """Change an attempt that has a status."""

    @abstractmethod
    def change(self, values: Mapping[str, Any]) -> None:
        """Change what the store has of the pipeline itself."""


class RunStore(ABC):
    """The records of a run log."""

    is_private = False
    """Whether no other process finds it."""
    shown: str
    """Where it is, without secrets."""

    @property
    def has_notes(self) -> bool:
        """Whether it can note what is stale: logs of older versions cannot."""
        return True

    @abstractmethod
    def secrets(self) -> Collection[str]:
        """Return the texts that no error may hold."""

    @abstractmethod
    def close(self) -> None: ...

    def require_control(self) -> None:
        """Raise where the store is too old to note pauses and cancels."""
        return

    @abstractmethod
    def locked(self, pipeline: str, work: Callable[[LockedPipeline], T]) -> T:
        """Call `work` with the records of a pipeline, and store what it changes in one step. `work` is called again
        where another process changed them meanwhile."""

    @abstractmethod
    def latest(self, pipelines: Sequence[str] | None) -> list[PipelineState]:
        """Return the states of those of these pipelines that the store knows; of all where `None`."""

    @abstractmethod
    def runs(self, pipeline: str | None, status: Status | None, since: datetime | None, limit: int) -> list[Attempt]:
        """Return attempts and skips, the newest first."""

    @abstractmethod
    def run(self, run_id: str) -> list[Attempt]:
        """Return all attempts at a run, the first one first; none where the store has no such run."""

    @abstractmethod
    def forget(self, pipeline: str, keep: int) -> None:
        """Remove old runs of a pipeline that succeeded, but for those of slots: so many attempts are kept."""
