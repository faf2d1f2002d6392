"""Claims: what a claim, a heartbeat and a finish do inside their one transaction.

The row of the pipeline in `weft.claims` is locked before anything is read, so two callers never decide at once. Leases
are judged by the database's clock alone, so hosts need not agree about the time. Each grant increments `fence`: a
process with an older one has lost the claim and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any
from uuid import uuid4

from weft.operate.records import Attempt, ClaimedRun, RefusedClaim, slot_text
from weft.operate.runlog_tables import LogTables, instant
from weft.systems import process
from weft.systems.sql.driver import Session

FREE_INTERRUPTIONS = 3
"""A killed attempt is not a failed one: so many of a run do not count. Beyond that it may be the run that kills."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A pipeline's row, locked."""

    pipeline: str
    fence: int
    run_id: str | None
    attempt: int | None
    owner: str | None
    expires_at: datetime | None
    failures: int
    now: datetime
    """By the database's clock."""

    @property
    def is_live(self) -> bool:
        return is_live(self.owner, self.expires_at, self.now)


def is_live(owner: str | None, expires_at: datetime | None, now: datetime) -> bool:
    """Return whether a lease has time left and its process still runs."""
    return owner is not None and expires_at is not None and expires_at > now and not process.has_ended(owner)


def slot_id(pipeline: str, slot: datetime, *more: str) -> str:
    """Return the id of the run for a slot: the same in every process."""
    return blake2b("\0".join((pipeline, slot_text(slot), *more)).encode(), digest_size=12).hexdigest()


def lock(session: Session, book: LogTables, pipeline: str) -> Claim | None:
    """Lock the pipeline's row until the transaction ends, and return it."""
    row = session.row(
        f"SELECT fence, run_id, attempt, owner, expires_at, failures, {book.now} FROM {book.claims} "
        f"WHERE pipeline = ?{book.for_update}",
        (pipeline,),
    )
    if row is None:
        return None
    fence, run_id, attempt, owner, expires_at, failures, now = row
    moment = instant(now)
    assert moment is not None
    return Claim(pipeline, fence, run_id, attempt, owner, instant(expires_at), failures, moment)


def grant(
    session: Session,
    claim: Claim,
    *,
    book: LogTables,
    slot: datetime | None,
    attempts_allowed: int,
    lease_seconds: float,
    resume: bool,
) -> ClaimedRun | RefusedClaim:
    """Begin an attempt, or return why not. Either way, an attempt whose process is gone is recorded as interrupted."""
    attempts = book.attempts_at(session, slot_id(claim.pipeline, slot)) if slot is not None else []
    if attempts and attempts[-1].status == "succeeded":
        return RefusedClaim("succeeded", claim.pipeline, attempts[-1])
    previous = book.attempts_at(session, claim.run_id) if claim.run_id is not None else []
    last = previous[-1] if previous else None
    if claim.is_live:
        return RefusedClaim("running", claim.pipeline, last)
    interrupted_now, failures = None, claim.failures
    if claim.owner is not None and last is not None:
        last = interrupted_now = _interrupt(session, book, claim, last)
        failures += 1
    allowed = None
    if slot is not None:
        run_id = slot_id(claim.pipeline, slot)
        died_now = interrupted_now is not None and interrupted_now.run_id == run_id
        if interrupted_now is not None and died_now:
            attempts[-1] = interrupted_now
        interrupted = sum(each.status == "interrupted" for each in attempts)
        allowed = attempts_allowed + min(interrupted, FREE_INTERRUPTIONS)
        if len(attempts) >= allowed:
            return RefusedClaim("exhausted", claim.pipeline, attempts[-1], gave_up=died_now)
        if attempts and attempts[-1].retry_at is not None and attempts[-1].retry_at > claim.now:
            return RefusedClaim("waiting", claim.pipeline, attempts[-1])
        number = len(attempts) + 1
    elif resume and last is not None and last.status != "succeeded":
        run_id, slot, number = last.run_id, last.slot, last.attempt + 1
    else:
        run_id, number = uuid4().hex[:24], 1
    run = ClaimedRun(
        run_id=run_id,
        pipeline=claim.pipeline,
        slot=slot,
        attempt=number,
        attempts_allowed=allowed,
        failures=failures,
        fence=claim.fence + 1,
        owner=process.this_process(),
        lease_seconds=lease_seconds,
        started_at=claim.now,
    )
    _begin(session, book, run)
    return run


def _begin(session: Session, book: LogTables, run: ClaimedRun) -> None:
    host, pid = process.host_of(run.owner)
    book.insert(
        session,
        {
            "run_id": run.run_id,
            "attempt": run.attempt,
            "pipeline": run.pipeline,
            "slot": run.slot,
            "status": "running",
            "host": host,
            "pid": pid,
            "owner": run.owner,
            "started_at": run.started_at,
        },
    )
    changes: dict[str, Any] = {
        "fence": run.fence,
        "run_id": run.run_id,
        "attempt": run.attempt,
        "owner": run.owner,
        "expires_at": run.started_at + timedelta(seconds=run.lease_seconds),
        # A pipeline that runs is not skipped any more. Start and skip may have the same time, so that cannot decide.
        "skip_run_id": None,
    }
    if run.slot is not None:
        changes |= {"slot_run_id": run.run_id, "slot_attempt": run.attempt}
    book.update(session, book.claims, changes, "pipeline = ?", (run.pipeline,))


def _interrupt(session: Session, book: LogTables, claim: Claim, last: Attempt) -> Attempt:
    """Record that the owner is gone, and release its claim."""
    assert claim.owner is not None
    ended = "has ended" if process.has_ended(claim.owner) else "was silent for longer than its lease"
    error = f"The process {last.pid} on {last.host} {ended}."
    book.update(
        session,
        book.runs,
        {"status": "interrupted", "finished_at": claim.now, "error": error},
        "run_id = ? AND attempt = ? AND status = 'running'",
        (last.run_id, last.attempt),
    )
    release(session, book, claim, {"failures": claim.failures + 1})
    return replace(last, status="interrupted", finished_at=claim.now, error=error)


def release(session: Session, book: LogTables, claim: Claim, changes: dict[str, Any]) -> None:
    book.update(session, book.claims, {"owner": None, "expires_at": None, **changes}, "pipeline = ?", (claim.pipeline,))


def holds(claim: Claim | None, run: ClaimedRun) -> bool:
    return claim is not None and claim.fence == run.fence and claim.owner == run.owner
