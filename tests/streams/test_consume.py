"""`consume`: own unacknowledged events first, then those whose lease ran out, then new ones; errors are raised."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from marks import on_tables
from weft import NotFoundError, SettingsError, WeftError
from weft.project import Project
from workers import declare, execute, log_of, plain, rowids, wait_until_expired


def publish(*numbers: int) -> list[int]:
    result = weft.publish_sync("orders", [{"n": n} for n in numbers])
    return list(range(result["first_rowid"], result["last_rowid"] + 1))


def consume(member: str = "a", consumer: str = "worker", **options: Any) -> list[int]:
    return [event["n"] for event in weft.consume_sync("orders", consumer, member=member, **options)]


def test_an_event_is_a_dict_with_all_fields(streams: Project) -> None:
    declare(fields={"a": "string", "b": "int64"})
    result = weft.publish_sync("orders", {"a": "x", "not a column!": [1]})
    (event,) = weft.consume_sync("orders", "worker")
    assert isinstance(event, dict)
    assert set(event) == {"a", "b", "not a column!", "_weft_rowid", "_weft_published_at", "_weft_publish_id"}
    assert (event["b"], event["_weft_rowid"]) == (None, result["first_rowid"])
    assert {**event} == event
    assert plain(event) == {"a": "x", "not a column!": [1]}


def test_nothing(streams: Project) -> None:
    declare()
    assert weft.consume_sync("orders", "worker") == []


def test_new_events_in_order_and_in_batches(streams: Project) -> None:
    declare()
    publish(*range(10))
    for expected in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []):
        events = weft.consume_sync("orders", "worker", batch_size=4)
        assert [event["n"] for event in events] == expected
        assert weft.ack_sync("orders", "worker", events) == len(expected)


def test_default_batch_size(streams: Project) -> None:
    declare()
    publish(*range(150))
    assert len(weft.consume_sync("orders", "worker")) == 100


def test_own_unacknowledged_events_come_first(streams: Project) -> None:
    declare()
    publish(0, 1, 2, 3)
    assert consume(batch_size=2) == [0, 1]
    assert consume(batch_size=2) == [0, 1]
    assert consume(batch_size=1) == [0]
    assert consume(batch_size=3) == [0, 1, 2]
    assert consume() == [0, 1, 2, 3]
    assert consume("b") == []


@pytest.mark.brief("sqlite", "redis")
@pytest.mark.timing
def test_the_order_own_expired_new(streams: Project) -> None:
    declare()
    publish(*range(6))
    assert consume("gone", batch_size=2, lease=2) == [0, 1]
    assert consume("a", batch_size=2) == [2, 3]
    wait_until_expired_of("gone")
    assert consume("a", batch_size=3) == [2, 3, 0]
    assert consume("a") == [0, 2, 3, 1, 4, 5]
    assert consume("b") == []


def wait_until_expired_of(member: str) -> None:
    from servers import wait_until
    from weft.streams.runtime import open_stream

    ready = open_stream("orders")
    (end,) = [each.expires_at for group in ready.log.groups() for each in group.members if each.member == member]
    wait_until(lambda: ready.hub.store.now() > end.timestamp(), "the lease to run out")


@pytest.mark.timing
def test_expired_events_go_to_another_member(streams: Project) -> None:
    declare()
    publish(0, 1, 2)
    assert consume("a", lease=0.05) == [0, 1, 2]
    wait_until_expired("orders")
    assert consume("b", batch_size=2) == [0, 1]
    assert consume("c") == [2]
    assert consume("a") == []


def test_a_live_lease_is_not_given_away(streams: Project) -> None:
    declare()
    publish(0, 1, 2)
    assert consume("a", batch_size=2) == [0, 1]
    assert consume("b") == [2]
    assert consume("c") == []
    publish(3)
    assert consume("c") == [3]


@pytest.mark.timing
def test_consuming_again_renews_the_lease(streams: Project) -> None:
    declare()
    publish(0)
    assert consume("a", lease=0.05) == [0]
    assert consume("a", lease=60) == [0]
    (group,) = weft.groups_sync("orders")
    (member,) = group["members"]
    assert member["deliveries"] == 2
    assert (member["expires_at"].timestamp() - log_of("orders").store.now()) > 30
    assert consume("b") == []


def test_consumers_are_independent(streams: Project) -> None:
    declare()
    publish(*range(5))
    assert consume(consumer="one", batch_size=2) == [0, 1]
    events = weft.consume_sync("orders", "two")
    weft.ack_sync("orders", "two", events)
    assert consume(consumer="one") == [0, 1, 2, 3, 4]
    assert consume(consumer="two") == []
    assert consume(consumer="three") == [0, 1, 2, 3, 4]


def test_streams_are_independent(streams: Project) -> None:
    declare("orders")
    declare("refunds")
    for name in ("orders", "refunds"):
        weft.publish_sync(name, [{"n": n} for n in range(3)])
    events = weft.consume_sync("orders", "worker")
    weft.ack_sync("orders", "worker", events)
    assert len(weft.consume_sync("refunds", "worker")) == 3


async def test_async(streams: Project) -> None:
    declare()
    await weft.publish("orders", [{"n": n} for n in range(5)])
    events = await weft.consume("orders", "worker", batch_size=3)
    assert [event["n"] for event in events] == [0, 1, 2]
    assert await weft.ack("orders", "worker", events[1:]) == 2
    again = await weft.consume("orders", "worker")
    assert [event["n"] for event in again] == [0, 3, 4]
    assert rowids(again)[0] == rowids(events)[0]
    assert await weft.nack("orders", "worker", again) == 3
    assert [group["pending"] for group in await weft.groups("orders")] == [3]
    await weft.reset("orders", "worker", to="end")
    assert await weft.consume("orders", "worker") == []


def test_a_batch_across_gaps(streams: Project) -> None:
    """Acknowledged events between others leave holes, which a batch skips."""
    declare()
    publish(*range(20))
    events = weft.consume_sync("orders", "worker", member="a")
    weft.ack_sync("orders", "worker", events[::2])
    assert consume("a") == [*range(1, 20, 2)]
    assert consume("a", batch_size=4) == [1, 3, 5, 7]


def test_bad_batch_size(streams: Project) -> None:
    declare()
    for wrong in (0, -1, 1.5, True, "5", None, 10**6):
        with pytest.raises(SettingsError, match="batch_size"):
            weft.consume_sync("orders", "worker", batch_size=wrong)  # type: ignore[arg-type]


def test_bad_seconds(streams: Project) -> None:
    declare()
    for wrong in (-1, "5", None, float("nan"), float("inf"), True):
        for option in ("lease", "wait"):
            with pytest.raises(SettingsError, match=option):
                weft.consume_sync("orders", "worker", **{option: wrong})  # type: ignore[arg-type]


def test_lease_of_nothing(streams: Project) -> None:
    declare()
    with pytest.raises(SettingsError, match="lease"):
        weft.consume_sync("orders", "worker", lease=0)


def test_unknown_stream(streams: Project) -> None:
    declare("orders")
    with pytest.raises(NotFoundError, match="Did you mean 'orders'"):
        weft.consume_sync("order", "worker")


@on_tables
def test_errors_are_raised(streams: Project, system: Any) -> None:
    """A database that fails is never an empty list."""
    declare()
    publish(0)
    assert consume() == [0]
    execute(system, f"ALTER TABLE {log_of('orders').store.groups} RENAME COLUMN position TO other")
    for _ in range(2):
        with pytest.raises(WeftError):
            weft.consume_sync("orders", "worker", member="a")
        with pytest.raises(WeftError):
            weft.consume_sync("orders", "other")


@on_tables
async def test_errors_are_raised_async(streams: Project, system: Any) -> None:
    declare()
    publish(0)
    execute(system, f"ALTER TABLE {log_of('orders').store.groups} RENAME COLUMN position TO other")
    with pytest.raises(WeftError):
        await weft.consume("orders", "worker", wait=5)


def test_unreachable(project: Any, streams: Project, system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = {
        "sqlite": f"sqlite:///{project}/a-file/x.db",
        "postgres": "postgresql://nobody:secret@127.0.0.1:1/x",
        "mysql": "mysql://nobody:secret@127.0.0.1:1/x",
        "redis": "redis://nobody:secret@127.0.0.1:1/0",
    }[system.kind]
    (project / "a-file").write_text("not a folder")
    monkeypatch.setenv("WEFT_DSN", nowhere)
    declare()
    for _ in range(2):
        with pytest.raises(weft.ConnectionFailedError) as caught:
            weft.consume_sync("orders", "worker")
        assert "secret" not in str(caught.value)


def test_another_connection(streams: Project, project: Any) -> None:
    elsewhere = weft.SQLiteConnection(str(project / "other.db"))
    declare()
    weft.publish_sync("orders", {"n": 1})
    weft.publish_sync("orders", {"n": 2}, connection=elsewhere)
    assert [event["n"] for event in weft.consume_sync("orders", "worker")] == [1]
    events = weft.consume_sync("orders", "worker", connection=elsewhere)
    assert [event["n"] for event in events] == [2]
    assert weft.ack_sync("orders", "worker", events, connection=elsewhere) == 1
    assert [group["pending"] for group in weft.groups_sync("orders", connection=elsewhere)] == [0]
    assert [group["pending"] for group in weft.groups_sync("orders")] == [1]
