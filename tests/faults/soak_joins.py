"""A soak of a join: orders, and their payments three seconds later in some disorder. Of ten orders one has no payment,
one has two, and one has one that comes too late. Times are of the events, not of the clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from soak_publisher import Events, publish

import weft

A_SECOND, LATER = 200, 600
"""Steps of a second, and how many steps after its order a payment comes."""
START = datetime(2026, 1, 1, tzinfo=UTC)


@weft.stream(fields={"n": "int64", "at": "timestamp"})
def orders() -> None:
    """Numbered orders."""


@weft.stream(fields={"order_n": "int64", "step": "int64", "at": "timestamp"})
def payments() -> None:
    """Their payments."""


@weft.streaming_pipeline(
    sources=[weft.Source(query=orders, max_rows=5_000), weft.Source(query=payments, max_rows=5_000)],
    target="default",
    target_table="paid",
    join=weft.Join(
        left_source="orders",
        right_source="payments",
        left_keys=["n"],
        right_keys=["order_n"],
        kind="left_outer",
        left_event_time_column="at",
        right_event_time_column="at",
        time_window_ms=10_000,
    ),
    watermark=weft.Watermark(lateness_ms=5_000),
    every="2s",
)
def soak() -> None:
    """Each order with its payments."""


def prepare(database: Any) -> None:
    """The streams are all that it needs."""


def paid_order(step: int) -> int | None:
    """Return the order whose payment comes in a step."""
    order = (step - LATER) ^ 63
    return None if step < LATER or order % 10 == 0 else order


def events(steps: Iterable[int]) -> Events:
    published: Events = {"orders": [], "payments": []}
    for step in steps:
        at = START + timedelta(seconds=step / A_SECOND)
        published["orders"].append({"n": step, "at": at})
        order = paid_order(step)
        if order is not None:
            # Further from its order than a pair may be.
            at += timedelta(seconds=60 if order % 10 == 2 else 0)
            payment = {"order_n": order, "step": step, "at": at}
            published["payments"] += [payment] * (2 if order % 10 == 1 else 1)
    return published


def last(steps: int) -> Events:
    """Return events for which no order has to wait any longer, but for this one."""
    at = START + timedelta(seconds=steps / A_SECOND + 120)
    return {"orders": [{"n": steps, "at": at}], "payments": [{"order_n": -1, "step": steps, "at": at}]}


def is_done(database: Any, steps: int) -> bool:
    return bool(database.execute("SELECT count(DISTINCT left_n) FROM paid").fetchone()[0] >= steps)


def mistakes(database: Any, steps: int) -> list[str]:
    """Return what is not as it must be in the table."""
    wanted: dict[int, list[int | None]] = defaultdict(list)
    for step in range(steps):
        order = paid_order(step)
        if order is not None and order % 10 != 2:
            wanted[order] += [step] * (2 if order % 10 == 1 else 1)
    right = {order: wanted.get(order, [None]) for order in range(steps)}
    paid: dict[int, list[int | None]] = defaultdict(list)
    for order, step in database.execute("SELECT left_n, right_step FROM paid").fetchall():
        paid[order].append(step)
    odd = [each for each in right.keys() | paid.keys() if right.get(each) != paid.get(each)]
    return [f"{len(odd):,} orders do not have their payments: {[(n, paid.get(n)) for n in odd[:4]]}"] if odd else []


if __name__ == "__main__":
    publish(events, last)
