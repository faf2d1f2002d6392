"""`weft cdc`: mirrors that streaming pipelines keep by change data capture."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from weft.cli.common import common_options, confirm, plural, print_json, print_table, yes_option
from weft.cli.consume import find_pipeline
from weft.engine.readers import opened_tables
from weft.engine.streaming.cdc.routes import resolved, source_table
from weft.engine.streaming.cdc.verify import Comparison, Side, compare
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.checkpoint_files import Verified
from weft.errors import DeclarationError, WeftError
from weft.pipelines.streaming.spec import table_name
from weft.project import current
from weft.systems.base import system_for

if TYPE_CHECKING:
    from weft.pipelines.streaming.spec import StreamingPipeline, Target

_SHOWN = 50


@click.group()
def cdc() -> None:
    """Look after the mirrors that pipelines keep by change data capture."""


@cdc.command()
@click.argument("what", metavar="NAME|FILE.toml")
@click.option("--source", required=True, metavar="CONNECTION", help="The connection to the database of the source.")
@click.option("--table", metavar="SCHEMA.TABLE", help="The table there; by default that of the topic.")
@click.option("--target", metavar="TABLE", help="Which target, where the pipeline has several.")
@click.option(
    "--settle",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a change may be on its way: a row that differs is asked for again after so long.",
)
@click.option("--mend", is_flag=True, help="Write the rows of the source where they differ.")
@yes_option
@common_options
def verify(
    what: str, source: str, table: str | None, target: str | None, settle: float, mend: bool, yes: bool, output: str
) -> None:
    """Compare a mirror with its source while both live, and name the keys that differ. Ends with 1 if any do.

    A change that is on its way is no difference: a row that differs is asked for again.
    """
    pipeline = find_pipeline(what)
    if (cdc := pipeline.cdc) is None:
        raise DeclarationError(f"{pipeline.name} has no cdc, and so no mirror.")
    pipeline = resolved(pipeline)
    mirror = _mirror(pipeline, target)
    assert mirror.table is not None
    if mirror.mode == "scd2":
        raise DeclarationError(f"{mirror.name} has all versions of rows (scd2), and the source has the last ones.")
    if cdc.row_sql is not None:
        raise DeclarationError(f"{mirror.name} has what row_sql makes of rows, and the source has the rows themselves.")
    connection = current().connection(mirror.connection)
    if mend:
        confirm(f"Write rows of {source} into {mirror.name} of {connection.label} where they differ?", yes)
    schema, name = table_name(table, "--table", pipeline.name) if table else source_table(pipeline, mirror)
    keys = mirror.primary_key
    about = (*mirror.table, keys, cdc.soft_delete_column or "")
    with ExitStack() as stack:
        theirs = Side(stack.enter_context(opened_tables(current().connection(source))), schema, name, keys)
        if system_for(connection.kind).tables:
            ours = Side(stack.enter_context(opened_tables(connection)), *about)
        else:
            from weft.engine.streaming.cdc.verify_lake import LakeSide

            ours = LakeSide(connection, *about)
        compared = compare(theirs, ours, settle_seconds=settle, mend=mend)
    _note(pipeline, mirror.name, compared)
    rows: list[dict[str, Any]] = [
        {"key": dict(zip(compared.keys, each.key, strict=True)), "in_mirror": each.kind, "columns": list(each.columns)}
        for each in compared.differences
    ]
    changing = [dict(zip(compared.keys, key, strict=True)) for key in compared.changing]
    if output == "json":
        print_json({"rows": compared.rows, "differences": rows, "changing": changing, "mended": compared.mended})
    else:
        if rows:
            shown = [{**row, "key": ", ".join(f"{name}={value}" for name, value in row["key"].items())} for row in rows]
            print_table(shown[:_SHOWN], ["key", "in_mirror", "columns"], seldom=["columns"])
            if len(rows) > _SHOWN:
                click.echo(f"… and {len(rows) - _SHOWN:,} more (--format json has all)", err=True)
        summary = f"{plural(compared.rows, 'row')} compared, {len(rows):,} differ"
        summary += f", {compared.mended:,} of them mended" if mend else ""
        summary += f", {len(changing):,} changed each time they were looked at" if changing else ""
        click.echo(f"{summary}.", err=True)
    if len(rows) > compared.mended:
        click.get_current_context().exit(1)


def _note(pipeline: StreamingPipeline, target: str, compared: Comparison) -> None:
    """Remember what was found, for those who look at the pipeline; not where its checkpoint is elsewhere."""
    checkpoint = Checkpoint.of(pipeline)
    with suppress(WeftError, OSError):
        if checkpoint.is_open and checkpoint.state().query_id is not None:
            counts = {"rows": compared.rows, "differ": len(compared.differences), "mended": compared.mended}
            Verified(checkpoint.home).note(target, at=datetime.now(UTC).isoformat(), **counts)


def _mirror(pipeline: StreamingPipeline, wanted: str | None) -> Target:
    mirrors = [each for each in pipeline.targets if each.table is not None and wanted in (None, each.name)]
    if len(mirrors) != 1:
        names = ", ".join(each.name for each in pipeline.targets)
        raise DeclarationError(
            f"{pipeline.name} has {'no such target' if wanted and not mirrors else 'not one table as target'}.",
            hint=f"Name one with --target: {names}.",
        )
    return mirrors[0]
