"""`weft scheduler`: dispatch pipelines when they are due."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from weft.cli.common import (
    ago,
    alerter_option,
    format_option,
    log_format_option,
    log_to_stderr,
    metrics_option,
    module_names_option,
    print_json,
    print_table,
    run_log_option,
    traces_to_pass_option,
    unused_module_option,
    use_traces,
)
from weft.cli.pipelines import declared_or_expected
from weft.cli.waiting import run_log_that_answers
from weft.errors import SettingsError
from weft.project import current
from weft.settings import read_project_file

if TYPE_CHECKING:
    from weft.operate.scheduler import Scheduler
    from weft.pipelines.models import Model


@click.group(invoke_without_command=True)
@module_names_option
@click.option(
    "--executor",
    default="subprocess+python://",
    show_default=True,
    metavar="URL",
    help="What starts the runs: subprocess:// (the command weft), subprocess+python:// (this Python), k8s://…, "
    "lambda://…, spark://….",
)
@run_log_option
@log_format_option
@alerter_option
@metrics_option
@traces_to_pass_option
@click.option(
    "--poll-interval", type=click.FloatRange(0.1), default=10, show_default=True, help="Seconds between looks."
)
@click.option(
    "--lease-seconds",
    type=click.FloatRange(1),
    default=300,
    show_default=True,
    help="A leader that is silent for so long is replaced.",
)
@click.option("--max-running", type=click.IntRange(1), default=16, show_default=True, help="Runs at once.")
@click.pass_context
def scheduler(
    context: click.Context,
    modules: tuple[str, ...],
    executor: str,
    run_log: str | None,
    alerters: tuple[str, ...],
    metrics: str | None,
    traces: str | None,
    poll_interval: float,
    lease_seconds: float,
    max_running: int,
) -> None:
    """Start pipelines when they are due, until Ctrl-C or SIGTERM.

    It runs no pipeline itself: the executor starts `weft run-due NAME` for each slot, which claims the slot in the run
    log. Of several schedulers one leads; another takes over when it ends or is silent for longer than its lease. A
    scheduler that is stopped leaves the runs that it started alone.
    """
    if context.invoked_subcommand is not None:
        return
    use_traces(context, traces)
    from weft.operate.alerters import open_alerters
    from weft.operate.executors import open_executor
    from weft.operate.metrics import LEADS, open_metrics
    from weft.operate.presence import present
    from weft.operate.runlog import project_log_url
    from weft.operate.scheduler import Scheduler
    from weft.operate.sinks import project_url
    from weft.operate.supervisor import signalled

    # Options from the environment reach the runs by their environment: a Secret must not become part of a Job.
    passed = {
        name: context.params[name]
        for name in ("run_log", "alerters", "traces")
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    current().load_modules(modules)
    declared_or_expected()
    log_to_stderr("%(asctime)s %(levelname)s: %(message)s")
    logging.getLogger("weft.scheduler").setLevel(logging.INFO)
    settings = read_project_file(current().root)
    starter = open_executor(executor)
    with (
        open_alerters(alerters or settings.get("alerters", ())) as own_alerters,
        open_metrics(project_url(metrics), must_serve=True) as counted,
        run_log_that_answers(
            project_log_url(run_log),
            poll_interval,
            logging.getLogger("weft.scheduler"),
            away=lambda: counted.set(LEADS, False),  # nobody knows
        ) as log,
    ):
        if log.is_private:
            # Each run would claim its slot in a log of its own, and be started again and again.
            raise SettingsError(
                "A scheduler and what it starts share a run log, and memory:// is of one process.",
                hint="Use sqlite://runs.db on one host, or a database or bucket that all hosts reach.",
            )
        running = Scheduler(
            log,
            starter,
            modules=modules,
            run_log=passed.get("run_log"),
            run_alerters=passed.get("alerters", ()),
            traces=passed.get("traces"),
            poll_seconds=poll_interval,
            lease_seconds=lease_seconds,
            most_running=max_running,
            pools=settings.get("pools"),
            metrics=counted,
            alerters=own_alerters,
        )
        with signalled(running.stop), present("scheduler", lambda: nullcontext(log)), _building_models(running):
            running.run()


def _building_models(running: Scheduler) -> AbstractContextManager[None]:
    """Start builds of the models that follow their inputs, where there are such."""
    from weft.pipelines.models import models

    followers = [each for each in models().values() if each.trigger == "auto"]
    if not followers:
        return nullcontext()
    return _dispatching(running, followers)


@contextmanager
def _dispatching(running: Scheduler, followers: Sequence[Model]) -> Iterator[None]:
    from weft.engine.models.freshness import freshness_of
    from weft.engine.models.inputs import Observer
    from weft.operate.model_dispatch import ModelDispatch

    with Observer() as observer, ModelDispatch(running, followers, lambda each: freshness_of(each, observer)):
        yield


@scheduler.command()
@unused_module_option
@run_log_option
@format_option
@click.pass_context
def status(context: click.Context, run_log: str | None, output: str) -> None:
    """Show which scheduler leads."""
    from weft.operate.runlog import open_run_log, project_log_url
    from weft.operate.scheduler import leader_status

    if context.get_parameter_source("run_log") is not ParameterSource.COMMANDLINE and context.parent is not None:
        run_log = context.parent.params["run_log"]  # `weft scheduler --run-log URL status`
    with open_run_log(project_log_url(run_log), read_only=True) as log:
        row = leader_status(log)
    if output == "json":
        print_json(row)
    elif row["since"] is None:
        click.echo("No scheduler has run with this log.")
    else:
        leads = "yes" if row["leads"] else "no: it has ended"
        row |= {"leads": leads, "since": ago(row["since"], datetime.now(UTC))}
        print_table([row], ["leads", "host", "pid", "since"])
