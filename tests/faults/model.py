"""What a stream and its consumers must do, in plain Python over lists. The property tests compare the real with it.

The model knows nothing of transactions, tables or SQL. Time is a number of seconds, a token the number of a delivery.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any


class Lost(Exception):
    """Retention removed events that the consumer had not acknowledged."""

    def __init__(self, lost: int) -> None:
        super().__init__(f"{lost} events lost")
        self.lost = lost


class Refused(Exception):
    """An ack or nack of events of which the caller does not hold some: none of them is settled."""

    def __init__(self, rowids: list[int]) -> None:
        super().__init__(f"refused: {rowids}")
        self.rowids = rowids


@dataclass
class Holding:
    """Events that were delivered together and are not acknowledged. No member: given back, free from `expires` on."""

    rowids: list[int]
    member: str
    token: int | None
    expires: int
    deliveries: int = 1
    reason: str | None = None

    def part(self, rowids: list[int]) -> Holding:
        return replace(self, rowids=rowids)


@dataclass
class Consumer:
    position: int
    lost: int = 0
    untold: int = 0
    epoch: int = 0
    holdings: list[Holding] = field(default_factory=list)

    def keep(self, holdings: Iterable[Holding]) -> None:
        self.holdings = sorted((each for each in holdings if each.rowids), key=lambda each: each.rowids[0])

    def without(self, holding: Holding) -> list[Holding]:
        return [each for each in self.holdings if each is not holding]


@dataclass
class Delivery:
    """What one consume returned; `acked` is what the caller acknowledged of it himself."""

    token: int
    rowids: list[int] = field(default_factory=list)
    acked: set[int] = field(default_factory=set)


class Model:
    def __init__(self, max_deliveries: int | None) -> None:
        self.max_deliveries = max_deliveries
        self.now = 0
        self.events: dict[int, dict[str, Any]] = {}  # what is stored, in the order of offsets
        self.head = 0  # the last offset ever given
        self.floor = 0  # the last offset that was trimmed
        self.keys: set[Any] = set()
        self.consumers: dict[str, Consumer] = {}
        self.dead: list[dict[str, Any]] = []
        self.tokens = 0

    # -------------------------------------------------------------------------------------------- publish and retention

    def fresh(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those that are not duplicates by the field `key`; an event without one never is."""
        kept = []
        for event in events:
            key = event.get("key")
            if key is None or key not in self.keys:
                kept.append(event)
            if key is not None:
                self.keys.add(key)
        return kept

    def publish(self, first: int, events: list[dict[str, Any]]) -> None:
        assert first > self.head, "an offset was used again, or a later event came earlier"
        for rowid, event in enumerate(events, first):
            self.events[rowid] = event
            self.head = rowid

    def between(self, first: int, last: int) -> list[int]:
        return [rowid for rowid in self.events if first <= rowid <= last]

    def trim(self, upto: int) -> int:
        removed = self.between(0, upto)
        if removed:
            cut = removed[-1]
            for consumer in self.consumers.values():
                if consumer.position < cut:
                    self._lose(consumer, len(self.between(consumer.position + 1, cut)))
                    consumer.position = cut
            for rowid in removed:
                del self.events[rowid]
            self.floor = cut
        return len(removed)

    # ---------------------------------------------------------------------------------------------------------- consume

    def consume(self, name: str, member: str, limit: int, lease: int) -> Delivery:
        """Own unacknowledged events, then those whose lease ran out, then new ones; dead letters on the way."""
        while True:
            delivery, exhausted = self._lease(name, member, limit, lease)
            consumer = self.consumers[name]
            for holding in exhausted:
                self._bury(name, holding)
                consumer.keep(consumer.without(holding))
            if delivery.rowids or not exhausted:
                return delivery

    def _lease(self, name: str, member: str, limit: int, lease: int) -> tuple[Delivery, list[Holding]]:
        consumer = self.consumers.setdefault(name, Consumer(self.floor))
        own = [each for each in consumer.holdings if each.member == member]
        free = [each for each in consumer.holdings if each.member != member and each.expires <= self.now]
        self._give_up_trimmed(consumer, own + free)
        if consumer.untold:
            lost, consumer.untold = consumer.untold, 0
            raise Lost(lost)

        self.tokens += 1
        delivery = Delivery(self.tokens)
        exhausted: list[Holding] = []
        room = limit
        most = self.max_deliveries
        for holding in own + free:
            final = most is not None and holding.deliveries >= most
            alone = most is not None and most > 1 and holding.deliveries == most - 1
            if room == 0 or (delivery.rowids and (alone or final)) or (exhausted and not final):
                break
            size = 1 if alone else room
            taken, rest = holding.part(holding.rowids[:size]), holding.part(holding.rowids[size:])
            taken.member, taken.token, taken.expires = member, delivery.token, self.now + lease
            consumer.keep([*consumer.without(holding), taken, rest])
            room -= len(taken.rowids)
            if final:
                exhausted.append(taken)
            else:
                taken.deliveries += 1
                delivery.rowids += taken.rowids
            if alone:
                room = 0
        new = [] if exhausted else self.between(consumer.position + 1, self.head)[:room]
        if new:
            consumer.keep([*consumer.holdings, Holding(new, member, delivery.token, self.now + lease)])
            consumer.position = new[-1]
            delivery.rowids += new
        return delivery, exhausted

    def _give_up_trimmed(self, consumer: Consumer, holdings: list[Holding]) -> None:
        """What was trimmed can be acknowledged by who holds it, but not delivered again."""
        for holding in holdings:
            left = [rowid for rowid in holding.rowids if rowid in self.events]
            self._lose(consumer, len(holding.rowids) - len(left))
            holding.rowids = left
        consumer.keep(consumer.holdings)

    def _bury(self, name: str, holding: Holding) -> None:
        for rowid in holding.rowids:
            self.dead.append(
                {
                    "consumer": name,
                    "rowid": rowid,
                    "deliveries": holding.deliveries,
                    "reason": holding.reason or f"delivered {holding.deliveries} times and never acknowledged",
                    "event": self.events[rowid],
                }
            )

    # ----------------------------------------------------------------------------------------------------- ack and nack

    def ack(self, name: str, rowids: Iterable[int], *, token: int | None = None, member: str | None = None) -> None:
        consumer, found = self._held(name, rowids, token, member, gives_back=False)
        for holding, chosen in found:
            pieces = self._pieces(holding, chosen)
            consumer.keep([*consumer.without(holding), *(piece for piece, is_chosen in pieces if not is_chosen)])

    def nack(
        self,
        name: str,
        rowids: Iterable[int],
        *,
        delay: int,
        reason: str | None,
        token: int | None = None,
        member: str | None = None,
    ) -> None:
        consumer, found = self._held(name, rowids, token, member, gives_back=True)
        for holding, chosen in found:
            pieces = self._pieces(holding, chosen)
            for piece, is_chosen in pieces:
                if is_chosen:
                    self._give_up_trimmed(consumer, [piece])
                    piece.member, piece.token, piece.expires = "", None, self.now + delay
                    piece.reason = reason or piece.reason
            consumer.keep([*consumer.without(holding), *(piece for piece, _ in pieces)])

    def _held(
        self, name: str, rowids: Iterable[int], token: int | None, member: str | None, *, gives_back: bool
    ) -> tuple[Consumer, list[tuple[Holding, set[int]]]]:
        """The holdings that cover offsets, if the caller holds all of them: all or none."""
        wanted = set(rowids)
        consumer = self.consumers.get(name)
        if consumer is None:
            raise Refused(sorted(wanted))
        found = []
        for holding in consumer.holdings:
            chosen = wanted & set(holding.rowids)
            if chosen:
                if token is not None:
                    ours = holding.token == token
                else:
                    ours = holding.token is not None and member in (None, holding.member)
                if not ours or holding.expires <= self.now:
                    raise Refused(sorted(wanted))
                found.append((holding, chosen))
        outside = wanted.difference(*(chosen for _, chosen in found))
        is_new = any(rowid > consumer.position for rowid in outside)
        # To acknowledge again what is acknowledged already does no harm, but whoever claims to hold it is told.
        if is_new or (outside and (token is not None or gives_back)):
            raise Refused(sorted(wanted))
        return consumer, found

    def _pieces(self, holding: Holding, chosen: set[int]) -> list[tuple[Holding, bool]]:
        """A holding cut where the chosen begin and end."""
        return [(holding.part(list(run)), is_chosen) for is_chosen, run in groupby(holding.rowids, chosen.__contains__)]

    @staticmethod
    def _lose(consumer: Consumer, lost: int) -> None:
        consumer.lost += lost
        consumer.untold += lost

    # ------------------------------------------------------------------------------------------------- reset and groups

    def reset(self, name: str, to: str | int) -> int:
        wanted = {"start": self.floor, "end": self.head}[to] if isinstance(to, str) else min(to - 1, self.head)
        consumer = self.consumers.setdefault(name, Consumer(self.floor))
        consumer.position = max(wanted, self.floor)
        consumer.untold = 0
        consumer.epoch += 1
        consumer.holdings = []
        return consumer.position

    def groups(self) -> list[dict[str, Any]]:
        return [
            {
                "consumer": name,
                "position": consumer.position,
                "lag": len(self.between(consumer.position + 1, self.head)),
                "pending": sum(len(each.rowids) for each in consumer.holdings),
                "lost": consumer.lost,
                "members": [
                    {
                        "member": member,
                        "pending": sum(len(each.rowids) for each in held),
                        "expires": max(each.expires for each in held),
                        "deliveries": max(each.deliveries for each in held),
                    }
                    for member in sorted({each.member for each in consumer.holdings} - {""})
                    if (held := [each for each in consumer.holdings if each.member == member])
                ],
            }
            for name, consumer in sorted(self.consumers.items())
        ]
