"""`weft preview`, `validate` and `dry-run`: what would happen. None of them changes anything."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from weft.cli.common import (
    common_options,
    engine_option,
    first_line,
    format_option,
    module_option,
    one_line,
    print_json,
    print_table,
    run_log_option,
    time_text,
)
from weft.cli.pipelines import declared, open_runner
from weft.errors import WeftError, stop_behind, unknown
from weft.operate.hints import hint_for
from weft.operate.records import counts_text
from weft.operate.redaction import clean
from weft.project import current

if TYPE_CHECKING:
    from weft.engine.preview import Preview
    from weft.engine.validate import ValidationResult
    from weft.pipelines.declare import Pipeline, PipelineTarget


@click.command()
@click.argument("name")
@click.option(
    "--rows", default=5, show_default=True, type=click.IntRange(0, 1000), help="How many sample rows to show."
)
@click.option("--no-trial", is_flag=True, help="Leave out what would change: for that, all rows are read and tried.")
@engine_option
@common_options
def preview(name: str, rows: int, no_trial: bool, output: str) -> None:
    """Show what a run of NAME would do: engine, SQL, plan, sample rows, and what would change.

    The load is carried out in a transaction that is rolled back. Nothing is created, nothing is changed.
    """
    from weft.engine.preview import preview as preview_target
    from weft.pipelines.declare import find

    declared()
    pipeline = find(name)
    now = datetime.fromtimestamp(current().clock(), UTC)
    with _explained():
        previews = [preview_target(pipeline, target, now, rows=rows, trial=not no_trial) for target in pipeline.targets]
    if output == "json":
        print_json([_for_json(each) for each in previews])
    else:
        for each in previews:
            _show(pipeline, each)
    if any(each.refused is not None for each in previews):
        sys.exit(1)


@contextmanager
def _explained() -> Iterator[None]:
    """Raise an error of the pipeline's own function as a `WeftError` with its text and place, without a traceback."""
    try:
        yield
    except Exception as error:
        from weft.operate.runner import described

        if stop := stop_behind(error):
            raise stop from None
        if isinstance(error, WeftError):
            error.hint = hint_for(error.what) or error.hint
            raise
        raise WeftError(described(error)) from error


def _for_json(preview: Preview) -> dict[str, Any]:
    from weft.columns import python_rows

    fields = {**vars(preview), "changes": preview.counts}
    del fields["counts"]
    fields["sample"] = [] if preview.sample is None else python_rows(preview.sample)
    fields["refused"] = None if preview.refused is None else str(preview.refused)
    return fields


def _show(pipeline: Pipeline, preview: Preview) -> None:
    from weft.columns import python_rows

    def title(text: str) -> None:
        click.echo(click.style(text, bold=True))

    engines = {
        "pushdown": "pushdown: inside the database, no Spark",
        "process": "this process copies the rows, no Spark",
        "spark": "Spark",
        "none": "nothing is new",
    }
    engine = engines[preview.engine]
    click.echo(f"{click.style(pipeline.name, bold=True)} → {preview.target} ({preview.mode}, {engine})")
    if preview.watermark:
        click.echo(f"  new rows only: {preview.watermark}")
    if preview.sql:
        title("\nSQL")
        click.echo("  " + preview.sql.replace("\n", "\n  "))
    if preview.plan:
        title("\nPlan")
        for line in preview.plan:
            click.echo(f"  {one_line(line)}")
    if preview.sample is not None and preview.sample.num_columns:
        count = preview.sample.num_rows
        several = f"The first {count} rows, as the source has them" if count else "No rows"
        title(f"\n{'The first row, as the source has it' if count == 1 else several}")
        print_table(python_rows(preview.sample), preview.sample.column_names, is_data=True)
    title("\nWhat would change")
    if preview.creates:
        click.echo(f"  the table is created: {preview.creates}")
    if preview.adds:
        click.echo(f"  columns are added: {', '.join(preview.adds)}")
    if preview.counts is not None:
        click.echo(f"  {counts_text(asdict(preview.counts))}")
        for line in preview.counts.warnings:
            click.echo(f"  {click.style('warning:', fg='yellow')} {line}")
    if preview.late:
        click.echo(f"  {preview.late:,} rows came too late to be read")
    if preview.refused is not None:
        click.echo(f"  {click.style('refused:', fg='red')} {preview.refused}")
    click.echo()


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME|FILE.toml]...")
@engine_option
@common_options
def validate(names: tuple[str, ...], output: str) -> None:
    """Check each NAME (or all) against its databases: connections, SQL, columns. Ends with exit code 1 on a problem.

    Streaming pipelines too, declared or in a file: of each target it says whether rows arrive exactly once, or at least
    once.
    """
    findings = []
    for each in _findings(names):
        if each.problem is not None:
            hint = hint_for(each.problem)
            each = replace(each, problem=clean(each.problem) + (f"\n  {hint}" if hint else ""))
        findings.append(each)
    if output == "json":
        print_json(findings)
    else:
        rows = [
            {
                "pipeline": each.pipeline,
                "check": each.check,
                "result": "ok" if each.problem is None else "problem",
                "delivery": (each.delivery or "").replace("_", " "),
                "detail": first_line(each.detail if each.problem is None else each.problem),
            }
            for each in findings
        ]
        columns = ["pipeline", "check", "result", "delivery", "detail"]
        print_table(rows, columns, seldom=["delivery"], below="detail")
        # A server that does not answer may fail several checks with the same text.
        for name, problem in dict.fromkeys((each.pipeline, each.problem) for each in findings if each.problem):
            click.echo(f"\n{click.style('problem:', fg='red', bold=True)} {name}: {problem}", err=True)
    if any(each.problem is not None for each in findings):
        sys.exit(1)


def _findings(names: tuple[str, ...]) -> Iterator[ValidationResult]:
    from weft.engine.validate import validate as check

    project = current()
    if project.pipelines or not (names or project.streaming_pipelines):
        declared()
    loads, streams = project.pipelines, project.streaming_pipelines
    for name in names:
        if not name.endswith(".toml") and name not in loads and name not in streams:
            raise unknown("pipeline", name, {**loads, **streams}, otherwise=project.elsewhere())
    for each in loads.values() if not names else (loads[name] for name in names if name in loads):
        yield from check(each)
    for name in names or streams:
        if name.endswith(".toml") or name in streams:
            # Not for loads alone: to import it takes as long as a small run.
            from weft.cli.consume import find_pipeline
            from weft.engine.streaming.validate import validate as check_streaming

            yield from check_streaming(find_pipeline(name))


@click.command("dry-run")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@module_option
@run_log_option
@format_option
def dry_run(names: tuple[str, ...], run_log: str | None, output: str) -> None:
    """Say what `weft run-due` would do now, in its order; for each NAME also what would change."""
    declared()
    rows: list[dict[str, Any]] = []
    would_run: set[str] = set()
    with open_runner(run_log, read_only=True) as runner:
        for due in runner.due(names):
            # The same call runs the pipelines that it waits for first.
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
                row["changes"] = "; ".join(_change(due.pipeline, each, runner.now) for each in due.pipeline.targets)
            rows.append(row)
    if output == "json":
        print_json(rows)
        return
    shown = [{**row, "slot": time_text(row["slot"])} for row in rows]
    columns = ["pipeline", "would", "why", "slot", *(["changes"] if names else [])]
    print_table(shown, columns, spare=["slot"], below="changes")


def _change(pipeline: Pipeline, target: PipelineTarget, now: datetime) -> str:
    from weft.engine.preview import preview as preview_target

    try:
        with _explained():
            preview = preview_target(pipeline, target, now, rows=0)
    except WeftError as error:
        return f"{target.name}: {first_line(error.what)}"
    if preview.refused is not None:
        return f"{target.name}: refused: {first_line(preview.refused.what)}"
    created = "new table, " if preview.creates else ""
    changes = preview.engine if preview.counts is None else counts_text(asdict(preview.counts))
    return f"{target.name}: {created}{changes}"
