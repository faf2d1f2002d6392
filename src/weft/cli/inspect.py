"""`weft preview`, `validate` and `dry-run`: what would happen. None of them changes anything."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from weft.cli.common import format_option, module_option, one_line, print_json, print_table
from weft.cli.pipelines import counted, declared, first_line, moment, opened, run_log_option
from weft.errors import WeftError, unknown
from weft.project import current

if TYPE_CHECKING:
    from weft.engine.preview import Preview
    from weft.engine.validate import ValidationResult
    from weft.pipelines.declare import Pipeline


def _find(name: str, modules: tuple[str, ...]) -> Pipeline:
    from weft.pipelines.declare import find

    declared(modules)
    return find(name)


@click.command()
@click.argument("name")
@click.option(
    "--rows", default=5, show_default=True, type=click.IntRange(0, 1000), help="How many sample rows to show."
)
@click.option("--no-trial", is_flag=True, help="Leave out what would change: for that, all rows are read and tried.")
@module_option
@format_option
def preview(name: str, rows: int, no_trial: bool, modules: tuple[str, ...], output: str) -> None:
    """Show what a run of NAME would do: engine, SQL, plan, sample rows, and what would change.

    The load is carried out in a transaction that is rolled back. Nothing is created, nothing is changed.
    """
    from datetime import UTC, datetime

    from weft.engine.preview import preview as find_out

    pipeline = _find(name, modules)
    now = datetime.fromtimestamp(current().clock(), UTC)
    with _explained():
        found = [find_out(pipeline, target, now, rows=rows, trial=not no_trial) for target in pipeline.targets]
    if output == "json":
        print_json([_for_json(each) for each in found])
    else:
        for each in found:
            _show(pipeline, each)
    if any(each.refused is not None for each in found):
        sys.exit(1)


@contextmanager
def _explained() -> Iterator[None]:
    """An error of the pipeline's own function as one of ours: what it says and where, not a traceback."""
    try:
        yield
    except Exception as error:
        from weft.operate.hints import hint_for
        from weft.operate.runner import described, stop_behind

        if stop := stop_behind(error):
            raise stop from None
        if isinstance(error, WeftError):
            error.hint = hint_for(error.what) or error.hint
            raise
        raise WeftError(described(error)) from error


def _for_json(found: Preview) -> dict[str, Any]:
    return {
        "target": found.target,
        "mode": found.mode,
        "engine": found.engine,
        "sql": found.sql,
        "plan": found.plan,
        "sample": [] if found.sample is None else found.sample.to_pylist(),
        "creates": found.creates,
        "adds": found.adds,
        "changes": None if found.counts is None else asdict(found.counts),
        "refused": None if found.refused is None else str(found.refused),
        "late": found.late,
        "watermark": found.watermark,
    }


def _show(pipeline: Pipeline, found: Preview) -> None:
    def title(text: str) -> None:
        click.echo(click.style(text, bold=True))

    engine = {"pushdown": "pushdown: inside the database, no Spark", "spark": "Spark"}[found.engine]
    click.echo(f"{click.style(pipeline.name, bold=True)} → {found.target} ({found.mode}, {engine})")
    if found.watermark:
        click.echo(f"  new rows only: {found.watermark}")
    if found.sql:
        title("\nSQL")
        click.echo("  " + found.sql.replace("\n", "\n  "))
    if found.plan:
        title("\nPlan")
        for line in found.plan:
            click.echo(f"  {one_line(line)}")
    if found.sample is not None and found.sample.num_columns:
        count = found.sample.num_rows
        first = "No rows" if not count else "The first row" if count == 1 else f"The first {count} rows"
        title(f"\n{first}, as the source has {'it' if count == 1 else 'them'}" if count else f"\n{first}")
        print_table(found.sample.to_pylist(), found.sample.column_names, is_data=True)
    title("\nWhat would change")
    if found.creates:
        click.echo(f"  the table is created: {found.creates}")
    if found.adds:
        click.echo(f"  columns are added: {', '.join(found.adds)}")
    if found.counts is not None:
        click.echo(f"  {counted({**asdict(found.counts)})}")
        for line in found.counts.warnings:
            click.echo(f"  {click.style('warning:', fg='yellow')} {line}")
    if found.late:
        click.echo(f"  {found.late:,} rows came too late to be read")
    if found.refused is not None:
        click.echo(f"  {click.style('refused:', fg='red')} {found.refused}")
    click.echo()


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME|FILE.toml]...")
@module_option
@format_option
def validate(names: tuple[str, ...], modules: tuple[str, ...], output: str) -> None:
    """Check each NAME (or all) against its databases: connections, SQL, columns. Ends with exit code 1 on a problem.

    Streaming pipelines too, declared or in a file: of each target it says whether rows arrive exactly once, or at least
    once.
    """
    from weft.operate.hints import hint_for
    from weft.operate.redaction import clean

    found = []
    for each in _findings(names, modules):
        if each.problem is None:
            found.append(each)
        else:
            hint = hint_for(each.problem)
            found.append(replace(each, problem=clean(each.problem) + (f"\n  {hint}" if hint else "")))
    if output == "json":
        print_json([asdict(each) for each in found])
    else:
        rows = [
            {
                "pipeline": each.pipeline,
                "check": each.check,
                "result": "ok" if each.problem is None else "problem",
                "delivery": (each.delivery or "").replace("_", " "),
                "detail": first_line(each.detail if each.problem is None else each.problem),
            }
            for each in found
        ]
        columns = ["pipeline", "check", "result", "delivery", "detail"]
        print_table(rows, columns if any(each.delivery for each in found) else [*columns[:3], "detail"], below="detail")
        # One server that is away may be the problem of several checks.
        for name, problem in dict.fromkeys((each.pipeline, each.problem) for each in found if each.problem is not None):
            click.echo(f"\n{click.style('problem:', fg='red', bold=True)} {name}: {problem}", err=True)
    if any(each.problem is not None for each in found):
        sys.exit(1)


def _findings(names: tuple[str, ...], modules: tuple[str, ...]) -> Iterator[ValidationResult]:
    from weft.cli.consume import find_pipeline
    from weft.engine.streaming.validate import validate as check_streaming
    from weft.engine.validate import validate as check

    project = current()
    project.load_modules(modules)
    if project.pipelines or not (names or project.streaming_pipelines):
        declared(())
    loads, streams = project.pipelines, project.streaming_pipelines
    for name in names:
        if not name.endswith(".toml") and name not in loads and name not in streams:
            raise unknown("pipeline", name, {**loads, **streams}, otherwise=project.elsewhere())
    for each in loads.values() if not names else (loads[name] for name in names if name in loads):
        yield from check(each)
    for name in names or streams:
        if name.endswith(".toml") or name in streams:
            yield from check_streaming(find_pipeline(name, ()))


@click.command("dry-run")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@module_option
@run_log_option
@format_option
def dry_run(names: tuple[str, ...], modules: tuple[str, ...], run_log: str | None, output: str) -> None:
    """Say what `weft run-due` would do now, in its order; for each NAME also what would change."""
    from datetime import UTC, datetime

    from weft.engine.preview import preview as find_out

    declared(modules)
    rows: list[dict[str, Any]] = []
    would_run: set[str] = set()
    with opened(run_log, read_only=True) as runner:
        for due in runner.due(names):
            # What it waits for comes before it in the same call.
            follows = bool(due.waits_for) and would_run.issuperset(due.waits_for)
            if due.is_due or follows:
                would_run.add(due.pipeline.name)
            row: dict[str, Any] = {
                "pipeline": due.pipeline.name,
                "would": "run" if due.is_due or follows else "wait" if due.waits_for else "not run",
                "why": f"once {' and '.join(due.waits_for)} succeeded" if follows else due.why,
                "slot": due.slot,
            }
            if names:
                now = datetime.fromtimestamp(current().clock(), UTC)
                row["changes"] = "; ".join(
                    _change(due.pipeline, target, now, find_out) for target in due.pipeline.targets
                )
            rows.append(row)
    if output == "json":
        print_json(rows)
        return
    shown = [{**row, "slot": moment(row["slot"])} for row in rows]
    columns = ["pipeline", "would", "why", "slot", *(["changes"] if names else [])]
    print_table(shown, columns, spare=["slot"], below="changes")


def _change(pipeline: Pipeline, target: Any, now: Any, find_out: Any) -> str:
    try:
        with _explained():
            found = find_out(pipeline, target, now, rows=0)
    except WeftError as error:
        return f"{target.name}: {first_line(error.what)}"
    if found.refused is not None:
        return f"{target.name}: refused: {first_line(found.refused.what)}"
    created = "new table, " if found.creates else ""
    return f"{target.name}: {created}{counted(asdict(found.counts)) if found.counts is not None else found.engine}"
