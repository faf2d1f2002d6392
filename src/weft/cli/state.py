"""`weft state`: what windows and joins of streaming pipelines keep between batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from shlex import quote
from typing import TYPE_CHECKING

import click

from weft.cli.common import (
    common_options,
    confirm,
    module_option,
    plural,
    print_json,
    print_table,
    time_text,
    yes_option,
)
from weft.cli.consume import find_pipeline
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.state import checkpoint_place
from weft.engine.streaming.status import (
    current_state,
    is_in_memory,
    opened_state,
    refuse_without_state,
    states_of,
    waiting_in,
    watermark_status,
)
from weft.errors import WeftError
from weft.project import current
from weft.systems.sql.state_store import drop_state, stored_states

if TYPE_CHECKING:
    from weft.pipelines.streaming.spec import StreamingPipeline
    from weft.systems.state_store import StateStore

_WHAT = click.argument("what", metavar="NAME|FILE.toml")
_SHOWN = 50


@click.group()
def state() -> None:
    """Show and remove the state of streaming pipelines with windows or joins."""


@state.command("list")
@common_options
def list_(output: str) -> None:
    """List the states of the declared pipelines: of the checkpoint that each has, and of those before it."""
    rows = []
    for pipeline in current().streaming_pipelines.values():
        if pipeline.step is not None and not is_in_memory(pipeline):
            try:
                rows += states_of(pipeline)
            except WeftError as error:  # the states of other pipelines are listed all the same
                click.echo(f"note: {pipeline.name}: {error.what}", err=True)
    if output == "json":
        print_json(rows)
    elif rows:
        shown = [{**row, "watermark": time_text(row["watermark"]), "oldest": time_text(row["oldest"])} for row in rows]
        print_table(shown, ["pipeline", "of", "batch", "watermark", "windows", "rows", "oldest", "table"], ["table"])
    else:
        click.echo("No declared pipeline has a state.", err=True)


@state.command()
@_WHAT
@click.option(
    "--key",
    multiple=True,
    metavar="K",
    help="Only rows of this group, or with this key of a join: its value. May be repeated, for each column.",
)
@common_options
def show(what: str, key: tuple[str, ...], output: str) -> None:
    """Show what waits: when each window begins and ends, or until when rows of a join are kept, and how many rows the
    state has of it."""
    with _current(what) as (pipeline, stored):
        rows = waiting_in(pipeline, stored, key)
    if output == "json":
        print_json(rows)
        return
    shown = [{**row, **{name: time_text(row[name]) for name in row if name != "rows"}} for row in rows[:_SHOWN]]
    sessions = pipeline.window is not None and pipeline.window.duration_ms is None
    ends = ["kept_until"] if pipeline.window is None else ["window_end"] if sessions else ["window_start", "window_end"]
    print_table(shown, [*ends, "rows"])
    if len(rows) > _SHOWN:
        click.echo(f"… and {len(rows) - _SHOWN:,} more (--format json has all)", err=True)


@state.command()
@_WHAT
@common_options
def why(what: str, output: str) -> None:
    """Say why the next window has not closed, or why rows of a join still wait: how far each source has come, and which
    one holds the watermark."""
    with _current(what) as (pipeline, stored):
        row = watermark_status(pipeline, stored)
    if output == "json":
        print_json(row)
        return
    click.echo(f"watermark: {time_text(row['watermark']) or 'none yet'}")
    for name, newest in row["sources"].items():
        came = "no rows yet" if newest is None else f"rows up to {time_text(newest)}"
        click.echo(f"source {name}: {came}{', holds the watermark' if name in row['held_by'] else ''}")
    end = row["next_window_ends"]
    if end is None:
        click.echo("No window is open." if pipeline.join is None else "No row waits.")
        return
    due, needed = time_text(end), time_text(end + timedelta(milliseconds=row["lateness_ms"]))
    ends = f"The next window ends at {due}. It closes"
    if pipeline.join is not None:
        ends = f"The oldest rows are kept until {due}. They go"
    click.echo(f"{ends} with a row of {' and '.join(row['held_by'])} at {needed} or later.")


@state.command()
@_WHAT
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="All of this name: those of other checkpoints, and that of its own.",
)
@yes_option
@module_option
def drop(what: str, every: bool, yes: bool) -> None:
    """Remove the states of earlier checkpoints, which `weft checkpoints reset` left for the case that one is brought
    back."""
    pipeline = _with_state(what)
    with opened_state(pipeline) as (tables, query_id):
        # Files are those of a checkpoint, and go with it.
        found = [] if tables is None else stored_states(tables, pipeline.name)
        # Another project may have a pipeline of this name in the same database.
        here = checkpoint_place(Checkpoint.of(pipeline).home)
        chosen = [each for each in found if every or (each.query_id != query_id and each.checkpoint == here)]
        if not chosen:
            click.echo(f"There is nothing to remove of {pipeline.name}.", err=True)
            return
        with Checkpoint.of(pipeline).locked():
            rows = sum(each.rows for each in chosen)
            confirm(f"Remove {plural(len(chosen), 'state')} of {pipeline.name} with {plural(rows, 'row')}?", yes)
            for each in chosen:
                assert tables is not None
                drop_state(tables, each)
    click.echo(f"Removed {plural(len(chosen), 'state')}.", err=True)


# ------------------------------------------------------------------------------------------------------------- finding


def _with_state(what: str) -> StreamingPipeline:
    pipeline = find_pipeline(what)
    refuse_without_state(pipeline)
    return pipeline


@contextmanager
def _current(what: str) -> Iterator[tuple[StreamingPipeline, StateStore]]:
    """Yield a pipeline and the state of its checkpoint."""
    pipeline = find_pipeline(what)
    with current_state(pipeline, f"It has one after its first rows: weft consume {quote(what)}") as stored:
        yield pipeline, stored
