"""The run log: which process runs which pipeline, how each attempt ended, and when the next one is due."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import unquote

from weft import settings
from weft.errors import (
    ConnectionFailedError,
    DeclarationError,
    MissingExtraError,
    NotFoundError,
    SettingsError,
    StorageError,
    WeftError,
    did_you_mean,
    nearest,
)
from weft.operate import claims
from weft.operate.claims import Claim
from weft.operate.records import COUNTS, Attempt, ClaimedRun, PipelineState, RefusedClaim, Status
from weft.operate.redaction import clean
from weft.operate.runlog_tables import LogTables, attempt_of, instant, schemes
from weft.project import build_connection, current
from weft.systems.base import Connection, system_for, system_for_url, url_scheme
from weft.systems.file import MEMORY
from weft.systems.sql.driver import Session

logger = logging.getLogger("weft.operate")

DEFAULT_FILE = ".weft/runs.db"
LEASE_SECONDS = 60.0
"""An owner without a heartbeat for this long has lost its claim."""
_NOT_OFFERED = ("s3", "gs", "gcs", "azure", "azureblob", "file")
_EXAMPLES = "sqlite://runs.db, postgres://user:${PASSWORD}@host/database, mysql://… or memory://."
# A query for more pipelines than this asks for all.
_LISTED = 200
_ENDS = ("succeeded", "failed", "interrupted")

T = TypeVar("T")


class RunLog:
    """What `open_run_log` returns. Every operation is one short transaction.

    `claim` and reads raise where the database cannot be reached. `heartbeat`, `finish` and `skip` do not: the work is
    not stopped by its log. The logger `weft.operate` warns once.
    """

    def __init__(self, tables: LogTables, *, shown: str) -> None:
        self._book = tables
        self.shown = shown
        """Where it is, without secrets."""
        self._warned = False
        self._warning = threading.Lock()

    def __repr__(self) -> str:
        return f"RunLog({self.shown!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._book.tables.close()

    # ----------------------------------------------------------------------------------------------------------- claims

    def claim(
        self,
        pipeline: str,
        *,
        slot: datetime | None = None,
        attempts_allowed: int = 1,
        lease_seconds: float = LEASE_SECONDS,
        resume: bool = True,
    ) -> ClaimedRun | RefusedClaim:
        """Return an attempt that only the caller may make, or why there is none.

        With a `slot` it is refused when that slot has succeeded, has used up its attempts or waits for its next one.
        Without one it is a manual run, which goes on with the pipeline's last run under the same `run_id` if that did
        not succeed; not with `resume=False`. Either is refused while another process works on the pipeline. A process
        that was killed or was silent for longer than its lease does not count: its attempt is recorded as interrupted.
        Up to three such attempts of a slot are not counted among those allowed.
        """
        if slot is not None and slot.tzinfo is None:
            raise DeclarationError("A slot needs a time zone.", hint="Use what Schedule.latest gives.")
        begin = partial(
            claims.grant,
            book=self._book,
            slot=slot,
            attempts_allowed=attempts_allowed,
            lease_seconds=lease_seconds,
            resume=resume,
        )
        try:
            return self._locked(pipeline, begin)
        except (ConnectionFailedError, StorageError) as error:
            raise type(error)(
                f"{pipeline} cannot be claimed, so it was not run: {error.what}", hint=error.hint
            ) from None

    def heartbeat(self, run: ClaimedRun) -> bool:
        """Keep the claim for another lease. `False`: it is lost, and another process works on the pipeline now."""

        def extend(session: Session, claim: Claim) -> bool:
            if not claims.holds(claim, run):
                return False
            expires = claim.now + timedelta(seconds=run.lease_seconds)
            self._book.update(session, self._book.claims, {"expires_at": expires}, "pipeline = ?", (run.pipeline,))
            return True

        return self._try(lambda: self._locked(run.pipeline, extend))

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
        """Record how an attempt ended (succeeded, failed, interrupted) and release its claim.

        `False`: the claim was lost, and nothing was recorded.
        `counts` has some of rows_read, inserted, updated, unchanged, deleted, quarantined and late. `retry_in`: seconds
        until the next attempt is due, by the database's clock.
        """
        if status not in _ENDS:
            raise DeclarationError(f"A run cannot end as {status!r}.", hint=f"It ends as {', '.join(_ENDS)}.")
        for name in counts or {}:
            if name not in COUNTS:
                hint = did_you_mean(name, COUNTS, f"Counted are: {', '.join(COUNTS)}.")
                raise DeclarationError(f"A run has no count {name!r}.", hint=hint)
        values: dict[str, Any] = {name: int(value) for name, value in (counts or {}).items()}
        values |= {"status": status, "engine": engine}
        values["error"] = None if error is None else clean(error, secrets=self._book.tables.connection.secrets())
        values["metrics"] = None if metrics is None else json.dumps(metrics, default=str)

        def end(session: Session, claim: Claim) -> bool:
            if not claims.holds(claim, run):
                return False
            retry_at = None if retry_in is None else claim.now + timedelta(seconds=retry_in)
            self._book.update(
                session,
                self._book.runs,
                {**values, "finished_at": claim.now, "retry_at": retry_at},
                "run_id = ? AND attempt = ?",
                (run.run_id, run.attempt),
            )
            done = status == "succeeded"
            changes = {"failures": 0, "succeeded_at": claim.now} if done else {"failures": claim.failures + 1}
            claims.release(session, self._book, claim, changes)
            return True

        return self._try(lambda: self._locked(run.pipeline, end))

    def skip(self, pipeline: str, slot: datetime, reason: str) -> None:
        """Record that a slot was not run, and why. Once for each slot and reason, however often it is called."""
        reason = clean(reason)
        run_id = claims.slot_id(pipeline, slot, "skip", reason)

        def record(session: Session, claim: Claim) -> bool:
            if not self._book.attempts_at(session, run_id):
                values = {"run_id": run_id, "attempt": 0, "pipeline": pipeline, "slot": slot, "status": "skipped"}
                times = {"started_at": claim.now, "finished_at": claim.now}
                self._book.insert(session, {**values, **times, "reason": reason})
            self._book.update(session, self._book.claims, {"skip_run_id": run_id}, "pipeline = ?", (pipeline,))
            return True

        self._try(lambda: self._locked(pipeline, record))

    # ---------------------------------------------------------------------------------------------------------- reading

    def latest(self, pipelines: Iterable[str] | None) -> dict[str, PipelineState]:
        """Return the state of each of these pipelines, which is empty for those without a run in the log; of all that
        the log knows where `None`."""
        wanted = list(dict.fromkeys(pipelines or ()))
        states = {name: PipelineState(name, None, None, None, None, 0, is_live=False) for name in wanted}
        listed = len(wanted) <= _LISTED
        where = f" WHERE c.pipeline IN ({', '.join('?' * len(wanted))})" if listed and wanted else ""
        book = self._book
        with book.session("read") as session:
            rows = session.rows(
                f"SELECT c.pipeline, c.owner, c.expires_at, c.succeeded_at, c.failures, {book.now}, "
                f"{book.columns('l')}, {book.columns('s')}, {book.columns('k')} FROM {book.claims} c "
                f"LEFT JOIN {book.runs} l ON l.run_id = c.run_id AND l.attempt = c.attempt "
                f"LEFT JOIN {book.runs} s ON s.run_id = c.slot_run_id AND s.attempt = c.slot_attempt "
                f"LEFT JOIN {book.runs} k ON k.run_id = c.skip_run_id AND k.attempt = 0{where}",
                wanted if where else (),
            )
        for name, owner, expires_at, succeeded_at, failures, now, *attempts in rows:
            if pipelines is not None and name not in states:
                continue
            width = len(attempts) // 3
            last, scheduled, skipped = (attempt_of(attempts[at : at + width]) for at in (0, width, 2 * width))
            moment = instant(now)
            assert moment is not None
            live = claims.is_live(owner, instant(expires_at), moment)
            states[name] = PipelineState(name, last, scheduled, skipped, instant(succeeded_at), failures, live)
        return states

    def runs(
        self,
        pipeline: str | None = None,
        status: Status | None = None,
        since: datetime | None = None,
        limit: int = 100,
    ) -> list[Attempt]:
        """Return attempts and skips, the newest first."""
        conditions, parameters = ["1 = 1"], []
        for name, value in (("pipeline", pipeline), ("status", status)):
            if value is not None:
                conditions.append(f"r.{name} = ?")
                parameters.append(value)
        if since is not None:
            conditions.append(f"r.started_at >= {self._book.tables.moment(since)}")
        order = f"ORDER BY r.started_at DESC, r.run_id, r.attempt DESC LIMIT {int(limit)}"
        with self._book.session("read") as session:
            return self._book.attempts(session, f"WHERE {' AND '.join(conditions)} {order}", parameters)

    def run(self, run_id: str) -> list[Attempt]:
        """Return all attempts at a run, the first one first; none where the log has no such run."""
        with self._book.session("read") as session:
            return self._book.attempts_at(session, run_id)

    # ----------------------------------------------------------------------------------------------------- transactions

    def _locked(self, pipeline: str, work: Callable[[Session, Claim], T]) -> T:
        """Call `work` in one transaction, with the row of the pipeline locked."""
        for _ in range(2):
            with self._book.session("publish") as session:
                claim = claims.lock(session, self._book, pipeline)
                if claim is not None:
                    return work(session, claim)
            self._add(pipeline)
        raise WeftError(f"The row of {pipeline} in {self.shown} was removed.", hint="Run it again.")

    def _add(self, pipeline: str) -> None:
        sql = f"INSERT INTO {self._book.claims} (pipeline, fence, failures) VALUES (?, 0, 0)"
        try:
            with self._book.session("publish") as session:
                session.run(sql, (pipeline,))
        except WeftError as error:
            # Another process was faster.
            if not self._book.tables.is_rejection(error):
                raise

    def _try(self, work: Callable[[], bool]) -> bool:
        try:
            return work()
        except Exception as error:  # whatever it is: it must not stop the work
            with self._warning:
                warned, self._warned = self._warned, True
            if not warned:
                logger.warning(
                    "The run log %s failed, and the work goes on without it: %s", self.shown, _one_line(error)
                )
            return True


def open_run_log(
    url: str | None = None,
    root: str | os.PathLike[str] | None = None,
    *,
    or_memory: bool = False,
    read_only: bool = False,
) -> RunLog:
    """Open the run log at a URL, or of a connection by its name; by default SQLite in `.weft/runs.db` of the project.

    `sqlite://path`, `duckdb://path` (relative to `root`, the project's folder), `postgres://…`, `mysql://…`,
    `memory://`. Its tables are created at first use, unless the URL says `?create_tables=false`. With `or_memory` a log
    that cannot be written is replaced by one in memory, with a warning. `read_only` creates and writes nothing: where
    there is no log yet, an empty one is returned.
    """
    folder = Path(root) if root is not None else current().root
    connection, create = _parse(url, folder)
    try:
        return _open(connection, create=create, read_only=read_only)
    except (MissingExtraError, SettingsError, DeclarationError):
        raise
    except (WeftError, OSError) as error:
        if not or_memory:
            raise
        text = "The run log %s cannot be used, and this process keeps its own: %s"
        logger.warning(text, connection.target, _one_line(error))
        return _open(_in_memory(), create=True, read_only=False)


def _open(connection: Connection, *, create: bool, read_only: bool) -> RunLog:
    if read_only and create and connection.is_missing():
        return _open(_in_memory(), create=True, read_only=False)
    tables = system_for(connection.kind).load_tables()(connection)
    book = LogTables(tables)
    try:
        if _prepare(book, create=create, read_only=read_only):
            return RunLog(book, shown=connection.target)
    except BaseException:
        tables.close()
        raise
    tables.close()
    return _open(_in_memory(), create=True, read_only=False)


def _prepare(book: LogTables, *, create: bool, read_only: bool) -> bool:
    """Check or create the tables. `False`: the database has no log, and nothing may be written."""
    if not book.tables.connection.is_missing():
        try:
            book.check(write=not read_only)
            return True
        except (ConnectionFailedError, StorageError):
            raise  # unreachable, or not writable: to create tables would not help
        except WeftError as error:
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
            book.check(write=True)
            return True
        raise
    return True


def _in_memory() -> Connection:
    return build_connection(None, {"kind": "sqlite", "path": MEMORY}, "The run log")


def _one_line(error: BaseException) -> str:
    text = error.what if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    return clean(" ".join(text.split()), most=500)


# ----------------------------------------------------------------------------------------------------------------- URLs


def _parse(url: str | None, root: Path) -> tuple[Connection, bool]:
    """Return the connection that a run log's URL or name leads to, and whether tables may be created."""
    if url is None:
        return build_connection(None, {"kind": "sqlite", "path": str(root / DEFAULT_FILE)}, "The run log"), True
    if not isinstance(url, str) or not url.strip():
        raise SettingsError("A run log needs a URL or the name of a connection.", hint=f"For example {_EXAMPLES}")
    if url_scheme(url) is None and settings.has_references(url):
        url = settings.interpolate(url, "the URL of the run log")
    url, create = _without_create_tables(url)
    scheme = url_scheme(url)
    if scheme is None:
        return current().connection(url), create
    if scheme in _NOT_OFFERED:
        raise SettingsError(
            f"A run log in {scheme}:// is not offered: such a store cannot say who claims a run.",
            hint=f"Several hosts can share a database: {_EXAMPLES}",
        )
    known = [*schemes(), "memory"]
    if scheme not in known:
        close = nearest(scheme, known)
        hint = f"Did you mean {close}://? " if close else ""
        raise NotFoundError(f"There is no run log at {scheme}://.", hint=f"{hint}For example {_EXAMPLES}")
    if scheme == "memory":
        if url.partition("://")[2].strip("/"):
            raise SettingsError("A run log in memory has no path.", hint="Write memory://.")
        return _in_memory(), create
    if system_for_url(url).load_connection().one_host:
        return _file(scheme, url, root), create
    return build_connection(None, {"url": url}, "The run log"), create


def _without_create_tables(url: str) -> tuple[str, bool]:
    """Return the URL without that parameter, and its value."""
    base, question, query = url.partition("?")
    create, rest = True, []
    for pair in query.split("&") if question else ():
        name, _, value = pair.partition("=")
        if name == "create_tables":
            if value.lower() not in ("true", "false"):
                raise SettingsError("create_tables of a run log is true or false.", hint="Write ?create_tables=false.")
            create = value.lower() == "true"
        else:
            rest.append(pair)
    return (f"{base}?{'&'.join(rest)}" if rest else base), create


def _file(scheme: str, url: str, root: Path) -> Connection:
    """Return the connection of `sqlite://runs.db`, or of a URL with three or four slashes as every connection's."""
    text = settings.interpolate(url.partition("://")[2], "the URL of the run log")
    if "?" in text:
        raise SettingsError(f"A run log at {scheme}:// has no parameter but create_tables.")
    path = unquote(text)
    if path.startswith("/"):
        first = path[1:].partition("/")[0]
        if first and Path("/", first).is_dir() and not (root / first).exists():
            # With a log in each folder, each host would run everything.
            raise SettingsError(
                f"{scheme}:///{first}/… is a path in the project's folder, and looks like an absolute one.",
                hint=f"An absolute path has four slashes: {scheme}:////{first}/…",
            )
        path = path[1:]
    if not path or path == MEMORY:
        raise SettingsError(f"A run log at {scheme}:// needs a file.", hint=f"For example {_EXAMPLES}")
    return system_for_url(url).load_connection().from_fields({"path": str(root / path)}, name=None)
