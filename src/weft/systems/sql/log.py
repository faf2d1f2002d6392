"""One stream in a SQL database: its columns, its range reads and its retention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from weft.errors import StorageError, unknown
from weft.systems.awaited_log import OF_NO_EVENTS
from weft.systems.log import META_TYPES, PUBLISHED_AT, ROWID, Group, Leased, LogPage, Member, Refused, Release
from weft.systems.sql import leases
from weft.systems.sql.driver import MissingTableError
from weft.systems.sql.leases import ConsumerLeases
from weft.systems.sql.literals import literal
from weft.types import FieldType

if TYPE_CHECKING:
    import pyarrow as pa

    from weft.systems.sql.driver import Session
    from weft.systems.sql.store import SqlStore

T = TypeVar("T")
P = ParamSpec("P")

# Retention removes this many events a transaction, so that publishers never wait for long behind it.
_TRIM_STEP = 10_000


def _reading(method: Callable[Concatenate[SqlLog, P], T]) -> Callable[Concatenate[SqlLog, P], T]:
    """Let a reader find a stream empty that another process deleted, as those do that begin after it."""

    @wraps(method)
    def read(log: SqlLog, /, *arguments: P.args, **named: P.kwargs) -> T:
        try:
            return method(log, *arguments, **named)
        except MissingTableError:
            log.forget()
            if log.store.has(log):  # it was created again; or its table alone was dropped, which is an error
                return method(log, *arguments, **named)
            nothing: T = OF_NO_EVENTS[method.__name__](*arguments, **named)
            return nothing

    return read


class SqlLog:
    """A stream's table and its bookkeeping rows. See `weft.systems.log.Log`."""

    def __init__(self, store: SqlStore, schema: str, name: str) -> None:
        self.store = store
        self._number: int | None = None
        self.schema = schema
        self.name = name
        self.full = f"{schema}.{name}"
        self.table = store.table(schema, name)
        self.rowid = store.quote(ROWID)
        self.declared: dict[str, FieldType] = {}
        self._types: dict[str, FieldType] = {}
        self._fields: dict[str, FieldType] = {}

    @property
    def number(self) -> int:
        """The stream's number in the catalogue, which is asked for it where it may have changed."""
        number = self._number
        if number is None:
            number = self._number = self.store.number_of(self)
        return number  # not the attribute: another thread may forget it meanwhile

    @property
    def is_numbered(self) -> bool:
        """Whether the number is known."""
        return self._number is not None

    def forget(self, *, with_fields: bool = False) -> None:
        """Ask the database again: the table or the catalogue is another one."""
        self._number = None
        self._types = {}
        if with_fields:
            self._fields, self.declared = {}, {}

    # ---------------------------------------------------------------------------------------------------------- columns

    def types(self, *, fresh: bool = False) -> dict[str, FieldType]:
        """Every column of the table, in order."""
        if fresh or not self._types:
            with self.store.session("read") as session:
                types = self._types = self.store.reflect(session, self.schema, self.name) or {}
            if types:  # else the next publish makes the table again, of the columns that it had
                self._fields = {name: kind for name, kind in types.items() if name not in META_TYPES}
            return types  # not the attribute: another thread may forget it meanwhile
        return self._types

    def fields(self, *, fresh: bool = False) -> dict[str, FieldType]:
        """The columns that hold users' fields."""
        self.types(fresh=fresh)
        return self._fields

    def add_fields(self, fields: dict[str, FieldType]) -> None:
        """Add columns; one that is there already stays as it is."""
        self.store.with_tables([self], lambda: self.store.add_columns(self, fields))
        self.types(fresh=True)

    @property
    def forbidden(self) -> str:
        """Characters that a text column cannot hold."""
        return self.store.forbidden

    # ---------------------------------------------------------------------------------------------------------- reading

    @_reading
    def head(self, reached: int = 0) -> int:
        """The last offset that a reader may see; never below what retention removed."""
        with self.store.session("read") as session:
            head = self.store.head(session, self)
            if head < reached:
                head = max(head, min(reached, self.store.end(session, self)))
        return head or self.floor()

    def identity(self) -> str:
        """What no other stream has, also not one that is created after this one was deleted."""
        number = self._one(f"SELECT id FROM {self.store.streams} WHERE name = ?", (self.full,))
        return f"{self.full}#{number}"

    def published(self) -> int:
        """The head: offsets grow by one, but for what was rolled back."""
        return self.head()

    @_reading
    def floor(self) -> int:
        """The last offset that retention removed."""
        sql = f"SELECT floor FROM {self.store.streams} WHERE id = ? AND name = ?"
        floor = self._one(sql, (self.number, self.full))
        if floor is None:  # somebody deleted the stream, and maybe created it again
            self.forget()
            floor = self._one(sql, (self.number, self.full))
        return int(floor or 0)

    def bound(self, after: int, upto: int, most: int) -> int:
        """As many offsets: some of them may be of no event."""
        return min(upto, max(after, self.floor()) + most)

    def extent(self, after: int, upto: int, most: int) -> int:
        """As many as there are offsets: some of them may be of no event."""
        return max(upto - max(after, self.floor()), 0)

    def removed_after(self, offset: int) -> int:
        """As many as there are offsets up to the floor, if each of them had an event."""
        return max(self.floor() - offset, 0)

    def lost_after(self, offset: int, following: int | None) -> tuple[int, int]:
        """Return what retention removed."""
        lost = self.removed_after(offset)
        return (offset + lost, lost) if lost else (0, 0)

    @_reading
    def count(self) -> int:
        """Return how many events are stored and visible."""
        with self.store.session("read") as session:
            fence = self.store.fence(session, self)
            return int(session.value(f"SELECT count(*) FROM {self.table} WHERE {self.rowid} <= ?", (fence,)))

    @_reading
    def size(self) -> int | None:
        """About how many bytes the table takes up, where the database knows."""
        with self.store.session("read") as session:
            return self.store.size(session, self)

    @_reading
    def nth_last(self, n: int) -> int | None:
        """The offset of the n-th event from the end."""
        if n > 1 << 63:  # beyond all offsets, and more than databases take
            return None
        offset = self._one(
            f"SELECT {self.rowid} FROM {self.table} ORDER BY {self.rowid} DESC LIMIT 1 OFFSET ?", (n - 1,)
        )
        return None if offset is None else int(offset)

    @_reading
    def first_since(self, moment: datetime, reached: int = 0) -> int:
        """The first offset published at or after a moment; one past the head if there is none."""
        head, since = self.head(reached), literal(moment.astimezone(UTC), self.store.dialect)
        # Only up to the head: an event above it may have a neighbour before it that is still to appear.
        offset = self._one(
            f"SELECT {self.rowid} FROM {self.table} WHERE {self.store.quote(PUBLISHED_AT)} >= {since} "
            f"AND {self.rowid} <= ? ORDER BY {self.rowid} LIMIT 1",
            (head,),
        )
        return head + 1 if offset is None else int(offset)

    @_reading
    def expired(self, before: datetime, now: datetime) -> int:
        """The last one before the moment that is in front of all that are neither older nor of the future."""
        moment, until = (literal(each.astimezone(UTC), self.store.dialect) for each in (before, now))
        published, select = self.store.quote(PUBLISHED_AT), f"SELECT {self.rowid} FROM {self.table} WHERE"
        head = self.head()
        kept = self._one(
            f"{select} {published} >= {moment} AND {published} <= {until} AND {self.rowid} <= ? "
            f"ORDER BY {self.rowid} LIMIT 1",
            (head,),
        )
        last = self._one(
            f"{select} {published} < {moment} AND {self.rowid} <= ? ORDER BY {self.rowid} DESC LIMIT 1",
            (head if kept is None else int(kept) - 1,),
        )
        return int(last or 0)

    @_reading
    def read(self, after: int, upto: int, limit: int) -> LogPage:
        """Up to `limit` events of a range, in order."""
        with self.store.session("read") as session:
            cursor = session.run(
                f"SELECT * FROM {self.table} WHERE {self.rowid} > ? AND {self.rowid} <= ? "
                f"ORDER BY {self.rowid} LIMIT ?",
                (after, upto, limit),
            )
            names = tuple(column[0] for column in cursor.description)
            rows = cursor.fetchall()
        return LogPage(names, self._decode(names, rows))

    def _decode(self, names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[Sequence[Any]]:
        types = self._types
        if any(name not in types for name in names):
            types = self.types(fresh=True)
        decoders = self.store.decoders
        todo = [
            (i, decoders[kind.base])
            for i, name in enumerate(names)
            if (kind := types.get(name)) is not None and kind.base in decoders
        ]
        if not rows:
            return [() for _ in names]
        columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
        for i, decode in todo:
            columns[i] = [None if v is None else decode(v) for v in columns[i]]
        return columns

    def read_arrow(self, after: int, upto: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """A range as Arrow record batches, in order and in bounded memory."""
        types = self.types(fresh=True)
        for name in columns or ():
            if name not in types:
                raise unknown(f"column in stream {self.name!r}", name, types)
        wanted = {name: types[name] for name in (columns if columns is not None else types)}
        return self.store.arrow_batches(self, max(after, self.floor()), min(upto, self.head(upto)), wanted)

    def _one(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        with self.store.session("read") as session:
            return session.value(sql, parameters)

    # -------------------------------------------------------------------------------------------------------- consumers

    def lease(
        self, consumer: str, member: str, limit: int, seconds: float, *, max_deliveries: int | None = None
    ) -> Leased:
        return self._keep(lambda session: self._of(session, consumer).lease(member, limit, seconds, max_deliveries))

    def settle(
        self,
        consumer: str,
        rowids: Sequence[int],
        *,
        token: str | None = None,
        member: str | None = None,
        release: Release | None = None,
        again: bool = False,
    ) -> int | Refused:
        return self._keep(lambda session: self._of(session, consumer).settle(rowids, token, member, release, again))

    def report_again(self, consumer: str, lost: int) -> None:
        self._keep(lambda session: self._of(session, consumer).report_again(lost))

    def reset(self, consumer: str, position: int) -> None:
        self._keep(lambda session: self._of(session, consumer).reset(position))

    def _of(self, session: Session, consumer: str) -> ConsumerLeases:
        return ConsumerLeases(session, self, consumer)

    def _keep(self, work: Callable[[Session], T]) -> T:
        def in_session() -> T:
            with self.store.session("keep") as session:
                return work(session)

        return self.store.with_tables([self], in_session)

    @_reading
    def groups(self) -> list[Group]:
        """Every consumer of this stream."""
        self.floor()  # where the number is that of a deleted stream, this finds the one that took its place
        with self.store.session("read") as session:
            return leases.groups(session, self)

    @_reading
    def members(self, consumer: str) -> list[Member]:
        """The members of a consumer that hold events."""
        self.floor()  # as in `groups`
        with self.store.session("read") as session:
            return leases.members(session, self, consumer)

    # -------------------------------------------------------------------------------------------------------- retention

    def forget_consumer(self, consumer: str) -> bool:
        return self._keep(lambda session: self._of(session, consumer).remove())

    @_reading
    def trim(self, upto: int, *, keeps_unread: bool = False) -> int:
        """Remove the events up to an offset, in steps; the next lease of each consumer reports how many it lost."""
        removed, most = 0, _TRIM_STEP
        self.floor()  # as in `groups`
        upto = min(upto, self.head())
        while True:
            try:
                with self.store.session("keep") as session:
                    count, more = self._trim_step(session, upto, most, keeps_unread=keeps_unread)
            except StorageError:
                if most == 1:
                    raise
                most //= 10  # a smaller transaction may find room on a full disk
                continue
            removed += count
            if not more:
                return removed
            most = min(10 * most, _TRIM_STEP)  # what was removed may have made room

    def _trim_step(self, session: Session, upto: int, most: int, *, keeps_unread: bool) -> tuple[int, bool]:
        # Consumers first: nobody may lease events that are about to be removed.
        consumers = leases.lock_all(session, self)
        if keeps_unread:
            upto = min([upto, *(position for _, position in consumers)])
        ((count, cut),) = session.rows(
            f"SELECT count(*), max(r) FROM (SELECT {self.rowid} AS r FROM {self.table} WHERE {self.rowid} <= ? "
            f"ORDER BY {self.rowid} LIMIT {most}) AS oldest",
            (upto,),
        )
        if not count:
            return 0, False
        leases.pass_over(session, self, consumers, int(cut))
        floor = int(session.value(f"SELECT floor FROM {self.store.streams} WHERE id = ?", (self.number,)) or 0)
        if gaps := max(int(cut) - floor - count, 0):
            leases.pass_removed(session, self, gaps)
        session.run(f"DELETE FROM {self.table} WHERE {self.rowid} <= ?", (cut,))
        session.run(f"UPDATE {self.store.streams} SET floor = ? WHERE id = ? AND floor < ?", (cut, self.number, cut))
        return count, count == most

    @_reading
    def remove(self, rowids: Sequence[int]) -> int:
        """Remove these events, in steps, as `trim` does."""
        self.floor()  # as in `groups`
        removed, offsets = 0, sorted(set(rowids))
        for start in range(0, len(offsets), _TRIM_STEP):
            with self.store.session("keep") as session:
                removed += leases.remove(session, self, offsets[start : start + _TRIM_STEP])
        return removed

    @_reading
    def trim_keys(self, before: float, most: int | None = None, young: float = math.inf) -> None:
        """Forget idempotency keys seen before a moment. Those of one commit were seen at once, and go together."""
        moment = int(before * 1e6)
        if most is not None:
            sql = f"SELECT seen FROM {self.store.keys} WHERE stream = ? ORDER BY seen DESC LIMIT 1 OFFSET ?"
            oldest = int(self._one(sql, (self.number, max(most, 1) - 1)) or 0)
            moment = max(moment, int(min(oldest, young * 1e6)))
        while True:
            with self.store.session("keep") as session:
                if self.store.forget_keys(session, self, moment, _TRIM_STEP) < _TRIM_STEP:
                    return

    def count_between(self, session: Session, first: int, last: int) -> int:
        """Return how many events a range holds now."""
        sql = f"SELECT count(*) FROM {self.table} WHERE {self.rowid} >= ? AND {self.rowid} <= ?"
        return int(session.value(sql, (first, last)))

    def between(self, session: Session, first: int, last: int) -> list[int]:
        """The offsets in a range that have an event now."""
        rowid = self.rowid
        rows = session.rows(
            f"SELECT {rowid} FROM {self.table} WHERE {rowid} >= ? AND {rowid} <= ? ORDER BY {rowid}", (first, last)
        )
        return [int(row[0]) for row in rows]

    def take(self, session: Session, first: int, last: int, limit: int) -> tuple[int, int, int]:
        """First offset, last offset and number of the first `limit` events of a range."""
        ((start, end, count),) = session.rows(
            f"SELECT min(r), max(r), count(*) FROM (SELECT {self.rowid} AS r FROM {self.table} "
            f"WHERE {self.rowid} >= ? AND {self.rowid} <= ? ORDER BY {self.rowid} LIMIT ?) AS page",
            (first, last, limit),
        )
        return (int(start), int(end), int(count)) if count else (0, 0, 0)
