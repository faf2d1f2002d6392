"""The progress of Spark at a terminal: one bar on stderr, and nothing elsewhere."""

from __future__ import annotations

import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.progress import Progress

_INTERVAL = 0.2
_shown = threading.Lock()
"""Held by the bar on the terminal: there is room for one. A second load at once, or one inside another, has none."""


class Counter:
    """Counts the rows that a task has read, in a file that another process of this machine reads."""

    def __init__(self, path: str) -> None:
        self.path = path

    def counted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the same batches, counted as they go by."""
        rows = 0
        for batch in batches:
            rows += batch.num_rows
            # On another machine there is no such file, and no bar. Nothing but this is suppressed: an error
            # of the source is an OSError too, if its connection broke.
            with suppress(OSError), open(self.path, "r+b") as file:
                file.write(struct.pack("<q", rows))
            yield batch

    def rows(self) -> int:
        """Return what was counted so far."""
        with suppress(OSError), open(self.path, "rb") as file:
            return int(struct.unpack("<q", file.read(8))[0])
        return 0


@contextmanager
def progress(what: str) -> Iterator[Counter | None]:
    """Show, while the block runs, how many of Spark's tasks are done, and rows where a task counts them. The bar is
    removed after it. Yields a counter of rows, where there is a terminal."""
    if not sys.stderr.isatty() or not _shown.acquire(blocking=False):
        yield None
        return
    try:
        with _bar() as bar, tempfile.NamedTemporaryFile(prefix="weft-rows-") as file:
            file.write(struct.pack("<q", 0))
            file.flush()
            counter = Counter(file.name)
            task = bar.add_task(what, total=None, rows="")
            ended = threading.Event()
            thread = threading.Thread(
                target=_follow, args=(bar, task, counter, ended), name="weft-spark-progress", daemon=True
            )
            thread.start()
            try:
                yield counter
            finally:
                ended.set()
                thread.join()
    finally:
        _shown.release()


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rows]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        # Else what the caller prints meanwhile would end up on stderr, where the bar is.
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _follow(bar: Progress, task: object, counter: Counter, ended: threading.Event) -> None:
    """Ask Spark what runs. Spark does not report stages that are done, so they are remembered."""
    stages: dict[int, tuple[int, int]] = {}
    first: tuple[float, int] | None = None
    over = False
    while not over:
        over = ended.wait(_INTERVAL)  # then all rows are counted, which is shown too
        rows, now = counter.rows(), time.perf_counter()
        if rows:
            # Since the first rows came: Spark may have had to start before.
            first = first or (now, rows)
            rate = (rows - first[1]) / (now - first[0]) if now > first[0] else 0.0
            shown = f"{rows:,} rows" + (f", {rate:,.0f}/s" if rate else "")
            bar.update(task, rows=shown)  # type: ignore[arg-type]
        if over:
            return
        with suppress(Exception):  # a session that stops meanwhile: its user gets the error, not the bar
            active = _active_stages()
            for stage, (_, total) in list(stages.items()):
                if stage not in active:
                    stages[stage] = (total, total)
            stages.update(active)
            if stages:
                done, total = (sum(numbers) for numbers in zip(*stages.values(), strict=True))
                bar.update(task, completed=done, total=total)  # type: ignore[arg-type]


def _active_stages() -> dict[int, tuple[int, int]]:
    """Return by running stage how many of its tasks are done, and how many there are."""
    from weft.engine.session import running

    session = running()
    if session is None:
        return {}
    tracker = session.sparkContext.statusTracker()
    stages = {stage: tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()}
    return {stage: (info.numCompletedTasks, info.numTasks) for stage, info in stages.items() if info is not None}


@contextmanager
def live(text: Callable[[], str]) -> Iterator[None]:
    """Show, while the block runs, a line with this text. Loads in the block have no bars of their own."""
    if not sys.stderr.isatty() or not _shown.acquire(blocking=False):
        yield
        return
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        # Log records meanwhile go above the line, not into it.
        with Live(
            get_renderable=lambda: Text(text(), no_wrap=True, overflow="ellipsis"),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=True,
        ):
            yield
    finally:
        _shown.release()
