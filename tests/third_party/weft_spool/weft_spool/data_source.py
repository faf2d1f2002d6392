"""The lines of a queue as a data source of Spark. Spark imports this module in its Python workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from weft_spool.queue_file import Queue

_COLUMNS = pa.schema([("line", pa.int64()), ("sent_at", pa.timestamp("us", "UTC")), ("value", pa.binary())])


class SpoolDataSource(DataSource):
    """One queue."""

    @classmethod
    def name(cls) -> str:
        return "weft_spool"

    def schema(self) -> str:
        return "line BIGINT, sent_at TIMESTAMP, value BINARY"

    def streamReader(self, schema: object) -> SpoolReader:
        return SpoolReader(Queue(Path(self.options["folder"])), self.options)


class SpoolReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reports to Spark how far the queue goes. Tasks read the lines."""

    def __init__(self, queue: Queue, options: dict[str, str]) -> None:
        self.queue, self.after, self.max_rows = queue, int(options["after"]), int(options["max_rows"])
        self.last: int | None = None

    def initialOffset(self) -> dict[str, int]:
        return {"line": self.after}

    def prepareForTriggerAvailableNow(self) -> None:
        self.last = self.queue.count()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        last = self.queue.count() if self.last is None else self.last
        return {"line": max(start["line"], min(last, start["line"] + self.max_rows))}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition((start["line"], end["line"]))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        after, upto = partition.value
        rows = [
            {"line": each.line, "sent_at": each.sent_at, "value": each.value} for each in self.queue.read(after, upto)
        ]
        yield pa.RecordBatch.from_pylist(rows, _COLUMNS)
