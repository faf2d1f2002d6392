"""`max_deliveries`: an event that was delivered so often goes to the dead letters, once, alone, and nothing stops."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

import weft
from marks import on_tables
from weft import WeftError
from weft.project import Project
from weft.streams.runtime import open_stream
from workers import declare, drain, execute, log_of, plain, rowids, started, wait_until_expired


def publish(many: int) -> None:
    weft.publish_sync("orders", [{"n": n} for n in range(many)])


def take(member: str = "a", **options: Any) -> list[dict[str, Any]]:
    return weft.consume_sync("orders", "worker", member=member, **options)


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["n"] for event in events]


def dead(name: str = "orders__dead_letter") -> list[dict[str, Any]]:
    return drain(name, "undertaker")


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_after_so_many_deliveries(streams: Project, limit: int) -> None:
    declare(max_deliveries=limit)
    publish(1)
    for _ in range(limit):
        assert numbers(take()) == [0]
        assert dead() == []
    assert take() == []
    assert [event["event"] for event in dead()] == [{"n": 0}]
    assert take() == []
    assert take("b") == []
    (group,) = weft.groups_sync("orders")
    assert (group["pending"], group["lag"]) == (0, 0)


def test_without_a_limit_for_ever(streams: Project) -> None:
    declare()
    publish(1)
    for _ in range(20):
        assert numbers(take()) == [0]


def test_the_record(streams: Project) -> None:
    declare(fields={"n": "int64", "at": "timestamp"}, max_deliveries=1)
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    weft.publish_sync("orders", {"n": 1, "at": moment, "more!": [None]})
    (event,) = take()
    assert take() == []
    (record,) = dead()
    assert plain(record) == {
        "stream": "orders",
        "consumer": "worker",
        "rowid": event["_weft_rowid"],
        "published_at": event["_weft_published_at"],
        "deliveries": 1,
        "reason": record["reason"],
        "event": {"n": 1, "at": moment.isoformat(), "more!": [None]},
        "delivery": record["delivery"],
    }
    assert "1" in record["reason"]


def test_every_type_in_the_record(streams: Project) -> None:
    declare(max_deliveries=1)
    event = {
        "text": "\x00 🦄",
        "flag": True,
        "whole": 2**63 - 1,
        "huge": 2**70,
        "real": 0.1,
        "price": Decimal("1.5"),
        "day": date(2026, 1, 31),
        "at": datetime(2026, 1, 31, tzinfo=UTC),
        "doc": {"a": [None]},
        "raw": b"\x00\xff",
        "id": UUID(int=5),
    }
    weft.publish_sync("orders", event)
    take()
    assert take() == []
    (record,) = dead()
    assert record["event"] == {
        **event,
        "price": "1.500000000000000000",
        "day": "2026-01-31",
        "at": "2026-01-31T00:00:00+00:00",
        "raw": "AP8=",
        "id": str(UUID(int=5)),
    }


def nested(depth: int) -> Any:
    value: Any = "bottom"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.brief("sqlite-deep", "sqlite-wide", "postgres-deepest", "mysql-long", "mysql-long bytes", "redis-odd keys")
@pytest.mark.parametrize(
    "event",
    [
        pytest.param({"deep": nested(199)}, id="deep"),
        pytest.param({"deep": nested(200)}, id="deepest"),
        pytest.param({"long": "x" * 8_000_000}, id="long"),
        pytest.param({"long": "é\x01" * 2_000_000}, id="long when it is escaped"),
        pytest.param({"a": "x" * 5_000_000, "b": "y" * 5_000_000}, id="two long ones"),
        pytest.param({"raw": b"x" * 8_000_000}, id="long bytes"),
        pytest.param({"key " * 200: 1, "": 2, "\x00": 3}, id="odd keys"),
        pytest.param({f"k{n}": "v" * 100 for n in range(300)}, id="wide"),
    ],
)
def test_no_event_stops_the_consumer(streams: Project, event: dict[str, Any]) -> None:
    """Whatever could be published can be buried."""
    declare(max_deliveries=1)
    weft.publish_sync("orders", [event, {"n": 1}])
    assert len(take()) == 2
    weft.publish_sync("orders", {"n": 2})
    assert numbers(take()) == [2]
    records = dead()
    assert len(records) == 2
    assert records[1]["event"] == {"n": 1, **{key: None for key in records[1]["event"] if key != "n"}}
    assert records[0]["rowid"] < records[1]["rowid"]
    for key, value in event.items():
        kept = records[0]["event"].get(key) == value or isinstance(value, bytes)
        assert kept or f"{key!r}" in records[0]["reason"]


def test_the_last_attempt_is_made_alone(streams: Project) -> None:
    """One event that kills its worker does not take its neighbours with it."""
    declare(max_deliveries=3)
    publish(6)

    def work() -> bool:
        events = take()
        for event in events:
            if event["n"] == 2:
                return True  # the worker dies here, with what follows in its hands
            weft.ack_sync("orders", "worker", event)
        return bool(events)

    rounds = 0
    while work():
        rounds += 1
        assert rounds < 50
    assert [record["event"]["n"] for record in dead()] == [2]
    (group,) = weft.groups_sync("orders")
    assert (group["pending"], group["lag"]) == (0, 0)


def test_neighbours_survive_when_batches_fail_whole(streams: Project) -> None:
    declare(max_deliveries=2)
    publish(10)
    assert numbers(take()) == list(range(10))
    done = []
    while events := take():
        assert len(events) == 1
        if events[0]["n"] != 4:
            weft.ack_sync("orders", "worker", events)
            done += numbers(events)
    assert done == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert [record["event"]["n"] for record in dead()] == [4]


def test_dead_and_new_events_in_one_call(streams: Project) -> None:
    declare(max_deliveries=1)
    publish(3)
    assert numbers(take()) == [0, 1, 2]
    publish(2)
    assert numbers(take()) == [0, 1]
    assert [record["event"]["n"] for record in dead()] == [0, 1, 2]


def test_many_at_once(streams: Project) -> None:
    declare(max_deliveries=1)
    publish(500)
    assert len(take(batch_size=500)) == 500
    weft.publish_sync("orders", {"n": 500})
    assert numbers(take("a", batch_size=10)) == [500]
    assert [record["event"]["n"] for record in dead()] == list(range(500))


@pytest.mark.timing
def test_a_lease_that_ran_out_counts(streams: Project) -> None:
    declare(max_deliveries=1)
    publish(2)
    take("gone", lease=0.05)
    wait_until_expired("orders")
    assert take("b") == []
    assert [record["event"]["n"] for record in dead()] == [0, 1]


def test_an_ack_in_time_saves_it(streams: Project) -> None:
    declare(max_deliveries=2)
    publish(1)
    take()
    assert weft.ack_sync("orders", "worker", take()) == 1
    assert take() == []
    assert dead() == []


def test_a_late_ack_of_a_dead_event_is_refused(streams: Project) -> None:
    declare(max_deliveries=1)
    publish(1)
    events = take()
    assert take() == []
    with pytest.raises(weft.LeaseLostError):
        weft.ack_sync("orders", "worker", events)
    assert len(dead()) == 1


def test_each_consumer_has_its_own(streams: Project) -> None:
    declare(max_deliveries=1)
    publish(1)
    for consumer in ("one", "two"):
        weft.consume_sync("orders", consumer, member="m")
        assert weft.consume_sync("orders", consumer, member="m") == []
    assert [record["consumer"] for record in dead()] == ["one", "two"]


def test_again_after_a_reset(streams: Project) -> None:
    """Another epoch is another delivery: what failed again is told again."""
    declare(max_deliveries=1)
    publish(1)
    for _ in range(3):
        assert numbers(take()) == [0]
        assert take() == []
        weft.reset_sync("orders", "worker", to="start")
    assert len(dead()) == 3


def test_another_name(streams: Project) -> None:
    declare(max_deliveries=1, dead_letter="failed")
    publish(1)
    take()
    assert take() == []
    assert [record["event"] for record in dead("failed")] == [{"n": 0}]


def test_a_declared_stream_for_several(streams: Project) -> None:
    declare("failed", fields={"reason": "string"}, retention={"max_rows": 1000})
    for name in ("orders", "refunds"):
        declare(name, max_deliveries=1, dead_letter="failed")
        weft.publish_sync(name, {"n": 1})
        weft.consume_sync(name, "worker", member="a")
        assert weft.consume_sync(name, "worker", member="a") == []
    records = dead("failed")
    assert [record["stream"] for record in records] == ["orders", "refunds"]
    assert [record["event"] for record in records] == [{"n": 1}, {"n": 1}]


@pytest.mark.timing
@on_tables
def test_once_when_two_steps_are_torn_apart(streams: Project, system: Any) -> None:
    """Stored among the dead letters, then a crash before the acknowledgement: the second try stores nothing twice."""
    declare(max_deliveries=1)
    publish(3)
    held = rowids(take("a", lease=0.05))
    wait_until_expired("orders")
    from weft.streams import runtime

    leases = runtime.open_stream("orders").hub.store.leases
    if system.kind == "sqlite":
        execute(system, f"CREATE TRIGGER torn BEFORE DELETE ON {leases} BEGIN SELECT RAISE(ABORT, 'torn'); END")
        heal = "DROP TRIGGER torn"
    elif system.kind == "postgres":
        execute(
            system,
            "CREATE FUNCTION torn() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'torn'; END $$; "
            f"CREATE TRIGGER torn BEFORE DELETE ON {leases} FOR EACH ROW EXECUTE FUNCTION torn()",
        )
        heal = f"DROP TRIGGER torn ON {leases}"
    else:
        execute(
            system,
            f"CREATE TRIGGER torn BEFORE DELETE ON {leases} FOR EACH ROW "
            "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'torn'",
        )
        heal = "DROP TRIGGER torn"
    for member in ("b", "b", "c"):
        with pytest.raises(WeftError, match="torn"):
            take(member, lease=0.05)
        wait_until_expired("orders")
    execute(system, heal)
    assert take("d") == []
    assert [record["rowid"] for record in dead()] == held
    assert take("e") == []
    assert dead() == []


@pytest.mark.timing
def test_once_with_several_processes(streams: Project) -> None:
    declare(max_deliveries=2, fields={"n": "int64"})
    publish(60)
    code = """
        import time
        declare(max_deliveries=2, fields={"n": "int64"})
        line()
        end = time.monotonic() + 40
        while time.monotonic() < end:
            for event in weft.consume_sync("orders", "worker", batch_size=8, lease=0.1):
                if event["n"] % 5:
                    try:
                        weft.ack_sync("orders", "worker", event)
                    except weft.LeaseLostError:
                        pass
            (group,) = weft.groups_sync("orders")
            if not group["pending"] and not group["lag"]:
                break
    """
    with started(3, code) as runs:
        for run in runs:
            run.ready()
        for run in runs:
            run.tell()
        for run in runs:
            run.answer()
    found = sorted(record["event"]["n"] for record in dead())
    assert len(found) == len(set(found))
    assert set(found) >= set(range(0, 60, 5))
    (group,) = weft.groups_sync("orders")
    assert (group["pending"], group["lag"]) == (0, 0)


def test_the_dead_letters_have_consumers_too(streams: Project) -> None:
    declare(max_deliveries=1)
    publish(2)
    take()
    assert take() == []
    events = weft.consume_sync("orders__dead_letter", "repair")
    assert weft.ack_sync("orders__dead_letter", "repair", events) == 2
    assert log_of("orders__dead_letter").count() == 2


async def test_async(streams: Project) -> None:
    declare(max_deliveries=1)
    await weft.publish("orders", {"n": 0})
    assert len(await weft.consume("orders", "worker", member="a")) == 1
    assert await weft.consume("orders", "worker", member="a") == []
    assert len(await weft.consume("orders__dead_letter", "undertaker")) == 1


def test_a_delivery_that_could_not_be_read_does_not_count(streams, monkeypatch: pytest.MonkeyPatch) -> None:
    sales = declare("sales", fields={"n": "int64"}, max_deliveries=2)
    weft.publish_sync(sales, [{"n": n} for n in range(4)])
    kind = type(open_stream(sales).log)

    def failing(*arguments: object) -> None:
        raise weft.ConnectionFailedError("gone")

    with monkeypatch.context() as patched:
        patched.setattr(kind, "read", failing)
        for _ in range(4):
            with pytest.raises(weft.ConnectionFailedError):
                weft.consume_sync(sales, "g", member="m")
    assert [event["n"] for event in weft.consume_sync(sales, "g", member="m")] == [0, 1, 2, 3]
