"""Several processes on one stream, embedded databases included: complete, disjoint, in each publisher's order."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.project import Project
from workers import declare, drain, started

pytestmark = pytest.mark.timing

PUBLISHER = """
    declare(fields={"publisher": "int64", "n": "int64"})
    line()
    n = 0
    for size in [1, 30, 7, 1, 1, 60] * 5:
        weft.publish_sync("orders", [{"publisher": args[0], "n": n + k} for k in range(size)])
        n += size
    answer(n)
"""
CONSUMER = """
    import os
    declare(fields={"publisher": "int64", "n": "int64"})
    line()
    consumed = []
    while True:
        finished = os.path.exists(args[1])
        events = weft.consume_sync("orders", "workers", batch_size=23, wait=0.1)
        weft.ack_sync("orders", "workers", events)
        if not events and finished:
            break
        consumed += [(event["publisher"], event["n"], event["_weft_rowid"]) for event in events]
    answer(consumed)
"""


def run(done: Path) -> tuple[int, list[list[tuple[int, int, int]]]]:
    """How many events there were, and what each consuming process got, in order."""
    with contextlib.ExitStack() as stack:
        publishing = stack.enter_context(started(3, PUBLISHER))
        consuming = stack.enter_context(started(3, CONSUMER, str(done)))
        for process in (*publishing, *consuming):
            process.ready()
        for process in (*publishing, *consuming):
            process.tell()
        published = sum(process.answer() for process in publishing)
        done.touch()
        return published, [process.answer() for process in consuming]


def in_order(events: list[tuple[int, int, int]]) -> bool:
    """Whether each publisher's events are in the order in which it published them."""
    by_publisher: dict[int, list[int]] = {}
    for publisher, n, _ in events:
        by_publisher.setdefault(publisher, []).append(n)
    return all(numbers == sorted(numbers) for numbers in by_publisher.values())


@pytest.mark.full
def test_processes_share_a_stream(streams: Project, tmp_path: Path) -> None:
    declare(fields={"publisher": "int64", "n": "int64"})
    published, answers = run(tmp_path / "done")
    assert published == 1500
    together = sorted((event for each in answers for event in each), key=lambda event: event[2])
    # Complete, and none twice.
    assert sorted((publisher, n) for publisher, n, _ in together) == [(k, n) for k in range(3) for n in range(500)]
    assert in_order(together)
    for each in answers:
        assert [rowid for _, _, rowid in each] == sorted(rowid for _, _, rowid in each)
    (group,) = weft.groups_sync("orders")
    assert (group["lag"], group["pending"], group["lost"], group["members"]) == (0, 0, 0, [])
    # A consumer of its own gets all of it once more.
    assert [(event["publisher"], event["n"], event["_weft_rowid"]) for event in drain("orders")] == together


def test_processes_that_create_the_stream_together(streams: Project) -> None:
    """All of them at once are the first, and each brings columns of its own."""
    code = """
        declare()
        line()
        for n in range(5):
            weft.publish_sync("orders", {"all": n, f"own_{args[0]}": n, f"same_{n}": str(n)})
    """
    with started(3, code) as processes:
        for process in processes:
            process.ready()
        for process in processes:
            process.tell()
        for process in processes:
            process.answer()
    declare()
    events: list[dict[str, Any]] = drain("orders")
    assert len(events) == 15
    for number in range(3):
        own = [event for event in events if event[f"own_{number}"] is not None]
        assert [(event["all"], event[f"own_{number}"]) for event in own] == [(n, n) for n in range(5)]
        assert all(event[f"same_{event['all']}"] == str(event["all"]) for event in own)
