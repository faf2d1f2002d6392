"""`weft list`, `run`, `run-due` and `status`: pipelines, and what becomes of them."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from weft.cli.common import Command, format_option, module_option, print_json, print_table
from weft.errors import NotFoundError
from weft.project import current
from weft.settings import read_project_file

if TYPE_CHECKING:
    from weft.operate.runner import Outcome, Runner
    from weft.pipelines.declare import Pipeline
    from weft.pipelines.execution import Execution

_NAMES = click.argument("names", nargs=-1, metavar="[NAME]...")
_SELDOM = ("slot", "next_due", "quarantined", "error", "why")
_EXIT_INTERRUPTED, _EXIT_TERMINATED = 130, 143


def run_log_option(command: Command) -> Command:
    """Add `--run-log URL`, given to the command as `run_log`."""
    return click.option(
        "--run-log",
        metavar="URL",
        envvar="WEFT_RUN_LOG",
        help="Where runs are recorded: sqlite://PATH, postgres://…, mysql://…, duckdb://PATH, memory://, or a "
        "connection's name. By default run_log in weft.toml, or .weft/runs.db.",
    )(command)


def alerter_option(command: Command) -> Command:
    """Add `--alerter URL`, given to the command as `alerters`."""
    return click.option(
        "--alerter",
        "alerters",
        metavar="URL",
        multiple=True,
        help="Who is told of failures and recoveries: stdout://, slack://…, https://…. May be repeated. By default "
        "alerters in weft.toml.",
    )(command)


def _execution(pipeline: Pipeline, key: str, moment: datetime, *, keep: Callable[[], None]) -> Execution:
    """A run by the engine, which is loaded for commands that run something."""
    from weft.engine.run import PipelineRun

    return PipelineRun(pipeline, key, moment, keep=keep)


@contextmanager
def opened(run_log: str | None, alerters: Sequence[str] = (), *, read_only: bool = False) -> Iterator[Runner]:
    """The runner of this project's pipelines under a run log."""
    from weft.operate.alerts import open_alerters
    from weft.operate.runlog import open_run_log
    from weft.operate.runner import Runner

    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    # What is less than a warning goes to the log of the run alone.
    shown.setLevel(logging.WARNING)
    # It logs the traceback of a call that an interrupt ends, beside raising it.
    shown.addFilter(lambda record: not record.name.startswith("py4j"))
    logging.basicConfig(handlers=[shown])
    # What a command is told wins over what the project says.
    settings = read_project_file(current().root)
    told = open_alerters(alerters or settings.get("alerters", ()))
    with open_run_log(
        run_log or settings.get("run_log"), current().root, or_memory=not read_only, read_only=read_only
    ) as log:
        yield Runner(log, _execution, told)


def declared(modules: tuple[str, ...]) -> dict[str, Pipeline]:
    """The pipelines of the project and of these modules; an error where there are none."""
    from weft.pipelines import graph

    project = current()
    project.load_modules(modules)
    if not project.pipelines:
        if project.streaming_pipelines:
            raise NotFoundError(
                "Only streaming pipelines are declared.", hint="weft consume-list lists them, weft consume runs one."
            )
        hint = "Name the module that declares them: --module my_pipelines, or modules = […] in weft.toml."
        raise NotFoundError("No pipeline is declared.", hint=project.elsewhere() or hint)
    graph.refuse_unknown(project.pipelines)
    return project.pipelines


@contextmanager
def stopped_by_signals(runner: Runner, outcomes: list[Outcome], output: str) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the work: what is open is rolled back and recorded, and one line says so."""
    from weft.operate.runner import Terminated, described

    def stop(number: int, _: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt as error:
        # Spark may take seconds to end. Who presses Ctrl-C again does not want to wait, nor to see where it was.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if sys.stderr.isatty():
            click.echo(err=True)  # ends the line on which the terminal shows ^C
        if runner.stopped is not None:
            outcomes.append(runner.stopped)
            if output != "json":
                told = f"{described(error)} The next run goes on with it."
                click.echo(f"{_status(runner.stopped)} {runner.stopped.pipeline}: {told}")
        print_outcomes(outcomes, output)
        sys.exit(_EXIT_TERMINATED if isinstance(error, Terminated) else _EXIT_INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, before)


def kept_apart(output: str) -> AbstractContextManager[object]:
    """What pipelines print goes to stderr where a script reads JSON from stdout."""
    return redirect_stdout(sys.stderr) if output == "json" else nullcontext()


# ------------------------------------------------------------------------------------------------------------- commands


@click.command("list")
@module_option
@format_option
def list_(modules: tuple[str, ...], output: str) -> None:
    """List the declared pipelines, in the order in which they run."""
    from weft.pipelines import graph

    rows = [_listed(each) for each in graph.in_order(declared(modules))]
    if output == "json":
        print_json(rows)
        return
    shown = [{**row, "targets": ", ".join(row["targets"]), "depends_on": ", ".join(row["depends_on"])} for row in rows]
    columns = ["pipeline", "mode", "targets", "schedule", "depends_on", "declared"]
    print_table(shown, columns, spare=["declared", "mode"])


def _listed(pipeline: Pipeline) -> dict[str, Any]:
    from weft.pipelines.declare import load_mode

    modes = dict.fromkeys(load_mode(each) for each in pipeline.targets)
    schedule = pipeline.schedule
    zone = "" if schedule is None or schedule.timezone == "UTC" else f" {schedule.timezone}"
    return {
        "pipeline": pipeline.name,
        "mode": ", ".join(modes),
        "targets": [each.name for each in pipeline.targets],
        "schedule": None if schedule is None else f"{schedule.cron}{zone}",
        "depends_on": list(pipeline.depends_on),
        "declared": pipeline.place,
        "description": pipeline.description,
        "tags": list(pipeline.tags),
        "owner": pipeline.owner,
    }


@click.command()
@click.argument("names", nargs=-1, metavar="NAME...")
@click.option("--all", "everything", is_flag=True, help="Run every pipeline, each after those that it depends on.")
@click.option(
    "--no-resume",
    is_flag=True,
    help="Begin a new run also where the last one failed or was interrupted: what that had committed is loaded again.",
)
@module_option
@run_log_option
@alerter_option
@format_option
def run(
    names: tuple[str, ...],
    everything: bool,
    no_resume: bool,
    modules: tuple[str, ...],
    run_log: str | None,
    alerters: tuple[str, ...],
    output: str,
) -> None:
    """Run each NAME now, whatever its schedule says.

    A run that was interrupted or failed before is continued: what it had committed is not done twice. Ends with exit
    code 1 when one of them failed or is being run by somebody else, 130 after Ctrl-C, 143 after SIGTERM.
    """
    known = declared(modules)
    if not names and not everything:
        raise NotFoundError("Which pipeline?", hint=f"Name one of: {', '.join(list(known)[:20])}. Or --all.")
    outcomes: list[Outcome] = []
    with opened(run_log, alerters) as runner, stopped_by_signals(runner, outcomes, output):
        for pipeline in runner.chosen(names):
            if failed := [each.pipeline for each in outcomes if each.status != "succeeded"]:
                stopped = [name for name in pipeline.depends_on if name in failed]
                if stopped:
                    outcomes.append(_skipped(pipeline, stopped))
                    report(outcomes[-1], output)
                    continue
            with kept_apart(output):
                outcomes.append(runner.run(pipeline, resume=not no_resume))
            report(outcomes[-1], output)
    finish(outcomes, output, is_bad=lambda each: each.status != "succeeded")


def _skipped(pipeline: Pipeline, stopped: list[str]) -> Outcome:
    from weft.operate.runner import Outcome

    return Outcome(pipeline.name, "skipped", reason=f"waiting on upstream: {', '.join(stopped)}")


@click.command("run-due")
@_NAMES
@module_option
@run_log_option
@alerter_option
@format_option
def run_due(
    names: tuple[str, ...],
    modules: tuple[str, ...],
    run_log: str | None,
    alerters: tuple[str, ...],
    output: str,
) -> None:
    """Run what is due by its schedule: for cron, a systemd timer or a CronJob.

    Each slot is run once, however often and by however many hosts this is called. Ends with exit code 1 when something
    failed, 130 after Ctrl-C, 143 after SIGTERM.
    """
    declared(modules)
    outcomes: list[Outcome] = []
    with opened(run_log, alerters) as runner, stopped_by_signals(runner, outcomes, output), kept_apart(output):
        for outcome in runner.run_due(names):
            outcomes.append(outcome)
            report(outcome, output)
    if not outcomes and output != "json":
        click.echo("Nothing is due.")
    finish(outcomes, output, is_bad=lambda each: each.is_failure)


@click.command()
@_NAMES
@module_option
@run_log_option
@format_option
def status(names: tuple[str, ...], modules: tuple[str, ...], run_log: str | None, output: str) -> None:
    """How each pipeline stands: its last run, its attempts, when it is due next, and what it waits for."""
    declared(modules)
    with opened(run_log, read_only=True) as runner:
        now = runner.now
        rows: list[dict[str, Any]] = []
        for due in runner.due(names):
            state, pipeline = due.state, due.pipeline
            last = state.last if state is not None else None
            stale = (
                pipeline.freshness_sla is not None
                and state is not None
                and (state.succeeded_at is None or (now - state.succeeded_at).total_seconds() > pipeline.freshness_sla)
            )
            rows.append(
                {
                    "pipeline": pipeline.name,
                    "status": (state.status if state is not None else None) or "never run",
                    "last_run": last.started_at if last is not None else None,
                    "last_success": state.succeeded_at if state is not None else None,
                    "attempts": last.attempt if last is not None else 0,
                    "failures": state.failures if state is not None else 0,
                    "quarantined": last.quarantined if last is not None else None,
                    "next_due": None if pipeline.schedule is None else pipeline.schedule.next(now),
                    "now": due.why + (", stale" if stale else ""),
                    "error": last.error if last is not None and last.status != "succeeded" else None,
                }
            )
    if output == "json":
        print_json(rows)
        return
    shown = [
        {
            **row,
            "last_run": ago(row["last_run"], now),
            "next_due": moment(row["next_due"]),
            "quarantined": row["quarantined"] or None,
            "error": first_line(row["error"]),
        }
        for row in rows
    ]
    columns = ["pipeline", "status", "last_run", "attempts", "next_due", "now", "quarantined", "error"]
    print_table(shown, used(shown, columns), spare=["attempts", "next_due"], below="error")


# -------------------------------------------------------------------------------------------------------------- showing


def used(rows: list[dict[str, Any]], columns: list[str]) -> list[str]:
    """The columns without those of which there is nothing to tell."""
    return [each for each in columns if each not in _SELDOM or any(row[each] for row in rows)]


def report(outcome: Outcome, output: str) -> None:
    """Say what became of a pipeline, as soon as it is known."""
    if output == "json":
        return
    took = "" if outcome.seconds is None else f" in {outcome.seconds:.1f} s"
    attempt = f", attempt {outcome.attempt}" if outcome.attempt and outcome.attempt > 1 else ""
    click.echo(f"{_status(outcome)} {outcome.pipeline}{took}{attempt}")
    if outcome.reason:
        click.echo(f"  {outcome.reason}")
    for each in outcome.targets:
        click.echo(f"  {each['target']}: {counted(each)} ({each['engine']})")
        for line in remarks(each):
            click.echo(f"  {click.style('warning:', fg='yellow')} {line}")
    for step in outcome.steps:
        click.echo(f"  then {first_line(step['step'])}{' (was done)' if step['replayed'] else ''}")
    if outcome.error is not None:
        from weft.operate.runner import described

        click.echo("  " + described(outcome.error).replace("\n", "\n  "), err=True)
    if outcome.retry_at is not None:
        click.echo(f"  It is tried again after {moment(outcome.retry_at)}.")


def _status(outcome: Outcome) -> str:
    color = {"succeeded": "green", "failed": "red", "interrupted": "red"}.get(outcome.status, "yellow")
    return click.style(outcome.status, fg=color, bold=True)


def remarks(counts: dict[str, Any]) -> list[str]:
    """What else is to be said of a load."""
    found = list(counts.get("warnings", ()))
    if counts.get("late"):
        found.append(
            f"rows that came too late to be read: {counts['late']:,} (with merge or scd2 a lookback reads them)"
        )
    if counts.get("without_value"):
        found.append(f"rows without a value in the incremental column, which are not read: {counts['without_value']:,}")
    return found


def counted(counts: dict[str, Any]) -> str:
    """What a load did, in words."""
    if counts.get("replayed"):
        return "was done already"
    words = [f"{counts['rows_read']:,} read"]
    words += [
        f"{counts[name]:,} {name}"
        for name in ("inserted", "updated", "unchanged", "deleted", "quarantined")
        if counts.get(name)
    ]
    return ", ".join(words)


def finish(outcomes: list[Outcome], output: str, *, is_bad: Any) -> None:
    """Print what scripts read, and end with the exit code that they trust."""
    print_outcomes(outcomes, output)
    if any(is_bad(each) for each in outcomes):
        sys.exit(1)


def print_outcomes(outcomes: list[Outcome], output: str) -> None:
    """What became of all pipelines, for scripts; people were told of each."""
    if output != "json":
        return
    from weft.operate.runner import described

    print_json(
        [
            {
                **{name: value for name, value in vars(each).items() if name != "error"},
                "error": None if each.error is None else described(each.error),
            }
            for each in outcomes
        ]
    )


def moment(value: datetime | None) -> str | None:
    """A time as people read it."""
    return (
        None
        if value is None
        else f"{value:%Y-%m-%d %H:%M} UTC"
        if not value.second
        else f"{value:%Y-%m-%d %H:%M:%S} UTC"
    )


def ago(value: datetime | None, now: datetime) -> str | None:
    """How long ago something was."""
    if value is None:
        return None
    seconds = max(0, int((now - value).total_seconds()))
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"


def first_line(text: str | None) -> str | None:
    """The beginning of a text, in one line."""
    if text is None:
        return None
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:199]}…"
