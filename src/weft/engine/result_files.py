"""Files of the result of a query: Parquet, CSV, JSON. Batch by batch, so that a result need not fit into memory."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa

from weft.columns import python_rows
from weft.errors import DeclarationError, StorageError
from weft.spark_support import outcome
from weft.spark_support.sessions import numbered
from weft.types import to_json_or_text

FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".ndjson": "ndjson", ".jsonl": "ndjson"}
"""By the end of a file's name."""
_PLAIN = set(',"\r\n')


def format_of(path: str | os.PathLike[str]) -> str:
    """Return the format that the name of a file says."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise DeclarationError(
            f"The name {os.fspath(path)!r} says no format.", hint=f"A result goes into a file that ends in {_ENDS}."
        )
    return FORMATS[suffix]


_ENDS = ", ".join(FORMATS)


def write_frame(frame: Any, path: str | os.PathLike[str], format: str) -> int:
    """Write the rows of a DataFrame in their order, by one task; return how many. On a cluster they come here first."""
    from pyspark.sql.pandas.types import to_arrow_schema

    from weft.engine import session
    from weft.engine.progress import progress

    refuse_twins(frame.columns)
    schema = to_arrow_schema(frame.schema, timezone="UTC")
    with progress("running the query") as counter, outcome.explained("run the query"), _replacing(path) as part:
        if not session.is_local():
            return write_batches(schema, frame.toArrow().to_batches(), part, format)

        def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            named = (batch.rename_columns(schema.names) for batch in batches)
            rows = named if counter is None else counter.counted(named)
            result = outcome.of(lambda: write_batches(schema, rows, part, format))
            yield pa.RecordBatch.from_pydict({"outcome": [result]})

        results = numbered(frame).coalesce(1).mapInArrow(run, "outcome binary").collect()
        # Spark calls no task for a query without partitions.
        return outcome.unpack(bytes(results[0][0])) if results else write_batches(schema, [], part, format)


def write_rows(schema: pa.Schema, batches: Iterable[pa.RecordBatch], path: str | os.PathLike[str], format: str) -> int:
    """Write batches into a file that is there when all of them are; return how many rows."""
    refuse_twins(schema.names)
    with _replacing(path) as part:
        return write_batches(schema, batches, part, format)


def write_batches(schema: pa.Schema, batches: Iterable[pa.RecordBatch], path: str, format: str) -> int:
    """Write batches into a new file; return how many rows."""
    rows = 0
    try:
        with _WRITERS[format](path, schema) as write:
            for batch in batches:
                write(batch)
                rows += batch.num_rows
    except pa.ArrowException as error:
        raise DeclarationError(f"The result cannot be written as {format}: {error}") from None
    except OSError as error:
        raise _not_written(path, error) from None
    return rows


def refuse_twins(names: Iterable[str]) -> None:
    """Refuse two columns of one name, of which a row would keep one."""
    names = list(names)
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:
        raise DeclarationError(
            f"The query has more than one column {twins[0]!r}.",
            hint="Give each a name of its own: SELECT a.id AS id, b.id AS other_id …",
        )


@contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the path of a file that takes the place of `path` at the end; a query that fails leaves nothing behind. As
    with a redirection of a shell, links are followed, and a file that is there keeps its mode."""
    goal = os.path.realpath(os.path.expanduser(path))
    part = os.path.join(os.path.dirname(goal), f".{os.path.basename(goal)}.{uuid4().hex[:8]}")
    before = os.stat(goal).st_mode if os.path.exists(goal) else None
    if before is not None and not stat.S_ISREG(before):
        raise StorageError(f"{goal} is there, and is no file.", hint="Choose another --output.")
    try:
        yield part
        try:
            if before is not None:
                os.chmod(part, stat.S_IMODE(before))
            os.replace(part, goal)
        except OSError as error:
            raise _not_written(goal, error) from None
    finally:
        with suppress(OSError):
            os.remove(part)


def _not_written(path: str, error: OSError) -> StorageError:
    folder = os.path.dirname(path)
    return StorageError(f"Cannot write a file in {folder}: {error.strerror or error}.", hint="Choose another --output.")


# ------------------------------------------------------------------------------------------------------------- formats

Write = Callable[[pa.RecordBatch], None]


@contextmanager
def _parquet(path: str, schema: pa.Schema) -> Iterator[Write]:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(path, schema) as writer:
        yield lambda batch: writer.write_batch(batch.cast(schema))


@contextmanager
def _csv(path: str, schema: pa.Schema) -> Iterator[Write]:
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(",".join(map(_csv_cell, schema.names)) + "\n")
        yield lambda batch: _write_lines(file, (",".join(map(_csv_cell, row.values())) for row in python_rows(batch)))


@contextmanager
def _ndjson(path: str, schema: pa.Schema) -> Iterator[Write]:
    with open(path, "w", encoding="utf-8") as file:
        yield lambda batch: _write_lines(file, map(json_line, python_rows(batch)))


@contextmanager
def _json(path: str, schema: pa.Schema) -> Iterator[Write]:
    with open(path, "w", encoding="utf-8") as file:
        begin = "[\n"

        def write(batch: pa.RecordBatch) -> None:
            nonlocal begin
            for row in python_rows(batch):
                file.write(f"{begin}  {json_line(row)}")
                begin = ",\n"

        yield write
        file.write("[]\n" if begin == "[\n" else "\n]\n")


_WRITERS = {"parquet": _parquet, "csv": _csv, "json": _json, "ndjson": _ndjson}


def _write_lines(file: Any, lines: Iterable[str]) -> None:
    file.writelines(f"{line}\n" for line in lines)


def json_line(value: object) -> str:
    """Return a value as JSON on one line, numbers exact: a decimal is a text, and so are NaN and infinity."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=to_json_or_text)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, default=to_json_or_text)


def text_of(value: object) -> str:
    """Return a value as text: strings as they are, other values as in JSON but without quotes."""
    if value is None or isinstance(value, str):
        return value or ""
    text = json_line(value)
    return text if isinstance(value, dict | list) else text.strip('"')


def _csv_cell(value: object) -> str:
    """Return a value of CSV. A null is empty, and an empty text is in quotes."""
    text = text_of(value)
    is_plain = value is None or (text and _PLAIN.isdisjoint(text))
    return text if is_plain else '"' + text.replace('"', '""') + '"'


def _finite(value: object) -> object:
    if isinstance(value, float) and not abs(value) < float("inf"):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
