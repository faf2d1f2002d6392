"""Groups: every entry reaches one consumer, and is acknowledged only after it was made into a frame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

import weft
from weft.errors import NotFoundError, SchemaError

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
    assert weft.ack_entries(url, "events", "analytics", frame["_id"].to_list()[:1]) == 1
    assert weft.ack_entries(url, "events", "analytics", frame["_id"]) == len(ids) - 1
    assert weft.ack_entries(url, "events", "analytics", frame.to_arrow()["_id"]) == 0
    assert weft.ack_entries(url, "events", "analytics", []) == 0
    assert pending(client) == 0


@pytest.mark.parametrize("on_error", ["raise", "null", "quarantine"])
def test_acknowledged_only_once_there_is_a_frame(url: str, add: Add, client: Any, on_error: Any) -> None:
    ids = add("events", {"n": 1}, {"n": "one"}, {"n": 3})
    options = {"schema": {"n": pl.Int64}, "auto_ack": True, "on_error": on_error}
    if on_error == "raise":
        with pytest.raises(SchemaError, match=ids[1]):
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
    sources = [fields[b"_weft_entry"].decode() for _, fields in client.xrange("events__quarantine")]
    assert sorted(sources) == ids


def test_a_frame_that_cannot_be_made_is_not_acknowledged(url: str, add: Add, client: Any) -> None:
    add("events", {"colour": "red"})
    with pytest.raises(pl.exceptions.PolarsError):
        read(url, schema={"colour": pl.Enum(["green"])}, auto_ack=True)
    assert pending(client) == 1


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
