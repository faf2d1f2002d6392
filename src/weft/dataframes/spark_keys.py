"""`scan_stream(…, to="spark")` of a key of Redis: a Spark DataFrame, whose tasks read ranges of ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from weft.columns import canonical_batch, canonical_schema
from weft.dataframes.layout import Layout, kinds_of
from weft.dataframes.reading import batches_of
from weft.dataframes.redis_feed import RangeFeed, Window, ranges
from weft.systems.redis.connection import RedisConnection
from weft.systems.redis.members import LARGEST
from weft.systems.redis.wire import Key, Wire

_numbers = itertools.count()
# Which end of a range each comparison moves.
_MOVES = {
    "EqualTo": ("least", "most"),
    "GreaterThan": ("least",),
    "GreaterThanOrEqual": ("least",),
    "LessThan": ("most",),
    "LessThanOrEqual": ("most",),
}


@dataclass(frozen=True)
class KeyScan:
    """A stream of Redis that any process can read, in ranges of ids."""

    connection: RedisConnection
    stream: Key
    layout: Layout
    start: str
    end: str
    parts: int

    @property
    def schema(self) -> pa.Schema:
        """The columns as Spark has them."""
        return canonical_schema(self.layout.arrow_schema)

    def ranges(self, window: Window) -> list[tuple[str, str]]:
        """What is there now, in ranges of about the same time."""
        with closing(Wire(self.connection, self.stream)) as wire:
            return ranges(wire, self.stream, self.start, self.end, self.parts, window)

    def read(self, first: str, last: str) -> Iterator[pa.RecordBatch]:
        """The rows between two ids."""
        schema = self.schema
        with closing(self._feed(first, last)) as feed:
            for batch in batches_of(feed):
                yield canonical_batch(batch, schema)

    def with_all_fields(self) -> KeyScan:
        """The same with the fields that its entries have, where no schema says them: that is to read them once."""
        if self.layout.types is not None:
            return self
        with closing(self._feed(self.start, self.end)) as feed:
            found = kinds_of((batch.schema for batch in batches_of(feed)), self.layout)
        own = self.layout.own_schema.names
        schema = {name: kind for name, kind in found.items() if name not in own}
        # A name such as `_id#2` is that of a column already.
        return replace(self, layout=replace(self.layout, schema=schema))

    def _feed(self, first: str, last: str) -> RangeFeed:
        return RangeFeed(Wire(self.connection, self.stream), self.stream, self.layout, first, last)


def narrowed(window: Window, pushed: Any, layout: Layout) -> Window:
    """The window in which a filter of Spark can be true."""
    moves = _MOVES.get(type(pushed).__name__)
    if moves is None:
        return window
    if pushed.attribute == (layout.timestamp_column,) and type(pushed.value) is int:
        moment, ends = min(max(pushed.value, 0), LARGEST), {end: f"{end}_ms" for end in moves}
    elif pushed.attribute == (layout.id_column,) and isinstance(pushed.value, str):
        digits = pushed.value.partition("-")[0]
        # Texts of as many digits as ids have now are in the order of time, others are not.
        if not (digits.isascii() and digits.isdigit() and len(digits) == 13):
            return window
        moment, ends = int(digits), {end: f"{end}_of_13_digits" for end in moves}
    else:
        return window
    within = {"least": max, "most": min}
    return replace(window, **{name: within[end](getattr(window, name), moment) for end, name in ends.items()})


def scan_keys(scan: KeyScan) -> Any:
    """A DataFrame of a stream of Redis. Each query reads what is there when it begins."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
    from pyspark.sql.pandas.types import from_arrow_schema

    from weft.engine import session
    from weft.engine.tasks import settle

    scan = scan.with_all_fields()
    schema = from_arrow_schema(scan.schema, prefer_timestamp_ntz=True)

    class Part(InputPartition):
        def __init__(self, first: str, last: str) -> None:
            self.first, self.last = first, last

    class Rows(DataSourceReader):
        def __init__(self) -> None:
            self.window = Window()

        def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
            for each in filters:
                self.window = narrowed(self.window, each, scan.layout)
                # Spark applies it as well: here it only makes less of the stream be read.
                yield each

        def partitions(self) -> list[InputPartition]:
            return [Part(*found) for found in scan.ranges(self.window)]

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            settle()
            # Of no partitions Spark makes one, which is none of ours.
            return scan.read(partition.first, partition.last) if isinstance(partition, Part) else iter(())

    class Source(DataSource):
        """Defined here, so that it travels by value: as an option, a plan would show the connection's secrets."""

        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> Any:
            return schema

        def reader(self, schema: Any) -> DataSourceReader:
            settle()
            return Rows()

    name = f"weft_stream_{next(_numbers)}"
    spark = session.spark()
    spark.dataSource.register(Source)
    return spark.read.format(name).load()
