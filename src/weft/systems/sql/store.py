"""A SQL database that holds streams: its connections, its catalogue, and the transaction that stores a group of
publishes."""

from __future__ import annotations

import re
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain, groupby, islice, repeat
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from weft.errors import ConnectionFailedError, DeclarationError, WeftError
from weft.systems.base import Connection
from weft.systems.log import EXTRA, META_TYPES, PUBLISH_ID, PUBLISHED_AT, ROWID, Appended, Batch
from weft.systems.sql.log import SqlLog
from weft.types import FieldType, comparable

if TYPE_CHECKING:
    import pyarrow as pa

Role = Literal["publish", "keep", "read"]
"""`publish` commits wait for the disk; `keep` is bookkeeping, whose loss in a power cut only redelivers; `read` is
autocommit."""

# A pooled connection that rested this long is tried before use: servers and firewalls drop idle ones without a word.
_IDLE_SECONDS = 60.0


class Session:
    """A driver's connection inside one transaction (or autocommit), with `?` as the placeholder everywhere."""

    __slots__ = ("driver", "store", "written")

    def __init__(self, store: SqlStore, driver: Any) -> None:
        self.store = store
        self.driver = driver
        self.written: set[int] = set()
        """The streams that this transaction has appended to."""

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """Execute one statement and give its cursor."""
        return self.store.execute(self.driver, self.store.translate_sql(sql), parameters)

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        return list(self.run(sql, parameters).fetchall())

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """The first row of a query."""
        found: tuple[Any, ...] | None = self.run(sql, parameters).fetchone()
        return found


class SqlStore(ABC):
    """What the three databases share. A subclass says how to connect, quote, lock, insert and wait."""

    dialect: ClassVar[str]
    for_update: ClassVar[str] = " FOR UPDATE"
    forbidden: ClassVar[str] = ""
    now_sql: ClassVar[str]
    """Microseconds since 1970 by the clock that leases are judged by: the server's, so that hosts need not agree."""

    def __init__(self, connection: Connection, clock: Callable[[], float] = time.time) -> None:
        self.connection = connection.resolved()
        self.clock = clock
        self._lock = threading.RLock()
        self._idle: dict[Role, list[tuple[float, Any]]] = {"publish": [], "keep": [], "read": []}
        self._logs: dict[tuple[str, str], SqlLog] = {}
        self._ready = False
        self._closed = False
        self.streams = self.table("weft", "streams")
        self.groups = self.table("weft", "groups")
        self.leases = self.table("weft", "leases")
        self.keys = self.table("weft", "keys")

    # ----------------------------------------------------------------------------------------------- hooks of a dialect

    @abstractmethod
    def connect(self, role: Role) -> Any:
        """A new driver connection for a role."""

    @abstractmethod
    def execute(self, driver: Any, sql: str, parameters: Sequence[Any]) -> Any:
        """Run a translated statement and give a cursor."""

    @abstractmethod
    def begin(self, driver: Any, role: Role) -> None:
        """Open the transaction of a role."""

    @abstractmethod
    def commit(self, driver: Any, role: Role) -> None:
        """Close it."""

    @abstractmethod
    def rollback(self, driver: Any) -> None:
        """Undo it; raises where the connection is broken, which is then dropped."""

    @abstractmethod
    def is_driver_error(self, error: BaseException) -> bool:
        """Whether the driver raised this."""

    @abstractmethod
    def explain(self, error: BaseException) -> WeftError:
        """A driver's error as one of ours, without secrets."""

    @abstractmethod
    def table(self, schema: str, name: str) -> str:
        """The quoted name of a table in a schema."""

    @abstractmethod
    def quote(self, name: str) -> str:
        """A quoted identifier."""

    @abstractmethod
    def reflect(self, session: Session, schema: str, name: str) -> dict[str, FieldType] | None:
        """The columns of a table in order, or `None` where there is no such table."""

    @abstractmethod
    def create_catalogue(self, session: Session) -> None:
        """Create the four bookkeeping tables where they are missing."""

    @abstractmethod
    def create_stream(self, session: Session, schema: str, name: str, columns: dict[str, FieldType]) -> None:
        """Create a stream's table and its row in the catalogue where they are missing; safe against others who do the
        same."""

    @abstractmethod
    def add_column(self, log: SqlLog, name: str, kind: FieldType) -> None:
        """Add one column where it is missing."""

    @abstractmethod
    def insert(self, session: Session, log: SqlLog, batches: Sequence[Batch]) -> list[tuple[int, int]]:
        """Insert batches that have the same columns; the first and last offset of each publish that has events."""

    @abstractmethod
    def arrow_batches(
        self, log: SqlLog, after: int, upto: int, columns: dict[str, FieldType]
    ) -> Iterator[pa.RecordBatch]:
        """A range as Arrow record batches, in order and in bounded memory."""

    @abstractmethod
    def bind(self, value: Any, kind: FieldType) -> Any:
        """A canonical value as a parameter of the driver's."""

    @abstractmethod
    def insert_ignore(self, table: str, columns: Sequence[str]) -> str:
        """An INSERT that leaves an existing row as it is."""

    @abstractmethod
    def changed(self, seen: object, timeout: float) -> object:
        """Block until something may have been appended since `seen`; see `weft.systems.log.Store`."""

    def fence(self, session: Session, log: SqlLog) -> int:
        """The offset up to which a reader may look now: nothing at or below it appears later."""
        row = session.row(f"SELECT max({self.quote(ROWID)}) FROM {log.table}")
        return int(row[0] or 0) if row else 0

    def head(self, session: Session, log: SqlLog) -> int:
        """The last event's offset at or below the fence: from there a reader may go on, also after a crash."""
        return self.fence(session, log)

    def forget_keys(self, session: Session, log: SqlLog, before: int, limit: int) -> int:
        """Remove up to `limit` idempotency keys last seen before a moment (in microseconds); how many went."""
        found = session.run(
            f"DELETE FROM {self.keys} WHERE stream = ? AND id IN "
            f"(SELECT id FROM {self.keys} WHERE stream = ? AND seen < ? LIMIT ?)",
            (log.number, log.number, before, limit),
        )
        return int(found.rowcount)

    def unwatch(self) -> None:  # noqa: B027 - optional, not forgotten
        """Nobody waits for changes any more: give back what `changed` holds."""

    def has_input(self, driver: Any) -> bool:
        """Whether a connection that nobody uses has something to read: most often the server hung up."""
        return False

    def alive(self, driver: Any) -> bool:
        """Whether a connection that rested for long, or has something to read, still answers."""
        return True

    decoders: ClassVar[dict[str, Callable[[Any], Any]]] = {}
    """By type: from what the driver gives to the canonical value."""

    def translate_sql(self, sql: str) -> str:
        """From `?` to the driver's placeholder."""
        return _percent(sql)

    # --------------------------------------------------------------------------------------------------------- sessions

    @contextmanager
    def session(self, role: Role) -> Iterator[Session]:
        """A transaction on a connection of that role; every driver error leaves as one of ours."""
        driver: Any = None
        try:
            driver = self._borrow(role)
            self.begin(driver, role)
            yield Session(self, driver)
            self.commit(driver, role)
        except BaseException as error:
            if driver is not None:
                self._return_or_drop(role, driver)
            if self.is_driver_error(error):
                raise self.explain(error) from None
            raise
        else:
            self._rest(role, driver)

    def _rest(self, role: Role, driver: Any) -> None:
        self._idle[role].append((time.monotonic(), driver))
        if self._closed:  # while this one was in use
            self.drop_idle()

    def check_open(self) -> None:
        """Raise where this was closed: whoever still holds it must not open connections that nobody closes."""
        if self._closed:
            raise ConnectionFailedError(
                f"Nothing was done: {self.connection.label} was closed.", hint="The next use of the stream opens it."
            )

    def _borrow(self, role: Role) -> Any:
        while True:
            self.check_open()
            try:
                rested, driver = self._idle[role].pop()
            except IndexError:
                return self.connect(role)
            is_fresh = time.monotonic() - rested < _IDLE_SECONDS
            if (is_fresh and not self.has_input(driver)) or self.alive(driver):
                return driver
            self._drop(driver)

    def _return_or_drop(self, role: Role, driver: Any) -> None:
        try:
            self.rollback(driver)
        except Exception:
            # One broken connection means a restarted server: its siblings are broken too.
            self._drop(driver)
            self.drop_idle()
        else:
            self._rest(role, driver)

    def _drop(self, driver: Any) -> None:
        with suppress(Exception):
            driver.close()

    def drop_idle(self) -> None:
        """Close the connections that nobody uses."""
        for pool in self._idle.values():
            with suppress(IndexError):
                while True:
                    self._drop(pool.pop()[1])

    def close(self) -> None:
        """Close the idle connections now, and those in use when they are given back."""
        self._closed = True
        self.drop_idle()

    # -------------------------------------------------------------------------------------------------------- catalogue

    def _prepare(self) -> None:
        if not self._ready:
            with self.session("publish") as session:
                self.create_catalogue(session)
            self._ready = True

    def open(self, schema: str, name: str, fields: dict[str, FieldType]) -> SqlLog:
        """The stream's log; its table is created where it is missing, and gets the declared columns it lacks."""
        with self._lock:
            log = self._logs.get((schema, name))
            if log is None:
                self._prepare()
                log = self._open(schema, name, fields)
                self._logs[schema, name] = log
            if not log.declared.items() >= fields.items():
                self._declare(log, fields)
            return log

    def _open(self, schema: str, name: str, fields: dict[str, FieldType]) -> SqlLog:
        full = f"{schema}.{name}"
        number = self._number(full)
        if number is None:
            columns = {
                **fields,
                ROWID: META_TYPES[ROWID],
                PUBLISHED_AT: META_TYPES[PUBLISHED_AT],
                PUBLISH_ID: META_TYPES[PUBLISH_ID],
                EXTRA: META_TYPES[EXTRA],
            }
            with self.session("publish") as session:
                if ROWID not in (self.reflect(session, schema, name) or columns):
                    raise _not_a_stream(full)
                self.create_stream(session, schema, name, columns)
            number = self._number(full)
            assert number is not None
        log = SqlLog(self, number, schema, name)
        if ROWID not in log.types(fresh=True):
            raise _not_a_stream(full)
        return log

    def _declare(self, log: SqlLog, fields: dict[str, FieldType]) -> None:
        present = log.fields(fresh=True)
        spelled = {comparable(name): name for name in present}
        for name in fields:
            stored_as = spelled.get(comparable(name), name)
            if stored_as != name:
                raise DeclarationError(
                    f"Field {name!r} of stream {log.schema}.{log.name} is stored as {stored_as!r}.",
                    hint="Databases take names that differ in case or accents for one: keep the stored name.",
                )
        missing = {name: kind for name, kind in fields.items() if name not in present}
        if missing:
            log.add_fields(missing)
            present = log.fields(fresh=True)
        for name, kind in fields.items():
            stored = present[name]
            if (stored.base, stored.precision, stored.scale) != (kind.base, kind.precision, kind.scale):
                raise DeclarationError(
                    f"Field {name!r} of stream {log.schema}.{log.name} is declared {kind}, but stored as {stored}.",
                    hint="Stored data is never converted: keep the stored type, or give the field another name.",
                )
        log.declared.update(fields)

    def _number(self, full: str) -> int | None:
        with self.session("read") as session:
            row = session.row(f"SELECT id FROM {self.streams} WHERE name = ?", (full,))
        return None if row is None else int(row[0])

    def names(self) -> list[tuple[str, str]]:
        """(schema, name) of every stream stored here. Asking creates nothing."""
        with self.session("read") as session:
            if self.reflect(session, "weft", "streams") is None:
                return []
            rows = session.rows(f"SELECT name FROM {self.streams} ORDER BY name")
        return [(full.partition(".")[0], full.partition(".")[2]) for (full,) in rows]

    # ----------------------------------------------------------------------------------------------------------- append

    def append(self, batches: Sequence[Batch]) -> list[list[Appended]]:
        """Store batches of any streams in one durable transaction."""
        with self.session("publish") as session:
            return self.append_in(session, batches)

    def append_in(self, session: Session, batches: Sequence[Batch]) -> list[list[Appended]]:
        """The same inside a transaction of the caller's."""
        results: list[list[Appended]] = [[] for _ in batches]
        # Streams in the order of their numbers: two processes that each store into two streams must not wait for each
        # other.
        order = sorted(range(len(batches)), key=lambda i: _number_of(batches[i]))
        for _, group in groupby(order, key=lambda i: _number_of(batches[i])):
            members = list(group)
            log = batches[members[0]].log
            assert isinstance(log, SqlLog)
            kept = {i: batches[i] for i in members}
            if any(batches[i].keys for i in members):
                kept = self._deduplicate(session, log, kept)
            runs = [i for i in members if kept[i].count]
            ranges: list[tuple[int, int]] = []
            for _, run in groupby(runs, key=lambda i: (kept[i].columns, kept[i].extra is None)):
                ranges += self.insert(session, log, [kept[i] for i in run])
            stored = iter(ranges)
            for i in members:
                for (_, given), (_, count) in zip(batches[i].publishes, kept[i].publishes, strict=True):
                    first, last = next(stored) if count else (None, None)
                    results[i].append(Appended(first, last, count, given - count))
        return results

    def _deduplicate(self, session: Session, log: SqlLog, batches: dict[int, Batch]) -> dict[int, Batch]:
        seen: set[bytes] = set()
        wanted: list[bytes] = []
        for batch in batches.values():
            for key in batch.keys or ():
                if key is not None and key not in seen:
                    seen.add(key)
                    wanted.append(key)
        horizon = max(batch.key_horizon for batch in batches.values())
        fresh = self.claim_keys(session, log, sorted(wanted), horizon) if wanted else set()
        kept: dict[int, Batch] = {}
        for i, batch in batches.items():
            mask = []
            for key in batch.keys or [None] * batch.count:
                mask.append(key is None or key in fresh)
                if key is not None:
                    fresh.discard(key)
            kept[i] = batch if all(mask) else _select(batch, mask)
        return kept

    @abstractmethod
    def claim_keys(self, session: Session, log: SqlLog, keys: list[bytes], horizon: float) -> set[bytes]:
        """Remember sorted keys, and give those that were not seen within the horizon (in seconds)."""

    def now(self) -> float:
        """The clock that leases and ages are judged by."""
        with self.session("read") as session:
            row = session.row(f"SELECT {self.now_sql}")
        assert row is not None
        return int(row[0]) / 1e6

    def appended(self) -> None:  # noqa: B027 - optional, not forgotten
        """Nothing to do where readers of other processes poll."""


def _not_a_stream(full: str) -> DeclarationError:
    return DeclarationError(
        f"{full} is a table in this database, but not a stream: it has no column {ROWID}.",
        hint="Give the stream another name or schema.",
    )


def _number_of(batch: Batch) -> int:
    assert isinstance(batch.log, SqlLog)
    return batch.log.number


def _select(batch: Batch, mask: list[bool]) -> Batch:
    keep = [i for i, wanted in enumerate(mask) if wanted]
    wanted_of = iter(mask)
    publishes = [(publish_id, sum(islice(wanted_of, count))) for publish_id, count in batch.publishes]
    return Batch(
        batch.log,
        publishes,
        batch.columns,
        [[column[i] for i in keep] for column in batch.values],
        None if batch.extra is None else [batch.extra[i] for i in keep],
    )


def contiguous(batches: Sequence[Batch], first: int) -> list[tuple[int, int]]:
    """The offsets of publishes that got theirs in one piece, without a gap."""
    ranges = []
    for batch in batches:
        for _, count in batch.publishes:
            if count:
                ranges.append((first, first + count - 1))
                first += count
    return ranges


def publish_ids(batch: Batch) -> Iterator[str]:
    """The id of its publish for each event."""
    return chain.from_iterable(repeat(publish_id, count) for publish_id, count in batch.publishes)


def readable(file: int) -> bool:
    """Whether a read would not wait: there is something to read, or the end."""
    waiting = select.poll()
    waiting.register(file, select.POLLIN)
    return bool(waiting.poll(0))


# A field may have a question mark in its name.
_MARK = re.compile(r"""\"[^"]*"|`[^`]*`|\?""")


@lru_cache(maxsize=4096)
def _percent(sql: str) -> str:
    return _MARK.sub(lambda found: "%s" if found[0] == "?" else found[0], sql.replace("%", "%%"))
