"""Work done ahead in a thread: what is read next while the last of it is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

_DONE = object()


def prefetch(
    make: Callable[[], Iterator[T]], *, depth: int = 2, cancel: Callable[[], None] = lambda: None
) -> Iterator[T]:
    """What the iterator gives, at most `depth` items ahead. It is made, used and closed in one thread.

    Who stops early waits for that thread; `cancel` is called to end what the thread may be waiting for.
    """
    found: queue.Queue[object] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: object) -> bool:
        while not stopped.is_set():
            with suppress(queue.Full):
                found.put(item, timeout=0.1)
                return True
        return False

    def work() -> None:
        end: object = _DONE
        try:
            items = make()
            try:
                for item in items:
                    if not put(item):
                        break
            finally:
                if hasattr(items, "close"):
                    items.close()
        except BaseException as error:
            end = _Failure(error)
        put(end)

    thread = threading.Thread(target=work, name="weft-read-ahead", daemon=True)
    thread.start()
    ended = False
    try:
        while True:
            item = found.get()
            ended = item is _DONE or isinstance(item, _Failure)
            if isinstance(item, _Failure):
                raise item.error
            if ended:
                return
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join(0 if not ended else None)
        while thread.is_alive():
            # Again and again: it may only now begin with what takes long.
            cancel()
            thread.join(0.2)


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error
