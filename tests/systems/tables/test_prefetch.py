"""What is read ahead in a thread: in order, bounded, with its errors, and ended with its user."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from weft.systems.sql.prefetch import prefetch


def test_in_order_and_bounded() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(50):
            made.append(number)
            yield number

    for number in prefetch(items, depth=2):
        time.sleep(0.001)
        # One is used, two wait, one is held by the thread.
        assert len(made) <= number + 4
    assert made == list(range(50))


def test_errors_come_after_what_came_before_them() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    found = prefetch(items)
    assert next(found) == 1
    with pytest.raises(ValueError, match="broken"):
        next(found)


def test_who_stops_early_ends_the_thread() -> None:
    closed, cancelled = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        try:
            yield 1
            yield 2
            # A query that takes long.
            cancelled.wait(60)
            yield 3
        finally:
            closed.set()

    found = prefetch(items, depth=5, cancel=cancelled.set)
    assert next(found) == 1
    found.close()  # type: ignore[attr-defined]
    assert closed.is_set()
    assert not any(thread.name == "weft-read-ahead" for thread in threading.enumerate())
