"""`weft plan`, `apply` and `backfill`: what has changed in the declarations of models, and to build it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from weft.cli.common import (
    Moment,
    alerter_option,
    confirm,
    engine_option,
    find_declared,
    format_option,
    module_option,
    plural,
    print_json,
    print_table,
    run_log_option,
    yes_option,
)
from weft.cli.models import declared_models
from weft.cli.pipelines import run_now
from weft.errors import NotFoundError
from weft.operate.redaction import clean

if TYPE_CHECKING:
    from weft.engine.models.planning import PlannedStep
    from weft.engine.models.survey import Survey

_SIGNS = {"new": ("+", "green"), "changed": ("~", "yellow"), "dependent": (" ", "cyan"), "removed": ("-", "red")}
_EXIT_CHANGES = 2


@contextmanager
def _planned(sample: int = 0) -> Iterator[tuple[Survey, list[PlannedStep]]]:
    from weft.engine.models.inputs import Observer
    from weft.engine.models.planning import make_plan
    from weft.engine.models.survey import Survey

    with Observer() as observer:
        survey = Survey(observer)
        yield survey, make_plan(survey, sample=sample)


@click.command()
@click.option("--sample", metavar="N", type=click.IntRange(1, 1000), help="Show N rows of each table before and after.")
@click.option("--exit-code", is_flag=True, help="End with exit code 2 where something has changed, for CI.")
@engine_option
@module_option
@format_option
def plan(sample: int | None, exit_code: bool, output: str) -> None:
    """Show what has changed in the models since they were built: new, changed and removed ones, their columns, the
    dependents, and what `weft apply` would build. Nothing is changed."""
    _declared_or_removed()
    with _planned(sample or 0) as (_, steps):
        if output == "json":
            print_json([_for_json(each) for each in steps])
        else:
            _print_plan(steps)
    if exit_code and steps:
        sys.exit(_EXIT_CHANGES)


@click.command()
@click.option("--drop-removed", is_flag=True, help="Drop the tables of models that are not declared any more.")
@yes_option
@engine_option
@module_option
@run_log_option
@alerter_option
@format_option
def apply(drop_removed: bool, yes: bool, run_log: str | None, alerters: tuple[str, ...], output: str) -> None:
    """Build what `weft plan` lists, in the order of the dependencies.

    On a terminal it asks before it builds an incremental model again from the beginning, and before it drops a table;
    --yes is for scripts. Ends with exit code 1 where a build failed.
    """
    from weft.engine.models.planning import drop

    _declared_or_removed()
    with _planned() as (survey, steps):
        if output != "json":
            _print_plan(steps)
        builds = [each for each in steps if each.change != "removed"]
        if problems := [each for each in builds if each.problem is not None]:
            raise NotFoundError(
                f"{problems[0].model} cannot be built: {problems[0].problem}", hint="Nothing was built. See weft plan."
            )
        drops = [each for each in steps if each.change == "removed"] if drop_removed else []
        if questions := [each.question for each in (*builds, *drops) if each.question]:
            text = f"{'; '.join(questions)}?"
            confirm(text[0].upper() + text[1:], yes)
        # Files of one writer must be free for the builds.
        survey.observer.close()
        if builds:
            full = [each.model for each in builds if each.full]
            run_now([each.model for each in builds], run_log, alerters, output, full=full)
        elif output == "json":
            print_json([])
        for each in drops:
            drop(survey, each)
            if output != "json":
                click.echo(f"dropped {each.table}")


class _Time(click.ParamType[Any]):
    """A time, or how long ago."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        moment = Moment().convert(value, param, ctx)
        if not isinstance(moment, datetime):
            self.fail(f"{value!r} is not a time such as 2026-01-31T12:00 or 10m (ago).", param, ctx)
        return moment


@click.command()
@click.argument("name")
@click.option("--since", required=True, metavar="T", type=_Time(), help="The first time of publication, or 2d (ago).")
@click.option("--until", metavar="T", type=_Time(), help="Up to, and without, this one. By default all since.")
@engine_option
@module_option
@run_log_option
@alerter_option
@format_option
def backfill(
    name: str,
    since: datetime,
    until: datetime | None,
    run_log: str | None,
    alerters: tuple[str, ...],
    output: str,
) -> None:
    """Build again what came to the model NAME in a range of time, after a correction of its code or of a table.

    The events that were published then are read again, other inputs as a whole, and the rows are merged by the key.
    What the next build reads is not changed.
    """
    from weft.pipelines.models import find

    find_declared(find, name)
    if until is not None and until <= since:
        raise click.UsageError("--until must be after --since.")
    run_now([name], run_log, alerters, output, resume=False, span=(since, until))


def _declared_or_removed() -> None:
    """Raise where no model is declared, unless streams are: then all of them may have been removed."""
    from weft.project import current

    if not current().streams:
        declared_models()


# -------------------------------------------------------------------------------------------------------------- showing


def _for_json(step: PlannedStep) -> dict[str, Any]:
    shown = {name: value for name, value in vars(step).items() if name != "connection"}
    if step.connection is not None:
        shown["connection"] = step.connection.name
    return {**shown, "problem": None if step.problem is None else clean(step.problem)}


def _print_plan(steps: list[PlannedStep]) -> None:
    if not steps:
        click.echo("Nothing has changed: the tables are as the models say.")
        return
    for each in steps:
        sign, color = _SIGNS[each.change]
        named = each.model if each.table == each.model else f"{each.model} → {each.table}"
        rows = "" if each.rows is None else f", {plural(each.rows, 'row')}"
        title = click.style(f"{sign} {each.change:<9} {named}", fg=color, bold=True)
        click.echo(f"{title} ({each.materialise}{rows}): {each.outcome}")
        if each.change != "new":
            for name, kind in each.added.items():
                click.echo(f"    + {name} {kind}")
        for name in each.dropped:
            click.echo(f"    - {name}")
        for name, (before, after) in each.retyped.items():
            click.echo(f"    ~ {name} {before} → {after}")
        if each.unknown and each.problem is None:
            click.echo(f"    {each.unknown}")
        if each.problem is not None:
            click.echo(f"    {click.style('problem:', fg='red')} {clean(each.problem)}")
        for title, sample in (("before", each.before), ("after", each.after)):
            if sample is not None:
                click.echo(click.style(f"    {title}:{'' if sample else ' no rows'}", bold=True))
                if sample:
                    print_table(sample, list(sample[0]), is_data=True)
    counts = [f"{sum(each.change == name for each in steps)} {name}" for name in _SIGNS]
    click.echo(f"\n{', '.join(each for each in counts if not each.startswith('0 '))}")
