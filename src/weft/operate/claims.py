"""What a claim, its release and a cancel do to the records of a pipeline. A heartbeat is `renew` of `RunLog`.

Two callers never decide at once: a store locks the records, or refuses the change of who was slower. Leases are judged
by the store's clock alone, so hosts need not agree about the time. Where that clock was set back, the first
process that looks shortens the lease to the length that its owner gave it; an owner that lives renews it. Each
grant increments `fence`: a process with an older one has lost the claim and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any, Literal
from uuid import uuid4

from weft.operate.records import Attempt, ClaimedRun, RefusedClaim, slot_text
from weft.operate.run_store import Claim, LockedPipeline, attempt_text, is_too_long
from weft.systems import process

FREE_INTERRUPTIONS = 3
"""A killed attempt is not a failed one: so many of a run do not count. Beyond that it may be the run that kills."""


PRESENCE_SECONDS = 60.0
"""A service, worker or scheduler that is silent for so long counts as gone."""
SILENT_DAYS = 3
"""For which it is still spoken of: over a weekend."""


def slot_id(pipeline: str, slot: datetime, *more: str) -> str:
    """Return the id of the run for a slot: the same in every process."""
    return blake2b("\0".join((pipeline, slot_text(slot), *more)).encode(), digest_size=12).hexdigest()


def grant(
    records: LockedPipeline,
    *,
    slot: datetime | None,
    attempts_allowed: int,
    lease_seconds: float,
    resume: bool,
    by_hand: bool,
    again: bool = False,
) -> ClaimedRun | RefusedClaim:
    """Begin an attempt, or return why not. Either way, an attempt whose process is gone is recorded as interrupted."""
    claim = records.claim
    attempts = records.attempts_at(slot_id(claim.pipeline, slot), slot) if slot is not None else []
    if attempts and attempts[-1].status in ("succeeded", "cancelled"):
        why: Any = attempts[-1].status
        return RefusedClaim(why, claim.pipeline, attempts[-1])
    previous = records.attempts_at(claim.run_id) if claim.run_id is not None else []
    last = previous[-1] if previous else None
    is_own = again and claim.owner == process.this_process()
    if claim.is_live and not is_own:
        shorten(records, lease_seconds)
        return RefusedClaim("running", claim.pipeline, last)
    if claim.paused_at is not None and not by_hand:
        return RefusedClaim("paused", claim.pipeline, last)
    interrupted_now, failures = None, claim.failures
    if claim.owner is not None and last is not None:
        last = interrupted_now = _interrupt(records, last)
        failures += last.status == "interrupted"
    allowed = None
    if slot is not None:
        run_id = slot_id(claim.pipeline, slot)
        died_now = interrupted_now is not None and interrupted_now.run_id == run_id
        if interrupted_now is not None and died_now:
            attempts[-1] = interrupted_now
        interrupted = sum(each.status == "interrupted" for each in attempts)
        allowed = attempts_allowed + min(interrupted, FREE_INTERRUPTIONS)
        if attempts and attempts[-1].status == "cancelled":
            return RefusedClaim("cancelled", claim.pipeline, attempts[-1])
        if len(attempts) >= allowed:
            last = attempts[-1]
            if last.status != "failed" or last.retry_at is not None:
                # So that nobody takes it for one that is tried again.
                records.end(run_id, last.attempt, {"status": "failed", "retry_at": None}, last.status)
            return RefusedClaim("exhausted", claim.pipeline, last, gave_up=died_now)
        if attempts and attempts[-1].waits(claim.now):
            return RefusedClaim("waiting", claim.pipeline, attempts[-1])
        number = len(attempts) + 1
    elif resume and last is not None and last.status not in ("succeeded", "cancelled"):
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
    _begin(records, run)
    return run


def attempt_of(run: ClaimedRun, values: Mapping[str, Any]) -> Attempt:
    """Return the record of a claimed attempt, with more values of it."""
    host, pid = process.host_of(run.owner)
    known = {
        "run_id": run.run_id,
        "attempt": run.attempt,
        "pipeline": run.pipeline,
        "slot": run.slot,
        "status": "running",
        "host": host,
        "pid": pid,
        "owner": run.owner,
        "started_at": run.started_at,
    }
    return Attempt(**{**dict.fromkeys(Attempt.__slots__), **known, **values})


def _begin(records: LockedPipeline, run: ClaimedRun) -> None:
    begun = attempt_of(run, {})
    records.add({name: value for name in Attempt.__slots__ if (value := getattr(begun, name)) is not None})
    changes: dict[str, Any] = {
        "fence": run.fence,
        "run_id": run.run_id,
        "attempt": run.attempt,
        "owner": run.owner,
        "expires_at": run.started_at + timedelta(seconds=run.lease_seconds),
        "lease_seconds": run.lease_seconds,
        # A pipeline that runs is not skipped any more. Start and skip may have the same time, so that cannot decide.
        "skip_run_id": None,
        "cancelled": None,
    }
    if run.slot is not None:
        changes |= {"slot_run_id": run.run_id, "slot_attempt": run.attempt}
    records.change(changes)


def _interrupt(records: LockedPipeline, last: Attempt) -> Attempt:
    """Record that the owner is gone, and release its claim."""
    claim = records.claim
    assert claim.owner is not None
    ended = "has ended" if process.has_ended(claim.owner) else "was silent for longer than its lease"
    if claim.is_live:
        ended = "was not told that it had this claim"
    error = f"The process {last.pid} on {last.host} {ended}."
    is_cancelled = claim.cancelled == attempt_text(last.run_id, last.attempt)
    status = "cancelled" if is_cancelled else "interrupted"
    end: dict[str, Any] = {"status": status, "finished_at": claim.now, "error": error}
    records.end(last.run_id, last.attempt, end)
    release(records, {"failures": claim.failures + (not is_cancelled)})
    return replace(last, **end)


def release(records: LockedPipeline, changes: dict[str, Any]) -> None:
    records.change({"owner": None, "expires_at": None, "lease_seconds": None, "cancelled": None, **changes})


def shorten(records: LockedPipeline, lease_seconds: float) -> None:
    """Let a lease that is longer than it can be end as one that is renewed now: the store's clock was set back.
    `lease_seconds` is for claims of older versions, which do not say how long theirs is."""
    claim = records.claim
    seconds = lease_seconds if claim.lease_seconds is None else claim.lease_seconds
    if claim.is_live and is_too_long(claim.expires_at, claim.now, seconds):
        records.change({"expires_at": claim.now + timedelta(seconds=seconds)})


def cancel(records: LockedPipeline, run_id: str) -> Literal["asked", "cancelled", "ended"]:
    """Ask the process that works on a run to end it; or keep one that waits for its next attempt from being tried."""
    claim, attempts = records.claim, records.attempts_at(run_id)
    last = attempts[-1] if attempts else None
    if claim.run_id == run_id and claim.is_live:
        records.change({"cancelled": attempt_text(run_id, claim.attempt)})
        return "asked"
    if last is None or last.status not in ("running", "failed", "interrupted"):
        return "ended"
    ended = last.finished_at or claim.now
    records.end(run_id, last.attempt, {"status": "cancelled", "finished_at": ended, "retry_at": None}, last.status)
    if claim.run_id == run_id:
        release(records, {})
    return "cancelled"


def attend(records: LockedPipeline) -> bool:
    """Note that this process lives, in a place that is its own or has nobody any more; else return `False`."""
    claim, this = records.claim, process.this_process()
    if claim.owner not in (None, this) and not _is_left(claim):
        return False
    # `succeeded_at`: since when it is there.
    began = {} if claim.owner == this else {"succeeded_at": claim.now}
    records.change({"owner": this, "expires_at": claim.now + timedelta(seconds=PRESENCE_SECONDS), **began})
    return True


def _is_left(claim: Claim) -> bool:
    """Return whether the place of a process may be another's: it ended on this host, or nobody speaks of it now."""
    if claim.is_live or claim.owner is None:
        return False
    is_old = claim.expires_at is None or claim.now - claim.expires_at > timedelta(days=SILENT_DAYS)
    return is_old or process.host_of(claim.owner)[0] == process.host_of(process.this_process())[0]


def holds(claim: Claim, run: ClaimedRun) -> bool:
    return claim.fence == run.fence and claim.owner == run.owner
