"""`weft quarantine`: the rows that the targets of pipelines put aside."""

from __future__ import annotations

from typing import Any

import click

from weft.cli.common import (
    Command,
    common_options,
    confirm,
    dry_run_option,
    plural,
    print_json,
    print_table,
    yes_option,
)
from weft.cli.pipelines import declared
from weft.engine import quarantined
from weft.pipelines.declare import find

_NAME = click.argument("name", metavar="PIPELINE")
_EXPECT = click.option(
    "--expect", type=click.IntRange(0), metavar="N", help="Do nothing unless there are so many such rows."
)


def _choosing(command: Command) -> Command:
    """Add the options that say which rows are meant."""
    command = click.option("--group", metavar="ID", help="Those of one group, as `weft quarantine list` names it.")(
        command
    )
    return click.option("--all", "every", is_flag=True, help="All of them.")(command)


@click.group()
def quarantine() -> None:
    """Look at the rows that the targets of pipelines put aside, load them once more, remove them."""


@quarantine.command("list")
@click.argument("name", metavar="[PIPELINE]", required=False)
@common_options
def list_(name: str | None, output: str) -> None:
    """List the rows in quarantine by error, the commonest first: of all pipelines, or of one."""
    chosen = [find(name)] if name is not None else list(declared().values())
    rows = [
        {"pipeline": each.name, "table": group.place, "group": group.group, "rows": group.rows, "error": group.error}
        for each in chosen
        for group in quarantined.groups(each)
    ]
    if output == "json":
        print_json(rows)
    elif rows:
        print_table(rows, ["pipeline", "table", "group", "rows", "error"], ["rows"], below="error", whole=["group"])
    else:
        click.echo(f"{name or 'No pipeline'} has {'no ' if name else ''}rows in quarantine.", err=True)


@quarantine.command()
@_NAME
@_choosing
@_EXPECT
@dry_run_option
@common_options
def replay(name: str, every: bool, group: str | None, expect: int | None, dry_run: bool, output: str) -> None:
    """Load rows of the quarantine once more, into the target that put them aside, as the pipeline is now.

    What is loaded leaves the quarantine in the same transaction; what the target rejects again stays in it.
    """
    _check(every, group)
    pipeline = find(name)
    if dry_run:
        done = quarantined.count(pipeline, group, to_replay=True)
    else:
        done = quarantined.replay(pipeline, group, expected=expect)
    if _printed(name, done, dry_run, output):
        return
    if dry_run:
        click.echo(f"{name}: {plural(done.rows, 'row')} would be loaded once more. Nothing was done.")
    else:
        click.echo(f"{name}: loaded {plural(done.rows - done.again, 'row')}; {done.again:,} failed again.")
    for why, number in done.held.items():
        click.echo(f"note: {plural(number, 'row')} left alone: {why}.", err=True)


@quarantine.command()
@_NAME
@_choosing
@_EXPECT
@dry_run_option
@yes_option
@common_options
def purge(name: str, every: bool, group: str | None, expect: int | None, dry_run: bool, yes: bool, output: str) -> None:
    """Remove rows of the quarantine. They are lost unless something else has them."""
    _check(every, group)
    pipeline = find(name)
    done = quarantined.count(pipeline, group)
    if done.rows and not dry_run:
        confirm(f"Remove {plural(done.rows, 'row')} of {name} from {', '.join(done.places)}?", yes)
        # Only rows that were counted are removed: others arrive meanwhile.
        done = quarantined.purge(pipeline, group, expected=done.rows if expect is None else expect)
    if _printed(name, done, dry_run, output):
        return
    if dry_run:
        click.echo(f"{name}: {plural(done.rows, 'row')} would be removed. Nothing was done.")
    else:
        click.echo(f"{name}: removed {plural(done.rows, 'row')}.")


def _check(every: bool, group: str | None) -> None:
    """Require a choice, so that nobody chooses all by mistake."""
    if every == (group is not None):
        raise click.UsageError(f"Give one of --all and --group.{'' if every else ' Which rows?'}")


def _printed(name: str, done: quarantined.Quarantined, dry_run: bool, output: str) -> bool:
    shown: dict[str, Any] = {"pipeline": name, "dry_run": dry_run, **vars(done)}
    if output == "json":
        print_json(shown)
    return output == "json"
