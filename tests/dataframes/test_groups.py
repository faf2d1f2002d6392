"""Groups: every entry reaches one consumer, and is acknowledged only after it was made into a frame."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import polars as pl
import pytest

import weft
from consumers.cutter import Cutter
from weft.errors import ConnectionFailedError, MissingExtraError, NotFoundError, SchemaError, SettingsError
from weft.systems.redis import scripts

Add = Callable[..., list[str]]


def read(url: str, consumer: str = "worker-1", **options: Any) -> Any:
    return weft.read_stream(url, "events", group="analytics", consumer=consumer, **options)


def pending(client: Any) -> int:
    found: int = client.xpending("events", "analytics")["pending"]
    return found


def test_two_consumers_share_all_entries(url: str, add: Add, client: Any) -> None:
    ids = add("events", *({"n": i} for i in range(250)))
    seen: list[str] = []
    for number in range(3):
        for consumer in ("worker-1", "worker-2"):
            frame = read(url, consumer, count=50, auto_ack=True)
            assert len(frame) == (50 if number < 2 or consumer == "worker-1" else 0)
            seen += frame["_id"].to_list()
    assert seen == ids
    assert pending(client) == 0


def test_without_a_count_all_that_is_there(url: str, add: Add, client: Any) -> None:
    ids = add("events", *({"n": i} for i in range(12_000)))
    assert read(url)["_id"].to_list() == ids
    assert pending(client) == 12_000
    assert len(read(url)) == 0


def test_acknowledging_by_hand(url: str, add: Add, client: Any) -> None:
    ids = add("events", *({"n": i} for i in range(6_000)))
    frame = read(url)
    assert weft.ack_entries(url, "events", "analytics", [ids[0].encode()]) == 1
    with pytest.raises(SettingsError, match="a list of ids"):
        weft.ack_entries(url, "events", "analytics", ids[1])
    assert weft.ack_entries(url, "events", "analytics", frame["_id"]) == len(ids) - 1
    assert weft.ack_entries(url, "events", "analytics", frame.to_arrow()["_id"]) == 0
    assert weft.ack_entries(url, "events", "analytics", []) == 0
    assert pending(client) == 0


@pytest.mark.parametrize("on_error", ["raise", "null", "quarantine"])
def test_acknowledged_only_once_there_is_a_frame(url: str, add: Add, client: Any, on_error: Any) -> None:
    ids = add("events", {"n": 1}, {"n": "one"}, {"n": 3})
    options = {"schema": {"n": pl.Int64}, "auto_ack": True, "on_error": on_error}
    if on_error == "raise":
        with pytest.raises(SchemaError, match=f"{ids[1]}.*\n.*only reads with claim_idle"):
            read(url, **options)
        assert pending(client) == 3
        return
    assert read(url, **options)["n"].to_list() == ([1, None, 3] if on_error == "null" else [1, 3])
    assert pending(client) == 0
    assert client.xlen("events__quarantine") == (on_error == "quarantine")


def test_what_is_put_aside_is_acknowledged_without_auto_ack_too(url: str, add: Add, client: Any) -> None:
    ids = add("events", {"n": 1}, {"n": "one"})
    frame = read(url, schema={"n": pl.Int64}, on_error="quarantine")
    assert frame["_id"].to_list() == ids[:1]
    assert [each["message_id"].decode() for each in client.xpending_range("events", "analytics", "-", "+", 10)] == ids[
        :1
    ]


def test_older_entries_are_put_aside_after_newer_ones(url: str, add: Add, client: Any) -> None:
    ids = add("events", {"n": "one"}, {"n": "two"})
    weft.read_stream(url, "events", start_id=ids[1], schema={"n": pl.Int64}, on_error="quarantine")
    weft.read_stream(url, "events", schema={"n": pl.Int64}, on_error="quarantine")
    for _ in range(2):  # read again, they are not put aside again
        weft.read_stream(url, "events", schema={"n": pl.Int64}, on_error="quarantine")
    sources = [fields[b"_weft_entry"].decode() for _, fields in client.xrange("events__quarantine")]
    assert sorted(sources) == ids


def test_the_answer_of_the_quarantine_is_lost(url: str, add: Add, client: Any, cutter: Cutter) -> None:
    ids = add("events", {"n": "one"}, {"n": "two"})
    weft.read_stream(url, "events", start_id=ids[1], schema={"n": pl.Int64}, on_error="quarantine")
    # The first one gets a new id, in the second try: what is older than the newest is refused.
    cutter.cut, cutter.passes = b"XADD", 1
    weft.read_stream(cutter.url, "events", schema={"n": pl.Int64}, on_error="quarantine")
    assert cutter.cuts == 1
    sources = [fields[b"_weft_entry"].decode() for _, fields in client.xrange("events__quarantine")]
    assert sorted(sources) == ids


def test_a_frame_that_cannot_be_made_is_not_acknowledged(url: str, add: Add, client: Any) -> None:
    add("events", {"colour": "red"})
    with pytest.raises(SchemaError, match="'red', which is no category"):
        read(url, schema={"colour": pl.Enum(["green"])}, auto_ack=True, on_error="raise")
    assert pending(client) == 1


@pytest.mark.parametrize("to", ["polars", "pandas"])
def test_a_package_that_is_not_installed(url: str, add: Add, client: Any, to: Any) -> None:
    """It is missed before anything is delivered."""
    add("events", {"n": 1})
    client.xgroup_create("events", "analytics", "0")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MissingExtraError, match=f"pip install {to}"):
        patch.setitem(sys.modules, to, None)
        read(url, to=to)
    assert pending(client) == 0


def test_claiming_what_another_left(url: str, add: Add, client: Any) -> None:
    ids = add("events", *({"n": i} for i in range(10)))
    assert len(read(url, "gone")) == 10
    client.xdel("events", ids[3])
    assert len(read(url, "worker-2", claim_idle=60_000)) == 0
    frame = read(url, "worker-2", claim_idle=0, include_delivery=True, auto_ack=True)
    assert frame["_id"].to_list() == [each for each in ids if each != ids[3]]
    assert frame["_deliveries"].to_list() == [2] * 9
    assert pending(client) == 0  # the deleted one too is no longer anybody's
    add("events", {"n": 11})
    assert read(url, "worker-2", claim_idle=0, include_delivery=True)["_deliveries"].to_list() == [1]


def test_claimed_ones_first_and_then_new_ones(url: str, add: Add) -> None:
    old = add("events", *({"n": i} for i in range(5)))
    read(url, "gone")
    new = add("events", *({"n": i} for i in range(5)))
    assert read(url, "worker-2", claim_idle=0)["_id"].to_list() == old + new


def test_where_a_group_starts(url: str, add: Add, client: Any) -> None:
    ids = add("events", *({"n": i} for i in range(3)))

    def first_read(group: str, **options: Any) -> list[str]:
        found: list[str] = weft.read_stream(url, "events", group=group, consumer="c", **options)["_id"].to_list()
        return found

    assert first_read("all") == ids
    assert first_read("from", start_id=ids[1]) == ids[1:]
    assert first_read("after", start_id=f"({ids[1]}") == ids[2:]
    assert first_read("new", start_id="$") == []
    with pytest.raises(NotFoundError, match=r"(?s)'other'.*create_group"):
        first_read("other", create_group=False)
    client.xgroup_create("events", "made", "0")
    assert first_read("made", create_group=False) == ids
    assert first_read("made") == []  # a group that is there stays where it is


def test_a_stream_that_is_not_there_yet(url: str, later: Callable[..., None], add: Add) -> None:
    assert len(read(url)) == 0
    later(add, "events", {"n": 1})
    assert len(read(url, block_ms=60_000)) == 1


def test_types_of_an_empty_read(url: str) -> None:
    frame = read(url, schema={"n": pl.Int64}, include_delivery=True)
    assert frame.schema == {"_id": pl.String, "_ts": pl.Int64, "_deliveries": pl.Int64, "n": pl.Int64}


@pytest.mark.full
def test_claiming_does_not_give_what_this_read_was_given(url: str, add: Add) -> None:
    ids = add("events", *({"n": i} for i in range(60_000)))
    assert sorted(read(url, claim_idle=0)["_id"].to_list()) == sorted(ids)


def test_a_group_at_the_end_that_vanished_begins_where_it_began(url: str, add: Add, client: Any) -> None:
    add("events", {"n": 0})
    options = {"group": "analytics", "consumer": "worker-1", "start_id": "$", "block_ms": 100, "yield_on_idle": True}
    with weft.iter_stream(url, "events", **options) as batches:
        assert len(next(batches)) == 0
        client.xgroup_destroy("events", "analytics")
        ids = add("events", *({"n": i} for i in range(1, 6)))
        assert next(batches)["_id"].to_list() == ids


# --------------------------------------------------------------------------------------------- what others left behind


def hold(client: Any, name: str, *, idle: int) -> None:
    """Be given all that there is, and do nothing for so long."""
    client.xgroup_create("events", "analytics", "0")
    ids = [found for _, entries in client.xreadgroup("analytics", name, {"events": ">"}) for found, _ in entries]
    client.xclaim("events", "analytics", name, 0, ids, idle=idle, justid=True)


async def test_what_consumers_gave_back(url: str, add: Add, client: Any) -> None:
    ids = add("events", *({"n": i} for i in range(10)))
    async with (
        weft.Redis.from_url(url) as redis,
        redis.xconsumer(streams=["events"], group="analytics", consumer="a", buffer_size=20) as consumer,
    ):
        await consumer.ack(await consumer.get_entry())
    new = add("events", {"n": 10})
    frame = read(url, auto_ack=True, include_delivery=True)
    assert frame["_id"].to_list() == ids[1:] + new
    assert frame["_deliveries"].to_list() == [1] * 10  # nobody saw them before
    assert pending(client) == 0


async def test_what_was_given_back_does_not_come_as_idle_too(url: str, add: Add) -> None:
    ids = add("events", *({"n": i} for i in range(6)))
    async with (
        weft.Redis.from_url(url) as redis,
        redis.xconsumer(streams=["events"], group="analytics", consumer="a", buffer_size=20) as consumer,
    ):
        await consumer.nack((await consumer.get_batch())[1:4])
    assert read(url, claim_idle=0)["_id"].to_list() == ids[1:4] + ids[:1] + ids[4:]


async def test_what_consumers_give_back_while_it_iterates(url: str, add: Add) -> None:
    ids = add("events", {"n": 0})
    batches = weft.iter_stream(url, "events", group="analytics", consumer="b", block_ms=10, yield_on_idle=True)
    async with (
        weft.Redis.from_url(url) as redis,
        redis.xconsumer(streams=["events"], group="analytics", consumer="a") as consumer,
    ):
        pair = await consumer.get_entry()
        with batches:
            assert len(next(batches)) == 0
            await consumer.nack(pair)
            assert next(frame for frame in batches if len(frame))["_id"].to_list() == ids


@pytest.mark.timing
@pytest.mark.parametrize("how", ["released", "idle"])
def test_what_others_leave_while_a_read_waits(
    url: str, add: Add, client: Any, later: Callable[..., None], how: str
) -> None:
    """Nobody announces it."""
    ids = add("events", *({"n": i} for i in range(3)))
    hold(client, "other", idle=0)
    name, idle = ("weft:given-back", 0) if how == "released" else ("other", 7_200_000)
    leave = partial(client.xclaim, "events", "analytics", name, 0, ids, idle=idle, justid=True)
    later(leave, when_blocked=True)
    assert read(url, block_ms=60_000, claim_idle=3_600_000)["_id"].to_list() == ids


def test_entries_that_are_deleted_before_they_are_acknowledged(
    url: str, add: Add, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ids = add("events", *({"n": i} for i in range(3)))
    hold(client, "dead", idle=1000)
    client.xdel("events", *ids[:2])
    assert read(url, claim_idle=1000)["_id"].to_list() == ids[2:]
    assert "2 entries of 'events' were deleted before they were acknowledged" in caplog.text


@pytest.mark.parametrize("ids", [None, 5, "5-0", ["x"], [None], ["5-0", "$"], pl.DataFrame({"_id": ["5-0"]})])
def test_what_cannot_be_acknowledged(url: str, ids: Any) -> None:
    with pytest.raises(SettingsError, match=r"entry_ids|not the id"):
        weft.ack_entries(url, "events", "analytics", ids)
    for group in ("", None):
        with pytest.raises(SettingsError, match="group"):
            weft.ack_entries(url, "events", group, ["5-0"])  # type: ignore[arg-type]


def test_acknowledgements_share_a_connection(url: str, add: Add, client: Any) -> None:
    ids = add("events", *({"n": i} for i in range(20)))
    read(url)
    before = client.info("stats")["total_connections_received"]
    assert [weft.ack_entries(url, "events", "analytics", [each]) for each in ids] == [1] * 20
    assert client.info("stats")["total_connections_received"] <= before + 1
    # One that the server ended is opened again.
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert weft.ack_entries(url, "events", "analytics", ids) == 0


def test_what_was_claimed_and_is_in_hand_does_not_come_again(url: str, add: Add, client: Any, cutter: Cutter) -> None:
    ids = add("events", *({"n": i} for i in range(5)))
    hold(client, "dead", idle=7_200_000)
    options: dict[str, Any] = {"group": "analytics", "consumer": "c", "claim_idle": 3_600_000, "block_ms": 10}
    with weft.iter_stream(cutter.url, "events", yield_on_idle=True, **options) as batches:
        assert next(batches)["_id"].to_list() == ids
        new = add("events", {"n": 5})
        cutter.cut = b"XREADGROUP"
        assert next(batches)["_id"].to_list() == new
        assert cutter.cuts == 1
        assert len(next(batches)) == 0


@pytest.mark.parametrize("script", ["member_pending", "member_take"])
def test_a_reply_about_idle_entries_is_lost(url: str, add: Add, client: Any, cutter: Cutter, script: str) -> None:
    """Once claimed they are idle no more: who just asks again gets nothing, and they are hidden for an hour."""
    ids = add("events", *({"n": i} for i in range(5)))
    hold(client, "dead", idle=7_200_000)
    text, digest = scripts.source(script)
    client.script_load(text)
    cutter.cut = digest.encode()
    frame = read(cutter.url, claim_idle=3_600_000, include_delivery=True)
    assert cutter.cuts == 1
    assert frame["_id"].to_list() == ids
    assert frame["_deliveries"].to_list() == [2] * 5


@pytest.mark.parametrize("create_group", [True, False])
def test_the_first_reply_is_lost(url: str, add: Add, client: Any, cutter: Cutter, create_group: bool) -> None:
    """What this consumer was given in an earlier life stays as it was: nobody asked for it."""
    add("events", {"n": 0})
    hold(client, "worker-1", idle=0)
    ids = add("events", {"n": 1}, {"n": 2})
    client.xdel("events", ids[0])
    ids += add("events", {"n": 3})
    cutter.cut = b"XREADGROUP"
    assert read(cutter.url, create_group=create_group, count=5)["_id"].to_list() == ids[1:]
    assert cutter.cuts == 1


def test_entries_of_a_lost_reply_that_are_deleted(url: str, add: Add, client: Any) -> None:
    """They are passed over, and what follows them is not."""
    with weft.iter_stream(url, "events", batch_size=2, group="analytics", consumer="c", block_ms=10) as batches:
        add("events", {"n": 0})
        next(batches)
        ids = add("events", *({"n": i} for i in range(4)))
        client.xreadgroup("analytics", "c", {"events": ">"})  # as the request whose reply is lost does
        client.xdel("events", *ids[:2])
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert next(batches)["_id"].to_list() == ids[2:]
    assert pending(client) == 3


# --------------------------------------------------------------------------------- acknowledgements that are refused


@pytest.fixture
def without_xack(url: str, client: Any) -> Iterator[str]:
    client.execute_command("ACL", "SETUSER", "reader", "on", ">hunter2", "~*", "+@all", "-xack")
    yield url.replace("redis://", "redis://reader:hunter2@")
    client.execute_command("ACL", "DELUSER", "reader")


def test_a_user_who_may_not_acknowledge(without_xack: str, add: Add, client: Any) -> None:
    add("events", *({"n": i} for i in range(10)))
    with pytest.raises(ConnectionFailedError, match=r"(?s)xack.*'events'.*ACL") as caught:
        read(without_xack, auto_ack=True)
    assert "hunter2" not in str(caught.value)
    assert pending(client) == 10


@pytest.mark.parametrize("how", ["next", "leave", "end"])
def test_an_iteration_whose_acknowledgements_are_refused(without_xack: str, add: Add, how: str) -> None:
    ids = add("events", *({"n": i} for i in range(30)))
    options: dict[str, Any] = {"group": "analytics", "consumer": "c", "batch_size": 10, "auto_ack": True}
    seen: list[str] = []
    with (
        pytest.raises(ConnectionFailedError, match="xack"),
        weft.iter_stream(without_xack, "events", count=10 if how == "end" else None, **options) as batches,
    ):
        for frame in batches:
            seen += frame["_id"].to_list()
            if how == "leave":
                break
    # What came with the answer is handed over first.
    assert seen == ids[: 20 if how == "next" else 10]


async def test_an_asynchronous_iteration_whose_acknowledgements_are_refused(without_xack: str, add: Add) -> None:
    add("events", {"n": 1})
    options: dict[str, Any] = {"group": "analytics", "consumer": "c", "auto_ack": True}
    with pytest.raises(ConnectionFailedError, match="xack"):
        async with weft.iter_stream_async(without_xack, "events", **options) as batches:
            await anext(batches)


def test_another_error_is_not_replaced(without_xack: str, add: Add, caplog: pytest.LogCaptureFixture) -> None:
    add("events", {"n": 1})
    options: dict[str, Any] = {"group": "analytics", "consumer": "c", "auto_ack": True}
    with pytest.raises(ZeroDivisionError), weft.iter_stream(without_xack, "events", **options) as batches:
        next(batches)
        raise ZeroDivisionError
    assert "xack" in caplog.text
