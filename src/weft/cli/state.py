"""`weft state`: what windows and joins of streaming pipelines keep between batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from shlex import quote
from typing import TYPE_CHECKING, Any

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
from weft.engine.readers import open_tables
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.state import checkpoint_place, files_state, state_connection
from weft.engine.streaming.stateful import NEVER, PARTITION
from weft.errors import DeclarationError, NotFoundError, WeftError
from weft.pipelines.streaming.windows import IN_MEMORY, Watermark
from weft.project import current
from weft.systems.sql.state_store import SqlState, StoredState, drop_state, stored_states

if TYPE_CHECKING:
    from weft.pipelines.streaming.spec import StreamingPipeline
    from weft.systems.sql.tables import SqlTables
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
        if pipeline.step is not None and not _is_in_memory(pipeline):
            try:
                rows += _listed(pipeline)
            except WeftError as error:  # the states of other pipelines are listed all the same
                click.echo(f"note: {pipeline.name}: {error.what}", err=True)
    if output == "json":
        print_json(rows)
    elif rows:
        shown = [{**row, "watermark": time_text(row["watermark"]), "oldest": time_text(row["oldest"])} for row in rows]
        print_table(shown, ["pipeline", "of", "batch", "watermark", "windows", "rows", "oldest", "table"], ["table"])
    else:
        click.echo("No declared pipeline has a state.", err=True)


def _listed(pipeline: StreamingPipeline) -> list[dict[str, Any]]:
    with _opened(pipeline) as (tables, query_id):
        if tables is None:
            found = _in_files(pipeline, query_id)
        else:
            found = sorted(stored_states(tables, pipeline.name), key=lambda each: each.query_id != query_id)
        # A join has no windows.
        windows = {"windows": None} if pipeline.join is not None else {}
        return [{**_described(each, query_id), **windows} for each in found]


def _in_files(pipeline: StreamingPipeline, query_id: str | None) -> list[StoredState]:
    """Return the state that a checkpoint has in its own files; those of others are in theirs."""
    home = Checkpoint.of(pipeline).home
    stored = None if query_id is None else files_state(home, query_id)
    last = None if stored is None else stored.last()
    if stored is None or last is None or query_id is None:
        return []
    place = files_state(home, query_id).path
    return [StoredState(pipeline.name, query_id, place, last, checkpoint_place(home), stored.counts())]


@state.command()
@_WHAT
@common_options
def show(what: str, output: str) -> None:
    """Show what waits: when each window begins and ends, or until when rows of a join are kept, and how many rows the
    state has of it."""
    with _current(what) as (pipeline, stored):
        last = stored.last()
        done = -NEVER if last is None or last.watermark is None else last.watermark
        counts = sorted((end, rows) for end, rows in stored.counts().items() if end > done)
        length = None if pipeline.window is None else pipeline.window.duration_ms
    end_column = "kept_until" if pipeline.window is None else "window_end"
    rows: list[dict[str, Any]] = [{end_column: _moment(end), "rows": count} for end, count in counts]
    if length is not None:  # a session begins when it does
        rows = [{"window_start": row["window_end"] - timedelta(milliseconds=length), **row} for row in rows]
    if output == "json":
        print_json(rows)
        return
    shown = [{**row, **{name: time_text(row[name]) for name in row if name != "rows"}} for row in rows[:_SHOWN]]
    print_table(shown, [*(["window_start"] if length is not None else []), end_column, "rows"])
    if len(rows) > _SHOWN:
        click.echo(f"… and {len(rows) - _SHOWN:,} more (--format json has all)", err=True)


@state.command()
@_WHAT
@common_options
def why(what: str, output: str) -> None:
    """Say why the next window has not closed, or why rows of a join still wait: how far each source has come, and which
    one holds the watermark."""
    with _current(what) as (pipeline, stored):
        last, waiting = stored.last(), sorted(stored.counts())
    assert last is not None
    lateness = (pipeline.watermark or Watermark()).lateness_ms * 1000
    sources: dict[str, int | None] = {name.replace(PARTITION, " "): newest for name, newest in last.sources.items()}
    for each in pipeline.sources:
        if not any(name.partition(PARTITION)[0] == each.name for name in last.sources):
            sources[each.name] = None
    waiting = [end for end in waiting if last.watermark is None or end > last.watermark]
    missing = [name for name, newest in sources.items() if newest is None]
    known = {name: newest for name, newest in sources.items() if newest is not None}
    # One that is behind the watermark was idle, and does not count.
    counts = {
        name: newest for name, newest in known.items() if newest - lateness >= (last.watermark or -NEVER)
    } or known
    holds = missing if last.watermark is None and missing else [min(counts, key=lambda name: counts[name])]
    row: dict[str, Any] = {
        "pipeline": pipeline.name,
        "watermark": None if last.watermark is None else _moment(last.watermark),
        "next_window_ends": _moment(waiting[0]) if waiting else None,
        "held_by": holds,
        "sources": {name: None if newest is None else _moment(newest) for name, newest in sources.items()},
        "lateness_ms": lateness // 1000,
    }
    if output == "json":
        print_json(row)
        return
    click.echo(f"watermark: {time_text(row['watermark']) or 'none yet'}")
    for name, newest in sources.items():
        came = "no rows yet" if newest is None else f"rows up to {time_text(_moment(newest))}"
        click.echo(f"source {name}: {came}{', holds the watermark' if name in holds else ''}")
    if not waiting:
        click.echo("No window is open." if pipeline.join is None else "No row waits.")
        return
    due, needed = time_text(_moment(waiting[0])), time_text(_moment(waiting[0] + lateness))
    ends = f"The next window ends at {due}. It closes"
    if pipeline.join is not None:
        ends = f"The oldest rows are kept until {due}. They go"
    click.echo(f"{ends} with a row of {' and '.join(holds)} at {needed} or later.")


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
    with _opened(pipeline) as (tables, query_id):
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
    if pipeline.step is None:
        raise DeclarationError(f"{pipeline.name} has neither a window nor a join, and so no state.")
    if _is_in_memory(pipeline):
        raise DeclarationError(f"The state of {pipeline.name} is in the memory of the process that runs it.")
    return pipeline


def _is_in_memory(pipeline: StreamingPipeline) -> bool:
    return pipeline.state_store is not None and pipeline.state_store.place == IN_MEMORY


@contextmanager
def _opened(pipeline: StreamingPipeline) -> Iterator[tuple[SqlTables | None, str | None]]:
    """Yield the tables of a pipeline's state, `None` for files, and the id of its checkpoint's query."""
    checkpoint = Checkpoint.of(pipeline)
    connection = state_connection(pipeline, checkpoint.home)
    if connection is None:
        yield None, checkpoint.state().query_id
        return
    with closing(open_tables(connection)) as tables:
        yield tables, checkpoint.state().query_id


@contextmanager
def _current(what: str) -> Iterator[tuple[StreamingPipeline, StateStore]]:
    """Yield a pipeline and the state of its checkpoint."""
    pipeline = _with_state(what)
    with _opened(pipeline) as (tables, query_id):
        found = _in_files(pipeline, query_id) if tables is None else stored_states(tables, pipeline.name)
        if query_id is None or query_id not in {each.query_id for each in found}:
            hint = f"It has one after its first rows: weft consume {quote(what)}"
            raise NotFoundError(f"{pipeline.name} has no state yet.", hint=hint)
        stored: StateStore
        if tables is None:
            stored = files_state(Checkpoint.of(pipeline).home, query_id)
        else:
            stored = SqlState(tables, pipeline.name, query_id)
        stored.last()
        yield pipeline, stored


def _described(each: StoredState, query_id: str | None) -> dict[str, Any]:
    done = -NEVER if each.batch.watermark is None else each.batch.watermark
    waiting = {end: rows for end, rows in each.counts.items() if end > done}
    return {
        "pipeline": each.pipeline,
        "of": "this checkpoint" if each.query_id == query_id else "an earlier one",
        "batch": each.batch.number,
        "watermark": None if each.batch.watermark is None else _moment(each.batch.watermark),
        "windows": len(waiting),
        "rows": sum(waiting.values()),
        "oldest": _moment(min(waiting)) if waiting else None,
        "query_id": each.query_id,
        "table": each.table,
    }


def _moment(microseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)
