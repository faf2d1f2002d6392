"""`weft worker`: build models when their inputs change."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import click

from weft.cli.common import (
    alerter_option,
    escaped,
    format_option,
    log_format_option,
    metrics_option,
    module_option,
    none_declared,
    run_log_option,
    traces_option,
)
from weft.cli.pipelines import open_runner, outcome_record, report
from weft.cli.waiting import run_log_that_answers

if TYPE_CHECKING:
    from weft.operate.model_worker import ModelWorker
    from weft.operate.runner import Outcome
    from weft.pipelines.models import Model

_log = logging.getLogger("weft.worker")
_PAUSE_SECONDS = 5.0


@click.command()
@click.option("--once", is_flag=True, help="Build what is stale now, then stop.")
@click.option("--threads", type=click.IntRange(1, 64), default=4, show_default=True, help="Models built at once.")
@click.option("--while-stdin-is-open", is_flag=True, hidden=True)
@module_option
@run_log_option
@alerter_option
@log_format_option
@metrics_option
@traces_option
@format_option
def worker(
    once: bool,
    threads: int,
    while_stdin_is_open: bool,
    run_log: str | None,
    alerters: tuple[str, ...],
    metrics: str | None,
    output: str,
) -> None:
    """Build models when their inputs change, until Ctrl-C or SIGTERM.

    Several workers share the models. A worker that is stopped finishes the running builds; a second signal ends it at
    once, and the next worker builds what is left. With --once it ends with exit code 1 when a build failed, or a model
    is stale at the end.
    """
    from weft import engine
    from weft.engine.models.freshness import freshness_of
    from weft.engine.models.inputs import Observer
    from weft.operate.model_worker import ModelWorker
    from weft.operate.presence import present
    from weft.operate.supervisor import signalled
    from weft.pipelines.models import models

    engine.starts_engine = False  # it would keep the engine from all other commands
    declared = list(models().values())
    if not declared:
        raise none_declared("model")
    lock, stopping = threading.Lock(), threading.Event()
    if while_stdin_is_open:
        threading.Thread(target=_stop_after_stdin, args=(stopping,), daemon=True).start()

    def built(outcome: Outcome) -> None:
        with lock:
            if output == "json":
                click.echo(escaped(json.dumps(outcome_record(outcome), ensure_ascii=False, default=str)))
            elif outcome.status != "refused":
                report(outcome, output)

    left: list[str] = []
    # Not with a log of its own: another worker would build the same models at the same time.
    open_log = None if once else partial(run_log_that_answers, pause=_PAUSE_SECONDS, log=_log, stopping=stopping)
    with (
        open_runner(run_log, alerters, metrics, or_memory=False, open_log=open_log) as runner,
        Observer() as observer,
    ):
        running = ModelWorker(runner, declared, lambda each: freshness_of(each, observer), threads=threads, built=built)
        if while_stdin_is_open:
            threading.Thread(target=_stop_with, args=(stopping, running), daemon=True).start()
        presence = nullcontext() if once else present("worker", lambda: nullcontext(runner.log))
        with signalled(running.stop), _watching(declared, running), presence:
            if once:
                left = running.run_once()
            else:
                running.run()
    if left:
        click.echo(f"Failed or still stale: {', '.join(left)}", err=True)
        sys.exit(1)


def _stop_after_stdin(stopping: threading.Event) -> None:
    """Stop when the process that started this one has ended: its end of the pipe is closed then."""
    sys.stdin.read()
    stopping.set()


def _stop_with(stopping: threading.Event, running: ModelWorker) -> None:
    stopping.wait()
    running.stop()


@contextmanager
def _watching(declared: list[Model], running: ModelWorker) -> Iterator[None]:
    """Wake the worker when something is published to a stream of its models, by any process."""
    from weft.engine.models.watching import Watcher

    watcher = Watcher(declared, running.wake)
    try:
        yield
    finally:
        watcher.close()
