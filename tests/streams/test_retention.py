"""Retention and `trim`: what goes, what stays, and that a consumer is told exactly what it lost, once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

import weft
import weft.streams
from marks import on_tables
from servers import wait_until
from weft import DeclarationError, EventsLostError, LeaseLostError, SettingsError, StorageError
from weft.project import Project
from weft.systems.redis.client import open_client
from weft.systems.sql.driver import Session
from weft.systems.sql.log import SqlLog
from weft.testing import Clock
from workers import declare, drain, execute, log_of, next_millisecond, rowids, wait_until_expired

NUMBER = {"n": "int64"}
OLD = datetime(2020, 1, 1, tzinfo=UTC)
TABLE = {"sqlite": '"events.orders"', "postgres": "events.orders", "mysql": "`events.orders`"}


def publish(*numbers: int) -> dict[str, Any]:
    return weft.publish_sync("orders", [{"n": n} for n in numbers])


def stored() -> list[int]:
    """What the stream holds, asked without a consumer."""
    log = log_of("orders")
    page = log.read(0, log.head(), 100_000)
    return list(page.columns[page.names.index("n")])


def consume(consumer: str = "c", **options: Any) -> list[dict[str, Any]]:
    return weft.consume_sync("orders", consumer, **options)


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["n"] for event in events]


def lost(consumer: str = "c") -> int:
    """How many events the next call says were lost; it gives nothing else."""
    with pytest.raises(EventsLostError, match=f"Consumer '{consumer}' of stream 'orders' lost") as caught:
        consume(consumer)
    return caught.value.lost


def group(consumer: str = "c") -> dict[str, Any]:
    return next(each for each in weft.groups_sync("orders") if each["consumer"] == consumer)


def make_old(system: Any, below: int) -> None:
    """Let events have been published long ago: a server has a clock of its own, which no test can move."""
    moment = f"{OLD:%Y-%m-%d %H:%M:%S}" if system.kind == "mysql" else OLD.isoformat(timespec="microseconds")
    execute(system, f"UPDATE {TABLE[system.kind]} SET _weft_published_at = '{moment}' WHERE n < {below}")


# ------------------------------------------------------------------------------------------------------------- policies


def test_max_rows(streams: Project) -> None:
    declare(fields=NUMBER, retention={"max_rows": 3})
    publish(0)
    assert weft.trim_sync("orders") == 0
    publish(1, 2, 3, 4)
    weft.trim_sync("orders")
    assert stored() == [2, 3, 4]
    assert weft.trim_sync("orders") == 0


@on_tables
def test_max_age(streams: Project, system: Any) -> None:
    declare(fields=NUMBER, retention={"max_age_days": 30})
    publish(*range(5))
    assert weft.trim_sync("orders") == 0
    make_old(system, below=3)
    weft.trim_sync("orders")
    assert stored() == [3, 4]
    make_old(system, below=9)
    weft.trim_sync("orders")
    assert stored() == []


@pytest.mark.parametrize("system", ["sqlite"], indirect=True)
def test_max_age_by_the_clock(streams: Project) -> None:
    streams.clock = clock = Clock()
    declare(fields=NUMBER, retention={"max_age_days": 1.5})
    for n in range(4):
        publish(n)
        clock.move(hours=12)
    # The oldest is 48 hours old, the next exactly 36.
    assert weft.trim_sync("orders") == 1
    assert stored() == [1, 2, 3]
    clock.move(seconds=1)
    assert weft.trim_sync("orders") == 1
    clock.move(days=-1)  # a clock that was set back removes nothing more
    assert weft.trim_sync("orders") == 0
    assert stored() == [2, 3]


def test_an_event_of_the_future_does_not_stop_it(streams: Project, system: Any) -> None:
    streams.clock = Clock()  # nothing in the background, which could note the last id between two steps
    declare(fields=NUMBER, retention={"max_age_days": 30})
    publish(0)
    if system.kind == "redis":
        with closing(open_client(system.connection)) as client:
            client.xadd("orders", {"n": 1}, id=f"{4_000_000_000_000}-0")
            publish(2)
            assert weft.trim_sync("orders") == 0
            for _ in range(2):  # 20 days pass, and 20 more
                for key, seen in client.zrange("weft:{orders}:ages", 0, -1, withscores=True):
                    client.zadd("weft:{orders}:ages", {key: seen - 20 * 86_400_000})
                publish(3)
                weft.trim_sync("orders")
            assert stored() == [3, 3]
            return
    publish(1, 2, 3, 4, 5)
    make_old(system, below=4)
    # The event 1, and the last one: nothing says that it is old.
    ahead = "2150-01-01 00:00:00" if system.kind == "mysql" else "2150-01-01T00:00:00.000000+00:00"
    execute(system, f"UPDATE {TABLE[system.kind]} SET _weft_published_at = '{ahead}' WHERE n IN (1, 5)")
    weft.trim_sync("orders")
    assert stored() == [4, 5]
    make_old(system, below=5)
    weft.trim_sync("orders")
    assert stored() == [5]


@on_tables
def test_both(streams: Project, system: Any) -> None:
    """Either is enough."""
    declare(fields=NUMBER, retention={"max_age_days": 30, "max_rows": 3})
    publish(*range(5))
    weft.trim_sync("orders")
    assert stored() == [2, 3, 4]
    make_old(system, below=4)
    weft.trim_sync("orders")
    assert stored() == [4]


def test_beside_publishes(streams: Project) -> None:
    """Without anybody calling trim."""
    declare(fields=NUMBER, retention={"max_rows": 3})
    publish(*range(10))
    wait_until(lambda: stored() == [7, 8, 9], "retention to be enforced")


@on_tables
def test_age_beside_publishes(streams: Project, system: Any) -> None:
    declare(fields=NUMBER)
    publish(*range(4))
    make_old(system, below=2)
    weft.streams.close(streams)
    declare(fields=NUMBER, retention={"max_age_days": 7})
    publish(4)
    wait_until(lambda: stored() == [2, 3, 4], "retention to be enforced")


def test_no_policy(streams: Project) -> None:
    declare(fields=NUMBER)
    publish(0)
    with pytest.raises(DeclarationError, match="no retention"):
        weft.trim_sync("orders")
    assert stored() == [0]


# ----------------------------------------------------------------------------------------------------------------- trim


def test_before_an_offset(streams: Project) -> None:
    declare(fields=NUMBER)
    offsets = [publish(n)["first_rowid"] for n in range(5)]
    assert weft.trim_sync("orders", before=offsets[2]) == 2
    assert weft.trim_sync("orders", before=offsets[2]) == 0
    assert weft.trim_sync("orders", before=0) == 0
    assert stored() == [2, 3, 4]
    assert weft.trim_sync("orders", before=2**63) == 3
    assert stored() == []


def test_before_a_moment(streams: Project) -> None:
    declare(fields=NUMBER)
    for n in range(4):
        publish(n)
        next_millisecond()
    moment = consume("look")[2]["_weft_published_at"]
    assert weft.trim_sync("orders", before=moment - timedelta(days=1)) == 0
    assert weft.trim_sync("orders", before=moment.replace(tzinfo=None)) == 2
    assert weft.trim_sync("orders", before=moment) == 0
    assert stored() == [2, 3]
    assert weft.trim_sync("orders", before=moment + timedelta(days=1)) == 2


def test_all_but_the_newest(streams: Project) -> None:
    declare(fields=NUMBER, retention={"max_rows": 1_000_000})
    assert weft.trim_sync("orders", max_rows=5) == 0
    publish(*range(5))
    assert weft.trim_sync("orders", max_rows=5) == 0
    assert weft.trim_sync("orders", max_rows=2**63 + 1) == 0
    assert weft.trim_sync("orders", max_rows=2) == 3
    assert stored() == [3, 4]
    assert weft.trim_sync("orders", max_rows=0) == 2
    assert weft.trim_sync("orders", max_rows=0) == 0


def test_before_and_all_but_the_newest(streams: Project) -> None:
    declare(fields=NUMBER)
    first = publish(*range(10))["first_rowid"]
    assert weft.trim_sync("orders", before=first + 2, max_rows=5) == 5
    assert weft.trim_sync("orders", before=first + 8, max_rows=5) == 3
    assert stored() == [8, 9]


async def test_async(streams: Project) -> None:
    declare(fields=NUMBER)
    await weft.publish("orders", [{"n": n} for n in range(5)])
    assert await weft.trim("orders", max_rows=2) == 3
    assert stored() == [3, 4]


def test_malformed_arguments(streams: Project) -> None:
    declare(fields=NUMBER)
    publish(0, 1)
    wrong: list[tuple[str, Any]] = [
        *(("before", value) for value in ("yesterday", "1.0", "-1", 1.5, True, date(2026, 1, 1), -1)),
        *(("max_rows", value) for value in (-1, "1", 1.0, True)),
    ]
    for option, value in wrong:
        with pytest.raises(SettingsError, match=option):
            weft.trim_sync("orders", **{option: value})
    assert stored() == [0, 1]


@on_tables
def test_a_trim_takes_larger_steps_again_after_a_full_disk(streams: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(fields=NUMBER)
    publish(*range(1200))
    log, steps = log_of("orders"), list[int]()
    assert isinstance(log, SqlLog)
    step = log._trim_step

    def full_at_first(session: Session, upto: int, most: int, *, keeps_unread: bool) -> tuple[int, bool]:
        steps.append(most)
        if len(steps) < 4:
            raise StorageError("The disk is full.")
        return step(session, upto, most, keeps_unread=keeps_unread)

    monkeypatch.setattr(log, "_trim_step", full_at_first)
    assert log.trim(log.head()) == 1200
    assert steps == [10_000, 1_000, 100, 10, 100, 1_000, 10_000]


def test_a_large_trim(streams: Project) -> None:
    """It goes in steps, and the counts are those of all of them together."""
    declare(fields=NUMBER)
    publish(*range(25_000))
    weft.ack_sync("orders", "ahead", consume("ahead", batch_size=12_000))
    weft.ack_sync("orders", "behind", consume("behind", batch_size=1))
    assert weft.trim_sync("orders", max_rows=5) == 24_995
    assert stored() == list(range(24_995, 25_000))
    assert lost("ahead") == 24_995 - 12_000
    assert lost("behind") == 24_994


def test_offsets_are_never_used_again(streams: Project) -> None:
    declare(fields=NUMBER)
    last = publish(0, 1, 2)["last_rowid"]
    for n in range(3):
        assert weft.trim_sync("orders", max_rows=0) > 0
        if n:
            weft.streams.close(streams)
        result = publish(n)
        assert result["first_rowid"] > last
        last = result["last_rowid"]


def test_a_consumer_goes_on_after_everything_was_removed(streams: Project) -> None:
    """It neither waits for offsets to come again nor skips what is new."""
    declare(fields=NUMBER)
    publish(*range(5))
    drain("orders", "c")
    weft.trim_sync("orders", max_rows=0)
    assert consume() == []
    weft.streams.close(streams)
    assert consume() == []
    publish(5)
    assert numbers(consume()) == [5]


# ----------------------------------------------------------------------------------------------------------------- loss


def test_told_exactly_once(streams: Project) -> None:
    declare(fields=NUMBER)
    publish(0, 1)
    assert numbers(drain("orders", "c")) == [0, 1]
    publish(*range(2, 10))
    assert weft.trim_sync("orders", max_rows=3) == 7
    assert group()["lost"] == 5
    assert group()["lag"] == 3
    assert lost() == 5
    assert numbers(drain("orders", "c")) == [7, 8, 9]
    assert consume() == []
    assert group()["lost"] == 5


def test_told_also_where_nothing_is_left(streams: Project) -> None:
    declare(fields=NUMBER)
    publish(0)
    drain("orders", "c")
    publish(1, 2)
    weft.trim_sync("orders", max_rows=0)
    assert lost() == 2
    assert consume() == []


async def test_told_async(streams: Project) -> None:
    declare(fields=NUMBER)
    assert await weft.consume("orders", "c") == []
    await weft.publish("orders", [{"n": n} for n in range(5)])
    await weft.trim("orders", max_rows=2)
    with pytest.raises(EventsLostError) as caught:
        await weft.consume("orders", "c")
    assert caught.value.lost == 3
    assert numbers(await weft.consume("orders", "c")) == [3, 4]


def test_each_consumer_its_own(streams: Project) -> None:
    declare(fields=NUMBER)
    publish(*range(10))
    for consumer, seen in (("a", 1), ("b", 4), ("c", 9)):
        weft.ack_sync("orders", consumer, consume(consumer, batch_size=seen))
    weft.trim_sync("orders", before=rowids(consume("look"))[6])
    assert lost("a") == 5
    assert lost("b") == 2
    assert numbers(consume("c")) == [9]
    assert {each["consumer"]: each["lost"] for each in weft.groups_sync("orders")} == {
        "a": 5,
        "b": 2,
        "c": 0,
        "look": 0,
    }
    assert numbers(consume("a")) == numbers(consume("b")) == [6, 7, 8, 9]


def test_losses_add_up(streams: Project) -> None:
    """Several before it is told are told as one; `groups` shows the sum of all."""
    declare(fields=NUMBER)
    publish(0)
    drain("orders", "c")
    for n in range(1, 5):
        publish(n, n)
        weft.trim_sync("orders", max_rows=0)
    assert group()["lost"] == 8
    assert lost() == 8
    publish(5)
    weft.trim_sync("orders", max_rows=0)
    assert lost() == 1
    assert group()["lost"] == 9
    assert consume() == []


def test_members_are_told_once_together(streams: Project) -> None:
    declare(fields=NUMBER)
    publish(0)
    drain("orders", "c")
    publish(1, 2, 3)
    weft.trim_sync("orders", max_rows=1)
    with pytest.raises(EventsLostError):
        consume(member="m1")
    assert numbers(consume(member="m2")) == [3]


def test_a_new_consumer_is_told_nothing(streams: Project) -> None:
    """It begins with what is there."""
    declare(fields=NUMBER)
    publish(*range(5))
    weft.trim_sync("orders", max_rows=2)
    assert numbers(consume("new")) == [3, 4]
    assert group("new")["lost"] == 0
    weft.trim_sync("orders", max_rows=0)
    assert consume("newer") == []
    publish(5)
    assert numbers(consume("newer")) == [5]


def test_a_reset_consumer_is_told_nothing(streams: Project) -> None:
    declare(fields=NUMBER)
    publish(*range(5))
    consume()
    weft.trim_sync("orders", max_rows=2)
    weft.reset_sync("orders", "c", to="start")
    assert numbers(consume()) == [3, 4]
    weft.reset_sync("orders", "c", to=1)
    assert numbers(consume()) == [3, 4]


@on_tables
def test_a_rolled_back_publish_is_no_loss(streams: Project, system: Any) -> None:
    """Offsets that no event has are not counted."""
    declare(fields=NUMBER)
    publish(0)
    drain("orders", "c")
    table = {"sqlite": '"events.orders"', "postgres": "events.orders", "mysql": "`events.orders`"}[system.kind]
    if system.kind == "sqlite":
        execute(
            system, f"CREATE TRIGGER no BEFORE INSERT ON {table} WHEN NEW.n < 0 BEGIN SELECT RAISE(ABORT, 'x'); END"
        )
    else:
        execute(system, f"ALTER TABLE {table} ADD CONSTRAINT positive CHECK (n >= 0)")
    for n in range(1, 4):
        with pytest.raises(weft.WeftError):
            publish(5, -1)
        publish(n)
    assert weft.trim_sync("orders", max_rows=1) == 3
    assert lost() == 2
    assert numbers(consume()) == [3]


# --------------------------------------------------------------------------------------------------------------- leases


def test_ack_of_what_was_removed_meanwhile(streams: Project) -> None:
    """The work was done before the events went: nothing is lost."""
    declare(fields=NUMBER)
    publish(*range(5))
    held = consume()
    weft.trim_sync("orders", max_rows=0)
    assert weft.ack_sync("orders", "c", held) == 5
    assert group()["lost"] == 0
    assert group()["pending"] == 0
    publish(5)
    assert numbers(consume()) == [5]


def test_ack_across_the_cut(streams: Project) -> None:
    declare(fields=NUMBER)
    publish(*range(6))
    held = consume()
    weft.trim_sync("orders", max_rows=2)
    assert weft.ack_sync("orders", "c", held) == 6
    assert group()["lost"] == 0
    assert consume() == []


def test_what_is_not_acknowledged_is_lost(streams: Project) -> None:
    declare(fields=NUMBER)
    publish(*range(6))
    held = consume()
    weft.trim_sync("orders", max_rows=2)
    assert weft.ack_sync("orders", "c", [held[0], held[3], held[5]]) == 3
    assert lost() == 2
    assert group()["lost"] == 2
    assert numbers(consume()) == [4]
    assert weft.ack_sync("orders", "c", consume()) == 1
    assert consume() == []


@pytest.mark.timing
def test_the_holder_dies(streams: Project) -> None:
    declare(fields=NUMBER)
    publish(*range(5))
    consume(member="dies", lease=0.05)
    weft.trim_sync("orders", max_rows=2)
    wait_until_expired("orders")
    with pytest.raises(EventsLostError) as caught:
        consume(member="lives")
    assert caught.value.lost == 3
    assert numbers(consume(member="lives")) == [3, 4]
    assert group()["lost"] == 3


def test_the_holder_asks_again(streams: Project) -> None:
    declare(fields=NUMBER)
    publish(*range(5))
    held = consume(batch_size=3)
    weft.trim_sync("orders", max_rows=1)
    assert lost() == 4  # three that it held, and one that it had not seen
    assert numbers(consume()) == [4]
    with pytest.raises(LeaseLostError):
        weft.ack_sync("orders", "c", held)


def test_a_lease_that_others_hold_is_not_lost_yet(streams: Project) -> None:
    """Somebody works on these events and may still acknowledge them."""
    declare(fields=NUMBER)
    publish(*range(4))
    held = consume(member="a", batch_size=2)
    weft.trim_sync("orders", max_rows=0)
    with pytest.raises(EventsLostError) as caught:
        consume(member="b")
    assert caught.value.lost == 2
    assert weft.ack_sync("orders", "c", held, member="a") == 2
    assert group()["lost"] == 2
    assert consume(member="b") == []


def test_nack_of_what_was_removed_meanwhile(streams: Project) -> None:
    """It cannot be delivered again: it is lost, and said so."""
    declare(fields=NUMBER)
    publish(*range(4))
    held = consume()
    weft.trim_sync("orders", max_rows=1)
    assert weft.nack_sync("orders", "c", held) == 4
    assert lost() == 3
    assert numbers(consume()) == [3]


@pytest.mark.timing
def test_given_back_then_removed(streams: Project) -> None:
    """It is told when the delay ends: until then nobody asked for these."""
    declare(fields=NUMBER)
    publish(*range(4))
    weft.nack_sync("orders", "c", consume(), delay=0.2)
    weft.trim_sync("orders", max_rows=1)
    with pytest.raises(EventsLostError) as caught:
        consume(wait=60)
    assert caught.value.lost == 3
    assert numbers(consume()) == [3]


# ---------------------------------------------------------------------------------------------------------- at one time


@pytest.mark.timing
def test_two_trims_at_once(streams: Project) -> None:
    """Each event is removed by one of them, and lost once."""
    declare(fields=NUMBER)
    consume()
    publish(*range(2000))
    cuts = [publish(n)["first_rowid"] - 100 * n for n in range(5)]
    with ThreadPoolExecutor(5) as pool:
        removed = list(pool.map(lambda cut: weft.trim_sync("orders", before=cut), cuts))
    left = stored()
    assert sum(removed) == 2005 - len(left) == lost()
    assert numbers(consume(batch_size=5000)) == left


@pytest.mark.timing
def test_seen_and_lost_are_all_there_was(streams: Project) -> None:
    """A consumer that races with retention: what it got and what it was told it lost are every event, none twice."""
    declare(fields=NUMBER)
    assert consume() == []
    total, done = 3000, threading.Event()

    def publisher() -> None:
        for first in range(0, total, 20):
            publish(*range(first, first + 20))

    def trimmer() -> None:
        while not done.is_set():
            weft.trim_sync("orders", max_rows=15)

    seen: list[int] = []
    missed = 0
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(publisher), pool.submit(trimmer)]
        while True:
            finished = jobs[0].done()
            try:
                events = consume(batch_size=7)
            except EventsLostError as error:
                missed += error.lost
                continue
            if not events and finished:
                break
            seen += numbers(events)
            weft.ack_sync("orders", "c", events)
        done.set()
        for job in jobs:
            job.result()
    assert seen == sorted(set(seen))
    assert len(seen) + missed == total
    assert group()["lost"] == missed
