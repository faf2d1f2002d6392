"""Consumers' bookkeeping: one row a consumer, one row a leased range. Every function runs inside one transaction.

A consumer's `position` is the last offset that was ever delivered to it: whatever lies at or below it is either
acknowledged or covered by a row of `leases`. Its row is locked before anything is read, so that two members never
decide about the same range at once. Tokens are random: a counter could be issued twice after a crash that forgot the
bookkeeping.

Retention parts the leases that it reaches into. So a lease is either stored as a whole or removed as a whole, and one
that is removed is dense: each of its offsets had an event. No row is left to ask.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count, groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from weft.systems.log import Group, Leased, Member, Refused, Release, Span

if TYPE_CHECKING:
    from weft.systems.sql.driver import Session
    from weft.systems.sql.log import SqlLog
    from weft.systems.sql.store import SqlStore

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _State(NamedTuple):
    position: int
    untold: int
    epoch: int
    now: int


class _Lease(NamedTuple):
    first: int
    last: int
    events: int
    member: str
    token: str
    expires: int
    deliveries: int
    reason: str | None

    @property
    def is_dense(self) -> bool:
        """Whether each offset has an event. Only PostgreSQL has others: a publish that was rolled back took them."""
        return self.events == self.last - self.first + 1


_COLUMNS = "first, last, events, member, token, expires, deliveries, reason"
# Offsets in one statement.
_LISTED = 5_000
# A row among the consumers of a stream. Creating a consumer and trimming both lock it: so a trim knows all consumers.
# Not the stream's own row, which publishers lock on MySQL. Its position is the last offset that was removed from
# between others, and `lost` how many of these are behind the floor.
_GATE = ""


def _shut(session: Session, log: SqlLog) -> None:
    """Let nobody else create a consumer or trim until this transaction ends. Before any consumer is locked."""
    gate = ConsumerLeases(session, log, _GATE)
    gate.create(0)
    gate.lock()


class ConsumerLeases:
    """One consumer of a stream."""

    def __init__(self, session: Session, log: SqlLog, name: str) -> None:
        self.session, self.log, self.store = session, log, session.store
        self.key = (log.number, name)
        self._stream = (log.number, log.full)

    def create(self, position: int) -> None:
        """Create its row where it is missing. Its epoch is a random one: a token of a consumer of this name that was
        removed must not be one of it."""
        epoch = secrets.randbelow(1 << 53)
        columns = ("stream", "consumer", "position", "lost", "untold", "epoch")
        self.session.run(self.store.insert_ignore(self.store.groups, columns), (*self.key, position, 0, 0, epoch))

    def lock(self) -> _State | None:
        """Lock its row; `None` where it has none."""
        row = self.session.row(
            f"SELECT position, untold, epoch, {self.store.now_sql}, (SELECT count(*) FROM {self.store.streams} "
            f"WHERE id = ? AND name = ?) FROM {self.store.groups} "
            f"WHERE stream = ? AND consumer = ?{self.store.for_update}",
            (*self._stream, *self.key),
        )
        if row is None:
            return None
        if not row[-1]:  # the catalogue was created again, and has another stream under this number
            raise self.store.gone(self.log)
        return _State(*map(int, row[:-1]))

    def _lock_or_create(self) -> _State:
        state = self.lock()
        if state is None:
            _shut(self.session, self.log)
            sql = f"SELECT floor FROM {self.store.streams} WHERE id = ? AND name = ?"
            floor = self.session.value(sql, self._stream)
            if floor is None:
                raise self.store.gone(self.log)
            while state is None:  # who forgets a consumer waits for no gate: another one's row may go in between
                self.create(int(floor))
                state = self.lock()
        return state

    def _update(self, changes: str, *values: int) -> None:
        sql = f"UPDATE {self.store.groups} SET {changes} WHERE stream = ? AND consumer = ?"
        self.session.run(sql, (*values, *self.key))

    def _lose(self, lost: int) -> None:
        """Count events that were removed before they were acknowledged; the next lease reports them."""
        self._update("lost = lost + ?, untold = untold + ?", lost, lost)

    def report_again(self, lost: int) -> None:
        """Have the next lease report losses that this consumer has counted."""
        self._update("untold = untold + ?", lost)

    def _leases(self, condition: str, *values: object) -> list[_Lease]:
        rows = self.session.rows(
            f"SELECT {_COLUMNS} FROM {self.store.leases} WHERE stream = ? AND consumer = ? AND {condition}",
            (*self.key, *values),
        )
        return [_Lease(*row) for row in rows]

    def _insert(self, *leases: _Lease) -> None:
        self.session.run_many(
            f"INSERT INTO {self.store.leases} (stream, consumer, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(*self.key, *lease) for lease in leases],
        )

    def _delete(self, *leases: _Lease) -> None:
        for firsts in _lists([lease.first for lease in leases]):
            sql = f"DELETE FROM {self.store.leases} WHERE stream = ? AND consumer = ? AND first IN ({firsts})"
            self.session.run(sql, self.key)

    # ------------------------------------------------------------------------------------------------------------ lease

    def lease(self, member: str, limit: int, seconds: float, max_deliveries: int | None) -> Leased:
        """Lease up to `limit` events: the member's own first, then those whose lease ran out, then new ones."""
        state = self._lock_or_create()
        expires = state.now + int(seconds * 1e6)
        token = f"{secrets.token_hex(8)}.{state.epoch}.{expires}"
        candidates = self._leases(
            "(member = ? OR expires <= ?) ORDER BY CASE WHEN member = ? THEN 0 ELSE 1 END, first LIMIT ?",
            *(member, state.now, member, limit),
        )
        if candidates:
            state = state._replace(untold=state.untold + self._give_up_trimmed(member, state.now))
        if state.untold:
            self._update("untold = 0")
            return Leased(token, [], [], state.untold, state.epoch)

        spans: list[Span] = []
        exhausted: list[Span] = []
        taken: list[int] = []
        room = limit
        for held in candidates:
            if room <= 0:
                break
            final = max_deliveries is not None and held.deliveries >= max_deliveries
            # The last attempt goes alone: when it fails, its neighbours in the range are not dead-lettered with it.
            alone = max_deliveries is not None and max_deliveries > 1 and held.deliveries == max_deliveries - 1
            # An exhausted span goes alone: while it cannot be moved away, no other event may use up its deliveries.
            if (spans and (alone or final)) or (exhausted and not final):
                break
            last, events = self._first_of(held, 1 if alone else room)
            taken.append(held.first)
            deliveries = held.deliveries + (0 if final else 1)
            (exhausted if final else spans).append(Span(held.first, last, events, deliveries, held.reason))
            room -= events
            if alone:
                room = 0
        self._take_over(taken, member, token, expires, 0 if exhausted else 1)
        if room > 0 and not exhausted:
            fence = self.store.fence(self.session, self.log)
            if fence > state.position:
                first, last, events = self.log.take(self.session, state.position + 1, fence, room)
                if events:
                    self._insert(_Lease(first, last, events, member, token, expires, 1, None))
                    self._update("position = ?", last)
                    spans.append(Span(first, last, events, 1))
        return Leased(token, spans, exhausted, 0, state.epoch)

    def _give_up_trimmed(self, member: str, now: int) -> int:
        """Forget the leases that a member could have now, if their events were removed; return how many events."""
        where = (
            f"FROM {self.store.leases} WHERE stream = ? AND consumer = ? AND (member = ? OR expires <= ?) "
            f"AND last <= (SELECT floor FROM {self.store.streams} WHERE id = ?)"
        )
        parameters = (*self.key, member, now, self.log.number)
        lost = int(self.session.value(f"SELECT sum(events) {where}", parameters) or 0)
        if lost:
            self.session.run(f"DELETE {where}", parameters)
            self._update("lost = lost + ?", lost)
        return lost

    def _first_of(self, held: _Lease, room: int) -> tuple[int, int]:
        """Cut a lease behind its first `room` events; return where it ends now, and how many events it has."""
        if held.events <= room:
            return held.last, held.events
        _, last, events = self.log.take(self.session, held.first, held.last, room)
        if not events:  # somebody emptied the range by hand
            return held.last, held.events
        left = held.events - events
        if last < held.last:
            self._insert(held._replace(first=last + 1, events=left))
        else:  # deleted by hand
            self._lose(left)
        self.session.run(
            f"UPDATE {self.store.leases} SET last = ?, events = ? WHERE stream = ? AND consumer = ? AND first = ?",
            (last, events, *self.key, held.first),
        )
        return last, events

    def _take_over(self, firsts: list[int], member: str, token: str, expires: int, deliveries: int) -> None:
        """Make leases the member's. Together: there are as many as offsets were left scattered."""
        for listed in _lists(firsts):
            self.session.run(
                f"UPDATE {self.store.leases} SET member = ?, token = ?, expires = ?, deliveries = deliveries + ? "
                f"WHERE stream = ? AND consumer = ? AND first IN ({listed})",
                (member, token, expires, deliveries, *self.key),
            )

    # ----------------------------------------------------------------------------------------------------------- settle

    def settle(
        self, rowids: Sequence[int], token: str | None, member: str | None, release: Release | None, again: bool
    ) -> int | Refused:
        """Acknowledge offsets (or give them back), all or none. `token` fences; without one the member does; without
        both any live lease will do. A range is given back without a list of its offsets: few may have an event."""
        wanted: Sequence[int] = rowids if isinstance(rowids, range) else sorted(set(rowids))
        if not wanted:
            return 0
        state = self.lock()
        if state is None:
            return Refused.because(wanted, "never")
        settled: list[tuple[_Lease, Sequence[int]]] = []
        covered = 0
        for held in self._leases("last >= ? AND first <= ? ORDER BY first", wanted[0], wanted[-1]):
            mine = wanted[bisect_left(wanted, held.first) : bisect_right(wanted, held.last)]
            if mine:
                covered += len(mine)
                settled.append((held, mine))
                why = _not_held(held, token, member, state.now)
                if why:
                    return Refused.because(mine, *why)
        if covered < len(wanted) and release is not None and isinstance(wanted, range):
            return Refused.because(wanted, "gone")  # without a list of those that no lease has
        if covered < len(wanted):
            inside = {rowid for _, mine in settled for rowid in mine}
            outside = [rowid for rowid in wanted if rowid not in inside]
            if outside[-1] > state.position:
                ahead = [rowid for rowid in outside if rowid > state.position]
                return Refused.because(ahead, "unread")
            # Without a token, a repeated ack and a late one look the same; what is acknowledged stays so. With one
            # nobody else had them while its lease lasts: the ack is repeated, if the caller may do that.
            if release is not None or (token is not None and not (again and _lasts(token, state))):
                return Refused.because(outside, "gone")
        present = set() if release is None else _present(self.session, self.log, wanted)
        pieces: list[_Lease] = []
        lost = 0
        for held, mine in settled:
            lost += self._settle_lease(held, mine, present, state.now, release, pieces)
        # Together: scattered offsets leave as many pieces.
        self._delete(*(held for held, _ in settled))
        self._insert(*pieces)
        if lost > 0:
            self._lose(lost)
        return covered

    def _settle_lease(
        self,
        held: _Lease,
        mine: Sequence[int],
        present: set[int],
        now: int,
        release: Release | None,
        pieces: list[_Lease],
    ) -> int:
        """Add what a lease leaves to `pieces`; return how many events were lost."""
        if held.is_dense:
            edges = pairwise([held.first - 1, *mine, held.last + 1])
            left = [held._replace(first=a + 1, last=b - 1, events=b - a - 1) for a, b in edges if b - a > 1]
            released = _dense(held, [offset for offset in mine if offset in present])
            # Events that were removed meanwhile can be acknowledged, but not delivered again.
            lost = 0 if release is None else len(mine) - sum(piece.events for piece in released)
        else:
            # Some of `mine` may be offsets that no event has: to count them would acknowledge others.
            chosen, stored = _set_of(mine), self.log.between(self.session, held.first, held.last)
            left, released = [], []
            for is_mine, run in groupby(stored, key=chosen.__contains__):
                offsets = list(run)
                piece = held._replace(first=offsets[0], last=offsets[-1], events=len(offsets))
                (released if is_mine else left).append(piece)
            # Events that somebody deleted by hand, unless they are acknowledged right now.
            lost = held.events - len(stored) - (len(set(mine).difference(stored)) if release is None else 0)
        pieces += left
        if release is not None:
            pieces += [
                piece._replace(
                    member="",
                    token="",
                    expires=now + int(release.delay * 1e6),
                    deliveries=held.deliveries - release.undelivered,
                    reason=release.reason or held.reason,
                )
                for piece in released
            ]
        return max(lost, 0)

    def reset(self, position: int) -> None:
        """Forget every lease and go on after `position`."""
        self._lock_or_create()
        self.session.run(f"DELETE FROM {self.store.leases} WHERE stream = ? AND consumer = ?", self.key)
        self._update("position = ?, untold = 0, epoch = epoch + 1", position)

    def remove(self) -> bool:
        """Remove its row and every lease; return whether there was one."""
        self.lock()  # else a lease that is made meanwhile would stay, for the next consumer of this name
        self.session.run(f"DELETE FROM {self.store.leases} WHERE stream = ? AND consumer = ?", self.key)
        removed = self.session.run(f"DELETE FROM {self.store.groups} WHERE stream = ? AND consumer = ?", self.key)
        return bool(removed.rowcount)

    # ------------------------------------------------------------------------------------------------------------- trim

    def skip(self, position: int, cut: int) -> None:
        """Move a consumer that has not reached `cut` behind it, and count the events that it lost."""
        self._lose(self.log.count_between(self.session, position + 1, cut))
        self._update("position = ?", cut)

    def split(self, held: _Lease, cut: int) -> None:
        """Split a lease at `cut`, and what is before it where there are gaps."""
        end = min(held.last, cut)
        if held.is_dense:
            pieces = [held._replace(last=end, events=end - held.first + 1)]
        else:
            pieces = _dense(held, self.log.between(self.session, held.first, end))
        left = held.events - sum(piece.events for piece in pieces)
        if end < held.last and left > 0:
            pieces.append(held._replace(first=end + 1, events=left))
        elif left > 0:  # deleted by hand
            self._lose(left)
        self._delete(held)
        self._insert(*pieces)


def _set_of(offsets: Sequence[int]) -> Container[int]:
    return offsets if isinstance(offsets, range) else set(offsets)


def _lists(offsets: Sequence[int]) -> Iterator[str]:
    """Offsets for IN, as many at a time as a statement has."""
    for start in range(0, len(offsets), _LISTED):
        yield ", ".join(map(str, offsets[start : start + _LISTED]))


def _present(session: Session, log: SqlLog, offsets: Sequence[int]) -> set[int]:
    """Return those of some offsets, in order, that have an event now."""
    if offsets[-1] - offsets[0] < 2 * len(offsets):
        wanted = _set_of(offsets)
        return {offset for offset in log.between(session, offsets[0], offsets[-1]) if offset in wanted}
    present: set[int] = set()
    for some in _lists(offsets):
        rows = session.rows(f"SELECT {log.rowid} FROM {log.table} WHERE {log.rowid} IN ({some})")
        present.update(int(row[0]) for row in rows)
    return present


def _lasts(token: str, state: _State) -> bool:
    """Whether the lease of a token has not ended: it says when it does, and before which reset it began."""
    epoch, _, expires = token.partition(".")[2].partition(".")
    return epoch == str(state.epoch) and expires.isdecimal() and int(expires) > state.now


def _not_held(held: _Lease, token: str | None, member: str | None, now: int) -> tuple[str, object] | None:
    """Return why somebody does not hold a lease, as `Refused.because` takes it."""
    if not held.token:
        return "returned", None
    if (token is not None and held.token != token) or (token is None and member is not None and held.member != member):
        return "other", held.member
    if held.expires <= now:
        return "late", (now - held.expires) / 1e6
    return None


def _dense(held: _Lease, offsets: Iterable[int]) -> list[_Lease]:
    """Parts of a lease that are these offsets and no others."""
    position = count()
    runs = [list(run) for _, run in groupby(offsets, key=lambda offset: offset - next(position))]
    return [held._replace(first=run[0], last=run[-1], events=len(run)) for run in runs]


def lock_all(session: Session, log: SqlLog) -> list[tuple[str, int]]:
    """Lock every consumer of a stream, in one order, and let nobody create others; return their names and positions."""
    store = session.store
    _shut(session, log)
    rows = session.rows(
        f"SELECT consumer, position FROM {store.groups} WHERE stream = ? ORDER BY consumer{store.for_update}",
        (log.number,),
    )
    return [(row[0], int(row[1])) for row in rows if row[0] != _GATE]


def pass_over(session: Session, log: SqlLog, consumers: list[tuple[str, int]], cut: int) -> None:
    """Before the events up to `cut` go: move consumers that have not reached it behind it, and note how many events
    each lost. What is leased is not lost yet: it may still be acknowledged."""
    for consumer, position in consumers:
        if position < cut:
            ConsumerLeases(session, log, consumer).skip(position, cut)
    for consumer, *columns in session.rows(
        f"SELECT consumer, {_COLUMNS} FROM {session.store.leases} "
        "WHERE stream = ? AND first <= ? AND (last > ? OR events < last - first + 1)",
        (log.number, cut, cut),
    ):
        ConsumerLeases(session, log, consumer).split(_Lease(*columns), cut)


def remove(session: Session, log: SqlLog, offsets: Sequence[int]) -> int:
    """Remove events from between others, and note how many each consumer lost; return how many there were. What is
    leased is not lost yet: it may still be acknowledged."""
    consumers = lock_all(session, log)
    gone = sorted(_present(session, log, offsets))
    if not gone:
        return 0
    for consumer, position in consumers:
        if unread := len(gone) - bisect_right(gone, position):
            ConsumerLeases(session, log, consumer)._lose(unread)
    for some in _lists(gone):
        session.run(f"DELETE FROM {log.table} WHERE {log.rowid} IN ({some})")
    changes = "position = CASE WHEN position < ? THEN ? ELSE position END, lost = lost + ?"
    ConsumerLeases(session, log, _GATE)._update(changes, gone[-1], gone[-1], len(gone))
    return len(gone)


def pass_removed(session: Session, log: SqlLog, gaps: int) -> None:
    """So many offsets up to the floor had no event any more."""
    ConsumerLeases(session, log, _GATE)._update("lost = CASE WHEN lost > ? THEN lost - ? ELSE 0 END", gaps, gaps)


def last_removed_sql(store: SqlStore) -> str:
    """Return a SELECT of the last offset of a stream that was removed from between others, by the stream's number."""
    return f"SELECT position FROM {store.groups} WHERE stream = ? AND consumer = '{_GATE}'"


class Standing(NamedTuple):
    """The position of the consumer of a stream that is the furthest behind, if there is one; the last offset that was
    removed from between others, and how many of these are behind the floor."""

    position: int | None
    last_removed: int
    removed: int


def standings(session: Session) -> dict[int, Standing]:
    """Return how the streams stand that have consumers or lost events, by their numbers."""
    of_gate = f"CASE WHEN consumer = '{_GATE}' THEN"
    rows = session.rows(
        f"SELECT stream, min(CASE WHEN consumer <> '{_GATE}' THEN position END), max({of_gate} position ELSE 0 END), "
        f"max({of_gate} lost ELSE 0 END) FROM {session.store.groups} GROUP BY stream"
    )
    return {
        int(number): Standing(None if position is None else int(position), int(last), int(removed))
        for number, position, last, removed in rows
    }


def groups(session: Session, log: SqlLog) -> list[Group]:
    """Every consumer of a stream with its members."""
    store = session.store
    fence = store.fence(session, log)
    rows = session.rows(
        f"SELECT consumer, position, lost FROM {store.groups} WHERE stream = ? AND consumer <> ? ORDER BY consumer",
        (log.number, _GATE),
    )
    held = _holders(session, log)
    consumers = []
    for consumer, position, lost in rows:
        mine = held.get(consumer, [])
        lag = log.count_between(session, int(position) + 1, fence)
        members, pending = [each for each in mine if each.member], sum(each.pending for each in mine)
        consumers.append(Group(consumer, int(position), lag, pending, int(lost), members))
    return consumers


def members(session: Session, log: SqlLog, consumer: str) -> list[Member]:
    """The members of a consumer that hold events."""
    return [each for each in _holders(session, log).get(consumer, []) if each.member]


def _holders(session: Session, log: SqlLog) -> dict[str, list[Member]]:
    """By consumer, who holds events; without a name, what was given back."""
    rows = session.rows(
        f"SELECT consumer, member, sum(events), max(expires), max(deliveries) FROM {session.store.leases} "
        "WHERE stream = ? GROUP BY consumer, member ORDER BY consumer, member",
        (log.number,),
    )
    held: dict[str, list[Member]] = {}
    for consumer, member, events, expires, deliveries in rows:
        moment = _EPOCH + timedelta(microseconds=int(expires))
        held.setdefault(consumer, []).append(Member(member, int(events), moment, int(deliveries)))
    return held
