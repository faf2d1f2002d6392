"""`reset`: a consumer goes to the start, the end, an offset or a moment; what its members held is taken from them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

import weft
from servers import wait_until
from weft import LeaseLostError, SettingsError
from weft.project import Project
from weft.streams.runtime import open_stream
from workers import declare, drain, rowids


def take(**options: Any) -> list[int]:
    return [event["n"] for event in weft.consume_sync("orders", "worker", member="a", **options)]


@pytest.fixture
def offsets(streams: Project) -> list[int]:
    declare()
    for n in range(6):
        weft.publish_sync("orders", {"n": n})
    return rowids(drain("orders", "all"))


def test_start(offsets: list[int]) -> None:
    drain("orders", "worker")
    assert take() == []
    assert weft.reset_sync("orders", "worker", to="start") < offsets[0]
    assert take() == [0, 1, 2, 3, 4, 5]
    weft.reset_sync("orders", "worker")
    assert take(batch_size=2) == [0, 1]


def test_end(offsets: list[int]) -> None:
    assert weft.reset_sync("orders", "worker", to="end") == offsets[-1]
    assert take() == []
    weft.publish_sync("orders", {"n": 6})
    assert take() == [6]


def test_offset(offsets: list[int]) -> None:
    """The event of that offset is the next."""
    for index, offset in enumerate(offsets):
        weft.reset_sync("orders", "worker", to=offset)
        assert take() == list(range(index, 6))


def test_offsets_outside(offsets: list[int]) -> None:
    assert weft.reset_sync("orders", "worker", to=0) == 0
    assert take() == [0, 1, 2, 3, 4, 5]
    for beyond in (offsets[-1] + 1, offsets[-1] + 1000, 2**63 - 1, 2**70):
        assert weft.reset_sync("orders", "worker", to=beyond) == offsets[-1]
        assert take() == []
    weft.publish_sync("orders", {"n": 6})
    assert take() == [6]


def test_moment(streams: Project) -> None:
    declare()
    moments = []
    for n in range(4):
        weft.publish_sync("orders", {"n": n})
        moments.append(drain("orders", "all")[0]["_weft_published_at"])
        wait_until(lambda: datetime.now(UTC) - moments[-1] > timedelta(milliseconds=2), "the clock to go on")
    for n, moment in enumerate(moments):
        weft.reset_sync("orders", "worker", to=moment)
        assert take() == list(range(n, 4))
        weft.reset_sync("orders", "worker", to=moment + timedelta(microseconds=1))
        assert take() == list(range(n + 1, 4))
    weft.reset_sync("orders", "worker", to=moments[2].astimezone(timezone(timedelta(hours=7))))
    assert take() == [2, 3]
    weft.reset_sync("orders", "worker", to=moments[1].replace(tzinfo=None))
    assert take() == [1, 2, 3]
    weft.reset_sync("orders", "worker", to=datetime(1, 1, 1))
    assert take() == [0, 1, 2, 3]
    weft.reset_sync("orders", "worker", to=datetime(9999, 12, 31))
    assert take() == []


def test_bad_target(offsets: list[int]) -> None:
    wrong: list[Any] = ["", "START", "begin", "5.0", "-5", -1, 1.5, True, None, b"start", [1], timedelta(1)]
    assert take(batch_size=1) == [0]
    for to in wrong:
        with pytest.raises(SettingsError) as caught:
            weft.reset_sync("orders", "worker", to=to)
        for word in ("start", "end", "offset", "datetime"):
            assert word in str(caught.value)
    assert take(batch_size=2) == [0, 1]


def test_bad_consumer(offsets: list[int]) -> None:
    wrong: list[Any] = ["", 5, None, " x", "a\nb", "x" * 201]
    for consumer in wrong:
        with pytest.raises(SettingsError, match="consumer"):
            weft.reset_sync("orders", consumer, to="start")


def test_what_members_held_is_taken_from_them(offsets: list[int]) -> None:
    held = weft.consume_sync("orders", "worker", member="b", batch_size=3)
    weft.reset_sync("orders", "worker", to="start")
    with pytest.raises(LeaseLostError):
        weft.ack_sync("orders", "worker", held)
    with pytest.raises(LeaseLostError):
        weft.nack_sync("orders", "worker", held)
    assert take() == [0, 1, 2, 3, 4, 5]
    (group,) = [group for group in weft.groups_sync("orders") if group["consumer"] == "worker"]
    assert [member["member"] for member in group["members"]] == ["a"]


def test_other_consumers_do_not_notice(offsets: list[int]) -> None:
    held = weft.consume_sync("orders", "other", batch_size=3)
    weft.reset_sync("orders", "worker", to="end")
    assert weft.ack_sync("orders", "other", held) == 3
    assert [event["n"] for event in weft.consume_sync("orders", "other")] == [3, 4, 5]


def test_an_empty_stream(streams: Project) -> None:
    declare()
    for to in ("start", "end", 0, 5, datetime.now(UTC)):
        assert weft.reset_sync("orders", "worker", to=to) == 0
    weft.publish_sync("orders", {"n": 0})
    assert take() == [0]


def test_after_retention(offsets: list[int]) -> None:
    """No further back than what is left, and nothing counts as lost."""
    take(batch_size=1)
    weft.trim_sync("orders", before=offsets[3])
    for to in ("start", 0, 1, offsets[1], datetime(2000, 1, 1)):
        assert offsets[2] <= weft.reset_sync("orders", "worker", to=to) < offsets[3]
        assert take() == [3, 4, 5]
    weft.trim_sync("orders", max_rows=0)
    for to in ("start", "end", 0, offsets[1], offsets[5]):
        assert weft.reset_sync("orders", "worker", to=to) == offsets[5]
        assert take() == []
    weft.publish_sync("orders", {"n": 6})
    assert take() == [6]


async def test_a_waiting_consumer_goes_on_after_a_reset(offsets: list[int]) -> None:
    drain("orders", "worker")
    waiting = asyncio.create_task(weft.consume("orders", "worker", wait=30))
    watch = open_stream("orders").hub.watch
    await asyncio.to_thread(wait_until, lambda: watch._waiting == 1, "the consumer to wait")
    assert not waiting.done()
    await weft.reset("orders", "worker", to=offsets[4])
    assert [event["n"] for event in await waiting] == [4, 5]
