"""`weft checkpoints`: how far streaming pipelines have come, and how to have them begin elsewhere."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from weft.cli.common import (
    Moment,
    ago,
    common_options,
    dry_run_option,
    print_json,
    print_table,
    time_text,
)
from weft.cli.consume import find_pipeline
from weft.engine.streaming.checkpoint import Checkpoint, stored
from weft.engine.streaming.checkpoint_files import Sources
from weft.engine.streaming.progress import SourceLag
from weft.engine.streaming.sources import open_source, show_position
from weft.engine.streaming.status import checkpoint_status, offsets_by_source
from weft.errors import DeclarationError, StorageError, WeftError, unknown
from weft.project import current
from weft.systems.stream_source import Rewind

if TYPE_CHECKING:
    from weft.pipelines.streaming.spec import Source, StreamingPipeline

_WHAT = click.argument("what", metavar="NAME|FILE.toml")


@click.group()
def checkpoints() -> None:
    """Show, reset and rewind the checkpoints of streaming pipelines."""


# -------------------------------------------------------------------------------------------------------------- looking


@checkpoints.command("list")
@common_options
def list_(output: str) -> None:
    """List the checkpoints of this project, and those that declared pipelines have elsewhere."""
    declared = current().streaming_pipelines
    places = {each.location: (each, declared.get(each.name)) for each in stored()}
    for pipeline in declared.values():
        try:
            checkpoint = Checkpoint.of(pipeline)
            if checkpoint.location not in places and checkpoint.home.exists():
                places[checkpoint.location] = (checkpoint, pipeline)
        except WeftError as error:  # the checkpoints of other pipelines are listed all the same
            click.echo(f"note: {error.what}", err=True)
    listed = []
    for checkpoint, declaration in places.values():
        try:
            listed.append((checkpoint_status(checkpoint, declaration), checkpoint, declaration))
        except WeftError as error:
            click.echo(f"note: {error.what}", err=True)
    if output == "json":
        print_json([_with_texts(row, "offsets") for row, _, _ in listed])
    elif listed:
        shown = [
            {**row, "offsets": _positions(checkpoint, row, declaration), "last_batch": ago(row["last_batch"])}
            for row, checkpoint, declaration in listed
        ]
        print_table(shown, ["pipeline", "running", "committed", "last_batch", "offsets", "location"], ["location"])
    else:
        click.echo("There are no checkpoints.", err=True)


@checkpoints.command()
@_WHAT
@common_options
def show(what: str, output: str) -> None:
    """Show how far a pipeline has come.

    committed: the last batch that is done; planned: the last one whose rows are chosen; offsets: by source, how far the
    batches that are done have come; lag: events, messages, files or versions that wait.
    """
    checkpoint, pipeline = _find(what)
    row = checkpoint_status(checkpoint, pipeline)
    lag = SourceLag(pipeline.sources, checkpoint) if pipeline is not None else None
    if lag is not None:
        row["lag"] = lag.now()
    if output == "json":
        print_json(_with_texts(row, "offsets"))
        return
    shown = {**row, "offsets": _positions(checkpoint, row, pipeline), "last_batch": time_text(row["last_batch"])}
    if lag is not None:
        shown["lag"] = "; ".join(f"{name} {waiting}" for name, waiting in lag.in_words().items())
    for name, value in shown.items():
        if value not in (None, ""):
            click.echo(f"{name.replace('_', ' ') + ':':<12} {value}")


def _with_texts(row: dict[str, Any], *names: str) -> dict[str, Any]:
    """Add the offsets of events, by source, as texts too: those of Redis are beyond the numbers of jq."""
    texts = {
        f"{name}_text": {source: str(offset) for source, offset in row[name].items() if isinstance(offset, int)}
        for name in names
    }
    return {**row, **texts}


def _find(what: str) -> tuple[Checkpoint, StreamingPipeline | None]:
    """Return the checkpoint of a pipeline that is declared, or that ran here once."""
    declared = current().streaming_pipelines
    if what.endswith(".toml") or what in declared:
        pipeline = find_pipeline(what)
        return Checkpoint.of(pipeline), pipeline
    known = {each.name: each for each in stored()}
    if what not in known:
        raise unknown("checkpoint", what, {*known, *declared}, otherwise="weft checkpoints list")
    return known[what], None


def _positions(checkpoint: Checkpoint, row: dict[str, Any], pipeline: StreamingPipeline | None) -> str:
    declared = {each.name: each for each in pipeline.sources} if pipeline is not None else {}
    return "; ".join(
        f"{name} {show_position(position, checkpoint.source_log(number), declared.get(name))}"
        for number, (name, position) in enumerate(row["offsets"].items())
    )


# --------------------------------------------------------------------------------------------------------------- moving


@checkpoints.command()
@_WHAT
@dry_run_option
@common_options
def reset(what: str, dry_run: bool, output: str) -> None:
    """Have a pipeline begin again, as if it had never run.

    Its checkpoint is not removed but moved aside, so that it can be brought back. Targets keep their rows: what is read
    again is added again by the mode append, and changes nothing by the mode merge.
    """
    checkpoint, pipeline = _find(what)
    before: dict[str, Any] = {}
    with suppress(StorageError):  # one that cannot be read can be moved
        before = offsets_by_source(checkpoint.state(), pipeline)
    aside = checkpoint.reset(dry_run=dry_run)
    _report(checkpoint, pipeline, aside, before, {}, dry_run, output)


@checkpoints.command()
@_WHAT
@click.option(
    "--to-offset",
    metavar="N",
    help="The first to be read again: of a stream the event N, of Delta the version N, of a topic the message N, or "
    "partition:N,… where it has several partitions.",
)
@click.option(
    "--to-time",
    type=Moment(),
    metavar="TIME",
    help="What was published, sent, changed or committed since: ISO, or 10m (ago).",
)
@click.option("--source", metavar="NAME", help="Of this source; the others go on where they are.")
@dry_run_option
@common_options
def rewind(
    what: str, to_offset: str | None, to_time: int | datetime | None, source: str | None, dry_run: bool, output: str
) -> None:
    """Have a pipeline read again what it has read since an offset or a time.

    Its checkpoint is moved aside, and a new one begins there. What is read again is added again by the mode append, and
    changes nothing by the mode merge.
    """
    if (to_offset is None) == (to_time is None):
        raise click.UsageError("Give one of --to-offset and --to-time.")
    if to_time is not None and not isinstance(to_time, datetime):
        raise click.UsageError(f"{to_time} is no time. To go to an offset: --to-offset {to_time}.")
    pipeline = find_pipeline(what)
    if pipeline.step is not None:
        raise DeclarationError(
            f"{pipeline.name} has a {'join' if pipeline.join else 'window'}: what is read again would be in its state "
            "twice.",
            hint=f"To compute everything again: weft checkpoints reset {quote(what)}.",
        )
    chosen = _chosen(pipeline, source, to_offset)
    checkpoint = Checkpoint.of(pipeline)
    with checkpoint.changing():
        state = checkpoint.state()
        if state.committed is None:
            raise DeclarationError(f"{pipeline.name} has done no batch, so there is nothing to go back to.")
        stay = [each.name for each in pipeline.sources if each not in chosen]
        if stay and state.planned != state.committed:
            raise DeclarationError(
                f"{pipeline.name} has begun batch {state.planned} and not finished it. Targets may have its rows, "
                f"so that {', '.join(stay)} cannot stay where it is.",
                hint=f"Finish it first: weft consume {quote(what)} --once.",
            )
        Sources(checkpoint.home).check(pipeline)
        if len(state.offsets) != len(pipeline.sources):  # of an old checkpoint that does not name its sources
            raise DeclarationError(
                f"The checkpoint of {pipeline.name} is of {len(state.offsets)} sources, and now it has "
                f"{len(pipeline.sources)}."
            )
        moved = {}
        for number, (each, position) in enumerate(zip(pipeline.sources, state.offsets, strict=True)):
            opened, source_log = open_source(each), checkpoint.source_log(number)
            if each not in chosen:
                moved[each.name] = opened.stay(position, source_log)
            elif to_offset is not None:
                moved[each.name] = opened.rewind_to_offset(position, to_offset, source_log)
            elif to_time is not None:
                moved[each.name] = opened.rewind_to_time(position, to_time, source_log)
        source_logs = {number: each.source_log for number, each in enumerate(moved.values()) if each.source_log}
        aside = checkpoint.rewind([each.position for each in moved.values()], source_logs, dry_run=dry_run)
    _report(checkpoint, pipeline, aside, offsets_by_source(state, pipeline), moved, dry_run, output)


def _chosen(pipeline: StreamingPipeline, name: str | None, to_offset: str | None) -> list[Source]:
    sources = {each.name: each for each in pipeline.sources}
    if name is not None and name not in sources:
        raise unknown("source", name, sources)
    if name is None and to_offset is not None and len(sources) > 1:
        raise click.UsageError(f"Whose offset? Name one: --source {' or '.join(sources)}.")
    return [sources[name]] if name is not None else list(sources.values())


def _report(
    checkpoint: Checkpoint,
    pipeline: StreamingPipeline | None,
    aside: str,
    before: dict[str, Any],
    moved: dict[str, Rewind],
    dry_run: bool,
    output: str,
) -> None:
    for each in moved.values():
        if each.note:
            click.echo(f"note: {each.note}", err=True)
    if output == "json":
        report = {
            "pipeline": checkpoint.name,
            "location": checkpoint.location,
            "moved_to": aside,
            "offsets": before,
            "starts": {name: each.first for name, each in moved.items()},
            "dry_run": dry_run,
        }
        print_json(_with_texts(report, "offsets", "starts"))
        return
    would = "would begin" if dry_run else "begins"
    for each in moved.values():
        if each.summary:
            click.echo(f"{checkpoint.name} {would} with {each.summary}.")
    if not moved:
        click.echo(f"{checkpoint.name} {would} again, as if it had never run.")
    if dry_run:
        click.echo("Nothing was done.")
        return
    here = checkpoint.home.path
    if "://" in here:
        click.echo(f"The old checkpoint is {aside} now; to bring it back, put it in the place of {here}.")
    else:
        back = f"mv -T {quote(aside)} {quote(here)}"
        click.echo(f"To bring the old checkpoint back: {f'rm -r {quote(here)} && {back}' if moved else back}")
    added = [each.name for each in pipeline.targets if each.mode == "append"] if pipeline is not None else []
    if added:
        click.echo(f"note: rows that are read again are added again to {', '.join(added)}.", err=True)
