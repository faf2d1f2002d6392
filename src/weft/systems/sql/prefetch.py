"""Reading ahead in a thread: the next item is read while the last one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_DONE = object()


def prefetch(
    make: Callable[[], Iterator[T]], *, depth: int = 2, cancel: Callable[[], None] = lambda: None
) -> Iterator[T]:
    """Yield the items of an iterator, read at most `depth` ahead. One thread makes, uses and closes it.

    A caller that stops early waits for that thread; `cancel` is called to end what the thread may be waiting for.
    """
    items: queue.Queue[Any] = queue.Queue(depth)
    stopped = threading.Event()
    failures: list[BaseException] = []

    def put(item: object) -> bool:
        while not stopped.is_set():
            with suppress(queue.Full):
                items.put(item, timeout=0.1)
                return True
        return False

    def work() -> None:
        try:
            source = make()
            try:
                for item in source:
                    if not put(item):
                        break
            finally:
                if hasattr(source, "close"):
                    source.close()
        except BaseException as error:
            failures.append(error)
        put(_DONE)

    thread = threading.Thread(target=work, name="weft-read-ahead", daemon=True)
    thread.start()
    ended = False
    try:
        while (item := items.get()) is not _DONE:
            yield item
        ended = True
        if failures:
            raise failures[0]
    finally:
        stopped.set()
        thread.join(0 if not ended else None)
        while thread.is_alive():
            # Again and again: it may only now begin with what takes long.
            cancel()
            thread.join(0.2)
