"""`scan_stream(…, to="spark")` of a system's own stream: a Spark DataFrame, whose tasks read ranges of ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa

from weft.columns import canonical_batch, canonical_schema
from weft.dataframes.layout import Layout, types_of
from weft.dataframes.reading import batches_of
from weft.systems.pages import Comparison, PageFeed, Pages

_numbers = itertools.count()
# By the names of Spark's classes.
_OPERATORS: dict[str, Literal["=", "<", "<=", ">", ">="]] = {
    "EqualTo": "=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
}


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

    def ranges(self, count: int, comparisons: Sequence[Comparison]) -> list[tuple[str, str]]:
        """Return up to so many ranges that hold what is there now."""
        return self.pages.partition(self.stream, self.start, self.end, count, comparisons)

    def read(self, first: str, last: str) -> Iterator[pa.RecordBatch]:
        """Read the rows between two ids."""
        schema = self.schema
        with closing(self._feed(first, last)) as feed:
            for batch in batches_of(feed, self.layout):
                yield canonical_batch(batch, schema)

    def with_all_fields(self) -> PageScan:
        """Return the same with the fields that its entries have, where no schema says them: that is to read them once.
        Ids that are none are refused here, before Spark begins."""
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


def _comparison(pushed: Any, layout: Layout) -> Comparison | None:
    """Return a filter of Spark as a comparison of an id or a timestamp, if it is one."""
    operator = _OPERATORS.get(type(pushed).__name__)
    if operator is not None and pushed.attribute == (layout.timestamp_column,):
        return Comparison("timestamp", operator, pushed.value)
    if operator is not None and pushed.attribute == (layout.id_column,):
        return Comparison("id", operator, pushed.value)
    return None


def scan_pages(scan: PageScan) -> Any:
    """Return a DataFrame of a stream. Each query reads what is there when it begins."""
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
            self.comparisons: list[Comparison] = []

        def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
            for each in filters:
                comparison = _comparison(each, scan.layout)
                if comparison is not None:
                    self.comparisons.append(comparison)
                # Spark applies it as well: here it only makes less of the stream be read.
                yield each

        def partitions(self) -> list[InputPartition]:
            return [Part(*ids) for ids in scan.ranges(parts, self.comparisons)]

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
    parts = spark.sparkContext.defaultParallelism
    spark.dataSource.register(Source)
    return spark.read.format(name).load()
