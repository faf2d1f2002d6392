"""Requests to a service that takes so much at a time, and refuses for now what comes too often."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0


class Retries:
    """The tries of one request."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._wait = _FIRST_WAIT

    def pause(self, error: Exception, patience: float) -> None:
        """Wait before the next try; raise the error once the tries took so many seconds. Each wait is longer than the
        one before it, and differs between processes, so that they do not all come back at once."""
        if time.monotonic() - self._began >= patience:
            raise error from None
        time.sleep(self._wait * random.uniform(0.5, 1.0))
        self._wait = min(2 * self._wait, _LONGEST_WAIT)


def chunks(items: Iterable[T], size_of: Callable[[T], int], most: int, most_bytes: int) -> Iterator[list[T]]:
    """Yield items in order, as many at a time as one request takes."""
    chunk: list[T] = []
    size = 0
    for each in items:
        length = size_of(each)
        if len(chunk) == most or (chunk and size + length > most_bytes):
            yield chunk
            chunk, size = [], 0
        chunk.append(each)
        size += length
    if chunk:
        yield chunk
