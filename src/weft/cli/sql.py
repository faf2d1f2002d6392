"""`weft sql`: a query over every connection by name."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import click

from weft.cli.common import engine_option, escaped, module_option, plural, print_table

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN_ROWS = 1000


@click.command()
@engine_option
@click.argument("query")
@click.option(
    "--format",
    "output",
    type=click.Choice(["table", "json", "csv", "ndjson"]),
    default="table",
    show_default=True,
    help="A table for people; JSON, CSV or a JSON object a line for scripts.",
)
@click.option(
    "--output", "file", metavar="FILE", help="Write all rows into a file: .parquet, .csv, .json, .ndjson or .jsonl."
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(0),
    help=f"At most so many rows. Without it a table has {SHOWN_ROWS:,}, and everything else all.",
)
@click.option(
    "--param",
    "parameters",
    metavar="NAME=VALUE",
    multiple=True,
    help="The value of :NAME: a JSON number, true, false, null or text; anything else is a text. May be repeated.",
)
@click.option(
    "--connection", metavar="C", help="Where tables without a connection are, by default the connection default."
)
@click.option("--pushdown", is_flag=True, help="Let the database of all tables run it, in its own SQL, without Spark.")
@module_option
def sql(
    query: str,
    output: str,
    file: str | None,
    limit: int | None,
    parameters: tuple[str, ...],
    connection: str | None,
    pushdown: bool,
) -> None:
    """Run QUERY, Spark SQL over streams, tables, Delta tables and files by name. With - it is read from standard input.

    \b
      weft sql "SELECT city, count(*) FROM events.orders GROUP BY city"
      weft sql "SELECT * FROM warehouse.public.orders o JOIN lake.raw.events e ON e.id = o.id"
      weft sql 'SELECT * FROM lake."2024/*.parquet"' --output all.parquet
    """
    from weft.engine import result_files

    text = sys.stdin.read() if query == "-" else query
    values = _values(parameters)
    format = output if file is None else result_files.format_of(file)
    with planned(text, values, connection, pushdown=pushdown) as result:
        if file is not None:
            rows = result.write(file, format, limit)
            click.echo(f"{plural(rows, 'row')} in {file}", err=True)
        elif format == "table":
            show(result, SHOWN_ROWS if limit is None else limit)
        else:
            _print(result, format, limit)


def _print(result: QueryResult, format: str, limit: int | None) -> None:
    with tempfile.TemporaryDirectory(prefix="weft-sql-") as folder:
        path = os.path.join(folder, "result")
        result.write(path, format, limit)
        with open(path, encoding="utf-8", newline="") as lines:
            sys.stdout.writelines(lines if format == "csv" else map(escaped, lines))


class QueryResult:
    """The result of a query, which Spark or a database has yet to compute."""

    def __init__(self, frame: Any, reader: Any) -> None:
        self._frame = frame
        self._reader = reader

    def first(self, count: int) -> pa.Table:
        import pyarrow as pa

        from weft.engine.progress import progress
        from weft.spark_support import outcome

        if self._frame is None:
            return pa.Table.from_batches(list(self._batches(count)), self._reader.schema)
        with progress("running the query"), outcome.explained("run the query"):
            table: pa.Table = self._frame.limit(count).toArrow()
            return table

    def write(self, path: str, format: str, limit: int | None) -> int:
        """Write the rows into a file; return how many."""
        from weft.engine import result_files

        if self._frame is None:
            return result_files.write_rows(self._reader.schema, self._batches(limit), path, format)
        frame = self._frame if limit is None else self._frame.limit(limit)
        return result_files.write_frame(frame, path, format)

    def _batches(self, limit: int | None) -> Iterator[pa.RecordBatch]:
        from weft.engine.readers import read_all

        for batch in read_all(self._reader):
            yield batch if limit is None else batch.slice(0, limit)
            if limit is not None:
                limit -= min(limit, batch.num_rows)
                if not limit:
                    return


@contextmanager
def planned(
    text: str, parameters: Mapping[str, Any] | None = None, connection: str | None = None, *, pushdown: bool = False
) -> Iterator[QueryResult]:
    """Plan a query, and yield its result."""
    from weft.engine import queries

    query = queries.understand(text, connection)
    if not pushdown:
        yield QueryResult(queries.frame(query, parameters), None)
        return
    with closing(queries.pushed_down(query, connection, parameters)) as reader:
        yield QueryResult(None, reader)


def show(result: QueryResult, limit: int) -> None:
    """Print the first rows as a table, and say so where there are more."""
    from weft.columns import python_rows
    from weft.engine.result_files import text_of

    table = result.first(limit + 1)
    names = _distinct(table.column_names)
    shown = table.slice(0, limit).rename_columns(names)
    # Nulls stay empty; of numbers as they are, columns are aligned to the right.
    rows = [
        {name: None if value is None else text_of(value) for name, value in row.items()} for row in python_rows(shown)
    ]
    print_table(rows, names, is_data=True)
    if table.num_rows > limit:
        click.echo(f"the first {plural(limit, 'row')}; more with --limit, all with --output FILE", err=True)
    else:
        click.echo(plural(table.num_rows, "row"), err=True)


def _distinct(names: Iterable[str]) -> list[str]:
    """Return names under which two columns of one name can be shown."""
    uses: dict[str, int] = {}
    shown = []
    for name in names:
        uses[name] = uses.get(name, 0) + 1
        shown.append(name if uses[name] == 1 else f"{name}:{uses[name] - 1}")
    return shown


def _values(assignments: Iterable[str]) -> dict[str, Any] | None:
    values: dict[str, Any] = {}
    for each in assignments:
        name, equals, text = each.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--param is NAME=VALUE, not {each!r}.")
        try:
            value = json.loads(text, parse_float=Decimal)
        except ValueError:
            value = text
        values[name] = text if isinstance(value, dict | list | float) else value
    return values or None
