"""Threads for calls that wait for a server. A process that ends waits for them, but not for a server that is gone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for_all
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar
from weakref import finalize

P = ParamSpec("P")
T = TypeVar("T")

_Call = tuple[Future[Any], Callable[[], Any]]
_running: set[Future[Any]] = set()
os.register_at_fork(after_in_child=_running.clear)  # a child has none of the threads


class Threads(Executor):
    """Up to `most` threads. Unlike those of a `ThreadPoolExecutor`, Python does not join them when it ends."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Semaphore(0)
        self._started: list[threading.Thread] = []
        # The threads know only their queue: they end with the last use of this object.
        finalize(self, _end, self._calls, self._started).atexit = False

    def submit(self, function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Run a call in a thread, as soon as one is free."""
        future: Future[T] = Future()
        with self._lock:
            if not self._idle.acquire(blocking=False) and len(self._started) < self._most:
                thread = threading.Thread(target=_run, args=(self._calls, self._idle), name=self._name, daemon=True)
                thread.start()
                self._started.append(thread)
            _running.add(future)
            future.add_done_callback(_running.discard)
            self._calls.put((future, lambda: function(*arguments, **named)))
        return future


def await_calls(seconds: float) -> None:
    """Wait until no call runs, but no longer than this."""
    wait_for_all(set(_running), seconds)


def _end(calls: SimpleQueue[_Call | None], started: list[threading.Thread]) -> None:
    for _ in started:
        calls.put(None)


def _run(calls: SimpleQueue[_Call | None], idle: threading.Semaphore) -> None:
    while (call := calls.get()) is not None:
        future, function = call
        if future.set_running_or_notify_cancel():
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        del call, future, function  # while it waits it keeps nothing alive
        result = None
        idle.release()
