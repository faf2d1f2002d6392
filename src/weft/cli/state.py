"""`weft state`: what windows and joins of streaming pipelines keep between batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from weft.engine.readers import opened_tables
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.state import checkpoint_place, is_in_memory
from weft.engine.streaming.status import (
    current_state,
    opened_state,
    refuse_without_state,
    states_in,
    states_of,
    waiting_in,
    watermark_status,
)
from weft.errors import DeclarationError, NotFoundError, WeftError, did_you_mean
from weft.project import current
from weft.systems.sql.state_store import StoredState, drop_state, stored_states

if TYPE_CHECKING:
    from weft.pipelines.streaming.spec import StreamingPipeline
    from weft.systems.sql.tables import SqlTables
    from weft.systems.state_store import StateStore

_WHAT = click.argument("what", metavar="NAME|FILE.toml")
_SHOWN = 50
_THERE = "All states in this database, also of pipelines that are declared nowhere."


@click.group()
def state() -> None:
    """Show and remove the state of streaming pipelines with windows or joins."""


@state.command("list")
@click.option("--connection", metavar="NAME", help=_THERE)
@common_options
def list_(connection: str | None, output: str) -> None:
    """List the states of the declared pipelines: of the checkpoint that each has, and of those before it."""
    rows = [] if connection is None else states_in(current().connection(connection))
    for pipeline in current().streaming_pipelines.values() if connection is None else ():
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
        whose = "No declared pipeline" if connection is None else f"No pipeline in {connection}"
        click.echo(f"{whose} has a state.", err=True)


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
    help="All of this name: those of other checkpoints, and that of its own, which then needs a reset.",
)
@click.option("--connection", metavar="NAME", help="All of this name in this database, of a pipeline that is gone.")
@yes_option
@module_option
def drop(what: str, every: bool, connection: str | None, yes: bool) -> None:
    """Remove the states of earlier checkpoints, which `weft checkpoints reset` left for the case that one is brought
    back."""
    if connection is not None:
        _drop_undeclared(what, connection, yes)
        return
    pipeline = _with_state(what)
    with opened_state(pipeline) as (tables, query_id):
        # Files are those of a checkpoint, and go with it.
        states = [] if tables is None else stored_states(tables, pipeline.name)
        # Another project may have a pipeline of this name in the same database.
        here = checkpoint_place(Checkpoint.of(pipeline).home)
        chosen = [each for each in states if every or (each.query_id != query_id and each.checkpoint == here)]
        if not chosen:
            click.echo(f"There is nothing to remove of {pipeline.name}.", err=True)
            return
        with Checkpoint.of(pipeline).locked():
            assert tables is not None
            _remove(tables, chosen, yes)


def _drop_undeclared(name: str, connection: str, yes: bool) -> None:
    if name in current().streaming_pipelines:
        raise DeclarationError(
            f"{name} is declared: --connection is for a pipeline that is gone.", hint=f"weft state drop {quote(name)}"
        )
    with opened_tables(current().connection(connection)) as tables:
        states = stored_states(tables)
        chosen = [each for each in states if each.pipeline == name]
        if not chosen:
            hint = did_you_mean(name, {each.pipeline for each in states}, f"weft state list --connection {connection}")
            raise NotFoundError(f"There is no state of {name} in {connection}.", hint=hint)
        _remove(tables, chosen, yes)


def _remove(tables: SqlTables, chosen: Sequence[StoredState], yes: bool) -> None:
    rows = plural(sum(each.rows for each in chosen), "row")
    # Another project, or another machine, may have a pipeline of this name.
    places = ", ".join(sorted({each.checkpoint for each in chosen}))
    confirm(f"Remove {plural(len(chosen), 'state')} of {chosen[0].pipeline} with {rows}, of {places}?", yes)
    for each in chosen:
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
