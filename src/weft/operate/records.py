"""The records of a run log: attempts, claims on runs, why one was refused, and the state of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

Status = Literal["running", "succeeded", "failed", "interrupted", "cancelled", "skipped"]
ENDS: tuple[Status, ...] = ("succeeded", "failed", "interrupted", "cancelled")
"""How an attempt may end."""
CLOCK_ERROR = timedelta(seconds=5)
"""What is recorded for later than this from now is of before the log's clock was set back. Two looks at the clock of a
bucket may differ by less."""
COUNTS = ("rows_read", "inserted", "updated", "unchanged", "deleted", "quarantined", "late")
"""What is counted of an attempt."""


def counts_text(counts: Mapping[str, Any]) -> str:
    """Return what a load did to its target, in words."""
    if counts.get("replayed"):
        return "was done already"
    words = [f"{counts['rows_read']:,} read"]
    words += [
        f"{counts[name]:,} {name}"
        for name in ("inserted", "updated", "unchanged", "deleted", "quarantined")
        if counts.get(name)
    ]
    return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A row of `weft.runs`: one attempt at a run, or a slot that was skipped. Times are in UTC."""

    run_id: str
    attempt: int
    pipeline: str
    slot: datetime | None
    """The moment that the schedule named; `None` for a manual run."""
    status: Status
    engine: str | None
    host: str | None
    pid: int | None
    owner: str | None
    started_at: datetime
    finished_at: datetime | None
    rows_read: int | None
    inserted: int | None
    updated: int | None
    unchanged: int | None
    deleted: int | None
    quarantined: int | None
    late: int | None
    error: str | None
    reason: str | None
    """Why it was skipped; of the lease of a scheduler, what it has declared."""
    retry_at: datetime | None
    """Failed: not before this moment again."""
    metrics: dict[str, Any] | None

    @property
    def seconds(self) -> float | None:
        return None if self.finished_at is None else (self.finished_at - self.started_at).total_seconds()

    def waits(self, now: datetime) -> bool:
        """Return whether the next attempt is to come later. If the log's clock was set back since this one ended,
        nobody knows how much later, and it does not wait."""
        is_set_back = self.finished_at is not None and self.finished_at > now + CLOCK_ERROR
        return self.retry_at is not None and self.retry_at > now and not is_set_back


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """An attempt that only the caller may make, until it is finished or the claim is lost."""

    run_id: str
    pipeline: str
    slot: datetime | None
    attempt: int
    attempts_allowed: int | None
    """The number of the last attempt that the slot has; `None` for a manual run."""
    failures: int
    """Attempts of the pipeline that did not succeed, since one did."""
    fence: int
    owner: str
    lease_seconds: float
    started_at: datetime

    @property
    def key(self) -> str:
        """What makes the commit of its data idempotent: the same for all attempts at one run."""
        return self.run_id if self.slot is None else slot_text(self.slot)


@dataclass(frozen=True, slots=True)
class RefusedClaim:
    """Why a pipeline may not run now.

    `succeeded`: the slot is done. `running`: another process holds the pipeline. `waiting`: its next attempt is not
    due. `exhausted`: it has no attempt left. `cancelled`: somebody cancelled the slot. `paused`: until somebody
    resumes the pipeline.
    """

    why: Literal["succeeded", "running", "waiting", "exhausted", "cancelled", "paused"]
    pipeline: str
    last: Attempt | None
    """The attempt that is the reason."""
    gave_up: bool = False
    """Whether this call found the process of the last attempt dead."""

    def __str__(self) -> str:
        last = self.last
        since = f" since {last.started_at:%Y-%m-%d %H:%M:%S} UTC" if last else ""
        if self.why == "running":
            by = f" by process {last.pid} on {last.host}" if last and last.pid is not None else ""
            return f"{self.pipeline} is being run{by}{since}."
        if self.why == "waiting" and last and last.retry_at:
            return f"{self.pipeline} is tried again at {last.retry_at:%Y-%m-%d %H:%M:%S} UTC."
        if self.why == "paused":
            return f"{self.pipeline} is paused."
        if self.why == "cancelled":
            return f"{self.pipeline} was cancelled for this slot."
        if self.why == "succeeded":
            return f"{self.pipeline} has run for this slot."
        return f"{self.pipeline} has used up its attempts for this slot."


@dataclass(frozen=True, slots=True)
class PipelineState:
    pipeline: str
    last: Attempt | None
    scheduled: Attempt | None
    """The last attempt that was for a slot."""
    skipped: Attempt | None
    """The last skip, where nothing was attempted since."""
    succeeded_at: datetime | None
    failures: int
    """Attempts that did not succeed, since one did."""
    is_live: bool
    """Whether a process works on it now."""
    paused_at: datetime | None = None
    """Since when its schedule is not followed."""
    watched_at: datetime | None = None
    """Since when somebody waits for a success: `weft.operate.freshness`."""
    stale_at: datetime | None = None
    """When it was last reported that none came in time; `None` where all is well."""
    now: datetime | None = field(default=None, compare=False)
    """When this was read, by the log's clock; `None` where the log does not know the pipeline."""
    expires_at: datetime | None = field(default=None, compare=False)
    """When the claim of the process that works on it ends, unless it is renewed."""
    owner: str | None = field(default=None, compare=False)
    """The process that works on it, or did and ended without a word."""

    @property
    def status(self) -> Status | None:
        """The status of its last attempt; interrupted where no process works on it, also before that is recorded."""
        if self.last is None:
            return None
        return "interrupted" if self.last.status == "running" and not self.is_live else self.last.status


def slot_text(slot: datetime) -> str:
    return slot.astimezone(UTC).isoformat()
