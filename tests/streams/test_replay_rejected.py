"""A replay publishes quarantined events and dead letters to their streams, each once, wherever one ended before."""

from __future__ import annotations

import itertools
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

import weft
from weft import DeclarationError, NotFoundError, SettingsError
from weft.project import Project
from weft.streams.rejected import Replayed, group_id, purge_sync, replay_sync
from weft.streams.runtime import open_stream
from workers import declare, drain, plain, start, started

PLACE = "orders__quarantine"
_readers = map(str, itertools.count())


def held(name: str) -> list[dict[str, Any]]:
    """Everything that a stream has, as it was published."""
    return [plain(event) for event in drain(name, f"reader {next(_readers)}")]


def declare_orders(*more: str) -> None:
    declare(fields={"n": "int64", **dict.fromkeys(more, "string")}, on_schema_drift="quarantine")


def make_dead(*events: dict[str, Any], stream: str = "orders") -> None:
    weft.publish_sync(stream, list(events))
    weft.consume_sync(stream, "worker", member="a")
    assert weft.consume_sync(stream, "worker", member="a") == []


def test_quarantined_events(streams: Project) -> None:
    declare_orders()
    weft.publish_sync("orders", [{"n": 1}, {"n": 2, "colour": "red"}, {"n": "three"}, {"n": 4, "colour": "blue"}])
    declare_orders("colour")
    weft.publish_sync("orders", {"n": 5, "size": "L"})
    last = drain(PLACE, "reader")[-1]["_weft_rowid"]
    assert replay_sync(PLACE, before=last) == Replayed(replayed=2, refused=1)
    expected = [{"n": 1}, {"n": 2, "colour": "red"}, {"n": 4, "colour": "blue"}]
    assert held("orders") == expected
    # The one that does not fit is behind those that came meanwhile, with why it does not.
    later, back = held(PLACE)
    assert later["event"] == {"n": 5, "size": "L"}
    assert (back["event"], back["field"]) == ({"n": "three"}, "n")
    assert "it must be int64" in back["reason"]
    assert replay_sync(PLACE) == Replayed(refused=2)
    assert held("orders") == expected
    assert len(held(PLACE)) == 2
    declare_orders("colour", "size")
    assert replay_sync(PLACE, before=datetime(2020, 1, 1, tzinfo=UTC)) == Replayed()
    assert replay_sync(PLACE) == Replayed(replayed=1, refused=1)
    assert held("orders") == [*expected, {"n": 5, "size": "L"}]


def group_of(place: str, number: int) -> str:
    """The group of one of the events in a place."""
    return group_id(drain(place, f"reader {next(_readers)}")[number])


@pytest.mark.every_system
def test_one_group(streams: Project) -> None:
    """Those of a field and reason, wherever they are among others, whatever came meanwhile."""
    declare_orders()
    sizes = [{"n": n, "size": "L"} for n in range(150)]
    weft.publish_sync("orders", [each for n in range(150) for each in (sizes[n], {"n": f"not {n}"})])
    declare_orders("size")
    size, number = group_of(PLACE, 0), group_of(PLACE, 1)
    log = open_stream(PLACE).log
    head, half = log.head(), drain(PLACE, "half")[100]["_weft_rowid"]
    assert replay_sync(PLACE, group=size, before=half) == Replayed(replayed=50)
    assert held("orders") == sizes[:50]
    weft.publish_sync("orders", {"n": "late"})
    assert replay_sync(PLACE, group=size) == Replayed(replayed=100)
    assert held("orders") == sizes
    # The others are where they were.
    kept = drain(PLACE, "kept")
    assert [each["event"]["n"] for each in kept] == [*(f"not {n}" for n in range(150)), "late"]
    assert kept[149]["_weft_rowid"] == head
    # What still does not fit is put back into its group.
    assert replay_sync(PLACE, group=number, before=kept[2]["_weft_rowid"]) == Replayed(refused=2)
    assert [each["event"]["n"] for each in held(PLACE)][-3:] == ["late", "not 0", "not 1"]
    assert replay_sync(PLACE, group=size) == Replayed()
    weft.publish_sync("orders", {"n": 1, "colour": "red"})
    assert purge_sync(PLACE, group=number, before=kept[4]["_weft_rowid"]) == 2
    assert purge_sync(PLACE, group=number) == 149
    (left,) = held(PLACE)
    assert left["event"] == {"n": 1, "colour": "red"}
    assert purge_sync(PLACE) == 1
    assert held(PLACE) == []
    with pytest.raises(DeclarationError, match="orders holds no rejected events"):
        purge_sync("orders")
    assert held("orders") == sizes


def test_groups_of_several_streams_in_one_place(streams: Project) -> None:
    for name in ("orders", "refunds"):
        declare(name, max_deliveries=1, dead_letter="failed")
        make_dead({"n": name}, stream=name)
    orders, refunds = group_of("failed", 0), group_of("failed", 1)
    assert orders != refunds
    assert replay_sync("failed", group=orders) == Replayed(replayed=1)
    assert [each["stream"] for each in held("failed")] == ["refunds"]
    assert purge_sync("failed", group=orders) == 0
    assert purge_sync("failed", group=refunds) == 1


@pytest.mark.timing
def test_a_group_once_if_it_is_killed(streams: Project) -> None:
    """Between the publish and the removal: the next replay finds what was published, and removes exactly that."""
    declare_orders()
    weft.publish_sync("orders", [{"n": 1, "size": "L"}, {"n": "one"}, {"n": 2, "size": "M"}])
    size = group_of(PLACE, 0)
    killed = start(
        """
        import os, signal
        from weft.streams import rejected
        declare(fields={"n": "int64", "size": "string"}, on_schema_drift="quarantine")
        log = type(rejected.open_stream("orders__quarantine", to_read=True).log)
        log.remove = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        rejected.replay_sync("orders__quarantine", group=args[0])
        """,
        size,
    )
    with pytest.raises(AssertionError, match="status -9"):
        killed.answer()
    declare_orders("size")
    expected = [{"n": 1, "size": "L"}, {"n": 2, "size": "M"}]
    assert held("orders") == expected
    assert len(held(PLACE)) == 3
    assert replay_sync(PLACE, group=size) == Replayed(duplicates=2)
    assert held("orders") == expected
    assert [each["event"] for each in held(PLACE)] == [{"n": "one"}]


@pytest.mark.timing
@pytest.mark.parametrize("step", ["put back", "trim"])
def test_once_if_it_is_killed(streams: Project, step: str) -> None:
    """Between the publish and the removal, and if the next replay has another declaration, by which more events fit."""
    declare_orders("colour")
    bad = [{"n": n, "size": "L"} for n in range(3)]
    good = [{"n": n, "shape": "round"} for n in range(3, 6)]
    weft.publish_sync("orders", [each for pair in zip(bad, good, strict=True) for each in pair])
    last = drain(PLACE, "reader")[-1]["_weft_rowid"]
    killed = start(
        """
        import os, signal
        from weft.streams import rejected
        die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        declare(fields={"n": "int64", "colour": "string", "shape": "string"}, on_schema_drift="quarantine")
        if args[0] == "trim":
            type(rejected.open_stream("orders__quarantine", to_read=True).log).trim = die
        else:
            rejected._put_back = die
        rejected.replay_sync("orders__quarantine")
        """,
        step,
    )
    with pytest.raises(AssertionError, match="status -9"):
        killed.answer()
    declare_orders("colour", "shape", "size")
    assert held("orders") == good
    # What was decided stands: three were published, three did not fit.
    assert replay_sync(PLACE, before=last + 1) == Replayed(duplicates=3, refused=3)
    assert held("orders") == good
    assert [each["event"] for each in held(PLACE)] == bad
    assert replay_sync(PLACE) == Replayed(replayed=3)
    assert held("orders") == [*good, *bad]
    assert held(PLACE) == []


@pytest.mark.timing
def test_once_with_several_processes(streams: Project) -> None:
    declare_orders()
    events = [{"n": n, "colour": "red"} for n in range(350)]
    weft.publish_sync("orders", events)
    code = """
        from weft.streams.rejected import replay_sync
        declare(fields={"n": "int64", "colour": "string"}, on_schema_drift="quarantine")
        line()
        replay_sync("orders__quarantine")
    """
    with started(3, code) as runs:
        for run in runs:
            run.ready()
        for run in runs:
            run.tell()
        for run in runs:
            run.answer()
    assert sorted(held("orders"), key=lambda event: event["n"]) == events
    assert held(PLACE) == []


def test_events_whose_key_another_has(streams: Project) -> None:
    """The key wins, and the replay says so."""
    keyed: dict[str, Any] = {"idempotency_key": "id", "on_schema_drift": "quarantine"}
    declare(fields={"id": "int64", "n": "int64"}, **keyed)
    odd = [{"id": key, "n": n, "colour": "red"} for n, key in enumerate([7, 8, 8, 9, 9])]
    weft.publish_sync("orders", [*odd, {"id": 6, "n": "six"}])
    weft.publish_sync("orders", {"id": 8, "n": 99})
    declare(fields={"id": "int64", "n": "int64", "colour": "string"}, **keyed)
    assert replay_sync(PLACE) == Replayed(replayed=2, refused=1, duplicates=3)
    assert held("orders") == [{"id": 8, "n": 99}, odd[0], odd[3]]
    assert [each["event"]["id"] for each in held(PLACE)] == [6]


def test_dead_letters_of_a_stream_with_keys(streams: Project) -> None:
    """They are no duplicates of themselves, and every value comes back."""
    event = {
        "n": 1,
        "price": Decimal("1.500000000000000000"),
        "day": date(2026, 1, 31),
        "at": datetime(2026, 1, 31, tzinfo=UTC),
        "doc": {"a": [None, 0.1]},
        "raw": b"\x00\xff",
        "id": UUID(int=5),
        "huge": 2**70,
    }
    declare(fields={"n": "int64"}, idempotency_key="n", max_deliveries=1)
    make_dead(event, {"n": 2})
    assert replay_sync("orders__dead_letter") == Replayed(replayed=2)
    assert held("orders") == [event, {"n": 2}] * 2
    assert held("orders__dead_letter") == []
    # Its consumer gets it again, and may fail again.
    assert [each["n"] for each in weft.consume_sync("orders", "worker", member="a")] == [1, 2]
    assert weft.consume_sync("orders", "worker", member="a") == []
    assert replay_sync("orders__dead_letter") == Replayed(replayed=2)
    assert len(held("orders")) == 6


def test_a_dead_letter_without_all_of_its_event_stays(streams: Project) -> None:
    declare(max_deliveries=1)
    make_dead({"long": "é\x01" * 2_000_000}, {"n": 1})
    assert replay_sync("orders__dead_letter") == Replayed(replayed=1, refused=1)
    (letter,) = held("orders__dead_letter")
    assert "left out: 'long'" in letter["reason"]
    assert replay_sync("orders__dead_letter") == Replayed(refused=1)


def test_a_place_for_several_streams(streams: Project) -> None:
    declare("failed", fields={"reason": "string"})
    for name in ("orders", "refunds"):
        declare(name, max_deliveries=1, dead_letter="failed")
        make_dead({"n": name}, stream=name)
    weft.publish_sync("failed", {"reason": "published by hand"})
    with pytest.raises(NotFoundError, match="is not a rejected event of orders, refunds") as refused:
        replay_sync("failed")
    assert "weft streams trim failed --before" in str(refused.value.hint)
    assert held("orders") == [{"n": "orders"}] * 2
    assert held("refunds") == [{"n": "refunds"}] * 2
    assert held("failed") == [{"reason": "published by hand"}]


def test_what_is_refused(streams: Project) -> None:
    declare_orders()
    with pytest.raises(DeclarationError, match="orders holds no rejected events") as refused:
        replay_sync("orders")
    assert PLACE in str(refused.value.hint)
    assert replay_sync(PLACE) == Replayed()  # nothing was ever rejected
    with pytest.raises(SettingsError, match="before takes an offset"):
        replay_sync(PLACE, before="yesterday")
