"""How far Spark is, for who waits at a terminal: one bar on stderr, and nothing at all elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_INTERVAL = 0.2
_shown = threading.Lock()
"""Held by the bar on the terminal: there is room for one. A second load at once, or one inside another, has none."""


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Show, while the block runs, how many of Spark's tasks are done. The bar is gone after it."""
    if not sys.stderr.isatty() or not _shown.acquire(blocking=False):
        yield
        return
    try:
        with _bar() as bar:
            task = bar.add_task(what, total=None)
            ended = threading.Event()
            thread = threading.Thread(target=_follow, args=(bar, task, ended), name="weft-spark-progress", daemon=True)
            thread.start()
            try:
                yield
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
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        # Else what the caller prints meanwhile would end up on stderr, where the bar is.
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _follow(bar: Progress, task: object, ended: threading.Event) -> None:
    """Ask Spark what runs. Stages that are done are not told any more, so they are remembered."""
    stages: dict[int, tuple[int, int]] = {}
    while not ended.wait(_INTERVAL):
        with suppress(Exception):  # a session that stops meanwhile: whoever uses it is told, not who looks on
            active = _active_stages()
            for stage, (_, total) in list(stages.items()):
                if stage not in active:
                    stages[stage] = (total, total)
            stages.update(active)
            if stages:
                done, total = (sum(numbers) for numbers in zip(*stages.values(), strict=True))
                bar.update(task, completed=done, total=total)  # type: ignore[arg-type]


def _active_stages() -> dict[int, tuple[int, int]]:
    """Of each stage that runs, how many of its tasks are done and how many there are."""
    from weft.engine.session import running

    session = running()
    if session is None:
        return {}
    tracker = session.sparkContext.statusTracker()
    found = {stage: tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()}
    return {stage: (info.numCompletedTasks, info.numTasks) for stage, info in found.items() if info is not None}
