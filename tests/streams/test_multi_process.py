"""Several processes on one stream, embedded databases included: complete, disjoint, in each publisher's order."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import weft
from weft.project import Project
from workers import declare, drain, rowids, started

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
    batches = []
    while True:
        finished = os.path.exists(args[1])
        events = weft.consume_sync("orders", args[2].format(args[0]), batch_size=23, wait=0.1)
        weft.ack_sync("orders", args[2].format(args[0]), events)
        if not events and finished:
            break
        batches.append([(event["publisher"], event["n"], event["_weft_rowid"]) for event in events])
    answer(batches)
"""


def run(consumers: str, done: Path) -> tuple[int, list[list[tuple[int, int, int]]]]:
    """How many events there were, and what each consuming process got, in order."""
    with contextlib.ExitStack() as stack:
        publishing = stack.enter_context(started(3, PUBLISHER))
        consuming = stack.enter_context(started(3, CONSUMER, str(done), consumers))
        for process in (*publishing, *consuming):
            process.ready()
        for process in (*publishing, *consuming):
            process.tell()
        published = sum(process.answer() for process in publishing)
        done.touch()
        answers = [[event for batch in process.answer() for event in batch] for process in consuming]
    return published, answers


def in_order(events: list[tuple[int, int, int]]) -> bool:
    """Whether each publisher's events are in the order in which it published them."""
    by_publisher: dict[int, list[int]] = {}
    for publisher, n, _ in events:
        by_publisher.setdefault(publisher, []).append(n)
    return all(numbers == sorted(numbers) for numbers in by_publisher.values())


def expected() -> list[tuple[int, int]]:
    return [(publisher, n) for publisher in range(3) for n in range(500)]


def test_processes_that_share_a_consumer(streams: Project, tmp_path: Path) -> None:
    declare(fields={"publisher": "int64", "n": "int64"})
    published, answers = run("workers", tmp_path / "done")
    assert published == 1500
    together = [event for each in answers for event in each]
    assert sorted((publisher, n) for publisher, n, _ in together) == expected()  # complete, and none twice
    assert in_order(sorted(together, key=lambda event: event[2]))
    for each in answers:
        assert [rowid for _, _, rowid in each] == sorted(rowid for _, _, rowid in each)
    (group,) = weft.groups_sync("orders")
    assert (group["lag"], group["pending"], group["lost"], group["members"]) == (0, 0, 0, [])


def test_processes_with_consumers_of_their_own(streams: Project, tmp_path: Path) -> None:
    """Each gets everything, in the same order, while it is published."""
    declare(fields={"publisher": "int64", "n": "int64"})
    published, answers = run("worker {}", tmp_path / "done")
    assert published == 1500
    assert sorted((publisher, n) for publisher, n, _ in answers[0]) == expected()
    assert in_order(answers[0])
    assert answers[0] == answers[1] == answers[2]
    assert [rowid for _, _, rowid in answers[0]] == rowids(drain("orders"))


def test_processes_that_create_the_stream_together(streams: Project) -> None:
    """All of them at once are the first, and each brings columns of its own."""
    code = """
        declare()
        line()
        for n in range(5):
            weft.publish_sync("orders", {"all": n, f"own_{args[0]}": n, f"same_{n}": str(n)})
    """
    with started(4, code) as processes:
        for process in processes:
            process.ready()
        for process in processes:
            process.tell()
        for process in processes:
            process.answer()
    declare()
    events: list[dict[str, Any]] = drain("orders")
    assert len(events) == 20
    for number in range(4):
        own = [event for event in events if event[f"own_{number}"] is not None]
        assert [(event["all"], event[f"own_{number}"]) for event in own] == [(n, n) for n in range(5)]
        assert all(event[f"same_{event['all']}"] == str(event["all"]) for event in own)
