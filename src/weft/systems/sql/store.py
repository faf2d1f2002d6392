"""A SQL database that holds streams: its connections, its catalogue, and the transaction that stores a group of
publishes."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain, groupby, islice, repeat
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from weft.errors import ConnectionFailedError, DeclarationError, WeftError
from weft.systems.base import Connection
from weft.systems.log import (
    EXTRA,
    META_TYPES,
    PUBLISH_ID,
    PUBLISHED_AT,
    ROWID,
    Appended,
    Batch,
    ColumnsChangedError,
    StreamSample,
    reused_key,
)
from weft.systems.sql import leases
from weft.systems.sql.driver import MissingTableError, Session, SqlDriver
from weft.systems.sql.log import SqlLog
from weft.systems.stream_fields import declare
from weft.types import FieldType

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

# Idempotency keys in one statement. Every SQLite takes 999 values.
_KEYS = 900
# Streams in one statement. SQLite joins up to 500 selects.
_SAMPLED = 400
_NO_CONSUMERS = leases.Standing(None, 0, 0)
_DROPPED = "If somebody dropped it, the next publish or consume makes it again."
_CATALOGUE = {
    "streams": "(id {id} PRIMARY KEY, name {stream} NOT NULL UNIQUE, head {offset} NOT NULL DEFAULT 0, "
    "floor {offset} NOT NULL DEFAULT 0){storage}",
    "groups": "(stream {number} NOT NULL, consumer {name} NOT NULL, position {offset} NOT NULL, "
    "lost {offset} NOT NULL, untold {offset} NOT NULL, epoch {offset} NOT NULL, "
    "PRIMARY KEY (stream, consumer)){storage}{clustered}",
    "leases": "(stream {number} NOT NULL, consumer {name} NOT NULL, first {offset} NOT NULL, last {offset} NOT NULL, "
    "events {offset} NOT NULL, member {name} NOT NULL, token {name} NOT NULL, expires {offset} NOT NULL, "
    "deliveries {offset} NOT NULL, reason {text}, PRIMARY KEY (stream, consumer, first)){storage}{clustered}",
    "keys": "(stream {number} NOT NULL, id {key} NOT NULL, seen {offset} NOT NULL, "
    "PRIMARY KEY (stream, id){index}){storage}{clustered}",
}
"""The bookkeeping tables, with the types of a dialect to be put in."""


class SqlStore(SqlDriver):
    """What the three databases share. A subclass implements how to connect, quote, lock, insert and wait."""

    for_update: ClassVar[str] = " FOR UPDATE"
    forbidden: ClassVar[str] = ""
    now_sql: ClassVar[str]
    """Microseconds since 1970 by the clock that leases are judged by: the server's, so that hosts need not agree."""

    def __init__(self, connection: Connection, clock: Callable[[], float] = time.time) -> None:
        super().__init__(connection)
        self.clock = clock
        self._logs: dict[tuple[str, str], SqlLog] = {}
        self._ready = False
        self.streams = self.table("weft", "streams")
        self.groups = self.table("weft", "groups")
        self.leases = self.table("weft", "leases")
        self.keys = self.table("weft", "keys")

    # ----------------------------------------------------------------------------------------------- hooks of a dialect

    @abstractmethod
    def reflect(self, session: Session, schema: str, name: str) -> dict[str, FieldType] | None:
        """Return the columns of a table in order, or `None` where there is no such table."""

    @abstractmethod
    def create_catalogue(self, session: Session) -> None:
        """Create the four bookkeeping tables, by `create_tables`; those that are there already stay."""

    @abstractmethod
    def create_stream(self, session: Session, schema: str, name: str, columns: dict[str, FieldType]) -> None:
        """Create a stream's table and its catalogue row where they are missing; safe where others do the same."""

    @abstractmethod
    def add_columns(self, log: SqlLog, columns: dict[str, FieldType]) -> None:
        """Add the columns that are missing."""

    @abstractmethod
    def insert(
        self, session: Session, log: SqlLog, types: Mapping[str, FieldType], batches: Sequence[Batch]
    ) -> list[tuple[int, int]]:
        """Insert batches of the same columns, which have these types; return the first and last offset of each publish
        that has events."""

    def size(self, session: Session, log: SqlLog) -> int | None:
        """Return about how many bytes a stream's table takes up; `None` where that takes a scan."""
        return None

    def arrow_batches(
        self, log: SqlLog, after: int, upto: int, columns: dict[str, FieldType]
    ) -> Iterator[pa.RecordBatch]:
        """Read a range as Arrow record batches, in order and in bounded memory."""
        # Only now: to import pyarrow takes longer than many publishes.
        batches: Iterator[pa.RecordBatch] = import_module(f"weft.systems.{self.dialect}.arrow").batches(
            self, log, after, upto, columns
        )
        return batches

    def insert_ignore(self, table: str, columns: Sequence[str]) -> str:
        """Return an INSERT that leaves an existing row as it is."""
        marks = ", ".join("?" * len(columns))
        return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks}) ON CONFLICT DO NOTHING"

    @abstractmethod
    def changed(self, seen: object, timeout: float) -> object:
        """Block until something may have been appended since `seen`; see `weft.systems.log.Store`."""

    def fence(self, session: Session, log: SqlLog) -> int:
        """Return the offset up to which a reader may read now: nothing at or below it appears later."""
        return self.end(session, log)

    def head(self, session: Session, log: SqlLog) -> int:
        """Return the last event's offset at or below the fence: a reader may go on from there, also after a crash."""
        return self.fence(session, log)

    def end(self, session: Session, log: SqlLog) -> int:
        """Return the last event's offset, also where a reader may not see it yet."""
        return self.last(session, log, f"SELECT max({self.quote(ROWID)}) FROM {log.table}")

    def last(self, session: Session, log: SqlLog, sql: str) -> int:
        """Return the offset that a SELECT finds, or the last one that was removed: a reader may have reached it."""
        removed = f"({leases.last_removed_sql(self)}), (SELECT floor FROM {self.streams} WHERE id = ?)"
        row = session.row(f"SELECT ({sql}), {removed}", (log.number, log.number))
        return max(int(each or 0) for each in row or (0,))

    def forget_keys(self, session: Session, log: SqlLog, before: int, limit: int) -> int:
        """Remove up to `limit` idempotency keys last seen before a moment (in microseconds); return how many."""
        cursor = session.run(
            f"DELETE FROM {self.keys} WHERE stream = ? AND id IN "
            f"(SELECT id FROM {self.keys} WHERE stream = ? AND seen < ? LIMIT ?)",
            (log.number, log.number, before, limit),
        )
        return int(cursor.rowcount)

    def unwatch(self) -> None:
        """Release what `changed` holds: nobody waits for changes any more."""

    decoders: ClassVar[dict[str, Callable[[Any], Any]]] = {}
    """By type: from the driver's value to the canonical one."""

    # ------------------------------------------------------------------------------------- what others drop or replace

    def failed(self, error: WeftError) -> WeftError:
        """As for every database; what is known of the streams is forgotten once one of their tables is missing."""
        if not isinstance(error, MissingTableError):
            return error
        self.forget()
        return MissingTableError(error.what, hint=error.hint or _DROPPED)

    def forget(self) -> None:
        """Read the catalogue again at the next use: the database may be another one by now."""
        self._ready = False
        for log in list(self._logs.values()):
            log.forget()

    def gone(self, log: SqlLog) -> MissingTableError:
        """Return the error for a stream that the catalogue does not have, or not under the number that we know."""
        return MissingTableError(
            f"The stream {log.full} is not in {self.connection.label} any more: it was deleted, or created again.",
            hint=_DROPPED,
        )

    def with_tables(self, logs: Iterable[SqlLog], work: Callable[[], T]) -> T:
        """Do something that writes to streams. If tables are missing, make them and do it once more."""
        try:
            return work()
        except MissingTableError:
            self._make_tables(logs)
            return work()

    def _make_tables(self, logs: Iterable[SqlLog]) -> None:
        with self._lock:
            self.forget()
            for log in logs:
                self._open(log, log.declared | log.fields())

    def has(self, log: SqlLog) -> bool:
        """Return whether the catalogue has the stream."""
        return self._is_prepared() and self._number(log.full) is not None

    def _twice(self, work: Callable[[], T]) -> T:
        """Do something that looks for tables. If the ones that we know of are gone, or the whole file, look again."""
        try:
            return work()
        except (MissingTableError, ConnectionFailedError) as error:
            if not isinstance(error, MissingTableError) and not self.connection.is_missing():
                raise
            self.forget()
            return work()

    # -------------------------------------------------------------------------------------------------------- catalogue

    def _prepare(self) -> None:
        # Where they are, nothing is asked for that a role without CREATE may not do, and no lock is waited for.
        if not self._is_prepared():
            with self.session("publish") as session:
                self.create_catalogue(session)
            self._ready = True

    def _is_prepared(self) -> bool:
        if not self._ready:
            with self.session("read") as session:
                self._ready = self.reflect(session, "weft", "keys") is not None
        return self._ready

    def create_tables(self, session: Session, **types: str) -> None:
        """Create the bookkeeping tables of columns of these types."""
        words = {"storage": "", "clustered": "", "index": ""} | types
        for name, columns in _CATALOGUE.items():
            session.run(f"CREATE TABLE IF NOT EXISTS {self.table('weft', name)} {columns.format_map(words)}")

    def open(self, schema: str, name: str, fields: dict[str, FieldType]) -> SqlLog:
        """Return a stream's log; create its table where it is missing, and add the declared columns that it lacks."""
        with self._lock:
            log = self._logs.get((schema, name))
            if log is None or not log.is_numbered:
                opened = log or SqlLog(self, schema, name)
                self._twice(lambda: self._open(opened, fields))
                log = self._logs.setdefault((schema, name), opened)
            if not log.declared.items() >= fields.items():
                declare(log, fields)
                log.declared.update(fields)
            return log

    def find(self, schema: str, name: str, fields: dict[str, FieldType]) -> SqlLog | None:
        """Return a stream's log, or `None` where there is none. Without the lock, under which `open` waits for others'
        writes."""
        log = self._logs.get((schema, name))
        if log is None or not log.is_numbered:
            opened = log or SqlLog(self, schema, name)
            if not self._twice(lambda: self._find(opened)):
                return None
            log = self._logs.setdefault((schema, name), opened)
        return log

    def _find(self, log: SqlLog) -> bool:
        if not self._is_prepared() or self._number(log.full) is None or not log.types():
            return False  # somebody may have dropped the table alone
        self._check(log)
        return True

    def _open(self, log: SqlLog, fields: dict[str, FieldType]) -> None:
        self._prepare()
        if self._number(log.full) is None or not log.types():
            self._create(log, fields)
        self._check(log)

    def _create(self, log: SqlLog, fields: dict[str, FieldType]) -> None:
        """Create the table, where it is missing, and its row in the catalogue, where that is."""
        columns = fields | {name: META_TYPES[name] for name in (ROWID, PUBLISHED_AT, PUBLISH_ID, EXTRA)}
        with self.session("publish") as session:
            if ROWID not in (self.reflect(session, log.schema, log.name) or columns):
                raise _not_a_stream(log.full)
            if self.folds_names(session):
                for (full,) in session.rows(f"SELECT name FROM {self.streams}"):
                    self._check_spelling(log.full, full)
            self.create_stream(session, log.schema, log.name, columns)
        log.types(fresh=True)

    def folds_names(self, session: Session) -> bool:
        """Return whether names of tables that differ in upper and lower case alone are one name, and in the catalogue
        are two."""
        return False

    def _check_spelling(self, full: str, stored: str) -> None:
        if full != stored and full.lower() == stored.lower():
            raise DeclarationError(
                f"The streams {full} and {stored}, which exists, would be one table: {self.connection.label} ignores "
                "upper and lower case in the names of tables.",
                hint=f"Call it {stored}, or give it another name.",
            )

    def _check(self, log: SqlLog) -> None:
        if ROWID not in log.types():
            raise _not_a_stream(log.full)
        assert log.number  # known from now on

    def number_of(self, log: SqlLog) -> int:
        """Return the number of a stream in the catalogue."""
        number = self._number(log.full)
        if number is None:
            raise self.gone(log)
        return number

    def _number(self, full: str) -> int | None:
        with self.session("read") as session:
            return self._number_in(session, full)

    def _number_in(self, session: Session, full: str) -> int | None:
        row = session.row(f"SELECT id, name FROM {self.streams} WHERE name = ?", (full,))
        if row is None:
            return None
        self._check_spelling(full, row[1])
        return int(row[0])

    def names(self) -> list[tuple[str, str]]:
        """Return (schema, name) of every stream stored here; create nothing."""
        with self.session("read") as session:
            if self.reflect(session, "weft", "streams") is None:
                return []
            rows = session.rows(f"SELECT name FROM {self.streams} ORDER BY name")
        return [(full.partition(".")[0], full.partition(".")[2]) for (full,) in rows]

    def delete(self, schema: str, name: str) -> bool:
        """Remove what the catalogue knows of a stream's users, then its table: in the order in which those lock them,
        or they would wait for each other. Its row is the last: MySQL commits each DROP, and the rest can be done
        again."""
        if not self._is_prepared():
            return False
        with self.session("publish") as session:
            number = self._number_in(session, f"{schema}.{name}")
            if number is not None:
                for table in (self.groups, self.leases, self.keys):
                    session.run(f"DELETE FROM {table} WHERE stream = ?", (number,))
                self.drop_stream(session, schema, name, number)
                session.run(f"DELETE FROM {self.streams} WHERE id = ?", (number,))
        log = self._logs.get((schema, name))
        if log is not None:
            log.forget(with_fields=True)
        return number is not None

    def drop_stream(self, session: Session, schema: str, name: str, number: int) -> None:
        """Drop a stream's table."""
        session.run(f"DROP TABLE IF EXISTS {self.table(schema, name)}")

    def sample(self, names: Sequence[tuple[str, str]]) -> list[StreamSample | None]:
        """Return the sizes of streams, by their offsets, in a few statements for all of them."""
        if not self._is_prepared():
            return [StreamSample(0, 0, 0)] * len(names)
        with self.session("read") as session:
            rows = session.rows(f"SELECT name, id, floor FROM {self.streams}")
            standings = leases.standings(session)
        catalogue = {full: (int(number), int(floor)) for full, number, floor in rows}
        known = [catalogue.get(f"{schema}.{name}", (0, 0)) for schema, name in names]
        selects = {
            number: self.last_offset_sql(number, self.table(*name))
            for name, (number, _) in zip(names, known, strict=True)
            if number
        }
        heads: dict[int, int] = {}
        for start in range(0, len(selects), _SAMPLED):
            heads |= self._last_offsets(list(selects.values())[start : start + _SAMPLED])
        samples: list[StreamSample | None] = []
        for number, floor in known:
            if number and number not in heads:
                samples.append(None)
                continue
            position, last_removed, removed = standings.get(number, _NO_CONSUMERS)
            head = max(heads.get(number, 0), floor, last_removed)
            behind = 0 if position is None else max(head - max(position, floor), 0)
            samples.append(StreamSample(head, max(head - floor - removed, 0), behind))
        return samples

    def last_offset_sql(self, number: int, table: str) -> str:
        """Return a SELECT of a stream's number and its last offset or so. It waits for nobody who locks the table: it
        would hold the locks of all others meanwhile."""
        return f"SELECT {number}, max({self.quote(ROWID)}) FROM {table}"

    def _last_offsets(self, selects: Sequence[str]) -> dict[int, int]:
        try:
            with self.session("read") as session:
                rows = session.rows(" UNION ALL ".join(selects))
            return {int(number): int(head or 0) for number, head in rows}
        except ConnectionFailedError:
            raise
        except WeftError:  # one of them was dropped, or is not for this role
            if len(selects) == 1:
                return {}
            middle = len(selects) // 2
            return self._last_offsets(selects[:middle]) | self._last_offsets(selects[middle:])

    # ----------------------------------------------------------------------------------------------------------- append

    def append(self, batches: Sequence[Batch]) -> list[list[Appended]]:
        """Store batches of any streams in one durable transaction."""
        logs = {log: log.fields() for batch in batches if isinstance(log := batch.log, SqlLog)}
        try:
            return self._append(batches)
        except MissingTableError:
            self._make_tables(logs)
            for log, fields in logs.items():
                if log.fields() != fields:  # another process made it again, of other events
                    raise ColumnsChangedError(f"The columns of stream {log.full} have changed.") from None
            return self._append(batches)

    def _append(self, batches: Sequence[Batch]) -> list[list[Appended]]:
        with self.session("publish") as session:
            return self.append_in(session, batches)

    def append_in(self, session: Session, batches: Sequence[Batch]) -> list[list[Appended]]:
        """Store batches inside a transaction of the caller."""
        results: list[list[Appended]] = [[] for _ in batches]
        # Streams in the order of their numbers: two processes that each store into two streams must not wait for each
        # other.
        order = sorted(range(len(batches)), key=lambda i: _number_of(batches[i]))
        for _, group in groupby(order, key=lambda i: _number_of(batches[i])):
            members = list(group)
            log = batches[members[0]].log
            assert isinstance(log, SqlLog)
            types = log.types()  # once: another thread may delete the stream meanwhile, or make it again
            if not types:
                raise self.gone(log)
            kept = {i: batches[i] for i in members}
            if any(batches[i].keys is not None for i in members):
                kept = self._deduplicate(session, log, kept)
            runs = [i for i in members if kept[i].count]
            ranges: list[tuple[int, int]] = []
            for (columns, _), run in groupby(runs, key=lambda i: (kept[i].columns, kept[i].extra is None)):
                if not types.keys() >= set(columns):
                    raise ColumnsChangedError(f"The columns of stream {log.full} have changed.")
                ranges += self.insert(session, log, types, [kept[i] for i in run])
            stored = iter(ranges)
            for i in members:
                for (_, published), (_, count) in zip(batches[i].publishes, kept[i].publishes, strict=True):
                    first, last = next(stored) if count else (None, None)
                    results[i].append(Appended(first, last, count, published - count))
        return results

    def _deduplicate(self, session: Session, log: SqlLog, batches: dict[int, Batch]) -> dict[int, Batch]:
        keys = {key for batch in batches.values() for key in (*(batch.keys or ()), *(batch.publish_keys or ())) if key}
        horizon = max(batch.key_horizon for batch in batches.values())
        fresh = self.claim_keys(session, log, sorted(keys), horizon) if keys else set()
        kept: dict[int, Batch] = {}
        for i, batch in batches.items():
            mask = []
            if batch.publish_keys is not None:
                used, same = (key not in fresh for key in batch.publish_keys)
                if used and not same:
                    raise reused_key(log.name)
                fresh.difference_update(batch.publish_keys)
            for key in batch.keys or [None] * batch.count:
                mask.append(key is None or key in fresh)
                if key is not None:
                    fresh.discard(key)
            kept[i] = batch if all(mask) else _select(batch, mask)
        return kept

    @abstractmethod
    def claim_keys(self, session: Session, log: SqlLog, keys: list[bytes], horizon: float) -> set[bytes]:
        """Store sorted keys, and return those that were not seen within the horizon (in seconds)."""

    def unseen(self, session: Session, log: SqlLog, keys: list[bytes], since: int) -> set[bytes]:
        """Return the keys that were not seen since a moment (in microseconds)."""
        fresh = set(keys)
        for start in range(0, len(keys), _KEYS):
            some = keys[start : start + _KEYS]
            sql = f"SELECT id FROM {self.keys} WHERE stream = ? AND seen >= ? AND id IN ({', '.join('?' * len(some))})"
            fresh.difference_update(bytes(key) for (key,) in session.rows(sql, (log.number, since, *some)))
        return fresh

    def now(self) -> float:
        """Return the time by which leases and ages are judged."""
        with self.session("read") as session:
            return int(session.value(f"SELECT {self.now_sql}")) / 1e6

    def make_room(self) -> bool:
        """Nothing is kept back: the disk is a server's."""
        return False

    def appended(self) -> None:
        """Wake the readers of other processes; nothing to do where they poll."""


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
    """Return the offsets of publishes that follow each other without a gap."""
    ranges = []
    for batch in batches:
        for _, count in batch.publishes:
            if count:
                ranges.append((first, first + count - 1))
                first += count
    return ranges


def bound(batch: Batch, binders: Sequence[Callable[[Any], Any] | None]) -> list[Any]:
    """The columns of a batch as a driver takes them; `binders` convert the values of each."""
    columns: list[Any] = [
        values if bind is None else [None if value is None else bind(value) for value in values]
        for values, bind in zip(batch.values, binders, strict=True)
    ]
    return columns if batch.extra is None else [*columns, batch.extra]


def publish_ids(batch: Batch) -> Iterator[str]:
    """Return for each event the id of its publish."""
    return chain.from_iterable(repeat(publish_id, count) for publish_id, count in batch.publishes)
