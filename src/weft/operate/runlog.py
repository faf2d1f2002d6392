"""The run log: which process runs which pipeline, how each attempt ended, and when the next one is due."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from weft import settings
from weft.errors import (
    ConnectionFailedError,
    DeclarationError,
    MissingExtraError,
    SettingsError,
    StorageError,
    WeftError,
    did_you_mean,
)
from weft.operate import claims
from weft.operate.records import COUNTS, ENDS, Attempt, ClaimedRun, PipelineState, RefusedClaim, Status
from weft.operate.redaction import clean
from weft.operate.run_store import LockedPipeline, RunStore, attempt_text, is_too_long
from weft.operate.runlog_objects import RunObjects
from weft.operate.runlog_tables import LogTables
from weft.operate.runlog_urls import in_memory, parse
from weft.operate.spool import Spool, record
from weft.project import current
from weft.systems import process
from weft.systems.base import Connection, system_for
from weft.systems.file_connection import MEMORY

logger = logging.getLogger("weft.operate")

VARIABLE = "WEFT_RUN_LOG"
ON_FAILURE_VARIABLE = "WEFT_ON_RUN_LOG_FAILURE"
LEASE_SECONDS = 60.0
"""An owner without a heartbeat for this long has lost its claim."""
# A scheduler renews its lease between its looks, of which this is a part.
_DELIVER_SECONDS, _DELIVER_AGAIN_SECONDS = 1.0, 5.0


class RunLog:
    """What `open_run_log` returns. Every operation is one short transaction, or one change of an object.

    `claim` and reads raise where the database cannot be reached. `heartbeat`, `finish` and `skip` do not: the work is
    not stopped by its log. The logger `weft.operate` warns once.
    """

    def __init__(self, book: RunStore, spool: Spool | None = None) -> None:
        self._book, self.shown, self._spool = book, book.shown, spool
        self._stands_in: set[str] | None = None
        """The attempts that it began with, if it is in memory because another log could not be opened."""
        self._cancelled: set[str] = set()
        self._deliver_at, self._has_told_of_spool = 0.0, False
        self._warned = False
        self._warning = threading.Lock()

    def __repr__(self) -> str:
        return f"RunLog({self.shown!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._stands_in is not None and self._spool is not None:
            ended = [each for each in self._book.runs(None, None, None, 100_000) if each.status in ENDS]
            new = [each for each in ended if attempt_text(each.run_id, each.attempt) not in self._stands_in]
            if new:
                self._spool.add(new[::-1])
        self._book.close()

    # ----------------------------------------------------------------------------------------------------------- claims

    def claim(
        self,
        pipeline: str,
        *,
        slot: datetime | None = None,
        attempts_allowed: int = 1,
        lease_seconds: float = LEASE_SECONDS,
        resume: bool = True,
        by_hand: bool | None = None,
        again: bool = False,
    ) -> ClaimedRun | RefusedClaim:
        """Return an attempt that only the caller may make, or why there is none.

        With a `slot` it is refused when that slot has succeeded, has used up its attempts or waits for its next one.
        Without one it is a manual run, which goes on with the pipeline's last run under the same `run_id` if that did
        not succeed; not with `resume=False`. Either is refused while another process works on the pipeline. A process
        that was killed or was silent for longer than its lease does not count: its attempt is recorded as interrupted.
        Up to three such attempts of a slot are not counted among those allowed. A pipeline that is paused runs only
        `by_hand`, which is without a slot unless it is said. `again`: the answer to the last claim of this process was
        lost, and if that was granted, it does not stand in the way. A claim that lasts longer than its own
        `lease_seconds` was made before the log's clock was set back, and is shortened to them.
        """
        if slot is not None and slot.tzinfo is None:
            raise DeclarationError("A slot needs a time zone.", hint="Use what Schedule.latest gives.")
        begin = partial(
            claims.grant,
            slot=slot,
            attempts_allowed=attempts_allowed,
            lease_seconds=lease_seconds,
            resume=resume,
            by_hand=slot is None if by_hand is None else by_hand,
            again=again,
        )
        try:
            return self._book.locked(pipeline, begin)
        except (ConnectionFailedError, StorageError) as error:
            raise type(error)(
                f"{pipeline} cannot be claimed, so it was not run: {error.what}", hint=error.hint
            ) from None

    def heartbeat(self, run: ClaimedRun) -> bool:
        """Keep the claim for another lease. `False`: it is lost, and another process works on the pipeline now."""

        def renewed() -> bool:
            try:
                return self.renew(run)
            except ConnectionFailedError:
                # This process may have stood still in the middle, until the server gave the row to another one.
                return self.renew(run)

        return self._try(renewed)

    def renew(self, run: ClaimedRun) -> bool:
        """Do the same, but raise where the database cannot be reached: nobody knows then who holds the claim."""

        def extend(records: LockedPipeline) -> bool:
            if not claims.holds(records.claim, run):
                return False
            if records.claim.cancelled == (name := attempt_text(run.run_id, run.attempt)):
                self._cancelled.add(name)
            records.change({"expires_at": records.claim.now + timedelta(seconds=run.lease_seconds)})
            return True

        return self._book.locked(run.pipeline, extend)

    def describe(self, run: ClaimedRun, text: str) -> None:
        """Note something of an attempt while it runs."""

        def note(records: LockedPipeline) -> None:
            if claims.holds(records.claim, run):
                records.end(run.run_id, run.attempt, {"reason": text})

        self._book.locked(run.pipeline, note)

    def shorten(self, states: Iterable[PipelineState]) -> None:
        """End claims in time that the log's clock, which was set back, made too long."""
        for each in states:
            if each.is_live and each.now is not None and is_too_long(each.expires_at, each.now, LEASE_SECONDS):
                self._book.locked(each.pipeline, partial(claims.shorten, lease_seconds=LEASE_SECONDS))

    def finish(
        self,
        run: ClaimedRun,
        status: str,
        *,
        counts: Mapping[str, int] | None = None,
        engine: str | None = None,
        error: str | None = None,
        retry_in: float | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> bool:
        """Record how an attempt ended (succeeded, failed, interrupted, cancelled) and release its claim.

        `False`: the claim was lost, and nothing was recorded.
        `counts` has some of rows_read, inserted, updated, unchanged, deleted, quarantined and late. `retry_in`: seconds
        until the next attempt is due, by the database's clock.
        """
        if status not in ENDS:
            raise DeclarationError(f"A run cannot end as {status!r}.", hint=f"It ends as {', '.join(ENDS)}.")
        for name in counts or {}:
            if name not in COUNTS:
                hint = did_you_mean(name, COUNTS, f"Counted are: {', '.join(COUNTS)}.")
                raise DeclarationError(f"A run has no count {name!r}.", hint=hint)
        values: dict[str, Any] = {name: int(value) for name, value in (counts or {}).items()}
        values |= {"status": status, "engine": engine}
        values["error"] = None if error is None else clean(error, secrets=self._book.secrets())
        values["metrics"] = None if metrics is None else dict(metrics)

        def end(records: LockedPipeline) -> bool:
            claim = records.claim
            if not claims.holds(claim, run):
                return False
            done = status == "succeeded"
            # Somebody cancelled it, and it ended before it found out.
            is_cancelled = not done and claim.cancelled == attempt_text(run.run_id, run.attempt)
            retry_at = None if retry_in is None or is_cancelled else claim.now + timedelta(seconds=retry_in)
            ended = {
                "finished_at": claim.now,
                "retry_at": retry_at,
                **({"status": "cancelled"} if is_cancelled else {}),
            }
            records.end(run.run_id, run.attempt, {**values, **ended})
            failures = claim.failures + (status != "cancelled" and not is_cancelled)
            changes = {"failures": 0, "succeeded_at": claim.now} if done else {"failures": failures}
            claims.release(records, changes)
            return True

        def keep() -> None:
            if self._spool is not None:
                now = datetime.now(UTC)
                again = None if retry_in is None else now + timedelta(seconds=retry_in)
                self._spool.add([claims.attempt_of(run, {**values, "finished_at": now, "retry_at": again})])

        return self._try(lambda: self._book.locked(run.pipeline, end), keep)

    def skip(self, pipeline: str, slot: datetime, reason: str, seen: PipelineState | None = None) -> None:
        """Record that a slot was not run, and why. Once for each slot and reason, however often it is called; not where
        the pipeline has been run since it was `seen`."""
        reason = clean(reason)
        run_id = claims.slot_id(pipeline, slot, "skip", reason)

        def record(records: LockedPipeline) -> bool:
            last = None if seen is None or seen.last is None else (seen.last.run_id, seen.last.attempt)
            if seen is not None and (records.claim.run_id, records.claim.attempt) != (last or (None, None)):
                return True
            if not records.attempts_at(run_id, slot):
                now = records.claim.now
                values = {"run_id": run_id, "attempt": 0, "pipeline": pipeline, "slot": slot, "status": "skipped"}
                records.add({**values, "started_at": now, "finished_at": now, "reason": reason})
            records.change({"skip_run_id": run_id})
            return True

        self._try(lambda: self._book.locked(pipeline, record))

    def is_cancelled(self, run: ClaimedRun) -> bool:
        """Return whether the last heartbeat of a run found that it is to end."""
        return attempt_text(run.run_id, run.attempt) in self._cancelled

    # -------------------------------------------------------------------------------------------------- what people say

    def pause(self, pipeline: str) -> bool:
        """Stop following a pipeline's schedule. `False`: it was paused already."""

        self._book.require_control()

        def begin(records: LockedPipeline) -> bool:
            if records.claim.paused_at is not None:
                return False
            records.change({"paused_at": records.claim.now})
            return True

        return self._book.locked(pipeline, begin)

    def resume(self, pipeline: str) -> bool:
        """Follow a pipeline's schedule again. `False`: it was not paused."""

        def end(records: LockedPipeline) -> bool:
            if records.claim.paused_at is None:
                return False
            # Rows that did not come while the pipeline was paused are not late.
            records.change({"paused_at": None, "watched_at": records.claim.now})
            return True

        return self._book.locked(pipeline, end)

    def cancel(self, pipeline: str, run_id: str) -> Literal["asked", "cancelled", "ended"]:
        """End a run: one that is worked on ends at its next heartbeat, wherever it is; one that waits for its next
        attempt at once. `ended`: there was nothing to end."""
        self._book.require_control()
        return self._book.locked(pipeline, partial(claims.cancel, run_id=run_id))

    def stand_in(self, spool: Spool) -> None:
        """Stand in for a log that cannot be opened. It knows what waits for that log, so that a slot does not run at
        every call, and will hand over what runs now."""
        self._spool, self._stands_in = spool, set()
        with suppress(Exception):
            for each in spool.waiting():
                self._book.locked(each.pipeline, partial(record, attempt=each))
                self._stands_in.add(attempt_text(each.run_id, each.attempt))

    @property
    def is_private(self) -> bool:
        """Whether it is in the memory of this process, where no other finds it."""
        return self._book.is_private

    @property
    def is_stand_in(self) -> bool:
        """Whether it is in memory because another log could not be opened."""
        return self._stands_in is not None

    def deliver(self) -> None:
        """Record what could not be recorded before."""
        if self._spool is None:
            return
        try:
            count = self._spool.deliver(self._book)
        except Exception as error:
            logger.warning("What %s did not record before waits on: %s", self.shown, _one_line(error))
            return
        if count:
            logger.warning("%s has now the %d attempts that it could not record before.", self.shown, count)

    def deliver_meanwhile(self) -> None:
        """Do the same in a process that keeps the log open, between its work: for a few seconds at most, not where
        another process does, and after a failure not at once again."""
        if self._spool is None or self.is_stand_in or time.monotonic() < self._deliver_at or self._spool.is_empty:
            return
        try:
            count = self._spool.deliver(self._book, most_seconds=_DELIVER_SECONDS)
        except Exception as error:
            # Another process that has the file may be stopped: it would hold up this one.
            if not isinstance(error, BlockingIOError) and not self._has_told_of_spool:
                logger.warning("What %s did not record before waits on: %s", self.shown, _one_line(error))
                self._has_told_of_spool = True
            self._deliver_at = time.monotonic() + _DELIVER_AGAIN_SECONDS
            return
        self._has_told_of_spool = False
        if count:
            logger.warning("%s has now the %d attempts that it could not record before.", self.shown, count)

    # -------------------------------------------------------------------------------------------------------- freshness

    @property
    def has_notes(self) -> bool:
        """Whether it can note what is stale."""
        return self._book.has_notes

    def watch(self, pipeline: str) -> None:
        """Wait for a success of a pipeline from now on, where nobody does so yet."""

        def begin(records: LockedPipeline) -> None:
            if records.claim.watched_at is None:
                records.change({"watched_at": records.claim.now})

        self._book.locked(pipeline, begin)

    def note_stale(self, pipeline: str, before: datetime | None, *, is_stale: bool) -> bool:
        """Note that a pipeline is stale now, or no longer. `before`: the `stale_at` that the caller has seen. `False`:
        another process was faster, and reports it."""

        def note(records: LockedPipeline) -> bool:
            if records.claim.stale_at != before:
                return False
            records.change({"stale_at": records.claim.now if is_stale else None})
            return True

        return self._book.locked(pipeline, note)

    def attend(self, place: str) -> bool:
        """Note that this process lives, in a place of `weft.operate.presence`; `False` where that is another's."""
        return self._book.locked(place, claims.attend)

    def leave(self, place: str) -> None:
        """Leave the place of this process to others."""

        def end(records: LockedPipeline) -> None:
            if records.claim.owner == process.this_process():
                claims.release(records, {})

        self._book.locked(place, end)

    def note_rows(self, pipeline: str) -> int:
        """Note that rows came to a streaming pipeline; return how often it had failed since rows came before."""

        def note(records: LockedPipeline) -> int:
            records.change({"succeeded_at": records.claim.now, "failures": 0})
            return records.claim.failures

        return self._book.locked(pipeline, note)

    def note_failure(self, pipeline: str) -> int:
        """Note that a streaming pipeline failed; return how often it has since rows came."""

        def note(records: LockedPipeline) -> int:
            records.change({"failures": records.claim.failures + 1})
            return records.claim.failures + 1

        return self._book.locked(pipeline, note)

    # ---------------------------------------------------------------------------------------------------------- reading

    def latest(self, pipelines: Iterable[str] | None) -> dict[str, PipelineState]:
        """Return the state of each of these pipelines, which is empty for those without a run in the log; of all that
        the log knows where `None`."""
        wanted = list(dict.fromkeys(pipelines or ()))
        states = {name: PipelineState(name, None, None, None, None, 0, is_live=False) for name in wanted}
        stored = self._book.latest(None if pipelines is None else wanted)
        return states | {each.pipeline: each for each in stored}

    def runs(
        self,
        pipeline: str | None = None,
        status: Status | None = None,
        since: datetime | None = None,
        limit: int = 100,
    ) -> list[Attempt]:
        """Return attempts and skips, the newest first."""
        return self._book.runs(pipeline, status, since, limit)

    def run(self, run_id: str) -> list[Attempt]:
        """Return all attempts at a run, the first one first; none where the log has no such run."""
        return self._book.run(run_id)

    def forget(self, pipeline: str, keep: int) -> None:
        """Remove old runs of a pipeline that succeeded, but for those of slots: so many attempts are kept."""

        def remove() -> bool:
            self._book.forget(pipeline, keep)
            return True

        self._try(remove)

    def _try(self, work: Callable[[], bool], otherwise: Callable[[], None] = lambda: None) -> bool:
        try:
            return work()
        except Exception as error:  # whatever it is: it must not stop the work
            otherwise()
            with self._warning:
                warned, self._warned = self._warned, True
            if not warned:
                logger.warning(
                    "The run log %s failed, and the work goes on without it: %s", self.shown, _one_line(error)
                )
            return True


def project_log_url(named: str | None = None) -> str | None:
    """Return the URL of the project's run log: by the option of a command, else by the environment, else by weft.toml;
    `None` where all leave it to the default."""
    return named or os.environ.get(VARIABLE) or settings.read_project_file(current().root).get("run_log")


def goes_on_without() -> bool:
    """Return whether commands of the project run pipelines also where the run log cannot be written."""
    choice = os.environ.get(ON_FAILURE_VARIABLE) or settings.read_project_file(current().root).get("on_run_log_failure")
    if choice not in (None, "warn", "fail"):
        raise SettingsError(f"{ON_FAILURE_VARIABLE} is 'warn' or 'fail', not {choice!r}.")
    return choice != "fail"


def deliver_spool() -> None:
    """Record what the project's run log could not record before, if it answers."""
    if not Spool(current().root, "").is_empty:
        with suppress(WeftError), open_run_log(project_log_url()):
            pass


def check_url(url: str) -> None:
    """Raise where a run log's URL or name leads nowhere. Opens nothing."""
    parse(url, current().root)


def open_run_log(
    url: str | None = None,
    root: str | os.PathLike[str] | None = None,
    *,
    or_memory: bool = False,
    read_only: bool = False,
) -> RunLog:
    """Open the run log at a URL, or of a connection by its name; by default SQLite in `.weft/runs.db` of the project.

    `sqlite://path`, `duckdb://path` (relative to `root`, the project's folder), `postgres://…`, `mysql://…`,
    `s3://bucket/prefix?region=…`, `gcs://bucket/prefix`, `azureblob://account/container/prefix`, `memory://`. Its
    tables are created at first use, unless the URL says `?create_tables=false`. With `or_memory` a log that cannot be
    written is replaced by one in memory, with a warning. `read_only` creates and writes nothing: where there is no log
    yet, an empty one is returned.
    """
    folder = Path(root) if root is not None else current().root
    parsed, create = parse(url, folder)
    shown = parsed.shown if isinstance(parsed, RunObjects) else parsed.target
    spool = Spool(folder, shown)
    try:
        if isinstance(parsed, RunObjects):
            if not read_only:
                parsed.check()
            log = RunLog(parsed)
        else:
            log = _open(parsed, create=create, read_only=read_only)
        if not read_only and getattr(parsed, "path", None) != MEMORY:
            log._spool = spool
            log.deliver()
        return log
    except (MissingExtraError, SettingsError, DeclarationError):
        raise
    except (WeftError, OSError) as error:
        if not or_memory:
            raise
        text = "The run log %s cannot be used, and this process keeps its own: %s"
        logger.warning(text, shown, _one_line(error))
        log = _open(in_memory(), create=True, read_only=False)
        log.stand_in(spool)
        return log


def _open(connection: Connection, *, create: bool, read_only: bool) -> RunLog:
    if read_only and create and connection.is_missing():
        return _open(in_memory(), create=True, read_only=False)
    tables = system_for(connection.kind).load_tables()(connection)
    book = LogTables(tables)
    try:
        if _prepare(book, create=create, read_only=read_only):
            return RunLog(book)
    except BaseException:
        tables.close()
        raise
    tables.close()
    return _open(in_memory(), create=True, read_only=False)


def _prepare(book: LogTables, *, create: bool, read_only: bool) -> bool:
    """Check or create the tables. `False`: the database has no log, and nothing may be written."""
    if not book.tables.connection.is_missing():
        try:
            book.check(write=not read_only, create=create)
            return True
        except (ConnectionFailedError, StorageError):
            raise  # unreachable, or not writable: to create tables would not help
        except WeftError as error:
            if _is_there(book, create=create):
                _check_again(book, create=create, read_only=read_only)
                return True
            if not create:
                raise book.missing(error) from None
            if read_only:
                return False
    elif not create:
        raise book.missing(WeftError("the file is not there."))
    try:
        book.create()
    except WeftError:
        # Two first uses at once: one of them was faster.
        with suppress(WeftError):
            book.check(write=True, create=create)
            return True
        raise
    return True


def _is_there(book: LogTables, *, create: bool) -> bool:
    with suppress(WeftError):
        book.check(write=False, create=create)
        return True
    return False


def _check_again(book: LogTables, *, create: bool, read_only: bool) -> None:
    """Raise where the rights to tables are missing. They may also be there only since the first look, made by another
    process."""
    try:
        book.check(write=not read_only, create=create)
    except (ConnectionFailedError, StorageError):
        raise
    except WeftError as error:
        hint = "It needs the rights to SELECT, INSERT, UPDATE and DELETE rows of its two tables."
        raise WeftError(error.what, hint=hint) from None


def _one_line(error: BaseException) -> str:
    text = error.what if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    return clean(" ".join(text.split()), most=500)
