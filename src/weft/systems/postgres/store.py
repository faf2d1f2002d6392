"""Streams on PostgreSQL. Publishers do not wait for each other; a registry of what is in flight holds readers back.

A publisher takes a shared advisory lock on the last offset that was given out before it takes its own, and keeps it
until its transaction ends. So a reader that reads `last_value` of the sequence and *then* the lowest of these locks has
an offset at or below which nothing can appear any more. The lock is released after the commit is visible, also when a
backend dies.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, ClassVar

import msgspec
import psycopg

from weft.errors import BusyError, SchemaError, StorageError
from weft.systems.base import Connection
from weft.systems.log import EXTRA, PUBLISH_ID, PUBLISHED_AT, ROWID, Appended, Batch
from weft.systems.postgres import sessions
from weft.systems.postgres.notify import Listener, Notifier
from weft.systems.postgres.sessions import PostgresSessions
from weft.systems.sql.driver import Session
from weft.systems.sql.log import SqlLog
from weft.systems.sql.store import SqlStore
from weft.systems.sql.tokens import quote_name
from weft.types import FieldType, from_sql, round_float32

# ALTER TABLE waits no longer than this at a time: everybody who comes to the table meanwhile waits behind it.
_ALTER_LOCK = "100ms"
# The registry's keys are (stream << 44) | offset: 2^19 streams with 2^44 offsets each.
_OFFSET_BITS = 44
_MAX_STREAM = 2**19 - 1
# A longer statement is several, in characters of up to four bytes: the server ends a connection that sends a gigabyte.
_STATEMENT_CHARACTERS = 64 * 1024 * 1024
_MAX_STATEMENT_BYTES = 1_000_000_000
_OF_STANDBY = 2**62
"""Stands for the offset that a standby does not know: it has the events, and not the registry."""
_MANY_KEYS = 1000
"""For so many it is worth three more statements that mostly none of them is known."""


class PostgresStore(PostgresSessions, SqlStore):
    """A PostgreSQL database: the catalogue in schema `weft`, each stream a table in its own schema."""

    forbidden: ClassVar[str] = "\x00"
    now_sql: ClassVar[str] = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"

    def __init__(self, connection: Connection, clock: Callable[[], float] = time.time) -> None:
        super().__init__(connection, clock)
        self.arrow_idle: list[Any] = []
        """Connections of the ADBC driver, which take longer to open than a short range takes to read."""
        self._notifier = Notifier(lambda: self.connect_as("keep", autocommit=True))
        self._listener = Listener(lambda: self.connect_as("read", autocommit=True))

    # ------------------------------------------------------------------------------------------------------ connections

    def close(self) -> None:
        """Close every connection and end the thread that notifies."""
        self._notifier.close()
        self._listener.close()
        self.close_arrow_idle()
        super().close()

    def close_arrow_idle(self) -> None:
        """Close the idle connections of the ADBC driver."""
        with suppress(IndexError):  # two threads that read may come here at once
            while True:
                self.arrow_idle.pop().close()

    # ----------------------------------------------------------------------------------------------------------- tables

    def sequence(self, number: int) -> str:
        """The sequence that gives out a stream's offsets."""
        return self.table("weft", f"offsets_{number}")

    def reflect(self, session: Session, schema: str, name: str) -> dict[str, FieldType] | None:
        rows = session.rows(
            "SELECT a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_attribute a "
            "JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = ? AND c.relname = ? AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum",
            (schema, name),
        )
        return {column: from_sql("postgres", kind) for column, kind in rows} or None

    def create_catalogue(self, session: Session) -> None:
        self.create_schema(session, "weft")
        # Numbers start at random: in a new catalogue, no stream has a number that processes remember.
        first = random.randint(1, _MAX_STREAM // 4)
        number = f"integer GENERATED ALWAYS AS IDENTITY (START WITH {first} MAXVALUE {_MAX_STREAM})"
        texts = dict.fromkeys(("stream", "name", "text"), "text")
        self.create_tables(session, id=number, number="integer", offset="bigint", key="bytea", **texts)
        session.run(f"CREATE INDEX IF NOT EXISTS keys_seen ON {self.keys} (stream, seen)")

    def create_stream(self, session: Session, schema: str, name: str, columns: dict[str, FieldType]) -> None:
        """The table and its sequence."""
        self.create_schema(session, schema)
        full = f"{schema}.{name}"
        number = session.value(f"SELECT id FROM {self.streams} WHERE name = ?", (full,))
        if number is None:
            number = session.value(f"INSERT INTO {self.streams} (name) VALUES (?) RETURNING id", (full,))
        spelled = ", ".join(
            f"{self.quote(column)} {kind.sql('postgres')}{' PRIMARY KEY' if column == ROWID else ''}"
            for column, kind in columns.items()
        )
        table, sequence = self.table(schema, name), self.sequence(number)
        present = self.reflect(session, schema, name)
        if present is None:
            session.run(f"CREATE TABLE {table} ({spelled})")
        elif ROWID not in present:
            return
        if session.value("SELECT to_regclass(?)", (sequence,)) is not None:
            return  # after a DROP TABLE the offsets go on
        # One offset is given away: before that, `last_value` does not show whether the first offset is still to come.
        session.run(f"CREATE SEQUENCE {sequence} MINVALUE 0 START 0 CACHE 1")
        session.run(f"SELECT setval('{sequence}', (SELECT coalesce(max({self.quote(ROWID)}), 0) FROM {table}))")

    def drop_stream(self, session: Session, schema: str, name: str, number: int) -> None:
        super().drop_stream(session, schema, name, number)
        session.run(f"DROP SEQUENCE IF EXISTS {self.sequence(number)}")

    def add_columns(self, log: SqlLog, columns: dict[str, FieldType]) -> None:
        """ALTER TABLE in short tries: behind one that waits for a long reader, every publisher would wait too."""
        deadline = time.monotonic() + sessions.LOCK_SECONDS
        while True:
            try:
                with self.session("publish") as session:
                    present = self.reflect(session, log.schema, log.name) or {}
                    missing = {name: kind for name, kind in columns.items() if name not in present}
                    if not missing:
                        return
                    session.run(f"SET LOCAL lock_timeout = '{_ALTER_LOCK}'")
                    added = ", ".join(
                        f"ADD COLUMN IF NOT EXISTS {self.quote(name)} {kind.sql('postgres')}"
                        for name, kind in missing.items()
                    )
                    session.run(f"ALTER TABLE {log.table} {added}")
                return
            except BusyError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(0.1, 0.3))

    # ---------------------------------------------------------------------------------------------------------- writing

    def _append(self, batches: Sequence[Batch]) -> list[list[Appended]]:
        """A single statement is its own transaction: one round trip instead of three."""
        shapes = {(id(batch.log), batch.columns, batch.extra is None, batch.keys is None) for batch in batches}
        # Behind a pooler it has not the settings of ours, by which a commit waits for the disk.
        alone = len(shapes) == 1 and batches[0].keys is None and not self.is_pooled
        with self.session("read" if alone else "publish") as session:
            return self.append_in(session, batches)

    def insert(
        self, session: Session, log: SqlLog, types: Mapping[str, FieldType], batches: Sequence[Batch]
    ) -> list[tuple[int, int]]:
        """One statement for all, unless it were too long. Several publishers' offsets interleave; those of a statement
        are in its order."""
        first = batches[0]
        names, kinds = list(first.columns), [types[name] for name in first.columns]
        columns = [list(chain.from_iterable(parts)) for parts in zip(*(batch.values for batch in batches), strict=True)]
        if first.extra is not None:
            names.append(EXTRA)
            kinds.append(FieldType("json"))
            columns.append(list(chain.from_iterable(batch.extra or () for batch in batches)))
        publishes = [(publish_id, count) for batch in batches for publish_id, count in batch.publishes if count]
        if len(publishes) > 1 or not columns:
            names.append(PUBLISH_ID)
            kinds.append(FieldType("string"))
            columns.append([publish_id for publish_id, count in publishes for _ in range(count)])
        ids = () if names[-1] == PUBLISH_ID else (publishes[0][0],)
        parts = _array_literals(columns, kinds)
        offsets: list[int] = []
        driver = session.driver
        with driver.transaction() if len(parts) > 1 and driver.autocommit else nullcontext():
            for arrays in parts:
                register = log.number not in session.written
                sql = _insert_sql(
                    log.table, self.sequence(log.number), log.number, tuple(names), tuple(kinds), register
                )
                session.written.add(log.number)
                stored = self.execute(driver, sql, (*ids, *arrays)).fetchone()
                assert stored is not None
                offsets += stored[0]
        if len(publishes) == 1:
            return [(offsets[0], offsets[-1])]
        ends = accumulate(count for _, count in publishes)
        return [(offsets[end - count], offsets[end - 1]) for (_, count), end in zip(publishes, ends, strict=True)]

    def claim_keys(self, session: Session, log: SqlLog, keys: list[bytes], horizon: float) -> set[bytes]:
        """One statement. Others wait for this transaction with the same key; the order prevents deadlocks."""
        ids = array_literal(keys, FieldType("bytes"))
        # One time for all: to store one for each takes longer.
        insert = (
            f"INSERT INTO {self.keys} AS known (stream, id, seen) SELECT ?, id, (SELECT {self.now_sql}) "
            "FROM unnest(?::bytea[]) AS id ORDER BY id"
        )
        if len(keys) >= _MANY_KEYS and self._is_done(session, insert, (log.number, ids)):
            return set(keys)
        claimed = session.rows(
            f"{insert} ON CONFLICT (stream, id) "
            "DO UPDATE SET seen = excluded.seen WHERE known.seen < excluded.seen - ? RETURNING id",
            (log.number, ids, int(horizon * 1e6)),
        )
        return {key for (key,) in claimed}

    def _is_done(self, session: Session, insert: str, parameters: Sequence[Any]) -> bool:
        """Insert rows, unless one of them is there. Where none is, that takes half as long as ON CONFLICT."""
        session.run("SAVEPOINT claim")
        try:
            session.run(insert, parameters)
        except psycopg.errors.UniqueViolation:
            session.run("ROLLBACK TO SAVEPOINT claim")
            return False
        session.run("RELEASE SAVEPOINT claim")
        return True

    def forget_keys(self, session: Session, log: SqlLog, before: int, limit: int) -> int:
        """Skip keys that a publisher renews right now: to wait for it could deadlock."""
        cursor = session.run(
            f"DELETE FROM {self.keys} WHERE stream = ? AND id IN (SELECT id FROM {self.keys} "
            "WHERE stream = ? AND seen < ? LIMIT ? FOR UPDATE SKIP LOCKED)",
            (log.number, log.number, before, limit),
        )
        return int(cursor.rowcount)

    # ---------------------------------------------------------------------------------------------------------- reading

    def last_offset_sql(self, number: int, table: str) -> str:
        """The last that was given out: nobody locks a sequence."""
        return f"SELECT {number}, last_value FROM {self.sequence(number)}"

    def fence(self, session: Session, log: SqlLog) -> int:
        """The last offset given out or the lowest in the registry. Events are read by a later statement's snapshot."""
        return self._of_primary(session.value(_fence_sql(self.sequence(log.number), log.number)))

    def size(self, session: Session, log: SqlLog) -> int | None:
        """By the lengths of its files."""
        size: int | None = session.value("SELECT pg_total_relation_size(to_regclass(?))", (log.table,))
        return size

    def head(self, session: Session, log: SqlLog) -> int:
        """An event's offset, not any that was given out: a crash takes back those of publishes that rolled back."""
        fence = _fence_sql(self.sequence(log.number), log.number)
        newest = f"SELECT max({ROWID}) FROM {log.table} WHERE {ROWID} <= ({fence})"
        return self._of_primary(self.last(session, log, f"SELECT {_unless_standby(newest)}"))

    def _of_primary(self, offset: int) -> int:
        if offset == _OF_STANDBY:
            raise StorageError(
                f"PostgreSQL ({self.connection.target}) is a standby. It does not show which publishes are in flight, "
                "so a reader could miss their events.",
                hint="Read from the primary server. target_session_attrs=read-write finds it among several hosts.",
            )
        return int(offset)

    decoders: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "float32": round_float32,
        "json": msgspec.json.decode,
    }

    # ---------------------------------------------------------------------------------------------------------- waiting

    def appended(self) -> None:
        """NOTIFY, soon."""
        self._notifier.send()

    def changed(self, seen: object, timeout: float) -> object:
        """Wait for a NOTIFY; without one the state changes once a second."""
        return self._listener.wait(timeout)

    def unwatch(self) -> None:
        self._listener.close()


@lru_cache(maxsize=1024)
def _insert_sql(
    table: str, sequence: str, number: int, names: tuple[str, ...], kinds: tuple[FieldType, ...], register: bool
) -> str:
    several = names[-1] == PUBLISH_ID
    leading = () if several else (PUBLISH_ID,)
    columns = ", ".join(map(quote_name, (ROWID, PUBLISHED_AT, *leading, *names)))
    into = f"{table} ({columns})".replace("%", "%%")
    arrays = ", ".join(f"%s::{kind.sql('postgres')}[]" for kind in kinds)
    # MATERIALIZED: the lock is taken before the first nextval. One a transaction and stream: the lowest is what counts.
    lock = (
        "in_flight AS MATERIALIZED (SELECT "
        f"pg_advisory_xact_lock_shared(({number}::bigint << {_OFFSET_BITS}) | last_value) FROM {sequence}), "
        if register
        else ""
    )
    return (
        f"WITH {lock}stored AS (INSERT INTO {into} "
        f"SELECT nextval('{sequence}'), now(), {'' if several else '%s, '}event.* "
        f"FROM {'in_flight, ' if register else ''}unnest({arrays}) AS event RETURNING {ROWID} AS o) "
        f"SELECT {'array_agg(o ORDER BY o)' if several else 'ARRAY[min(o), max(o)]'} FROM stored"
    )


@lru_cache(maxsize=1024)
def _fence_sql(sequence: str, number: int) -> str:
    # The inner query uses `last_value`, so it cannot run before that is read. The other way round a publisher could
    # register and take an offset in between, unseen. A key's upper half is the stream and the offset's upper 12 bits.
    lowest = (
        "SELECT least(given.last_value, min(((classid::bigint & 4095) << 32) | objid::bigint)) FROM pg_locks "
        "WHERE locktype = 'advisory' AND objsubid = 1 AND mode = 'ShareLock' "
        f"AND classid::bigint >> {_OFFSET_BITS - 32} = {number} "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    return f"SELECT {_unless_standby(lowest)} FROM {sequence} AS given"


def _unless_standby(query: str) -> str:
    return f"CASE WHEN pg_is_in_recovery() THEN {_OF_STANDBY} ELSE ({query}) END"


# ------------------------------------------------------------------------------------------------------- array literals


def _array_literals(columns: Sequence[list[Any]], kinds: Sequence[FieldType]) -> list[list[str]]:
    """The columns as array literals, one list for each statement that they need."""
    arrays = [array_literal(values, kind) for values, kind in zip(columns, kinds, strict=True)]
    rows = len(columns[0])
    if sum(map(len, arrays)) <= _STATEMENT_CHARACTERS:
        return [arrays]
    if rows == 1:
        size = sum(len(array.encode()) for array in arrays)
        if size > _MAX_STATEMENT_BYTES:
            raise SchemaError(
                f"An event is too long for PostgreSQL: {size:,} bytes, and it takes {_MAX_STATEMENT_BYTES:,}."
            )
        return [arrays]
    del arrays
    half = rows // 2
    return [
        *_array_literals([values[:half] for values in columns], kinds),
        *_array_literals([values[half:] for values in columns], kinds),
    ]


_ESCAPE = re.compile(r"\\(?:u00([0-9a-fA-F]{2})|(.))")
_RAW = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def array_literal(values: Sequence[Any], kind: FieldType) -> str:
    """A column as the text of a PostgreSQL array: JSON with other brackets, encoded at the speed of C.

    Both quote strings alike and escape `"` and `\\` alike; only control characters stand for themselves here.
    """
    if kind.base == "bytes":
        values = [None if value is None else "\\x" + value.hex() for value in values]
    text = msgspec.json.encode(values).decode()
    if "\\" in text and "\\" in text.replace("\\\\", "").replace('\\"', ""):
        text = _ESCAPE.sub(_unescape, text)
    return "{" + text[1:-1] + "}"


def _unescape(match: re.Match[str]) -> str:
    if match[1]:
        return chr(int(match[1], 16))
    return _RAW.get(match[2], match[0])
