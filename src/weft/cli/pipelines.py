"""`weft list`, `consume-list`, `run`, `run-due` and `status`: pipelines, and what becomes of them."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from datetime import datetime
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from weft.cli.common import (
    ago,
    alerter_option,
    common_options,
    engine_option,
    first_line,
    format_option,
    log_format_option,
    log_to_stderr,
    metrics_option,
    module_option,
    none_declared,
    print_json,
    print_table,
    run_log_option,
    time_text,
    traces_of_runs_option,
)
from weft.errors import DeclarationError, NotFoundError, unknown
from weft.operate import freshness, log_format, sinks
from weft.operate.records import counts_text
from weft.pipelines import graph
from weft.project import current
from weft.settings import read_project_file

if TYPE_CHECKING:
    from weft.engine.models.inputs import Span
    from weft.operate.runlog import RunLog
    from weft.operate.runner import Outcome, Runner
    from weft.pipelines.declare import Pipeline
    from weft.pipelines.execution import Execution
    from weft.pipelines.streaming.spec import StreamingPipeline
    from weft.systems.base import Connection

_NAMES = click.argument("names", nargs=-1, metavar="[NAME]...")
_EXIT_INTERRUPTED, _EXIT_TERMINATED = 130, 143


def _execution(
    pipeline: Pipeline,
    key: str,
    moment: datetime,
    *,
    keep: Callable[[], None],
    full: Collection[str] = (),
    span: Span | None = None,
) -> Execution:
    """A run by the engine, which is loaded for commands that run something. `full`: models that are built again from
    the beginning; `span`: the range of time that is."""
    from weft.pipelines.models import Model

    if isinstance(pipeline, Model):
        from weft.engine.models.build import ModelRun

        return ModelRun(pipeline, key, moment, keep=keep, full=pipeline.name in full, span=span)
    from weft.engine.run import PipelineRun

    return PipelineRun(pipeline, key, moment, keep=keep)


@contextmanager
def open_runner(
    run_log: str | None,
    alerters: Sequence[str] = (),
    metrics: str | None = None,
    *,
    read_only: bool = False,
    or_memory: bool = True,
    open_log: Callable[[str | None], AbstractContextManager[RunLog]] | None = None,
    full: Collection[str] = (),
    span: Span | None = None,
) -> Iterator[Runner]:
    """Open the run log, and give the runner of this project's pipelines. A log that cannot be written is replaced by
    one in memory; with `or_memory=False` its error is raised, and with `open_log` that opens it."""
    from weft.operate.alerters import open_alerters
    from weft.operate.metrics import open_metrics
    from weft.operate.runlog import goes_on_without, open_run_log, project_log_url
    from weft.operate.runner import Runner

    # Lower levels are written to the log of the run only.
    log_to_stderr("%(levelname)s: %(message)s", logging.WARNING)
    # Options of a command win over the settings of the project.
    settings = read_project_file(current().root)
    url = project_log_url(run_log)
    or_memory = or_memory and goes_on_without()
    # Before the log is opened: a wrong URL of an alerter leaves no new log behind.
    opened_alerters = open_alerters(alerters or settings.get("alerters", ()))
    with (
        opened_alerters,
        open_metrics(sinks.project_url(metrics)) as counted,
        open_log(url)
        if open_log is not None
        else open_run_log(url, or_memory=or_memory and not read_only, read_only=read_only) as log,
    ):
        yield Runner(log, partial(_execution, full=full, span=span), opened_alerters, metrics=counted)


def declared() -> dict[str, Pipeline]:
    """Return the declared pipelines; raise where there are none."""
    project = current()
    if not project.pipelines:
        if project.streaming_pipelines:
            raise NotFoundError(
                "Only streaming pipelines are declared.", hint="weft consume-list lists them, weft consume runs one."
            )
        raise none_declared("pipeline")
    graph.refuse_unknown_dependencies(project.pipelines)
    return project.pipelines


def declared_or_expected() -> None:
    """Raise where there is no pipeline to run, nor a streaming one of which rows are expected."""
    if current().pipelines or not freshness.expected(current()):
        declared()


def declared_streaming() -> dict[str, StreamingPipeline]:
    """Return the declared streaming pipelines; raise where there are none."""
    project = current()
    if not project.streaming_pipelines:
        if project.pipelines:
            raise NotFoundError(
                "None of the declared pipelines is a streaming one.", hint="weft list lists them, weft run runs them."
            )
        raise none_declared("streaming pipeline")
    return project.streaming_pipelines


@contextmanager
def stopped_by_signals(runner: Runner, outcomes: list[Outcome], output: str) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the work: open transactions are rolled back and recorded, and one line reports it."""
    from weft.operate.runner import Terminated, described

    def stop(number: int, _: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    runner.has_signals = True
    try:
        yield
    except KeyboardInterrupt as error:
        # Spark may take seconds to end. A second Ctrl-C ends the process at once, without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if sys.stderr.isatty():
            click.echo(err=True)  # ends the line on which the terminal shows ^C
        if runner.stopped is not None:
            outcomes.append(runner.stopped)
            if output != "json":
                stopped = f"{_status(runner.stopped)} {runner.stopped.pipeline}"
                click.echo(f"{stopped}: {described(error)} The next run goes on with it.")
        print_outcomes(outcomes, output)
        sys.exit(_EXIT_TERMINATED if isinstance(error, Terminated) else _EXIT_INTERRUPTED)
    finally:
        runner.has_signals = False
        signal.signal(signal.SIGTERM, before)


def prints_to_stderr(output: str) -> AbstractContextManager[object]:
    """Send to stderr what pipelines print, where a script reads JSON from stdout."""
    return redirect_stdout(sys.stderr) if output == "json" else nullcontext()


# ------------------------------------------------------------------------------------------------------------- commands


@click.command("list")
@common_options
def list_(output: str) -> None:
    """List the declared pipelines, in the order in which they run."""
    rows = [_listed(each) for each in graph.in_order(declared())]
    if output == "json":
        print_json(rows)
        return
    columns = ["pipeline", "mode", "targets", "schedule", "depends_on", "declared"]
    print_table(rows, columns, spare=["declared", "mode"])


def _listed(pipeline: Pipeline) -> dict[str, Any]:
    from weft.pipelines.declare import load_mode

    # A model says more of itself than how its rows are loaded.
    modes = dict.fromkeys(getattr(pipeline, "materialise", None) or load_mode(each) for each in pipeline.targets)
    schedule = pipeline.schedule
    zone = "" if schedule is None or schedule.timezone == "UTC" else f" {schedule.timezone}"
    return {
        "pipeline": pipeline.name,
        "mode": ", ".join(modes),
        "targets": [each.name for each in pipeline.targets],
        "schedule": None if schedule is None else f"{schedule.cron}{zone}",
        "depends_on": list(pipeline.depends_on),
        "declared": pipeline.declared_at,
        "description": pipeline.description,
        "tags": list(pipeline.tags),
        "owner": pipeline.owner,
    }


@click.command("consume-list")
@common_options
def consume_list(output: str) -> None:
    """List the declared streaming pipelines: what each reads, where its rows go, and how often one may arrive."""
    rows = [_listed_streaming(each) for each in declared_streaming().values()]
    if output == "json":
        print_json(rows)
        return
    shown = [
        {
            "name": row["name"],
            "sources": [each["name"] for each in row["sources"]],
            "targets": [each["name"] for each in row["targets"]],
            **{key: list(dict.fromkeys(each[key] for each in row["targets"])) for key in ("mode", "delivery")},
        }
        for row in rows
    ]
    print_table(shown, ["name", "sources", "targets", "mode", "delivery"], spare=["mode", "delivery"])


def _listed_streaming(pipeline: StreamingPipeline) -> dict[str, Any]:
    from weft.pipelines.streaming.endpoints import delivery_to

    return {
        "name": pipeline.name,
        "sources": [{"name": each.name, "connection": _named(each.connection)} for each in pipeline.sources],
        "targets": [
            {
                "name": each.name,
                "connection": _named(each.connection),
                "mode": each.mode,
                "keys": list(each.primary_key),
                "delivery": delivery_to(pipeline, each),
            }
            for each in pipeline.targets
        ],
        "declared": pipeline.declared_at,
        "description": pipeline.description,
    }


def _named(connection: str | Connection | None) -> str:
    """Return the name of a connection; of one without a name its target, which holds no secret."""
    if connection is None or isinstance(connection, str):
        return connection or "default"
    return connection.name or f"{connection.kind} {connection.target}"


@click.command()
@click.argument("names", nargs=-1, metavar="NAME...")
@click.option("--all", "everything", is_flag=True, help="Run every pipeline, each after those that it depends on.")
@click.option(
    "--no-resume",
    is_flag=True,
    help="Begin a new run also where the last one failed or was interrupted: what that had committed is loaded again.",
)
@click.option("--full", is_flag=True, help="Build incremental models again from the beginning, of all rows there are.")
@engine_option
@module_option
@run_log_option
@alerter_option
@metrics_option
@traces_of_runs_option
@log_format_option
@format_option
def run(
    names: tuple[str, ...],
    everything: bool,
    no_resume: bool,
    full: bool,
    run_log: str | None,
    alerters: tuple[str, ...],
    metrics: str | None,
    output: str,
) -> None:
    """Run each NAME now, a pipeline or a model, whatever its schedule says.

    A run that was interrupted or failed before is continued: what it had committed is not done twice. Ends with exit
    code 1 when one of them failed or is being run by another process, 130 after Ctrl-C, 143 after SIGTERM.
    """
    known = declared()
    if not names and not everything:
        raise NotFoundError("Which pipeline?", hint=f"Name one of: {', '.join(list(known)[:20])}. Or --all.")
    chosen = names or tuple(known)
    if full:
        from weft.pipelines.models import Model

        for name in chosen:
            if name in known and not isinstance(known[name], Model):
                raise DeclarationError(
                    f"--full builds a model again from the beginning, and {name!r} is a pipeline.",
                    hint="Leave --full out, or name the models. Its mode says what a run of a pipeline replaces.",
                )
    # A run that failed may have been another kind of build.
    run_now(names, run_log, alerters, output, metrics, resume=not (no_resume or full), full=chosen if full else ())


def run_now(
    names: Sequence[str],
    run_log: str | None,
    alerters: Sequence[str],
    output: str,
    metrics: str | None = None,
    *,
    resume: bool = True,
    full: Collection[str] = (),
    span: Span | None = None,
) -> None:
    """Run pipelines, each after those that it depends on, and exit with code 1 where one failed."""
    from weft.operate.runner import Outcome

    outcomes: list[Outcome] = []
    with (
        open_runner(run_log, alerters, metrics, full=full, span=span) as runner,
        stopped_by_signals(runner, outcomes, output),
    ):
        for pipeline in runner.chosen(names):
            failed = {each.pipeline for each in outcomes if each.status != "succeeded"}
            if missing := [name for name in pipeline.depends_on if name in failed]:
                reason = f"waiting on upstream: {', '.join(missing)}"
                outcomes.append(Outcome(pipeline.name, "skipped", reason=reason))
            else:
                with prints_to_stderr(output):
                    outcomes.append(runner.run(pipeline, resume=resume and pipeline.name not in full))
                    if outcomes[-1].is_failure and _has_lost_engine():
                        # The run goes on in a new session, and does not repeat what it has committed.
                        outcomes[-1] = runner.run(pipeline)
            report(outcomes[-1], output)
    finish(outcomes, output, is_bad=lambda each: each.status != "succeeded")


def _has_lost_engine() -> bool:
    """Whether the engine's JVM ended under this command: it was killed, by a person or for want of memory."""
    if "weft.engine.session" not in sys.modules:
        return False
    from weft import engine
    from weft.engine import session

    if not session.has_lost_engine():
        return False
    engine.starts_engine = False
    return True


def _stale(runner: Runner, names: Sequence[str], done: Sequence[Outcome]) -> Iterator[Outcome]:
    """Build the named models that follow their inputs and are stale, unless they have just run for a slot."""
    if not names:
        return
    from weft.pipelines.models import Model

    chosen = [each for each in runner.chosen(names) if isinstance(each, Model) and each.trigger == "auto"]
    left = [each for each in chosen if each.name not in {outcome.pipeline for outcome in done}]
    if not left:
        return
    from weft.engine.models.freshness import freshness_of
    from weft.engine.models.inputs import Observer

    with Observer() as observer:
        for model in left:
            (freshness,) = freshness_of([model], observer)
            if freshness.problem is not None:
                raise freshness.problem
            if freshness.why is not None:
                yield runner.run(model, by_hand=False)


@click.command("run-due")
@_NAMES
@module_option
@run_log_option
@alerter_option
@metrics_option
@traces_of_runs_option
@log_format_option
@format_option
def run_due(
    names: tuple[str, ...], run_log: str | None, alerters: tuple[str, ...], metrics: str | None, output: str
) -> None:
    """Run what is due by its schedule: for cron, a systemd timer or a CronJob.

    Each slot is run once, however often and by however many hosts this is called. A model that is named and follows its
    inputs is built if these have changed. Ends with exit code 1 when something failed, 130 after Ctrl-C, 143 after
    SIGTERM.
    """
    declared_or_expected()
    outcomes: list[Outcome] = []
    with (
        open_runner(run_log, alerters, metrics) as runner,
        stopped_by_signals(runner, outcomes, output),
        prints_to_stderr(output),
    ):
        for outcome in chain(runner.run_due(names), _stale(runner, names, outcomes)):
            outcomes.append(outcome)
            report(outcome, output)
    if not outcomes and output != "json":
        if log_format.is_json():
            click.echo(log_format.command_line("Nothing is due.", levelname="INFO"), err=True)
        else:
            click.echo("Nothing is due.")
    finish(outcomes, output, is_bad=lambda each: each.is_failure)


@click.command()
@_NAMES
@module_option
@run_log_option
@format_option
def status(names: tuple[str, ...], run_log: str | None, output: str) -> None:
    """How each pipeline stands: its last run, its attempts, when it is due next, and what it waits for. Streaming
    pipelines are listed that have `expect_within`, with the time of their last rows.

    With --run-log and no declared pipeline it shows what the log knows of any.
    """
    from weft.operate.presence import is_place
    from weft.operate.scheduler import LEADER
    from weft.operate.status import next_due, now_text, standing, streaming_standing

    project = current()
    streaming = {name: each for name, each in project.streaming_pipelines.items() if each.expect_within is not None}
    is_known_by_log_only = run_log is not None and not project.pipelines and not streaming
    if not is_known_by_log_only and (project.pipelines or not streaming):
        declared()
    rows: list[dict[str, Any]] = []
    with open_runner(run_log, read_only=True) as runner:
        now = runner.now
        if is_known_by_log_only:
            states = runner.log.latest(None)
            for name in names or sorted(each for each in states if each != LEADER and not is_place(each)):
                if name not in states:
                    raise unknown("pipeline", name, states, otherwise=f"{runner.log.shown} has no run of it.")
                rows.append(standing(states[name]) | {"next_due": None, "now": "not declared here"})
        # Two may have one name: a pipeline, and a streaming one.
        batch_names = [name for name in names if name in project.pipelines or name not in streaming]
        for name in () if is_known_by_log_only else batch_names:
            if name not in project.pipelines and name not in project.streaming_pipelines:
                raise unknown("pipeline", name, {*project.pipelines, *streaming})
        for due in runner.due(batch_names) if not is_known_by_log_only and (batch_names or not names) else ():
            rows.append(standing(due.state) | {"next_due": next_due(due, now), "now": now_text(due, now)})
        rows += [streaming_standing(runner.log, each) for name, each in streaming.items() if not names or name in names]
    if output == "json":
        print_json(rows)
        return
    shown = [
        {
            **row,
            "last_run": ago(row["last_run"], now),
            "next_due": time_text(row["next_due"]),
            "quarantined": row["quarantined"] or None,
            "error": first_line(row["error"]),
        }
        for row in rows
    ]
    columns = ["pipeline", "status", "last_run", "attempts", "next_due", "now", "quarantined", "error"]
    seldom = ["next_due", "quarantined", "error"]
    print_table(shown, columns, spare=["attempts", "next_due"], seldom=seldom, below="error")


# -------------------------------------------------------------------------------------------------------------- showing


def report(outcome: Outcome, output: str) -> None:
    """Print the outcome of one pipeline for people; as a line of JSON on stderr where logs are."""
    if output == "json":
        return
    error = None
    if outcome.error is not None:
        from weft.operate.runner import described

        error = described(outcome.error)
    lines = list(_outcome_lines(outcome))
    if log_format.is_json():
        known = {name: getattr(outcome, name) for name in ("pipeline", "run_id", "attempt", "slot")}
        said = error or click.unstyle("; ".join(lines))
        level = "ERROR" if error else "INFO"
        click.echo(log_format.command_line(said, levelname=level, outcome=outcome.status, **known), err=True)
        return
    click.echo("\n  ".join(lines))
    if error is not None:
        click.echo("  " + error.replace("\n", "\n  "), err=True)
    if outcome.retry_at is not None:
        click.echo(f"  It is tried again after {time_text(outcome.retry_at)}.")


def _outcome_lines(outcome: Outcome) -> Iterator[str]:
    took = "" if outcome.seconds is None else f" in {outcome.seconds:.1f} s"
    attempt = f", attempt {outcome.attempt}" if outcome.attempt and outcome.attempt > 1 else ""
    yield f"{_status(outcome)} {outcome.pipeline}{took}{attempt}"
    if outcome.reason:
        yield outcome.reason
    for each in outcome.targets:
        yield f"{each['target']}: {counts_text(each)} ({each['engine']})"
        for line in load_warnings(each):
            yield f"{click.style('warning:', fg='yellow')} {line}"
    for step in outcome.steps:
        yield f"then {first_line(step['step'])}{' (was done)' if step['replayed'] else ''}"


def _status(outcome: Outcome) -> str:
    color = {"succeeded": "green", "failed": "red", "interrupted": "red"}.get(outcome.status, "yellow")
    return click.style(outcome.status, fg=color, bold=True)


def load_warnings(counts: dict[str, Any]) -> list[str]:
    warnings = list(counts.get("warnings", ()))
    if late := counts.get("late"):
        warnings.append(f"rows that came too late to be read: {late:,} (with merge or scd2 a lookback reads them)")
    if missing := counts.get("without_value"):
        warnings.append(f"rows without a value in the incremental column, which are not read: {missing:,}")
    return warnings


def finish(outcomes: list[Outcome], output: str, *, is_bad: Any) -> None:
    """Print the outcomes for scripts, and exit with code 1 where one is bad."""
    print_outcomes(outcomes, output)
    if any(is_bad(each) for each in outcomes):
        sys.exit(1)


def print_outcomes(outcomes: list[Outcome], output: str) -> None:
    """Print the outcomes of all pipelines as JSON; for people `report` printed each."""
    if output == "json":
        print_json([outcome_record(each) for each in outcomes])


def outcome_record(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome for scripts."""
    from weft.operate.runner import described

    error = None if outcome.error is None else described(outcome.error)
    return {**{name: value for name, value in vars(outcome).items() if name != "error"}, "error": error}
