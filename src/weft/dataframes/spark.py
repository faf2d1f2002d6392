"""`scan_stream(…, to="spark")`: a declared stream as the engine reads it, a system's own in tasks by ranges of ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from weft.columns import canonical_batch, canonical_schema
from weft.dataframes.layout import Layout, types_of
from weft.dataframes.log_feed import offsets
from weft.dataframes.reading import batches_of
from weft.spark_support.lazy import F
from weft.spark_support.sessions import quoted, read_source
from weft.streams.declare import Stream
from weft.systems.base import Connection
from weft.systems.log import EXTRA, META_TYPES, PUBLISHED_AT, ROWID
from weft.systems.pages import PageFeed, Pages, name_columns

_numbers = itertools.count()


@dataclass(frozen=True)
class PageScan:
    """A stream that any process can read, in ranges of ids."""

    pages: Pages
    stream: Any
    layout: Layout
    start: str
    end: str

    @property
    def schema(self) -> pa.Schema:
        """The columns as Spark has them."""
        return canonical_schema(self.layout.arrow_schema)

    def ranges(self, count: int) -> list[tuple[str, str]]:
        """Return up to so many ranges that hold what is there now."""
        return self.pages.partition(self.stream, self.start, self.end, count)

    def read(self, first: str, last: str) -> Iterator[pa.RecordBatch]:
        """Read the rows between two ids."""
        schema = self.schema
        with closing(self._feed(first, last)) as feed:
            for batch in batches_of(feed, self.layout):
                yield canonical_batch(batch, schema)

    def with_all_fields(self) -> PageScan:
        """Return a scan with the fields that the entries have, if no schema names them: it reads all entries once.
        Invalid ids are refused here, before Spark begins."""
        with closing(self._feed(self.start, self.end)) as feed:
            if self.layout.types is not None:
                return self
            types = types_of((batch.schema for batch in batches_of(feed, self.layout)), self.layout)
        own = self.layout.own_schema.names
        # A name such as `_id#2` is that of a column already.
        return replace(
            self,
            layout=replace(self.layout, schema={name: kind for name, kind in types.items() if name not in own}),
        )

    def _feed(self, first: str, last: str) -> PageFeed:
        return self.pages.read_range(self.stream, self.layout.field_names, first, last)


def scan_pages(scan: PageScan) -> Any:
    """Return a DataFrame of a stream. Each query reads what is there when it begins.

    It takes no filters: Spark would apply those of one scan to all scans of a query."""
    from pyspark.sql.datasource import DataSourceReader, InputPartition
    from pyspark.sql.pandas.types import from_arrow_schema

    from weft.engine import session
    from weft.engine.tasks import freeze_imports

    scan = scan.with_all_fields()
    schema = from_arrow_schema(scan.schema, prefer_timestamp_ntz=True)

    class Part(InputPartition):
        def __init__(self, first: str, last: str) -> None:
            self.first, self.last = first, last

    class RangeReader(DataSourceReader):
        def __init__(self) -> None:
            freeze_imports()

        def partitions(self) -> list[InputPartition]:
            return [Part(*ids) for ids in scan.ranges(parts)]

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            freeze_imports()
            # Without partitions Spark passes one of its own.
            return scan.read(partition.first, partition.last) if isinstance(partition, Part) else iter(())

    spark = session.spark()
    parts = spark.sparkContext.defaultParallelism
    return read_source(spark, f"weft_stream_{next(_numbers)}", schema, RangeReader)


def scan_log(connection: Connection, stream: str | Stream, layout: Layout, start: str, end: str) -> Any:
    """Return a DataFrame of what a declared stream holds now."""
    from pyspark.sql.pandas.types import from_arrow_type

    from weft.engine import reader_frames, session
    from weft.engine.readers import stream_reader

    (after, upto), reader = offsets(start, end), stream_reader(stream, connection)
    reader = replace(
        reader,
        after=reader.upto if after is None else max(reader.after, after),
        upto=reader.upto if upto is None else min(reader.upto, upto),
    )
    session.refuse_one_host(reader.one_host, "The source of this load")
    spark = session.spark()
    frame = reader_frames.from_reader(spark, reader, spark.sparkContext.defaultParallelism)
    own = {
        layout.id_column: frame[ROWID].cast("string"),
        layout.timestamp_column: F.unix_millis(frame[PUBLISHED_AT]),
        layout.sequence_column: F.lit(0).cast("long"),
    }
    columns = {name: column for name, column in own.items() if name is not None}
    stored = [name for name in reader.schema.names if name not in META_TYPES]
    if layout.types is None:
        fields = dict(zip(name_columns([name.encode() for name in stored], layout.reserved), stored, strict=True))
        columns |= {name: frame[quoted(field)] for name, field in fields.items()}
        columns[EXTRA] = frame[EXTRA]
    else:
        for field, (name, kind) in zip(layout.schema or (), layout.types.items(), strict=True):
            kind = from_arrow_type(canonical_schema(pa.schema([(name, kind)]))[0].type, prefer_timestamp_ntz=True)
            # A value that does not fit the field's own type is there too, and may fit this type.
            values = [F.get_json_object(frame[EXTRA], f"$['{field}']")]
            values += [frame[quoted(field)]] if field in stored else []
            cast = [value.cast(kind) if layout.on_error == "raise" else value.try_cast(kind) for value in values]
            columns[name] = F.coalesce(*cast)
    return frame.select(*(column.alias(name) for name, column in columns.items()))
