"""Any interleaving of publish, consume, ack, nack, reset, trim and the passing of time does what a simple model says.

The model is in `model.py`. SQLite runs under a clock that the test moves; the servers judge leases by their own clock,
so there leases are long and only a nack gives events back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from faults.model import Delivery, Lost, Model, Refused
from marks import on_logs
from weft.errors import EventsLostError, LeaseLostError
from weft.project import Project, connect, use
from weft.streams import ack_sync, consume_sync, groups_sync, nack_sync, publish_sync, reset_sync, stream, trim_sync
from weft.streams.events import to_dicts
from weft.streams.runtime import close, open_stream
from weft.systems.base import Connection
from weft.systems.redis import ids

START = 1_700_000_000
LONG = 100_000

numbers = itertools.count(1)
consumers = st.sampled_from(["mail", "stock"])
members = st.sampled_from(["m1", "m2", "m3"])
AHEAD = ids.first_of(4_000_000_000_000)
reasons = st.sampled_from([None, "no address", "no stock"])


class StreamMachine(RuleBasedStateMachine):
    """The rules that hold on every system."""

    connection: Connection
    has_clock = False
    has_gaps = False
    leases = st.just(LONG)
    delays = st.sampled_from([0, LONG])

    def __init__(self) -> None:
        super().__init__()
        self.project = self.new_project()
        self.using = use(self.project)
        self.using.__enter__()
        self.deliveries: list[tuple[str, Delivery, list[dict[str, Any]]]] = []
        self.serial = itertools.count(1)
        self.burned: set[int] = set()

    @initialize(max_deliveries=st.sampled_from([None, 1, 2, 3, 4]))
    def declare(self, max_deliveries: int | None) -> None:
        self.model = Model(max_deliveries)
        fields = {"n": "int64", "key": "int64"}
        options: dict[str, Any] = {"fields": fields, "idempotency_key": "key", "max_deliveries": max_deliveries}
        self.stream = stream(name=f"s{next(numbers)}", **options)(StreamMachine)
        self.ready = open_stream(self.stream, self.connection)
        self.ready.trimmed_at = float("inf")  # no retention in the background: the rules trim
        self.begin()

    def begin(self) -> None:
        """Make the stream's next offsets the model's."""

    def new_project(self) -> Project:
        project = Project()
        project.clock = lambda: START + self.model.now
        return project

    # -------------------------------------------------------------------------------------------------------- the rules

    @rule(keys=st.lists(st.one_of(st.none(), st.none(), st.integers(0, 5)), min_size=1, max_size=6))
    def publish(self, keys: list[int | None]) -> None:
        events = [{"n": next(self.serial), "key": key} for key in keys]
        fresh = self.model.fresh(events)
        result = publish_sync(self.stream, events, connection=self.connection)
        assert result["rows_deduplicated"] == len(events) - len(fresh)
        if fresh:
            assert result["last_rowid"] - result["first_rowid"] + 1 == len(fresh)
            self.model.publish(result["first_rowid"], fresh)
        else:
            assert result["first_rowid"] is None

    @precondition(lambda self: self.has_gaps)
    @rule()
    def burn(self) -> None:
        """Take an offset that no event gets, as a publish does that is rolled back."""
        store: Any = self.ready.hub.store
        with store.session("publish") as session:
            ((offset,),) = session.rows(f"SELECT nextval('{store.sequence(self.ready.log.number)}')")
        self.burned.add(int(offset))

    @rule(consumer=consumers, member=members, limit=st.integers(1, 8), data=st.data())
    def consume(self, consumer: str, member: str, limit: int, data: st.DataObject) -> None:
        seconds = data.draw(self.leases, "lease")

        def really() -> list[dict[str, Any]]:
            return consume_sync(self.stream, consumer, limit, self.connection, member, lease=seconds)

        try:
            expected = self.model.consume(consumer, member, limit, seconds)
        except Lost as lost:
            try:
                events = really()
            except EventsLostError as error:
                assert error.lost == lost.lost
                return
            raise AssertionError(f"{lost.lost} events were lost, but consume returned {events}") from None
        events = really()
        assert [event["_weft_rowid"] for event in events] == expected.rowids
        assert [_body(event) for event in events] == [self.model.events[rowid] for rowid in expected.rowids]
        if events:
            self.deliveries.append((consumer, expected, events))

    @precondition(lambda self: self.deliveries)
    @rule(data=st.data(), gives_back=st.booleans(), reason=reasons)
    def settle_delivered(self, data: st.DataObject, gives_back: bool, reason: str | None) -> None:
        """Ack or nack any part of any delivery, old ones too."""
        at = data.draw(st.integers(0, min(5, len(self.deliveries) - 1)), "how many deliveries ago")
        consumer, delivery, events = self.deliveries[-1 - at]
        chosen = [event for event in events if data.draw(st.integers(0, 3), "choose?")]
        rowids = [event["_weft_rowid"] for event in chosen]
        delay = data.draw(self.delays, "delay") if gives_back else 0
        try:
            if gives_back:
                if rowids:
                    self.model.nack(consumer, rowids, delay=delay, reason=reason, token=delivery.token)
            else:
                rowids = [rowid for rowid in rowids if rowid not in delivery.acked]
                if rowids:
                    self.model.ack(consumer, rowids, token=delivery.token)
                delivery.acked.update(rowids)
        except Refused as refused:
            expected: int | tuple[int, ...] = tuple(refused.rowids)
        else:
            expected = len(rowids)
        assert self._settle(consumer, chosen, gives_back, delay, reason) == expected

    @rule(
        consumer=consumers,
        member=st.none() | members,
        data=st.data(),
        gives_back=st.booleans(),
        reason=reasons,
    )
    def settle_by_offset(
        self, consumer: str, member: str | None, data: st.DataObject, gives_back: bool, reason: str | None
    ) -> None:
        """Ack or nack with bare offsets, whoever they belong to."""
        offsets = st.integers(max(1, self.model.head - 12), self.model.head + 1)
        rowids = data.draw(st.sets(offsets, min_size=1, max_size=5), "offsets") - self.burned
        if not rowids:
            return
        delay = data.draw(self.delays, "delay") if gives_back else 0
        refused: tuple[int, ...] = ()
        try:
            if gives_back:
                self.model.nack(consumer, rowids, delay=delay, reason=reason, member=member)
            else:
                self.model.ack(consumer, rowids, member=member)
        except Refused as error:
            refused = tuple(error.rowids)
        bare = [{"_weft_rowid": rowid} for rowid in rowids]
        answer = self._settle(consumer, bare, gives_back, delay, reason, member)
        assert answer == refused if refused else type(answer) is int

    def _settle(
        self,
        consumer: str,
        events: list[dict[str, Any]],
        gives_back: bool,
        delay: int,
        reason: str | None,
        member: str | None = None,
    ) -> int | tuple[int, ...]:
        """How many were settled, or the offsets that were refused."""
        where: dict[str, Any] = {"connection": self.connection, "member": member}
        try:
            if gives_back:
                return nack_sync(self.stream, consumer, events, delay=delay, reason=reason, **where)
            return ack_sync(self.stream, consumer, events, **where)
        except LeaseLostError as error:
            return error.rowids

    @rule(consumer=consumers, data=st.data())
    def reset(self, consumer: str, data: st.DataObject) -> None:
        near = st.integers(max(self.model.head - 100, 0), self.model.head + 3)
        to = data.draw(st.sampled_from(["start", "end"]) | near, "to")
        assert reset_sync(self.stream, consumer, to, connection=self.connection) == self.model.reset(consumer, to)

    @rule(data=st.data(), by_number=st.booleans())
    def trim(self, data: st.DataObject, by_number: bool) -> None:
        if by_number:
            keep = data.draw(st.integers(0, 20), "max_rows")
            stored = list(self.model.events)
            beyond = stored[: max(0, len(stored) - keep)]
            removed = trim_sync(self.stream, max_rows=keep, connection=self.connection)
            assert removed == (self.model.trim(beyond[-1]) if beyond else 0)
        else:
            before = data.draw(st.integers(self.model.floor, self.model.head + 3), "before")
            assert trim_sync(self.stream, before=before, connection=self.connection) == self.model.trim(before - 1)

    @precondition(lambda self: self.has_clock)
    @rule(seconds=st.sampled_from([1, 5, 10, 20]))
    def wait(self, seconds: int) -> None:
        self.model.now += seconds

    # ------------------------------------------------------------------------------------------------ what holds always

    @invariant()
    def groups_are_as_modelled(self) -> None:
        found = groups_sync(self.stream, connection=self.connection)
        for group in found:
            for each in group["members"]:
                expires = each.pop("expires_at")
                if self.has_clock:
                    each["expires"] = int((expires - datetime.fromtimestamp(START, UTC)).total_seconds())
        expected = self.model.groups()
        if not self.has_clock:
            for group in expected:
                for each in group["members"]:
                    del each["expires"]
        assert found == expected

    @invariant()
    def log_is_as_modelled(self) -> None:
        log = self.ready.log
        assert log.head() == max(self.model.events, default=self.model.floor)
        assert log.floor() == self.model.floor
        stored = to_dicts(log.read(0, log.head(), 10_000))
        assert {event["_weft_rowid"]: _body(event) for event in stored} == self.model.events

    def teardown(self) -> None:
        try:
            if hasattr(self, "model") and self.model.max_deliveries is not None:
                dead = open_stream(self.stream.dead_letters, self.connection).log
                names = ("consumer", "rowid", "deliveries", "reason", "event")
                found = [
                    {name: record[name] for name in names} for record in to_dicts(dead.read(0, dead.head(), 10_000))
                ]
                assert found == self.model.dead
        finally:
            self.end_project()
            self.using.__exit__(None, None, None)

    def end_project(self) -> None:
        close(self.project)


def _body(event: dict[str, Any]) -> dict[str, Any]:
    return {"n": event["n"], "key": event["key"]}


class EmbeddedMachine(StreamMachine):
    connection = connect(url="sqlite:///:memory:")
    has_clock = True
    # Few different ones, so that a lease often ends at the very moment of a call.
    leases = st.sampled_from([5, 10, 20])
    delays = st.sampled_from([0, 5, 10])


def settings(examples: int, steps: int) -> hypothesis.settings:
    return hypothesis.settings(max_examples=examples, stateful_step_count=steps)


def test_sqlite_does_what_the_model_says(count: Callable[..., int]) -> None:
    run_state_machine_as_test(EmbeddedMachine, settings=settings(count(4000, 40), 30))


@on_logs
def test_every_system_does_what_the_model_says(system: Any, count: Callable[..., int]) -> None:
    project = Project()

    class Machine(StreamMachine):
        connection = system.connection
        has_gaps = system.kind == "postgres"

        def begin(self) -> None:
            if system.kind == "redis":
                # Ids that are ahead of the clock go on one by one, as the model's do, and are the same in every run.
                log: Any = self.ready.log
                start = ids.to_id(AHEAD)
                log.store.command("XGROUP", "CREATE", log.keys.stream, "nobody", 0, "MKSTREAM")
                log.store.command("XGROUP", "DESTROY", log.keys.stream, "nobody")
                log.store.command("XSETID", log.keys.stream, start)
                log.store.command("HSET", log.keys.meta, "floor", start)
                self.model.floor = self.model.head = AHEAD

        def new_project(self) -> Project:
            return project  # its connections serve all cases, each with a stream of its own

        def end_project(self) -> None:
            pass

    try:
        run_state_machine_as_test(Machine, settings=settings(count(400, 10), 25))
    finally:
        close(project)
