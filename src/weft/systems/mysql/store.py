"""Streams on MySQL and MariaDB. A stream's row in the catalogue holds its head; an append locks it until the commit.

So the order of offsets is the order of commits, offsets have no holes, and whatever lies at or below the highest offset
that can be seen can be seen too. There are no schemas here: stream `user_events` in schema `events` is the table
`events.user_events` of the connection's database.
"""

from __future__ import annotations

import itertools
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar
from uuid import UUID

import msgspec
import pymysql
from pymysql.constants import ER

from weft.errors import ConnectionFailedError, SchemaError
from weft.systems.base import Connection
from weft.systems.log import EXTRA, PUBLISH_ID, PUBLISHED_AT, ROWID, Batch
from weft.systems.mysql.driver import LOCK_SECONDS, Driver
from weft.systems.mysql.sessions import BUSY, MySQLSessions
from weft.systems.sql.driver import Session
from weft.systems.sql.log import SqlLog
from weft.systems.sql.store import SqlStore, bound, contiguous, publish_ids
from weft.types import FieldType, from_sql

# One INSERT takes no more than this, unless a single event does: the server parses a statement as a whole.
_STATEMENT_BYTES = 4 * 1024 * 1024
# Idempotency keys in one statement.
_KEYS = 1_000
# A waiting process asks this often at first, then less and less.
_POLL_SECONDS = 0.005
_IDLE_POLL_SECONDS = 0.025
_MAX_STREAM = 2**31 - 1
# Closing a store waits for a poll to end.
_LOOK_SECONDS = 0.2


class MySQLStore(MySQLSessions, SqlStore):
    """A MySQL or MariaDB database. Durability is the server's choice here: bookkeeping commits as publishes do."""

    # SYSDATE, unlike NOW, is the time after the wait for a lock.
    now_sql: ClassVar[str] = "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)"

    def __init__(self, connection: Connection, clock: Callable[[], float] = time.time) -> None:
        super().__init__(connection, clock)
        self._packet = 0
        self._watching = threading.Lock()
        self._watcher: Driver | None = None

    def close(self) -> None:
        watcher = self._watcher
        if watcher is not None:  # its thread may wait for a server that answers no more
            watcher.end()
        self.unwatch()
        super().close()

    # ----------------------------------------------------------------------------------------------------------- tables

    def reflect(self, session: Session, schema: str, name: str) -> dict[str, FieldType] | None:
        """Columns by SHOW COLUMNS: types, and comments where a type does not say it all."""
        try:
            rows = session.rows(f"SHOW FULL COLUMNS FROM {self.table(schema, name)}")
        except pymysql.ProgrammingError as error:
            if error.args[0] == ER.NO_SUCH_TABLE:
                return None
            raise
        return {row[0]: from_sql("mysql", row[1], row[8]) for row in rows}

    def create_catalogue(self, session: Session) -> None:
        # Without padding: under other collations "a" and "a " are the same name.
        collation = "utf8mb4_nopad_bin" if session.driver.is_mariadb() else "utf8mb4_0900_bin"
        text = f"CHARACTER SET utf8mb4 COLLATE {collation}"
        self.create_tables(
            session,
            **dict.fromkeys(("stream", "name"), f"VARCHAR(255) {text}"),
            text=f"LONGTEXT {text}",
            id="INT",
            number="INT",
            offset="BIGINT",
            key="VARBINARY(20)",
            index=", KEY (stream, seen)",
            storage=f" {_STORAGE}",
        )

    def create_stream(self, session: Session, schema: str, name: str, columns: dict[str, FieldType]) -> None:
        """The table and its row in the catalogue; both statements leave alone what another made meanwhile."""
        more = {ROWID: " PRIMARY KEY", PUBLISHED_AT: " NOT NULL DEFAULT (UTC_TIMESTAMP(6))"}
        spelled = ", ".join(
            f"{self.quote(column)} {kind.sql('mysql')}{more.get(column, '')}" for column, kind in columns.items()
        )
        table = self.table(schema, name)
        session.run(f"CREATE TABLE IF NOT EXISTS {table} ({spelled}) {_STORAGE}")
        highest = session.value(f"SELECT max({self.quote(ROWID)}) FROM {table}") or 0
        # At random: no stream gets the number of a deleted one, or of one in a dropped database. If another stream
        # has it, nothing is stored, and the next try takes another number.
        number = secrets.randbelow(_MAX_STREAM) + 1
        session.run(self.insert_ignore(self.streams, ("id", "name", "head")), (number, f"{schema}.{name}", highest))

    def folds_names(self, session: Session) -> bool:
        return bool(session.value("SELECT @@lower_case_table_names"))

    def add_columns(self, log: SqlLog, columns: dict[str, FieldType]) -> None:
        """ALTER TABLE in short tries: behind one that waits for a long reader, every publisher would wait too."""
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            with self.session("read") as session:
                present = self.reflect(session, log.schema, log.name) or {}
                missing = {name: kind for name, kind in columns.items() if name not in present}
                if not missing:
                    return
                added = ", ".join(
                    f"ADD COLUMN {self.quote(name)} {kind.sql('mysql')}" for name, kind in missing.items()
                )
                session.run("SET SESSION lock_wait_timeout = 1")
                try:
                    session.run(f"ALTER TABLE {log.table} {added}")
                    return
                except pymysql.OperationalError as error:
                    if error.args[0] == ER.DUP_FIELDNAME:
                        break
                    if error.args[0] not in BUSY or time.monotonic() > deadline:
                        raise
                finally:
                    session.run(f"SET SESSION lock_wait_timeout = {LOCK_SECONDS}")
            time.sleep(0.2)
        # Another process added one of them just now, or one differs from another in case or accents alone.
        if len(missing) > 1:
            for name, kind in missing.items():
                self.add_columns(log, {name: kind})

    def insert_ignore(self, table: str, columns: Sequence[str]) -> str:
        """Not INSERT IGNORE: that lets wrong values pass, and locks a row that is there in a way that deadlocks."""
        return (
            f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
            f"ON DUPLICATE KEY UPDATE {columns[0]} = {columns[0]}"
        )

    # ---------------------------------------------------------------------------------------------------------- writing

    def insert(
        self, session: Session, log: SqlLog, types: Mapping[str, FieldType], batches: Sequence[Batch]
    ) -> list[tuple[int, int]]:
        """Take the offsets, which locks the head until the commit, then insert under them."""
        first = batches[0]
        if not self._packet:
            self._packet = int(session.value("SELECT @@max_allowed_packet"))
        count = sum(batch.count for batch in batches)
        cursor = session.run(
            f"UPDATE {self.streams} SET head = LAST_INSERT_ID(head + ?) WHERE id = ? AND name = ?",
            (count, log.number, log.full),
        )
        if not cursor.rowcount:
            raise self.gone(log)
        ranges = contiguous(batches, int(cursor.lastrowid) - count + 1)
        names = [PUBLISH_ID, ROWID, *first.columns, *([EXTRA] if first.extra is not None else [])]
        into = f"INSERT INTO {log.table} ({', '.join(map(self.quote, names))}) VALUES ".encode()
        binders = [_BINDERS.get(types[name].base) for name in first.columns]
        offsets = itertools.count(ranges[0][0])
        rows = chain.from_iterable(_rows(batch, offsets, binders) for batch in batches)
        for statement in _statements(into, _literals(rows), self._packet):
            session.driver.query(statement)
        return ranges

    def claim_keys(self, session: Session, log: SqlLog, keys: list[bytes], horizon: float) -> set[bytes]:
        """Under the lock of the head, which `insert` takes again."""
        sql = f"SELECT {self.now_sql} FROM {self.streams} WHERE id = ? AND name = ?{self.for_update}"
        now = session.value(sql, (log.number, log.full))
        if now is None:
            raise self.gone(log)
        fresh = self.unseen(session, log, keys, now - int(horizon * 1e6))
        ordered = sorted(fresh)
        for start in range(0, len(ordered), _KEYS):
            some = ordered[start : start + _KEYS]
            rows = ", ".join([f"({log.number}, ?, {now})"] * len(some))
            session.run(
                f"INSERT INTO {self.keys} (stream, id, seen) VALUES {rows} ON DUPLICATE KEY UPDATE seen = {now}",
                some,
            )
        return fresh

    def forget_keys(self, session: Session, log: SqlLog, before: int, limit: int) -> int:
        """DELETE takes a limit here, and no subquery on its own table."""
        sql = f"DELETE FROM {self.keys} WHERE stream = ? AND seen < ? ORDER BY seen LIMIT ?"
        return int(session.run(sql, (log.number, before, limit)).rowcount)

    # ---------------------------------------------------------------------------------------------------------- reading

    def size(self, session: Session, log: SqlLog) -> int | None:
        """By the statistics of the table, which are up to some minutes old."""
        size = session.value(
            "SELECT data_length + index_length FROM information_schema.tables "
            "WHERE table_schema = DATABASE() AND table_name = ?",
            (log.full,),
        )
        return None if size is None else int(size)

    def last_offset_sql(self, number: int, table: str) -> str:
        """The catalogue's own."""
        return f"SELECT id, head FROM {self.streams} WHERE id = {number}"

    decoders: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "bool": bool,
        "date": date.fromisoformat,
        # The events of one commit share their time of publication.
        "timestamp": lru_cache(maxsize=4096)(lambda text: datetime.fromisoformat(text + "+00:00")),
        "json": msgspec.json.decode,
        "uuid": UUID,
    }

    # ---------------------------------------------------------------------------------------------------------- waiting

    def changed(self, seen: object, timeout: float) -> object:
        """Poll the heads of all streams. While the server or the catalogue is away, nothing changes."""
        deadline = time.monotonic() + min(timeout, _LOOK_SECONDS)
        pause = _POLL_SECONDS
        with self._watching:
            while True:
                try:
                    if self._watcher is None:
                        self._watcher = self.connect("read")
                    cursor = self.execute(self._watcher, f"SELECT sum(head) FROM {self.streams}", ())
                    heads = int(cursor.fetchone()[0] or 0)
                    if heads != seen:
                        return heads
                except (pymysql.Error, ConnectionFailedError):
                    self._drop_watcher()
                    pause = _LOOK_SECONDS
                left = deadline - time.monotonic()
                if left <= 0:
                    return seen
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, max(pause, _IDLE_POLL_SECONDS))

    def unwatch(self) -> None:
        with self._watching:
            self._drop_watcher()

    def _drop_watcher(self) -> None:
        if self._watcher is not None:
            with suppress(pymysql.Error):
                self._watcher.close()
            self._watcher = None


_STORAGE = "ENGINE=InnoDB ROW_FORMAT=DYNAMIC"


# --------------------------------------------------------------------------------------------------------- SQL literals


def _rows(
    batch: Batch, offsets: Iterator[int], binders: list[Callable[[Any], Any] | None]
) -> Iterator[tuple[Any, ...]]:
    # The ids first: they end the rows, and `zip` must not take an offset that the next batch needs.
    return zip(publish_ids(batch), offsets, *bound(batch, binders), strict=False)


def _bytes_literal(value: bytes) -> msgspec.Raw:
    escaped = value.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")
    return msgspec.Raw(b'_binary"' + escaped + b'"')


_BINDERS: dict[str, Callable[[Any], Any]] = {
    "bytes": _bytes_literal,
    "timestamp": lambda value: value.replace(tzinfo=None),
}

_encode_lines = msgspec.json.Encoder().encode_lines
_BETWEEN = b"]\n["
_ESCAPE = re.compile(rb"\\(?:u00([0-9a-f]{2})|(f)|.)")


def _literals(rows: Iterator[tuple[Any, ...]]) -> bytes:
    """Rows as SQL literals, with `_BETWEEN` between them: JSON, encoded at the speed of C.

    Numbers, null, true and false are written alike, and so are strings, with the same escapes but for some control
    characters, which SQL takes as they are. JSON escapes line ends, so `_BETWEEN` is in no value.
    """
    text: bytes = _encode_lines(list(rows))[1:-2]
    if b"\\u" in text or b"\\f" in text:
        text = _ESCAPE.sub(_unescape, text)
    return text


def _unescape(match: re.Match[bytes]) -> bytes:
    if match[1]:
        return bytes([int(match[1], 16)])
    return b"\f" if match[2] else match[0]


def _statements(into: bytes, literals: bytes, packet: int) -> Iterator[bytes]:
    """INSERT statements, none longer than a packet. `packet` counts the command's own byte too."""
    limit = min(packet - 1, _STATEMENT_BYTES)
    if len(into) + len(literals) < limit - 2:
        # The separators shrink or stay as long when they become `),(`.
        yield into + b"(" + literals.replace(_BETWEEN, b"),(") + b")"
        return
    rows: list[bytes] = []
    size = len(into)
    for row in literals.split(_BETWEEN):
        if rows and size + len(row) + 3 > limit:
            yield into + b"(" + b"),(".join(rows) + b")"
            rows, size = [], len(into)
        rows.append(row)
        size += len(row) + 3
        if len(into) + len(row) + 3 > packet - 1:
            raise SchemaError(
                f"An event takes {len(row):,} bytes as SQL, and the server takes {packet:,} at a time.",
                hint="Raise the server's max_allowed_packet, or keep large values elsewhere.",
            )
    yield into + b"(" + b"),(".join(rows) + b")"
