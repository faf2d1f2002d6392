"""`iter_stream`, `iter_stream_async`: a stream as frames that come one after the other."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import FrameType
from typing import Any, Protocol, Self, Unpack

import pyarrow as pa

from weft.dataframes.layout import frame_of, join
from weft.dataframes.options import Options, ReadOptions, refuse_unknown_options, true_or_false, wait_of, whole_number
from weft.dataframes.reading import fetch, open_feed
from weft.errors import ConnectionFailedError, SettingsError, WeftError
from weft.streams.declare import Stream
from weft.streams.threads import Threads
from weft.systems.base import Connection
from weft.systems.pages import PageFeed

_log = logging.getLogger("weft.dataframes")
# What `take` returns in place of rows where nobody waits for them any more. Not an error: nobody would handle it.
_NOBODY_WAITS: Any = object()
# How soon a request to stop is noticed while nothing comes.
_LOOK_SECONDS = 0.1


class _Event(Protocol):
    def is_set(self) -> bool: ...


Stop = Callable[[], bool] | _Event | signal.Signals | Iterable[signal.Signals]
"""How an iteration is stopped: by a function, an event, or signals."""


class IterOptions(ReadOptions, total=False):
    """The options of the functions that iterate."""

    batch_size: int
    block_ms: int
    stop: Stop | None
    yield_on_idle: bool


class StreamBatches:
    """Frames of a stream, one after the other. Also a context manager: leaving it stops the iteration."""

    def __init__(
        self,
        open_it: Callable[[Callable[[], bool]], PageFeed],
        options: Options,
        *,
        batch_size: int,
        idle_seconds: float | None,
        stop: Stop | None,
    ) -> None:
        """`idle_seconds`: after so long without entries, a frame without rows is yielded."""
        self._options, self._layout, self._left = options, options.layout, options.count
        self._batch_size, self._idle_seconds = batch_size, idle_seconds
        self._closed = self._began = self._in_hand = False
        self._stop = _Stop(stop)
        try:
            # Not a method of this one: it could not be let go of before all garbage is collected, in any order.
            self._feed = open_it(self._stop.ends_wait)
        except BaseException:
            self._stop.restore()
            raise

    def stopped(self) -> bool:
        """Return whether the iteration is to stop."""
        return self._stop.is_set()

    def begin(self) -> None:
        """Fix where to start, and create what must be there."""
        if not self._began:
            self._feed.begin()
            self._began = True

    def wait_unless(self, nobody_waits: Callable[[], bool]) -> None:
        """End `take` as soon as this says that nobody waits for it."""
        self._stop.nobody_waits = nobody_waits

    def ask_to_stop(self) -> None:
        """Let the call that waits, in any thread, be the last one."""
        self._stop.requested = True
        self._stop.restore()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            table = self.take()
            frame = None if table is None else self.hand_over(table)
        except BaseException:
            self.close_after_a_failure()
            raise
        if frame is None:
            self.close()
            raise StopIteration
        return frame

    def take(self) -> pa.Table | None:
        """Return the next rows, none of them where it is to yield on idle; `None` at the end."""
        if self.stopped() or self._left == 0:
            return None
        self.begin()
        limit = self._batch_size if self._left is None else min(self._batch_size, self._left)
        idle_at = math.inf if self._idle_seconds is None else time.monotonic() + self._idle_seconds
        while not self.stopped():
            if self._stop.nobody_waits():
                return _NOBODY_WAITS
            wait = max(0.0, min(idle_at - time.monotonic(), _LOOK_SECONDS))
            try:
                more = self._left is None or self._left > limit
                batch = fetch(self._feed, self._layout, limit, wait, more)
            except ConnectionFailedError:
                if self._stop.ends_wait():
                    continue
                raise
            if batch is not None and len(batch) > 0:  # else all of it was put aside
                self._in_hand = True
                self._left = None if self._left is None else self._left - len(batch)
                return join([batch], self._layout, self._feed)
            if self._feed.finished:
                return None
            if time.monotonic() >= idle_at:
                return join([], self._layout, self._feed)
        return None

    def hand_over(self, table: pa.Table) -> Any:
        """Return the rows as a frame, acknowledged where they are to be."""
        self._in_hand = False
        frame = frame_of(table, self._options.to, self._layout)
        # Not before there is a frame: what cannot be made into one must be delivered again.
        if self._options.auto_ack:
            self._feed.confirm()
        return frame

    def close(self) -> None:
        """Stop, give back entries that were not handed over, disconnect. Raise if Redis refused an acknowledgement."""
        self.ask_to_stop()
        if not self._closed:
            self._closed = True
            if self._in_hand:
                self._feed.give_back()
            self._feed.close()

    def close_after_a_failure(self) -> None:
        """Close it where another error is raised, or nobody can handle one: an error is logged."""
        try:
            self.close()
        except WeftError as error:
            _log.warning("Some entries may be delivered again: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.close_after_a_failure()

    def __del__(self) -> None:
        # A loop that was left by `break` closes nothing itself.
        if hasattr(self, "_feed"):
            self.close_after_a_failure()


class AsyncStreamBatches:
    """`StreamBatches` for asyncio. Waiting takes one thread."""

    def __init__(self, batches: StreamBatches) -> None:
        self._batches = batches
        self._thread = Threads(1, "weft-frames")
        self._taking: Future[pa.Table | None] | None = None
        self._cancelled = threading.Event()
        self._closed = False

    def __del__(self) -> None:
        # Else a loop that was left by `break` would leave its thread waiting for entries.
        self._batches.ask_to_stop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        loop, cancelled = asyncio.get_running_loop(), self._cancelled
        while True:
            if self._closed:
                raise StopAsyncIteration
            # A task that is cancelled while it waits leaves what the thread fetched to the next call. The thread ends:
            # it would fetch for nobody, and keep the process alive. Where Ctrl-C ends a loop, it may cancel none.
            if self._taking is None:
                cancelled.clear()
                self._batches.wait_unless(lambda: cancelled.is_set() or not loop.is_running())
                self._taking = self._thread.submit(self._batches.take)
            taking = self._taking
            try:
                table = await asyncio.shield(asyncio.wrap_future(taking))
                # Another task has it, or it is closed meanwhile, which gives back what was taken.
                if self._closed or self._taking is not taking:
                    continue
                self._taking = None
                if table is _NOBODY_WAITS:  # another task did not, or this one does again
                    continue
                # Nothing is awaited from here on: what is acknowledged reaches the caller.
                frame = None if table is None else self._batches.hand_over(table)
            except (asyncio.CancelledError, GeneratorExit):
                cancelled.set()
                raise
            except BaseException:
                await self._close(self._batches.close_after_a_failure)
                raise
            if frame is None:
                await self.aclose()
                raise StopAsyncIteration
            return frame

    async def aclose(self) -> None:
        """Stop, give back entries that were not handed over, disconnect. Raise if Redis refused an acknowledgement."""
        await self._close(self._batches.close)

    async def _close(self, close: Callable[[], None]) -> None:
        self._batches.ask_to_stop()
        if not self._closed:
            self._closed = True
            await asyncio.wrap_future(self._thread.submit(close))

    async def __aenter__(self) -> Self:
        try:
            await asyncio.wrap_future(self._thread.submit(self._batches.begin))
        except BaseException:
            await self._close(self._batches.close_after_a_failure)
            raise
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self._close(self._batches.close if kind is None else self._batches.close_after_a_failure)


class _Stop:
    """Whether the iteration is to stop. Signals are caught until `restore`."""

    def __init__(self, stop: Stop | None) -> None:
        self.requested = False
        self.nobody_waits: Callable[[], bool] = lambda: False
        self._asked: Callable[[], bool] = lambda: False
        self._signals: list[signal.Signals] = []
        if stop is None:
            return
        if callable(getattr(stop, "is_set", None)):
            self._asked = stop.is_set  # type: ignore[union-attr]
        elif callable(stop):
            self._asked = stop
        elif signals := _signals(stop):
            _caught.check(signals)
            for each in signals:
                _caught.add(each, self)
            self._signals = signals
        else:
            raise SettingsError(
                f"stop is a function, an event or a signal, not a {type(stop).__name__}.",
                hint="stop=signal.SIGTERM, or stop=event with event = threading.Event().",
            )

    def is_set(self) -> bool:
        return self.requested or self._asked()

    def ends_wait(self) -> bool:
        """Return whether a server that is gone is not to be waited for any longer."""
        return self.is_set() or self.nobody_waits()

    def restore(self) -> None:
        signals, self._signals = self._signals, []
        for each in signals:
            _caught.remove(each, self)


class _Caught:
    """The iterations that each signal stops. When the last one ends, the handler from before is restored."""

    def __init__(self) -> None:
        self._waiting: dict[int, set[_Stop]] = {}
        self._before: dict[int, Any] = {}

    def check(self, signals: list[signal.Signals]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise SettingsError(
                "Only an iteration in the main thread can be stopped by a signal.",
                hint="Give an event: threading.Event().",
            )
        for each in signals:
            if each in (signal.SIGKILL, signal.SIGSTOP):
                raise SettingsError(f"stop cannot be {each.name}, which no process catches.", hint="signal.SIGTERM")
            if signal.getsignal(each) is None:
                raise SettingsError(
                    f"{each.name} has a handler that is not Python's, which could not be put back.",
                    hint="Give an event: threading.Event().",
                )

    def add(self, number: signal.Signals, stop: _Stop) -> None:
        self._waiting.setdefault(number, set()).add(stop)
        if signal.getsignal(number) != self._catch:
            self._before[number] = signal.signal(number, self._catch)

    def remove(self, number: signal.Signals, stop: _Stop) -> None:
        waiting = self._waiting[number]
        waiting.discard(stop)
        # Another thread cannot put it back: the next signal does. Nor is it ours to replace what somebody set since.
        in_main = threading.current_thread() is threading.main_thread()
        if not waiting and in_main and signal.getsignal(number) == self._catch:
            signal.signal(number, self._before[number])

    def _catch(self, number: int, frame: FrameType | None) -> None:
        waiting = list(self._waiting[number])
        for stop in waiting:
            stop.requested = True
        if not waiting:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)


_caught = _Caught()


def _signals(stop: Any) -> list[signal.Signals]:
    if isinstance(stop, signal.Signals):
        return [stop]
    listed = list(stop) if isinstance(stop, Iterable) else []
    return listed if all(isinstance(each, signal.Signals) for each in listed) else []


def iter_stream(
    url: str | Connection,
    stream: str | bytes | Stream,
    *,
    batch_size: int = 100,
    block_ms: int = 1000,
    stop: Stop | None = None,
    yield_on_idle: bool = False,
    **options: Unpack[ReadOptions],
) -> StreamBatches:
    """Return the entries of a stream, and then new ones, as frames of up to `batch_size` rows.

    The iteration ends when `stop` says so (a function, an event, a signal or several), at the end of its `with` block,
    after `count` rows, or at `end_id`. After `block_ms` without entries it goes on waiting, or with `yield_on_idle`
    yields a frame without rows. The other parameters are those of `read_stream`; with `auto_ack` a batch is
    acknowledged when it is handed over. A lost connection is opened again, and no entry is missed."""
    refuse_unknown_options(iter_stream, ReadOptions, options)
    batches = _open(
        url, stream, batch_size=batch_size, block_ms=block_ms, stop=stop, yield_on_idle=yield_on_idle, **options
    )
    try:
        batches.begin()
    except BaseException:
        batches.close_after_a_failure()
        raise
    return batches


def _open(
    url: str | Connection,
    stream: str | bytes | Stream,
    *,
    batch_size: int = 100,
    block_ms: int = 1000,
    stop: Stop | None = None,
    yield_on_idle: bool = False,
    **options: Unpack[ReadOptions],
) -> StreamBatches:
    asked, wait_seconds = Options(**options), wait_of(whole_number("block_ms", block_ms))
    return StreamBatches(
        lambda stopped: open_feed(url, stream, asked, iterates=True, stopped=stopped),
        asked,
        batch_size=whole_number("batch_size", batch_size, 1),
        idle_seconds=wait_seconds if true_or_false("yield_on_idle", yield_on_idle) else None,
        stop=stop,
    )


def iter_stream_async(
    url: str | Connection,
    stream: str | bytes | Stream,
    *,
    batch_timeout_ms: int | None = None,
    **options: Unpack[IterOptions],
) -> AsyncStreamBatches:
    """`iter_stream` for asyncio, with the same parameters. `batch_timeout_ms` is another name of `block_ms`."""
    refuse_unknown_options(iter_stream_async, IterOptions, options)
    if batch_timeout_ms is not None and options.setdefault("block_ms", batch_timeout_ms) != batch_timeout_ms:
        raise SettingsError("block_ms and batch_timeout_ms are two names of one option.", hint="Give one of them.")
    return AsyncStreamBatches(_open(url, stream, **options))
