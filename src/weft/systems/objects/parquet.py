"""Parquet files written from Arrow batches, without Spark's rows between: what is in them is what Spark would write.

The work is done wherever the batches are, mostly in Spark's tasks. A file counts only where its name comes back: what
an attempt wrote that died, or that was slower than another, has a name that nobody knows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
from pyarrow import fs

from weft.columns import has_nan, is_nested
from weft.systems.base import Connection
from weft.systems.objects.s3 import S3Connection
from weft.systems.target import ArrowRows

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

SUFFIXES = {"snappy": ".snappy", "gzip": ".gz", "zstd": ".zstd", "uncompressed": ""}
"""The compressions, and what Spark has them in a file's name."""

_GROUP_BYTES = 16 * 1024 * 1024
"""The Arrow bytes of one row group, which are in memory until it is written."""
_DICTIONARY_BYTES = 64 * 1024
"""A column of more different values than fit is not worth a dictionary, which would take twice the time."""
_ROWS_PER_FILE = "spark.sql.files.maxRecordsPerFile"


@dataclass(frozen=True)
class Range:
    """The statistics of a column in a file. `low` and `high` are `None` if there is no value, or if they are
    unknown."""

    nulls: int
    low: Any = None
    high: Any = None


@dataclass(frozen=True)
class WrittenFile:
    """A file."""

    name: str
    size: int
    rows: int
    ranges: dict[str, Range]


@dataclass(frozen=True)
class ParquetFolder:
    """The folder of files, and how they are written. It is sent to the tasks."""

    connection: Connection
    folder: str
    schema: pa.Schema
    metadata: dict[str, str]
    compression: str


def can_write(rows: ArrowRows, connection: Connection, spark: Any) -> bool:
    """Return whether `write` makes the same of these rows as Spark."""
    from pyspark.sql.pandas.types import to_arrow_schema

    if isinstance(connection, S3Connection):
        # Spark's client would look for what is missing in places of its own.
        resolved = connection.resolved()
        if not resolved.access_key_id or not (resolved.endpoint or resolved.region):
            return False
    if int(spark.conf.get(_ROWS_PER_FILE)) > 0:
        return False
    as_spark = to_arrow_schema(rows.columns, timezone="UTC")
    return not any(
        is_nested(field.type) or field.type != expected.type
        for field, expected in zip(rows.schema, as_spark, strict=True)
    )


def has_columns(rows: ArrowRows, table: StructType) -> bool:
    """Return whether the rows have the columns of a table, in any order, and no others."""
    return {field.name: field.dataType for field in rows.columns} == {field.name: field.dataType for field in table}


def target(
    rows: ArrowRows, connection: Connection, spark: Any, folder: str, columns: StructType, compression: str
) -> ParquetFolder:
    """Files in a folder with these columns of the rows."""
    schema = pa.schema([pa.field(name, rows.schema.field(name).type) for name in columns.names])
    metadata = {
        # Without it Spark takes dates before 1900 for those of another calendar, or refuses them.
        "org.apache.spark.version": str(spark.version),
        "org.apache.spark.sql.parquet.row.metadata": columns.json(),
    }
    return ParquetFolder(connection.resolved(), folder, schema, metadata, compression)


def write_all(rows: ArrowRows, target: ParquetFolder) -> list[WrittenFile]:
    """Return a file of each part that has rows, in the order of the parts."""
    return [each for each in rows.each_part(functools.partial(write, target)) if each is not None]


def write(target: ParquetFolder, number: int, batches: Iterable[pa.RecordBatch]) -> WrittenFile | None:
    """Return one file of the batches of a part; `None` where they hold no row."""
    import pyarrow.parquet as pq

    groups = _groups(batches, target.schema)
    first = next(groups, None)
    if first is None:
        return None
    store, folder = _opened(target)
    name = f"part-{number:05}-{uuid4()}-c000{SUFFIXES[target.compression]}.parquet"
    path = f"{folder}/{name}"
    footers: list[Any] = []
    with_nan: set[str] = set()
    try:
        with store.open_output_stream(path) as stream:
            with pq.ParquetWriter(
                stream,
                target.schema,
                compression="none" if target.compression == "uncompressed" else target.compression,
                dictionary_pagesize_limit=_DICTIONARY_BYTES,
                store_decimal_as_integer=True,
                store_schema=False,
                write_page_index=True,
                metadata_collector=footers,
            ) as writer:
                group: pa.Table | None = first
                while group is not None:
                    writer.write_table(group, row_group_size=group.num_rows)
                    with_nan |= {name for name in group.column_names if any(map(has_nan, group[name].chunks))}
                    group = next(groups, None)
                writer.add_key_value_metadata(target.metadata)
            size = stream.tell()
    except BaseException:
        with suppress(OSError):
            store.delete_file(path)
        raise
    return WrittenFile(name, size, footers[0].num_rows, _ranges(footers[0], target.schema, with_nan))


def _opened(target: ParquetFolder) -> tuple[fs.FileSystem, str]:
    if isinstance(target.connection, S3Connection):
        return target.connection.filesystem(), target.folder.partition("://")[2]
    store = fs.LocalFileSystem()
    store.create_dir(target.folder)
    return store, target.folder


def _groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of each row group."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        waiting.append(pa.RecordBatch.from_arrays([batch[name] for name in schema.names], schema=schema))
        size += batch.nbytes
        if size >= _GROUP_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def _ranges(footer: Any, schema: pa.Schema, with_nan: set[str]) -> dict[str, Range]:
    """Return the statistics of the columns in the footer of a file; all columns are flat."""
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    return {
        name: _range([group.column(index).statistics for group in groups], name in with_nan)
        for index, name in enumerate(schema.names)
    }


def _range(statistics: list[Any], has_nan: bool) -> Range:
    nulls = sum(each.null_count for each in statistics)
    bounds = [each for each in statistics if each.has_min_max]
    if not has_nan and any(not each.has_min_max and each.num_values for each in statistics):
        # A text too long for the footer.
        return Range(nulls)
    try:
        low = min((each.min for each in bounds), default=None)
        high = max((each.max for each in bounds), default=None)
    except (OverflowError, ValueError):
        # A time that Python does not know.
        return Range(nulls)
    if has_nan:
        # Arrow leaves NaN out. To Spark it is the greatest of all.
        return Range(nulls, math.nan if low is None else low, math.nan)
    return Range(nulls, low, high)
