"""`scan_stream(…, to="spark")` of a declared stream: the engine reads it, here it gets its columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

from weft.columns import canonical_schema
from weft.dataframes.layout import Layout
from weft.dataframes.log_feed import offsets
from weft.spark_support.lazy import F
from weft.spark_support.sessions import quoted
from weft.streams.declare import Stream
from weft.systems.base import Connection
from weft.systems.pages import name_columns


def scan_log(connection: Connection, stream: str | Stream, layout: Layout, start: str, end: str) -> Any:
    """Return a DataFrame of what a declared stream holds now."""
    from pyspark.sql.pandas.types import from_arrow_type

    from weft.engine import frames, session
    from weft.engine.readers import stream_reader
    from weft.systems.log import EXTRA, META_TYPES, PUBLISHED_AT, ROWID

    (after, upto), reader = offsets(start, end), stream_reader(stream, connection)
    reader = replace(
        reader,
        after=reader.upto if after is None else max(reader.after, after),
        upto=reader.upto if upto is None else min(reader.upto, upto),
    )
    session.refuse_one_host(reader.one_host, "The source of this load")
    spark = session.spark()
    frame = frames.from_reader(spark, reader, spark.sparkContext.defaultParallelism)
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
        for name, kind in layout.types.items():
            value = frame[quoted(name)] if name in stored else F.get_json_object(frame[EXTRA], f"$['{name}']")
            kind = from_arrow_type(canonical_schema(pa.schema([(name, kind)]))[0].type, prefer_timestamp_ntz=True)
            columns[name] = value.cast(kind) if layout.on_error == "raise" else value.try_cast(kind)
    return frame.select(*(column.alias(name) for name, column in columns.items()))
