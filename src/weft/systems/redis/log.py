"""One stream in Redis: an ordinary stream of Redis, whose consumers are its consumer groups."""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.errors import SettingsError, unknown
from weft.systems.log import META_TYPES, ROWID, Group, Leased, LogPage, Member, Refused, Release, Span, StreamSample
from weft.systems.pages import FieldNames
from weft.systems.redis import ids, values
from weft.systems.redis.group_member import GIVEN_BACK
from weft.types import FieldType, comparable, dump_json

if TYPE_CHECKING:
    import pyarrow as pa

    from weft.systems.redis import resp
    from weft.systems.redis.store import RedisStore

_log = logging.getLogger("weft.streams")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# How many events retention removes in one step: others wait until it ends.
# How often the age of entries of the future is noted while they grow as old as retention lets them.
_NOTES = 100
_TRIM_STEP = 1000
# Entries of one step of a walk, as the scripts have it.
_WALK_STEP = 10_000
# Entries of one reply of a range read.
_PAGE = 5000
# Offsets of which a process remembers how many entries had been added by then.
_REMEMBERED = 10_000


class _State(NamedTuple):
    """The state of a stream: its last offset, the last that retention removed, how many entries it has, how many were
    ever added, if that is known, and the id of the first."""

    head: int
    floor: int
    length: int
    added: int | None
    first: bytes | None


class _Added:
    """How many entries were ever added up to the offsets of this process's readers; fewer where some went unread."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._lock = threading.Lock()

    def note(self, offset: int, added: int, *, is_exact: bool = False) -> None:
        with self._lock:
            known = self._known.pop(offset, 0)
            self._known[offset] = added if is_exact else max(added, known)
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]

    def up_to(self, offset: int) -> int | None:
        """Return the count of a noted offset. The offset that was not asked for the longest is forgotten first."""
        with self._lock:
            added = self._known.pop(offset, None)
            if added is not None:
                self._known[offset] = added
            return added


class RedisLog:
    """A stream and its bookkeeping keys. See `weft.systems.log.Log`."""

    def __init__(self, store: RedisStore, schema: str, name: str) -> None:
        self.store = store
        self.schema = schema
        self.name = name
        self.keys = ids.Keys.of(schema, name)
        self.declared: dict[str, FieldType] = {}
        self.is_enlisted = False
        """Whether this process has noted the stream in the server, which publishers and consumers do."""
        self._read_as: dict[str, FieldType] = {}
        self._fields: dict[str, FieldType] | None = None
        self.highest = 0
        """The last offset that this process saw. The next publish goes on after it, also on a server that lost it."""
        self._is_behind = False
        self._added = _Added()

    # ----------------------------------------------------------------------------------------------------------- fields

    def fields(self, *, fresh: bool = False) -> dict[str, FieldType]:
        """Return the fields, in the order in which they were added."""
        if fresh or self._fields is None:
            known, stored = {**(self._fields or {}), **self.declared}, self._stored_fields()
            if not self.is_enlisted:  # a reader, who writes nothing
                more = {**self._read_as, **known}
                stored |= {name: kind for name, kind in more.items() if name not in stored}
            elif not stored.keys() >= known.keys():
                # Fields are never removed: the server was flushed, or went back to an earlier state. Without their
                # types the next event would give them others.
                self.enlist()
                stored = self._add(known)
            self._fields = stored
        return self._fields

    def read_as(self, fields: dict[str, FieldType]) -> None:
        """Take these types for fields that are not stored yet: others add entries, and no types."""
        if not self._read_as.items() >= fields.items():
            self._read_as.update(fields)
            self._fields = None

    def _stored_fields(self) -> dict[str, FieldType]:
        stored = []
        for name, text in self.store.command("HGETALL", self.keys.fields).items():
            number, _, kind = text.decode().partition(" ")
            stored.append((int(number), name.decode(), FieldType.parse(kind)))
        return {name: kind for _, name, kind in sorted(stored, key=lambda each: each[0])}

    def add_fields(self, fields: dict[str, FieldType]) -> None:
        """Add fields; one that exists, in any spelling, stays as it is."""
        self._fields = self._add(fields)

    def _add(self, fields: dict[str, FieldType]) -> dict[str, FieldType]:
        while True:
            present = self._stored_fields()
            used = set(map(comparable, present))
            missing = {name: kind for name, kind in fields.items() if comparable(name) not in used}
            if not missing:
                return present
            words = [word for name, kind in missing.items() for word in (name, str(kind))]
            self.store.script("add_fields", [self.keys.fields], len(present), *words)

    def enlist(self) -> None:
        """Note in the server that there is this stream."""
        self.store.command("SADD", ids.CATALOGUE, f"{self.schema}.{self.name}")
        self.store.command("HSETNX", self.keys.meta, "floor", "0-0")
        self.is_enlisted = True

    def delete(self) -> None:
        """Remove every key of the stream and of its consumers."""
        _, _, rows = self.store.script("groups", [self.keys.stream, self.keys.meta], f"{self.keys.meta}:")
        books = [key for row in rows for key in self.keys.books(row[0].decode(errors="backslashreplace"))]
        keys = self.keys
        self.store.command(
            "DEL", keys.stream, keys.meta, keys.fields, keys.seen, keys.trims, keys.ages, *sorted(set(books))
        )
        self.declared, self._fields, self.is_enlisted = {}, None, False
        self._is_behind = True  # which is no loss

    @property
    def forbidden(self) -> str:
        """Redis holds every text."""
        return ""

    # ---------------------------------------------------------------------------------------------------------- reading

    def _offset(self, entry_id: bytes) -> int:
        return ids.to_offset(entry_id, self.keys.stream)

    def _state(self) -> _State:
        reached = self.highest  # before the server is asked: another thread may see later events meanwhile
        last, floor, length, added, first = self.store.script("state", [self.keys.stream, self.keys.meta])
        head = self._offset(last)
        self.note_loss(is_behind=head < reached)
        self.highest = max(self.highest, head)
        if added is not None:
            self._added.note(head, added, is_exact=True)
        return _State(head, self._offset(floor), length, added, first)

    def note_loss(self, *, is_behind: bool) -> None:
        """Warn, once, of a server whose stream ends before what this process saw."""
        if is_behind and not self._is_behind:
            _log.warning(
                "%s: stream %r ended before offset %d, which it had reached. The server lost its last events: it was "
                "flushed, restored, or a replica took over.",
                *(self.store.connection.label, self.name, self.highest),
            )
        self._is_behind = is_behind

    def head(self, reached: int = 0) -> int:
        """Return the last offset; a server runs one command after the other, so that nothing appears below it later."""
        return self._state().head

    def identity(self) -> None:
        """Return nothing: offsets are moments, also those of a stream that was deleted and made again."""

    def published(self) -> int:
        """Return how many entries were ever added: offsets are moments here. Redis before 7 does not count them."""
        state = self._state()
        return state.length if state.added is None else state.added

    def floor(self) -> int:
        return self._state().floor

    def removed_after(self, offset: int) -> int:
        """Return at most how many events retention removed after an offset, as far back as it remembers its cuts."""
        return int(self.store.script("removed", [self.keys.meta, self.keys.trims], ids.to_id(offset)))

    def lost_after(self, offset: int, following: int | None) -> tuple[int, int]:
        """Return the loss by retention, or by other clients that deleted entries: then fewer exist than were added."""
        state = self._state()
        if state.floor > offset:
            return state.floor, self.removed_after(offset)
        before = self._added.up_to(offset)
        if before is None or state.added is None:
            return 0, 0
        first = state.head + 1 if state.first is None else self._offset(state.first)
        removed = state.added - state.length
        # Entries that were read and are removed since are not lost. The next read reports others that are.
        if first <= offset or (following is not None and following < first) or removed <= before:
            return 0, 0
        self._added.note(first - 1, removed)
        return first - 1, removed - before

    def count(self) -> int:
        return self._state().length

    def size(self) -> int | None:
        """Return what the server holds of it in memory, by samples; `None` where this user may not ask for that."""
        size: int | None = self.store.script("size", [self.keys.stream])
        return size

    def nth_last(self, n: int) -> int | None:
        """Return the offset of the n-th event from the end, counted from the nearer end."""
        while True:
            length = self.count()
            if n > length:
                return None
            if n <= length - n:
                count, last = self._walk("XREVRANGE", "+", "-", n)
                return None if last is None or count < n else self._offset(last)
            count, last = self._walk("XRANGE", "-", "+", length - n + 1)
            # Where others removed some meanwhile it may be later than the n-th, and retention would take too many.
            if last is not None and self.count() - count + 1 >= n:
                return self._offset(last)

    def _walk(self, command: str, first: str, last: str, most: float = math.inf) -> tuple[int, bytes | None]:
        """Return how many entries there are between two ids, and the last of them; counted in short steps."""
        total, reached = 0, None
        while total < most:
            wanted = min(_WALK_STEP, most - total)
            count, last_id = self.store.script("walk", [self.keys.stream], command, first, last, int(wanted))
            total, reached = total + count, last_id or reached
            if count < wanted:
                break
            first = f"({last_id.decode()}"
        return total, reached

    def bound(self, after: int, upto: int, most: int) -> int:
        """Count the entries: ids are moments, and do not show how many there are."""
        if self.store.command("XLEN", self.keys.stream) <= most:
            return upto
        count, reached = self._count(after, upto, most)
        return upto if count < most else reached

    def extent(self, after: int, upto: int, most: int) -> int:
        """Entries are counted, which takes longer the more there are; of the whole stream Redis knows it."""
        state = self._state()
        if after <= state.floor and upto >= state.head:
            return state.length
        return self._count(after, upto, most)[0]

    def _count(self, after: int, upto: int, most: int) -> tuple[int, int]:
        """Return how many entries a range has, so many at most, and the offset of the last of these."""
        first = min(most, _WALK_STEP)
        count, last = self._walk("XRANGE", ids.to_id(after + 1), ids.to_id(upto), first)
        reached = after if last is None else self._offset(last)
        if count == first:
            # To send entries takes a server a quarter of the time that a script takes to walk over them.
            for _, page in self._pages(reached, upto, most - count, ()):
                count, reached = count + len(page), self._offset(page.ids[-1].as_py().encode())
        return count, reached

    def first_since(self, moment: datetime, reached: int = 0) -> int:
        milliseconds = math.ceil((moment - _EPOCH) / timedelta(milliseconds=1))
        entries = self._range(max(ids.first_of(milliseconds), 1), None, 1)
        return self._offset(entries[0][0]) if entries else self.head() + 1

    def expired(self, before: datetime, now: datetime) -> int:
        """After an id of the future, which a client can choose, all others are of the future too. Then it is noted when
        which id was the last, and an entry is as old as the first note behind it."""
        removable, head = self.first_since(before) - 1, self.head()
        oldest, latest = ((each - _EPOCH) // timedelta(milliseconds=1) for each in (before, now))
        if ids.milliseconds_of(head) <= latest:
            return removable
        command, ages = self.store.command, self.keys.ages
        # Note times only as often as a policy of days needs, not at each check.
        if not command("ZCOUNT", ages, latest - (latest - oldest) // _NOTES, "+inf"):
            command("ZADD", ages, latest, ids.to_id(head))
        for seen in command("ZREVRANGEBYSCORE", ages, oldest, "-inf", "LIMIT", 0, 1):
            command("ZREMRANGEBYSCORE", ages, "-inf", f"({int(command('ZSCORE', ages, seen))}")
            removable = max(removable, self._offset(seen))
        return removable

    def _range(self, first: int, last: int | None, limit: int) -> list[values.Entry]:
        upto = "+" if last is None else ids.to_id(last)
        return self.store.entries(self.keys.stream, ids.to_id(first), upto, "COUNT", limit)

    def read(self, after: int, upto: int, limit: int) -> LogPage:
        entries: list[values.Entry] = []
        first = max(after + 1, 1)
        while first <= upto and len(entries) < limit:
            count = min(limit - len(entries), _PAGE)
            page = self._range(first, upto, count)
            entries += page
            if len(page) < count:
                break
            first = self._offset(page[-1][0]) + 1
        before = self._added.up_to(after)
        if entries and before is not None:
            self._added.note(self._offset(entries[-1][0]), before + len(entries))
        return self._page(entries)

    def _page(self, entries: list[values.Entry], *, is_trusted: bool = True) -> LogPage:
        fields = self.fields()
        names = {name for entry in entries for name in entry[1][::2]}
        if not {name.decode(errors="backslashreplace") for name in names} <= fields.keys() | META_TYPES.keys():
            fields = self.fields(fresh=True)  # another process may have added some
        return values.page_of(entries, fields, self.keys.stream, is_trusted=is_trusted)

    def read_arrow(self, after: int, upto: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        types = {**self.fields(fresh=True), **META_TYPES}
        for name in columns or ():
            if name not in types:
                raise unknown(f"column in stream {self.name!r}", name, types)
        wanted = {name: types[name] for name in (columns if columns is not None else types)}
        state = self._state()
        return self._batches(max(after, state.floor), min(upto, state.head), wanted)

    def _batches(self, after: int, upto: int, wanted: dict[str, FieldType]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        from weft.systems.redis import arrow, resp

        schema = pa.schema([(name, kind.arrow) for name, kind in wanted.items()])
        for reply, page in self._pages(after, upto):
            batch = arrow.batch_of(page, self.fields(), schema)
            yield self._batch(resp.parse(reply), wanted, schema) if batch is None else batch

    def _pages(
        self, after: int, upto: int, most: float = math.inf, wanted: Sequence[str] | None = None
    ) -> Iterator[tuple[resp.Bytes, resp.EntryPage]]:
        """Yield the pages of a range, of at most so many entries, each with its reply, valid until the next page."""
        from weft.systems.redis.pages import RangeFeed
        from weft.systems.redis.wire import Wire

        # Stopped from the beginning: it waits for no server that is gone.
        wire = Wire(self.store.connection, self.keys.stream, stopped=lambda: True)
        names = FieldNames((), wanted)
        with closing(RangeFeed(wire, self.keys.stream, names, ids.to_id(after + 1), ids.to_id(upto))) as feed:
            while after < upto and most > 0 and not feed.drained:
                self.store.check_open()
                limit = int(min(_PAGE, most))
                page = feed.fetch(limit, 0, most >= 2 * limit)
                if page is None:
                    return
                most -= len(page)
                yield feed.reply, page

    def _batch(self, entries: list[values.Entry], wanted: dict[str, FieldType], schema: pa.Schema) -> pa.RecordBatch:
        try:
            return _arrays(self._page(entries), wanted, schema)
        except (ValueError, OverflowError):  # of an entry that Weft did not write, although it says so
            return _arrays(self._page(entries, is_trusted=False), wanted, schema)

    # -------------------------------------------------------------------------------------------------------- consumers

    def _keys_of(self, consumer: str) -> list[str]:
        return [self.keys.stream, self.keys.meta, *self.keys.books(consumer)]

    def lease(
        self, consumer: str, member: str, limit: int, seconds: float, *, max_deliveries: int | None = None
    ) -> Leased:
        if member == GIVEN_BACK:
            raise SettingsError(f"A member cannot be {GIVEN_BACK!r}: that name holds the events that were given back.")
        lost, epoch, spans, exhausted, token = self.store.script(
            "lease",
            self._keys_of(consumer),
            *(consumer, member, limit, int(seconds * 1e6), max_deliveries or 0, secrets.token_hex(8)),
        )
        return Leased(token.decode(), self._spans(spans), self._spans(exhausted), int(lost), int(epoch))

    def _spans(self, rows: list[Any]) -> list[Span]:
        return [
            Span(self._offset(first), self._offset(last), int(events), int(deliveries), reason and reason.decode())
            for first, last, events, deliveries, reason in rows
        ]

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
        if not rowids:
            return 0
        if release is not None and isinstance(rowids, range):
            # A leased span that turned out empty. Its offsets are not listed: an hour has trillions of them.
            action, wanted = "empty", [rowids[0], rowids[-1]]
        else:
            action = "nack" if release is not None else "again" if again else "ack"
            wanted = sorted(set(rowids))
        how = release or Release()
        reply = self.store.script(
            "settle",
            self._keys_of(consumer),
            *(consumer, token or "", member or "", action, int(how.delay * 1e6)),
            *(int(how.reason is not None), how.reason or "", int(how.undelivered), *map(ids.to_id, wanted)),
        )
        if isinstance(reply, int):
            return reply
        why, detail, refused = reply[0].decode(), reply[1].decode(), [self._offset(each) for each in reply[2]]
        return Refused.because(refused or wanted, why, float(detail) if why == "late" else detail)

    def report_again(self, consumer: str, lost: int) -> None:
        self.store.command("HINCRBY", self.keys.meta, f"untold:{consumer}", lost)

    def reset(self, consumer: str, position: int) -> None:
        self.store.script("reset", self._keys_of(consumer), consumer, ids.to_id(position))

    def forget_consumer(self, consumer: str) -> bool:
        return bool(self.store.script("forget_consumer", self._keys_of(consumer), consumer))

    def groups(self) -> list[Group]:
        """Return every consumer group of this stream, also those that others made."""
        prefix = f"{self.keys.meta}:"
        last, added, rows = self.store.script("groups", [self.keys.stream, self.keys.meta], prefix)
        groups = []
        for name, position, pending, lost, lag, leases in rows:
            if lag is None:
                lag, _ = self._walk("XRANGE", f"({position.decode()}", last.decode())
                if self.is_enlisted:  # else this is a reader, who writes nothing
                    note = f"{added - lag} {position.decode()}"
                    self.store.command("HSET", self.keys.meta, b"read:" + name, note)
            members = self._members(name, dict(leases)) if pending else []
            consumer = name.decode(errors="backslashreplace")
            groups.append(Group(consumer, self._offset(position), int(lag), int(pending), int(lost), members))
        return sorted(groups, key=lambda group: group.consumer)

    def members(self, consumer: str) -> list[Member]:
        _, _, rows = self.store.script("groups", [self.keys.stream, self.keys.meta], f"{self.keys.meta}:")
        held = next((row for row in rows if row[0] == consumer.encode() and row[2]), None)
        return [] if held is None else self._members(held[0], dict(held[5]))

    def sample(self) -> StreamSample:
        """Return the stream's size. A lag that would have to be counted entry by entry is left out."""
        state = self._state()
        published = state.length if state.added is None else state.added
        _, _, rows = self.store.script("groups", [self.keys.stream, self.keys.meta], f"{self.keys.meta}:")
        lags = [int(lag) for _, _, _, _, lag, _ in rows if lag is not None]
        return StreamSample(published, state.length, max(lags, default=0))

    def _members(self, consumer: bytes, ends: dict[bytes, bytes]) -> list[Member]:
        """Return the members that hold entries, and when their last lease ends."""
        members: dict[bytes, Member] = {}
        first, count = "-", _WALK_STEP
        while count == _WALK_STEP:
            count, last, holders = self.store.script("holders", [self.keys.stream], consumer, first)
            first = last and f"({last.decode()}"
            for name, pending, since, deliveries in holders:
                member = members.get(name)
                if member is None:
                    expires = max(int(since), int(ends.get(name, 0)))
                    text = name.decode(errors="backslashreplace")
                    member = Member(text, 0, _EPOCH + timedelta(microseconds=expires), 0)
                members[name] = replace(
                    member, pending=member.pending + pending, deliveries=max(member.deliveries, deliveries)
                )
        return sorted(members.values(), key=lambda member: member.member)

    # -------------------------------------------------------------------------------------------------------- retention

    def trim(self, upto: int, *, keeps_unread: bool = False) -> int:
        removed = 0
        upto = min(upto, self.head())
        while True:
            keys = [self.keys.stream, self.keys.meta, self.keys.trims]
            count, more = self.store.script("trim", keys, ids.to_id(upto), _TRIM_STEP, int(keeps_unread))
            removed += int(count)
            if not more:
                return removed

    def remove(self, rowids: Sequence[int]) -> int:
        removed, chosen = 0, list(map(ids.to_id, sorted(set(rowids))))
        for start in range(0, len(chosen), _TRIM_STEP):
            some = chosen[start : start + _TRIM_STEP]
            removed += int(self.store.script("remove", [self.keys.stream, self.keys.meta], *some))
        return removed

    def trim_keys(self, before: float, most: int | None = None, young: float = math.inf) -> None:
        moment = int(before * 1e6)
        if most is not None:
            newest = self.store.command("ZREVRANGE", self.keys.seen, max(most, 1) - 1, max(most, 1) - 1, "WITHSCORES")
            if newest:
                moment = max(moment, int(min(float(newest[1]), young * 1e6)))
        self.store.command("ZREMRANGEBYSCORE", self.keys.seen, "-inf", f"({moment}")


def _arrays(page: LogPage, wanted: dict[str, FieldType], schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    columns = dict(zip(page.names, page.columns, strict=True))
    rows = len(columns[ROWID])
    arrays = [
        pa.array(_texts(columns[name], kind), kind.arrow) if name in columns else pa.nulls(rows, kind.arrow)
        for name, kind in wanted.items()
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _texts(column: Sequence[Any], kind: FieldType) -> Sequence[Any]:
    """Return a column as Arrow takes it: JSON and UUIDs as texts."""
    if kind.base == "json":
        return [None if value is None else dump_json(value) for value in column]
    return [None if value is None else str(value) for value in column] if kind.base == "uuid" else column
