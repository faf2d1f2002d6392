"""`weft dlq`: the rows that streaming pipelines could not read, transform or store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import datetime
from heapq import nlargest
from typing import TYPE_CHECKING, Any

import click
import msgspec

from weft.cli.common import (
    Command,
    Moment,
    ago,
    common_options,
    confirm,
    dry_run_option,
    escaped,
    first_line,
    one_line,
    plural,
    print_json,
    print_table,
    time_text,
    yes_option,
)
from weft.cli.consume import find_pipeline
from weft.cli.pipelines import declared_streaming
from weft.engine.streaming.dead_letter_selection import SHORT_ID, Wanted, named, passing, summary, wanted
from weft.engine.streaming.dead_letter_selection import purge as remove
from weft.engine.streaming.dead_letters import DeadLetterBox
from weft.engine.streaming.replay import MAX_REPLAYS, Replay
from weft.errors import WeftError
from weft.systems.dead_letter_store import STAGES

if TYPE_CHECKING:
    from weft.pipelines.streaming.spec import StreamingPipeline

_WHAT = click.argument("what", metavar="NAME|FILE.toml")
_NAMED = 5


def _selecting(verb: str) -> Callable[[Command], Command]:
    """Add the options that say which letters are meant."""

    def add(command: Command) -> Command:
        help_ = f"{verb} those that failed there."
        command = click.option("--stage", type=click.Choice(STAGES), help=help_)(command)
        help_ = f"{verb} those of one group, as the page and GET /api/v1/dead-letters/NAME name it."
        command = click.option("--group", metavar="ID", help=help_)(command)
        command = click.option("--error", metavar="TEXT", help=f"{verb} those with TEXT in their error.")(command)
        command = click.option("--all", "every", is_flag=True, help=f"{verb} all.")(command)
        help_ = f"{verb} this one; the beginning will do. May be repeated."
        return click.option("--id", "ids", multiple=True, metavar="ID", help=help_)(command)

    return add


@click.group()
def dlq() -> None:
    """Look at the dead letters of streaming pipelines, replay them, remove them."""


# -------------------------------------------------------------------------------------------------------------- looking


@dlq.command("list")
@click.argument("what", metavar="[NAME|FILE.toml]", required=False)
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, metavar="N", help="Show so many.")
@click.option("--error", metavar="TEXT", help="Those with TEXT in their error.")
@click.option("--stage", type=click.Choice(STAGES), help="Those that failed there.")
@common_options
def list_(what: str | None, limit: int, error: str | None, stage: str | None, output: str) -> None:
    """List the dead letters of a pipeline, the newest first; without a name, how many each pipeline has."""
    if what is None:
        pipelines = [each for each in declared_streaming().values() if each.dead_letters is not None]
        _print_pipelines([_count_letters(each, error, stage) for each in pipelines], output)
        return
    box = DeadLetterBox(find_pipeline(what))
    # Counted as they come: a list of all letters may not fit into memory.
    counter = itertools.count()
    letters = (letter for letter, _ in zip(filter(passing(error, stage), box.letters()), counter, strict=False))
    newest = nlargest(limit, letters, key=lambda each: (each.failed_at, each.letter_id))
    total = next(counter)
    if output == "json":
        print_json([each.record() for each in newest])
        return
    if not newest:
        click.echo(f"{box.pipeline.name} has no {'such ' if error or stage else ''}dead letters.", err=True)
        return
    shown = [
        {
            "letter": each.letter_id[:SHORT_ID],
            "failed": ago(each.failed_at),
            "stage": each.stage,
            "where": each.target if each.stage == "store" else " ".join(filter(None, (each.source, each.offset))),
            "replays": each.replays,
            "error": first_line(each.error),
        }
        for each in newest
    ]
    columns = ["letter", "failed", "stage", "where", "replays", "error"]
    print_table(shown, columns, ["replays"], below="error", whole=["letter"])
    if total > limit:
        click.echo(f"{total - limit:,} more: --limit {total}", err=True)


def _count_letters(pipeline: StreamingPipeline, error: str | None, stage: str | None) -> dict[str, Any]:
    """Count the letters of a pipeline. A place that does not answer is reported in the row, so others are shown."""
    row: dict[str, Any] = {"pipeline": pipeline.name, "place": None, "letters": None, "newest": None}
    try:
        box = DeadLetterBox(pipeline)
        row["place"] = box.store.name
        counted = summary(box.letters(), passing(error, stage))
    except WeftError as failure:
        return {**row, "commonest_error": None, "failure": failure.what}
    common = first_line(counted.groups[0].error) if counted.groups else None
    return {**row, "letters": counted.count, "newest": counted.newest, "commonest_error": common, "failure": None}


def _print_pipelines(rows: Sequence[dict[str, Any]], output: str) -> None:
    if output == "json":
        print_json(rows)
        return
    if not rows:
        click.echo("No pipeline has a place for dead letters.", err=True)
        return
    shown = [
        {
            **row,
            "letters": "?" if row["letters"] is None else f"{row['letters']:,}",
            "newest": ago(row["newest"]),
            "commonest_error": row["failure"] or row["commonest_error"],
        }
        for row in rows
    ]
    print_table(shown, ["pipeline", "letters", "newest", "place", "commonest_error"], below="commonest_error")


@dlq.command()
@_WHAT
@click.argument("letter_id", metavar="ID")
@common_options
def show(what: str, letter_id: str, output: str) -> None:
    """Show all of a dead letter: why and where it failed, and the row itself. The beginning of its ID will do."""
    box = DeadLetterBox(find_pipeline(what))
    (letter,) = named(box, [letter_id]).values()
    if output == "json":
        print_json(letter.record())
        return
    fields = {"letter": letter.letter_id, **letter.record(), "failed_at": time_text(letter.failed_at)}
    for name, value in fields.items():
        if value is not None and name not in ("letter_id", "error", "payload"):
            click.echo(f"{name.replace('_', ' ') + ':':<12} {one_line(value)}")
    for title, text in (("error", letter.error), ("payload", _pretty(letter.payload))):
        click.echo(f"{title}:")
        for line in text.splitlines():
            click.echo(f"  {one_line(line)}")


def _pretty(payload: str) -> str:
    """Return a payload with line breaks, each value as it was written."""
    try:
        return escaped(msgspec.json.format(payload.encode(), indent=2).decode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return payload


# ------------------------------------------------------------------------------------------------------------ replaying


@dlq.command()
@_WHAT
@_selecting("Replay")
@click.option(
    "--max-replays",
    type=click.IntRange(1),
    default=MAX_REPLAYS,
    show_default=True,
    metavar="N",
    help="Leave those alone that failed in so many replays.",
)
@dry_run_option
@common_options
def replay(what: str, max_replays: int, dry_run: bool, output: str, **selection: Any) -> None:
    """Run dead letters through the pipeline once more, as it is now.

    Rows that could not be read or transformed go through the SQL into all targets; rows that a target refused go into
    that one. What fails again is a dead letter again. The pipeline may run meanwhile.
    """
    pipeline = find_pipeline(what)
    name = pipeline.name
    replaying = Replay(pipeline, _wanted(DeadLetterBox(pipeline), **selection), max_replays=max_replays)
    done = replaying.plan() if dry_run else replaying.run()
    if output == "json":
        print_json({"pipeline": name, "dry_run": dry_run, **vars(done)})
        return
    if dry_run:
        click.echo(f"{name}: {plural(done.letters, 'letter')} would be replayed. Nothing was done.")
    else:
        if done.finished:
            click.echo(f"{name}: {plural(done.finished, 'letter')} of a replay that was broken off came first.")
        click.echo(f"{name}: replayed {plural(done.letters, 'letter')}; {done.again:,} failed again.")
    if done.held:
        named = [f"{each[:SHORT_ID]} ({why})" for each, why in list(done.held.items())[:_NAMED]]
        more = f" and {len(done.held) - _NAMED:,} more" if len(done.held) > _NAMED else ""
        click.echo(f"note: {plural(len(done.held), 'letter')} left alone: {', '.join(named)}{more}.", err=True)
        if replaying.exhausted:
            click.echo(f"  To try them all the same: --max-replays {max_replays + 1}", err=True)


# ------------------------------------------------------------------------------------------------------------- removing


@dlq.command()
@_WHAT
@_selecting("Remove")
@click.option("--before", type=Moment(), metavar="TIME", help="Remove those that failed before: ISO, or 10m (ago).")
@dry_run_option
@yes_option
@common_options
def purge(what: str, before: int | datetime | None, dry_run: bool, yes: bool, output: str, **selection: Any) -> None:
    """Remove dead letters. Their rows are lost unless something else has them."""
    if before is not None and not isinstance(before, datetime):
        raise click.UsageError(f"{before} is no time. Letters are named by --id.")
    pipeline = find_pipeline(what)
    box = DeadLetterBox(pipeline)
    # Only letters that were counted are removed: others arrive meanwhile.
    letter_ids = [each.letter_id for each in filter(_wanted(box, before=before, **selection), box.letters())]
    letters = plural(len(letter_ids), "letter")
    if letter_ids and not dry_run:
        confirm(f"Remove {letters} of {pipeline.name} from {box.store.name}?", yes)
        remove(box, letter_ids)
    if output == "json":
        print_json({"pipeline": pipeline.name, "dry_run": dry_run, "letters": len(letter_ids)})
    elif dry_run:
        click.echo(f"{pipeline.name}: {letters} would be removed. Nothing was done.")
    else:
        click.echo(f"{pipeline.name}: removed {letters}.")


# ------------------------------------------------------------------------------------------------------------- choosing


def _wanted(
    box: DeadLetterBox,
    ids: Sequence[str],
    every: bool,
    error: str | None,
    stage: str | None,
    group: str | None,
    before: datetime | None = None,
) -> Wanted:
    """Return the filter for the letters that the options select. One is required, so that nobody selects all by
    mistake."""
    selections = bool(ids) + every + any(each is not None for each in (error, stage, group, before))
    if selections != 1:
        more = "" if selections else " Which letters?"
        raise click.UsageError(f"Give one of --id, --all and filters such as --error.{more}")
    return wanted(box, ids, error, stage, before, group)
