"""Publishes events at a steady rate, until its stdin ends; then prints how many steps there were."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import weft

Events = Mapping[str, list[dict[str, Any]]]
"""Events by the name of their stream."""


def publish(events: Callable[[Iterable[int]], Events], last: Callable[[int], Events] | None = None) -> None:
    """Publish the events of each step, and in the end those that `last` returns for the number of steps."""
    rate, ended = float(sys.argv[1]), threading.Event()

    def listen() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    steps, began = 0, time.monotonic()
    while not ended.wait(0.1):
        due = range(steps, int((time.monotonic() - began) * rate))
        if due:
            _publish(events(due))
            steps = due.stop
    if last is not None:
        _publish(last(steps))
    print(steps, flush=True)


def _publish(events: Events) -> None:
    for stream, some in events.items():
        if some:
            weft.publish_sync(stream, some)
