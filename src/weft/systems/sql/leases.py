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
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count, groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from weft.systems.log import Group, Leased, Member, Refused, Release, Span

if TYPE_CHECKING:
    from weft.systems.sql.log import SqlLog
    from weft.systems.sql.store import Session

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _Consumer(NamedTuple):
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
# A row among the consumers of a stream whose lock is for who creates a consumer and for who trims: so a trim knows all
# of them. Not the stream's own row, which publishers hold on MySQL.
_GATE = ""


def _shut(session: Session, log: SqlLog) -> None:
    """Let nobody else create a consumer or trim until this transaction ends. Before any consumer is locked."""
    store = session.store
    _create(session, log, _GATE, 0)
    session.row(
        f"SELECT position FROM {store.groups} WHERE stream = ? AND consumer = ?{store.for_update}", (log.number, _GATE)
    )


def _create(session: Session, log: SqlLog, consumer: str, position: int) -> None:
    store = session.store
    session.run(
        store.insert_ignore(store.groups, ("stream", "consumer", "position", "lost", "untold", "epoch")),
        (log.number, consumer, position, 0, 0, 0),
    )


def _lock(session: Session, log: SqlLog, consumer: str, *, create: bool) -> _Consumer | None:
    store = session.store
    sql = (
        f"SELECT position, untold, epoch, {store.now_sql} FROM {store.groups} "
        f"WHERE stream = ? AND consumer = ?{store.for_update}"
    )
    row = session.row(sql, (log.number, consumer))
    if row is None and create:
        _shut(session, log)
        floor = session.row(f"SELECT floor FROM {store.streams} WHERE id = ?", (log.number,))
        _create(session, log, consumer, int(floor[0]) if floor else 0)
        row = session.row(sql, (log.number, consumer))
    return None if row is None else _Consumer(int(row[0]), int(row[1]), int(row[2]), int(row[3]))


def _insert(session: Session, log: SqlLog, consumer: str, lease: _Lease) -> None:
    session.run(
        f"INSERT INTO {session.store.leases} (stream, consumer, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (log.number, consumer, *lease),
    )


def _delete(session: Session, log: SqlLog, consumer: str, first: int) -> None:
    session.run(
        f"DELETE FROM {session.store.leases} WHERE stream = ? AND consumer = ? AND first = ?",
        (log.number, consumer, first),
    )


def _lose(session: Session, log: SqlLog, consumer: str, lost: int, *, told: bool) -> None:
    session.run(
        f"UPDATE {session.store.groups} SET lost = lost + ?, untold = untold + ? WHERE stream = ? AND consumer = ?",
        (lost, 0 if told else lost, log.number, consumer),
    )


def lease(
    session: Session,
    log: SqlLog,
    consumer: str,
    member: str,
    limit: int,
    seconds: float,
    max_deliveries: int | None,
) -> Leased:
    """Lease up to `limit` events: the member's own first, then those whose lease ran out, then new ones."""
    store = session.store
    state = _lock(session, log, consumer, create=True)
    assert state is not None
    token = secrets.token_hex(8)
    expires = state.now + int(seconds * 1e6)
    candidates = [
        _Lease(*row)
        for row in session.rows(
            f"SELECT {_COLUMNS} FROM {store.leases} WHERE stream = ? AND consumer = ? AND (member = ? OR expires <= ?) "
            f"ORDER BY CASE WHEN member = ? THEN 0 ELSE 1 END, first LIMIT ?",
            (log.number, consumer, member, state.now, member, limit),
        )
    ]
    if candidates:
        gone = _give_up_trimmed(session, log, consumer, member, state.now)
        state = state._replace(untold=state.untold + gone)
    if state.untold:
        session.run(f"UPDATE {store.groups} SET untold = 0 WHERE stream = ? AND consumer = ?", (log.number, consumer))
        return Leased(token, [], [], state.untold, state.epoch)

    spans: list[Span] = []
    exhausted: list[Span] = []
    room = limit
    for held in candidates:
        if room <= 0:
            break
        final = max_deliveries is not None and held.deliveries >= max_deliveries
        # The last attempt goes alone: when it fails, its neighbours in the range are not dead-lettered with it.
        alone = max_deliveries is not None and max_deliveries > 1 and held.deliveries == max_deliveries - 1
        # What is exhausted goes alone too: while it cannot be moved away, nothing else may use up its deliveries.
        if (spans and (alone or final)) or (exhausted and not final):
            break
        taken = _take_over(session, log, consumer, held, 1 if alone else room, member, token, expires, again=not final)
        room -= taken.events
        (exhausted if final else spans).append(taken)
        if alone:
            room = 0
    if room > 0 and not exhausted:
        fence = store.fence(session, log)
        if fence > state.position:
            first, last, events = log.take(session, state.position + 1, fence, room)
            if events:
                _insert(session, log, consumer, _Lease(first, last, events, member, token, expires, 1, None))
                session.run(
                    f"UPDATE {store.groups} SET position = ? WHERE stream = ? AND consumer = ?",
                    (last, log.number, consumer),
                )
                spans.append(Span(first, last, events, 1))
    return Leased(token, spans, exhausted, 0, state.epoch)


def _give_up_trimmed(session: Session, log: SqlLog, consumer: str, member: str, now: int) -> int:
    """Forget the leases that a member could have now, if their events were removed; how many events that were."""
    store = session.store
    where = (
        f"FROM {store.leases} WHERE stream = ? AND consumer = ? AND (member = ? OR expires <= ?) "
        f"AND last <= (SELECT floor FROM {store.streams} WHERE id = ?)"
    )
    parameters = (log.number, consumer, member, now, log.number)
    row = session.row(f"SELECT sum(events) {where}", parameters)
    gone = int(row[0] or 0) if row else 0
    if gone:
        session.run(f"DELETE {where}", parameters)
        _lose(session, log, consumer, gone, told=True)
    return gone


def _take_over(
    session: Session,
    log: SqlLog,
    consumer: str,
    held: _Lease,
    room: int,
    member: str,
    token: str,
    expires: int,
    *,
    again: bool,
) -> Span:
    """Make a lease, or the first `room` events of it, the member's."""
    last, events = held.last, held.events
    if events > room:
        _, end, taken = log.take(session, held.first, held.last, room)
        if taken:  # not where somebody emptied the range by hand
            last, events = end, taken
            _insert(session, log, consumer, held._replace(first=last + 1, events=held.events - events))
    deliveries = held.deliveries + (1 if again else 0)
    session.run(
        f"UPDATE {session.store.leases} SET last = ?, events = ?, member = ?, token = ?, expires = ?, deliveries = ? "
        "WHERE stream = ? AND consumer = ? AND first = ?",
        (last, events, member, token, expires, deliveries, log.number, consumer, held.first),
    )
    return Span(held.first, last, events, deliveries, held.reason)


def settle(
    session: Session,
    log: SqlLog,
    consumer: str,
    rowids: Sequence[int],
    token: str | None,
    member: str | None,
    release: Release | None,
) -> int | Refused:
    """Acknowledge offsets (or give them back), all or none. `token` fences; without one the member does; without both
    any live lease will do."""
    wanted = sorted(set(rowids))
    if not wanted:
        return 0
    state = _lock(session, log, consumer, create=False)
    if state is None:
        return Refused(wanted, "nothing was ever delivered to this consumer")
    covering = [
        _Lease(*row)
        for row in session.rows(
            f"SELECT {_COLUMNS} FROM {session.store.leases} "
            "WHERE stream = ? AND consumer = ? AND last >= ? AND first <= ? ORDER BY first",
            (log.number, consumer, wanted[0], wanted[-1]),
        )
    ]
    settled: list[tuple[_Lease, list[int]]] = []
    covered = 0
    for held in covering:
        mine = wanted[bisect_left(wanted, held.first) : bisect_right(wanted, held.last)]
        if mine:
            covered += len(mine)
            settled.append((held, mine))
            why = _not_held(held, token, member, state.now)
            if why:
                return Refused(mine, why, late=True)
    if covered < len(wanted):
        inside = {rowid for _, mine in settled for rowid in mine}
        outside = [rowid for rowid in wanted if rowid not in inside]
        if outside[-1] > state.position:
            return Refused([r for r in outside if r > state.position], "they were not delivered to this consumer yet")
        # Without a token nobody can tell a repeated ack from a late one; what is acknowledged stays so.
        if token is not None or release is not None:
            why = "their lease is gone: another member acknowledged them, or the consumer was reset"
            return Refused(outside, why, late=True)
    for held, mine in settled:
        _settle_lease(session, log, consumer, held, mine, state.now, release)
    return covered


def _not_held(held: _Lease, token: str | None, member: str | None, now: int) -> str | None:
    if not held.token:
        return "they were given back and wait to be delivered again"
    if (token is not None and held.token != token) or (token is None and member is not None and held.member != member):
        return f"they were delivered again, and member {held.member!r} holds them now"
    if held.expires <= now:
        return f"their lease ran out {(now - held.expires) / 1e6:.1f} seconds ago"
    return None


def _settle_lease(
    session: Session, log: SqlLog, consumer: str, held: _Lease, mine: list[int], now: int, release: Release | None
) -> None:
    _delete(session, log, consumer, held.first)
    chosen = set(mine)
    if held.is_dense:
        edges = pairwise([held.first - 1, *mine, held.last + 1])
        left = [held._replace(first=a + 1, last=b - 1, events=b - a - 1) for a, b in edges if b - a > 1]
        stored = [] if release is None else log.between(session, mine[0], mine[-1])
        given_back = _dense(held, [offset for offset in stored if offset in chosen])
        # What was removed meanwhile can be acknowledged, but not delivered again.
        lost = 0 if release is None else len(mine) - sum(piece.events for piece in given_back)
    else:
        # Some of `mine` may be offsets that no event has: to count them would acknowledge others.
        stored = log.between(session, held.first, held.last)
        left, given_back = [], []
        for is_mine, run in groupby(stored, key=chosen.__contains__):
            offsets = list(run)
            piece = held._replace(first=offsets[0], last=offsets[-1], events=len(offsets))
            (given_back if is_mine else left).append(piece)
        # What somebody deleted by hand, unless it is acknowledged right now.
        lost = held.events - len(stored) - (len(chosen.difference(stored)) if release is None else 0)
    for piece in left:
        _insert(session, log, consumer, piece)
    if release is not None:
        for piece in given_back:
            free = piece._replace(
                member="",
                token="",
                expires=now + int(release.delay * 1e6),
                deliveries=held.deliveries - release.undelivered,
                reason=release.reason or held.reason,
            )
            _insert(session, log, consumer, free)
    if lost > 0:
        _lose(session, log, consumer, lost, told=False)


def _dense(held: _Lease, offsets: Iterable[int]) -> list[_Lease]:
    """Parts of a lease that are these offsets and no others."""
    position = count()
    runs = [list(run) for _, run in groupby(offsets, key=lambda offset: offset - next(position))]
    return [held._replace(first=run[0], last=run[-1], events=len(run)) for run in runs]


def reset(session: Session, log: SqlLog, consumer: str, position: int) -> None:
    """Forget every lease of a consumer and let it go on after `position`."""
    store = session.store
    _lock(session, log, consumer, create=True)
    session.run(f"DELETE FROM {store.leases} WHERE stream = ? AND consumer = ?", (log.number, consumer))
    session.run(
        f"UPDATE {store.groups} SET position = ?, untold = 0, epoch = epoch + 1 WHERE stream = ? AND consumer = ?",
        (position, log.number, consumer),
    )


def lock_all(session: Session, log: SqlLog) -> list[tuple[str, int]]:
    """Lock every consumer of a stream, in one order, and let nobody create others; their names and positions."""
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
    store = session.store
    for consumer, position in consumers:
        if position < cut:
            _lose(session, log, consumer, log.count_between(session, position + 1, cut), told=False)
            session.run(
                f"UPDATE {store.groups} SET position = ? WHERE stream = ? AND consumer = ?",
                (cut, log.number, consumer),
            )
    for consumer, *columns in session.rows(
        f"SELECT consumer, {_COLUMNS} FROM {store.leases} "
        "WHERE stream = ? AND first <= ? AND (last > ? OR events < last - first + 1)",
        (log.number, cut, cut),
    ):
        _part(session, log, consumer, _Lease(*columns), cut)


def _part(session: Session, log: SqlLog, consumer: str, held: _Lease, cut: int) -> None:
    """Part a lease at `cut`, and what is before it where there are gaps."""
    end = min(held.last, cut)
    if held.is_dense:
        pieces = [held._replace(last=end, events=end - held.first + 1)]
    else:
        pieces = _dense(held, log.between(session, held.first, end))
    left = held.events - sum(piece.events for piece in pieces)
    if end < held.last and left > 0:
        pieces.append(held._replace(first=end + 1, events=left))
    elif left > 0:  # deleted by hand
        _lose(session, log, consumer, left, told=False)
    _delete(session, log, consumer, held.first)
    for piece in pieces:
        _insert(session, log, consumer, piece)


def groups(session: Session, log: SqlLog) -> list[Group]:
    """Every consumer of a stream with its members."""
    store = session.store
    fence = store.fence(session, log)
    rows = session.rows(
        f"SELECT consumer, position, lost FROM {store.groups} WHERE stream = ? AND consumer <> ? ORDER BY consumer",
        (log.number, _GATE),
    )
    held = session.rows(
        f"SELECT consumer, member, sum(events), max(expires), max(deliveries) FROM {store.leases} "
        "WHERE stream = ? GROUP BY consumer, member ORDER BY consumer, member",
        (log.number,),
    )
    found = []
    for consumer, position, lost in rows:
        mine = [row for row in held if row[0] == consumer]
        members = [
            Member(member, int(events), _EPOCH + timedelta(microseconds=int(expires)), int(deliveries))
            for _, member, events, expires, deliveries in mine
            if member
        ]
        lag = log.count_between(session, int(position) + 1, fence)
        found.append(Group(consumer, int(position), lag, sum(int(row[2]) for row in mine), int(lost), members))
    return found
