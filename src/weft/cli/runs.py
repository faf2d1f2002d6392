"""`weft runs list | show | cancel`, `weft logs`, `weft pause` and `weft resume`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from weft.cli.common import (
    ago,
    first_line,
    format_option,
    module_option,
    one_line,
    print_json,
    print_table,
    run_log_option,
    time_text,
    unused_module_option,
)
from weft.cli.pipelines import load_warnings, open_runner
from weft.errors import DeclarationError, NotFoundError, did_you_mean, unknown
from weft.operate.records import counts_text
from weft.project import current

if TYPE_CHECKING:
    from weft.operate.records import Attempt
    from weft.operate.runner import Runner

_STATUSES = ["running", "succeeded", "failed", "interrupted", "cancelled", "skipped"]


@click.group()
def runs() -> None:
    """List and cancel runs, and show what became of one."""


@runs.command("list")
@click.option("--pipeline", metavar="NAME", help="Only those of this pipeline.")
@click.option("--status", type=click.Choice(_STATUSES), help="Only those that ended so.")
@click.option("--days", type=click.FloatRange(min=0), help="Only those of the last so many days.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 100_000), help="How many at most.")
@unused_module_option
@run_log_option
@format_option
def list_(
    pipeline: str | None, status: str | None, days: float | None, limit: int, run_log: str | None, output: str
) -> None:
    """List attempts and skips, the newest first."""
    with open_runner(run_log, read_only=True) as runner:
        now = runner.now
        since = None if days is None else now - timedelta(days=days)
        attempts = runner.log.runs(pipeline, status, since, limit)  # type: ignore[arg-type]
    if output == "json":
        print_json([asdict(each) for each in attempts])
        return
    rows = [
        {
            "run": each.run_id,
            "pipeline": each.pipeline,
            "status": each.status,
            "attempt": each.attempt or None,
            "slot": time_text(each.slot),
            "started": ago(each.started_at, now),
            "seconds": None if each.seconds is None else f"{each.seconds:.1f}",
            "read": each.rows_read,
            "quarantined": each.quarantined or None,
            "why": first_line(each.error or each.reason),
        }
        for each in attempts
    ]
    columns = ["run", "pipeline", "status", "attempt", "slot", "started", "seconds", "read", "quarantined", "why"]
    spare = ["slot", "seconds", "attempt", "read", "started"]
    print_table(rows, columns, spare, seldom=["slot", "quarantined", "why"], below="why", whole=["run"])


@runs.command()
@click.argument("run_id")
@unused_module_option
@run_log_option
@format_option
def show(run_id: str, run_log: str | None, output: str) -> None:
    """Show every attempt at the run RUN_ID, with what each did and why it failed."""
    with open_runner(run_log, read_only=True) as runner:
        attempts = runner.log.run(run_id)
        if not attempts:
            latest = [each.run_id for each in runner.log.runs(limit=5)]
            hint = f"The latest: {', '.join(dict.fromkeys(latest))}." if latest else "The log is empty."
            raise NotFoundError(f"There is no run {run_id!r} in {runner.log.shown}.", hint=hint)
    if output == "json":
        print_json([asdict(each) for each in attempts])
        return
    for each in attempts:
        took = "" if each.seconds is None else f" in {each.seconds:.1f} s"
        if each.status == "skipped":
            click.echo(click.style(f"{each.pipeline}: skipped", bold=True))
            click.echo(f"  first at {time_text(each.started_at)}")
        else:
            click.echo(click.style(f"{each.pipeline}, attempt {each.attempt}: {each.status}{took}", bold=True))
            click.echo(f"  started {time_text(each.started_at)} by process {each.pid} on {each.host}")
        if each.slot is not None:
            click.echo(f"  for the slot {time_text(each.slot)}")
        for target in (each.metrics or {}).get("targets", []):
            click.echo(f"  {target['target']}: {counts_text(target)} ({target['engine']}, {target['seconds']:.1f} s)")
            for line in load_warnings(target):
                click.echo(f"    {line}")
        for step in (each.metrics or {}).get("steps", []):
            click.echo(f"  then {first_line(step['step'])} ({step['seconds']:.1f} s)")
        for text in (each.error, each.reason):
            if text:
                click.echo("  " + text.replace("\n", "\n  "))
        if each.retry_at is not None:
            click.echo(f"  tried again after {time_text(each.retry_at)}")


@runs.command()
@click.argument("run_id")
@unused_module_option
@run_log_option
def cancel(run_id: str, run_log: str | None) -> None:
    """End the run RUN_ID, wherever it runs, and do not try it again.

    The process that works on it finds out at its next heartbeat, within 20 seconds. What is not committed is undone.
    """
    from weft.operate.scheduler import LEADER

    with open_runner(run_log, or_memory=False) as runner:
        attempts = runner.log.run(run_id)
        if not attempts:
            raise NotFoundError(f"There is no run {run_id!r} in {runner.log.shown}.", hint="List them: weft runs list")
        last = attempts[-1]
        if last.pipeline == LEADER:
            raise DeclarationError(
                f"{run_id} is the lease of a scheduler, and no run.",
                hint=f"Stop its process, {last.pid} on {last.host}: it hands the lease over.",
            )
        outcome = runner.log.cancel(last.pipeline, run_id)
    if outcome == "asked":
        click.echo(f"The process {last.pid} on {last.host} ends {last.pipeline} within 20 seconds.")
    elif outcome == "cancelled":
        click.echo(f"{last.pipeline} is not tried again for this run.")
    else:
        raise DeclarationError(f"The run {run_id} of {last.pipeline} has ended: {last.status}.")


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@module_option
@run_log_option
def pause(names: tuple[str, ...], run_log: str | None) -> None:
    """Stop following the schedule of each NAME, or the inputs of a model, until `weft resume`.

    run-due, the scheduler and the worker leave it out; what runs now goes on. `weft run NAME` runs it all the same.
    """
    with _open_to_change(names, run_log) as runner:
        for name in names:
            is_new = runner.log.pause(name)
            click.echo(f"{name} is paused{'' if is_new else ' already'}. To go on: weft resume {name}")


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@module_option
@run_log_option
def resume(names: tuple[str, ...], run_log: str | None) -> None:
    """Follow the schedule of each NAME, or the inputs of a model, again.

    Slots that passed meanwhile are run only with catchup.
    """
    with _open_to_change(names, run_log) as runner:
        for name in names:
            was_paused = runner.log.resume(name)
            click.echo(f"{name} goes on." if was_paused else f"{name} was not paused.")


@contextmanager
def _open_to_change(names: Sequence[str], run_log: str | None) -> Iterator[Runner]:
    """Open the log to change what it has of pipelines, which are declared or known to it."""
    from weft.operate.presence import is_place

    with open_runner(run_log, or_memory=False) as runner:
        known = {*current().pipelines, *(each for each in runner.log.latest(None) if not is_place(each))}
        for name in names:
            if name not in known:
                raise unknown("pipeline", name, known)
        yield runner


@click.command()
@click.argument("name")
@click.option("--run", "run_id", metavar="RUN_ID", help="Of this run, not of the last one.")
@unused_module_option
@run_log_option
def logs(name: str, run_id: str | None, run_log: str | None) -> None:
    """Print what the last run of NAME wrote to its log (those of this machine), or else how it ended."""
    from weft.operate.logs import log_file

    with open_runner(run_log, read_only=True) as runner:
        attempts = runner.log.run(run_id) if run_id else _last(runner, name)
    if not attempts:
        raise NotFoundError(
            f"There is no run {run_id!r} in {runner.log.shown}.", hint=f"weft runs list --pipeline {name}"
        )
    if attempts[0].pipeline != name:
        raise NotFoundError(
            f"The run {run_id} is one of {attempts[0].pipeline!r}, not of {name!r}.",
            hint=f"weft logs {attempts[0].pipeline} --run {run_id}",
        )
    for each in attempts:
        file = log_file(current().root, each.run_id, each.attempt)
        if file.exists():
            lines = file.read_text("utf-8", "replace").splitlines()
            click.echo("".join(f"{one_line(line)}\n" for line in lines), nl=False)
        else:
            click.echo(f"{each.status}: {each.error or each.reason or 'nothing was written'}")


def _last(runner: Runner, name: str) -> list[Attempt]:
    """The last attempt of a pipeline; where there is none, why it was skipped."""
    state = runner.log.latest([name])[name]
    attempt = state.last or state.skipped
    if attempt is None:
        known = {each.pipeline for each in runner.log.runs(limit=1000)}
        hint = did_you_mean(name, known, "weft runs list shows what it knows.")
        raise NotFoundError(f"The run log knows no run of {name!r}.", hint=hint)
    return [attempt]
