"""A soak of windows: events in disorder, counted by user in windows of ten seconds; those that are late are dead
letters. Times are of the events, not of the clock: so it is known which row is in which window."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from soak_publisher import Events, publish

import weft

USERS, A_SECOND, SECONDS = 200, 200, 10
"""Users, steps of a second, and the seconds of a window."""
START = datetime(2026, 1, 1, tzinfo=UTC)


@weft.stream(fields={"n": "int64", "user": "int64", "at": "timestamp"})
def clicks() -> None:
    """Numbered events."""


@weft.streaming_pipeline(
    source=weft.Source(query=clicks, max_rows=5_000),
    target="default",
    target_table="counted",
    window=weft.Window(
        kind="tumbling",
        duration_ms=SECONDS * 1000,
        group_by="user",
        event_time_column="at",
        late_data="dlq",
        aggregations=[
            weft.Aggregation(agg="count", as_="clicks"),
            weft.Aggregation(agg="sum", column="n", as_="total"),
            weft.Aggregation(agg="max", column="n", as_="newest"),
            weft.Aggregation(
                agg="count_distinct", column="n", as_="numbers", mode="exact", max_distinct_values_per_group=100
            ),
        ],
    ),
    watermark=weft.Watermark(lateness_ms=5_000),
    dead_letter_stream="late",
    every="2s",
)
def soak() -> None:
    """The clicks of each user in ten seconds."""


def prepare(database: Any) -> None:
    """The stream is all that it needs."""


def is_late(n: int) -> bool:
    # Later than the first batch can reach: before a batch is committed, nothing is late.
    return n % 10_000 == 7_777


def second(n: int) -> float:
    """Return the time of an event: up to two and a half seconds before or after its turn, or an hour ago."""
    return (n ^ 511) / A_SECOND - (3600 if is_late(n) else 0)


def event(n: int) -> dict[str, Any]:
    return {"n": n, "user": n % USERS, "at": START + timedelta(seconds=second(n))}


def events(steps: Iterable[int]) -> Events:
    return {"clicks": [event(n) for n in steps]}


def last(steps: int) -> Events:
    """Return the event that closes all windows before it, but for its own."""
    return {"clicks": [{**event(steps), "at": START + timedelta(seconds=steps / A_SECOND + 60)}]}


def is_done(database: Any, steps: int) -> bool:
    return bool(database.execute("SELECT sum(clicks) FROM counted").fetchone()[0] >= steps - late(steps))


def late(steps: int) -> int:
    return sum(map(is_late, range(steps)))


def mistakes(database: Any, steps: int) -> list[str]:
    """Return what is not as it must be in the tables."""
    wanted: dict[tuple[datetime, int], list[int]] = defaultdict(list)
    for n in range(steps):
        if not is_late(n):
            wanted[START + timedelta(seconds=second(n) // SECONDS * SECONDS), n % USERS].append(n)
    rows = 'SELECT window_start, window_end, "user", clicks, total, newest, numbers FROM counted'
    counted = sorted(map(tuple, database.execute(rows).fetchall()))
    right = sorted(
        (start, start + timedelta(seconds=SECONDS), user, len(some), sum(some), max(some), len(some))
        for (start, user), some in wanted.items()
    )
    found = []
    if counted != right:
        odd = sorted(set(counted) ^ set(right))[:4]
        found.append(f"{len(counted):,} windows are not the {len(right):,} that there must be: {odd}")
    letters = database.execute("SELECT payload FROM events.late").fetchall() if late(steps) else []
    if sorted(json.loads(each)["n"] for (each,) in letters) != [n for n in range(steps) if is_late(n)]:
        found.append(f"the {len(letters)} dead letters are not the late events")
    return found


if __name__ == "__main__":
    publish(events, last)
