"""Reads the shards of a stream, each from a place on, and those of one lineage in order.

A shard that is split or merged takes no more records: it ends, and its children begin. A child is read when all of its
parents were read to their ends, so that the records of one partition key stay in order. `following` has Spark's query
find the next records; `between` reads the same ones again after a crash. Spark's Python processes import this module.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from weft.errors import StorageError
from weft.spark_support.sessions import read_source
from weft.systems.kinesis import shard_positions
from weft.systems.kinesis.client import ExpiredIteratorError, KinesisClient, client
from weft.systems.kinesis.connection import KinesisConnection
from weft.systems.kinesis.shard_positions import CLOSED, EARLIEST

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Position = dict[str, dict[str, str]]
"""Where a pipeline is: `{"shards": {"shardId-000000000000": ">123"}}`."""
COLUMNS = pa.schema(
    [
        ("key", pa.string()),
        ("value", pa.binary()),
        ("partition", pa.string()),
        ("offset", pa.string()),
        ("timestamp", pa.timestamp("us", "UTC")),
    ]
)
# What GetRecords gives at most, and how often it may be called for a shard that has nothing new.
_PAGE, _PAUSE = 10_000, 0.2
MOST_BYTES = 64 << 20
"""The data of a batch, which the process of Spark's that finds it holds in memory."""
_PAGE_BYTES = 10 << 20
"""What GetRecords gives at most."""
_THREADS = 8
MOST_COUNTED = 10_000
"""The most records of a shard that are counted for the lag: they have to be read."""
# And in so many requests: behind a gap most of them find nothing.
_MOST_PAGES = 20
# In turns: a session keeps every name, and each query of a pipeline has the session of the one before.
_numbers = itertools.cycle(range(100))
# A moment this long ago is the past for Kinesis' clock and for ours.
_RECENT = timedelta(seconds=10)


class Page(NamedTuple):
    """What one GetRecords gave."""

    records: list[dict[str, Any]]
    following: str | None
    """The next iterator; `None` at the end of a shard that is closed."""
    is_last: bool
    """Whether the shard has no more records now."""
    told_at: datetime
    """When, by Kinesis' clock."""


@dataclass
class Shards:
    """The shards of one stream, opened in the process that reads them."""

    connection: KinesisConnection
    stream: str
    start: str = EARLIEST
    max_rows: int = 1_000_000

    def __post_init__(self) -> None:
        self._position: Position | None = None
        self._places: dict[str, str] = {}
        self._iterators: dict[str, str] = {}
        self._asked: dict[str, float] = {}
        self._idle: set[str] = set()
        self._parents: dict[str, tuple[str, ...]] = {}
        self._ended: set[str] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out what is open: it is copied to tasks."""
        return type(self), (self.connection, self.stream, self.start, self.max_rows)

    @property
    def client(self) -> KinesisClient:
        return client(self.connection)

    def stop_at_end(self) -> None:
        """Have `following` read no further than what each shard has when it is first read to its end."""
        self._ended = set()

    # ------------------------------------------------------------------------------------------------------------ batch

    def first(self) -> Position:
        """Return where a new checkpoint begins."""
        parents = self.client.shards(self.stream)
        named = {} if self.start == EARLIEST else shard_positions.parse(self.stream, self.start, parents)
        # A shard that is not named is read from its beginning: at once, or when its parents are done.
        roots = {shard: EARLIEST for shard, of in parents.items() if not any(each in parents for each in of)}
        return {"shards": {**roots, **named}}

    def following(self, position: Position) -> tuple[list[pa.RecordBatch], Position]:
        """Return the next records, and the position behind them; the same position where there are none."""
        if position != self._position:
            self._begin_at(position)
        self._position = None  # after a failure nobody knows what was read
        batches: list[pa.RecordBatch] = []
        rows = size = 0
        ended = set() if self._ended is None else self._ended
        with ThreadPoolExecutor(_THREADS) as threads:
            while rows < self.max_rows and size < MOST_BYTES:
                wanted = [each for each in self._readable() if each not in ended]
                if not wanted:
                    break
                # Each in its turn, also where a batch has fewer rows or bytes than there are shards.
                most = min(self.max_rows - rows, max(1, (MOST_BYTES - size) // _PAGE_BYTES))
                wanted = sorted(wanted, key=lambda each: self._asked.get(each, 0.0))[:most]
                limit = min(_PAGE, (self.max_rows - rows) // len(wanted))
                pages = list(threads.map(self._next, wanted, repeat(limit)))
                for shard, page in zip(wanted, pages, strict=True):
                    self._note(shard, page)
                    if page.records:
                        batches.append(as_arrow(shard, page.records))
                        rows, size = rows + len(page.records), size + batches[-1].nbytes
                    if page.following is not None and page.is_last:
                        ended.add(shard)
                # Behind a gap the next records take many requests to find. The query need not wait for them.
                if not any(page.records or page.is_last for page in pages) and (batches or self._ended is None):
                    break
        self._position = {"shards": dict(sorted(self._places.items()))} if batches else position
        return batches, self._position

    def _begin_at(self, position: Position) -> None:
        self._parents = self.client.shards(self.stream)
        self._places, self._iterators = {}, {}
        for shard, place in position["shards"].items():
            if shard in self._parents:
                self._places[shard] = place
            elif place != CLOSED:
                raise StorageError(
                    f"The shard {shard} of the stream {self.stream!r} is gone, and was not read to its end: Kinesis "
                    "removed its records, or it is another stream of that name. "
                    "To begin with what it has now: weft checkpoints reset.",
                )

    def _readable(self) -> list[str]:
        """Return the shards that can be read now: those whose parents were read to their ends, or are gone."""
        return [
            shard
            for shard, parents in self._parents.items()
            if self._places.get(shard) != CLOSED
            and all(self._places.get(each) == CLOSED for each in parents if each in self._parents)
        ]

    def _next(self, shard: str, limit: int) -> Page:
        """Read the next page of a shard."""
        if shard in self._idle:
            time.sleep(max(0.0, self._asked[shard] + _PAUSE - time.monotonic()))
        self._asked[shard] = time.monotonic()
        return self._page(shard, self._iterators.get(shard), self._places.get(shard, EARLIEST), limit)

    def _note(self, shard: str, page: Page) -> None:
        """Note where a page ends."""
        self._places.setdefault(shard, EARLIEST)
        if page.records:
            self._places[shard] = _behind(page)
        if page.following is not None:
            self._iterators[shard] = page.following
        else:
            self._places[shard] = CLOSED
            self._iterators.pop(shard, None)
            self._parents = self.client.shards(self.stream)
        if page.is_last or not page.records:
            self._idle.add(shard)
        else:
            self._idle.discard(shard)

    def _page(self, shard: str, iterator: str | None, place: str, limit: int) -> Page:
        """Read a page by an iterator, or from a place where there is none or it is too old."""
        try:
            iterator = iterator or self.client.iterator(self.stream, shard, shard_positions.iterator_arguments(place))
            answer = self.client.call("get_records", ShardIterator=iterator, Limit=limit)
        except ExpiredIteratorError:
            iterator = self.client.iterator(self.stream, shard, shard_positions.iterator_arguments(place))
            answer = self.client.call("get_records", ShardIterator=iterator, Limit=limit)
        records, following = answer["Records"], answer.get("NextShardIterator")
        is_last = following is None or (not answer.get("MillisBehindLatest") and len(records) < limit)
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        return Page(records, following, is_last, parsedate_to_datetime(date) if date else datetime.now(UTC))

    def between(self, start: Position, end: Position) -> Iterator[pa.RecordBatch]:
        """Yield the records between two positions again."""
        before, upto = start["shards"], end["shards"]
        for shard in sorted(upto):  # parents have smaller ids
            first = before.get(shard, EARLIEST)
            if upto[shard] == first:
                continue
            last = shard_positions.sequence(upto[shard])
            for page in self.pages(shard, first):
                wanted = [each for each in page.records if last is None or int(each["SequenceNumber"]) <= last]
                if wanted:
                    yield as_arrow(shard, wanted)
                if last is not None and wanted and int(wanted[-1]["SequenceNumber"]) == last:
                    break
                if len(wanted) < len(page.records) or (page.is_last and last is not None):
                    raise StorageError(
                        f"The record {last} of the shard {shard} is gone, up to which a batch reads the stream "
                        f"{self.stream!r}: Kinesis removed it, or it is another stream of that name. "
                        "To begin with what it has now: weft checkpoints reset."
                    )

    # -------------------------------------------------------------------------------------------------------- questions

    def pages(self, shard: str, place: str, limit: int = _PAGE) -> Iterator[Page]:
        """Yield the pages of a shard from a place on, up to what is its end now."""
        iterator: str | None = None
        while place != CLOSED:
            page = self._page(shard, iterator, place, limit)
            yield page
            if page.is_last:
                return
            iterator, place = page.following, _behind(page) if page.records else place

    def count(self, position: Position) -> int:
        """Return how many records come after a position. No more than so many of a shard are counted."""
        total, at = 0, position["shards"]
        for shard in self.client.shards(self.stream):
            records = 0
            for page in itertools.islice(self.pages(shard, at.get(shard, EARLIEST), MOST_COUNTED), _MOST_PAGES):
                records += len(page.records)
                if records >= MOST_COUNTED:
                    break
            total += records
        return total

    def ends(self) -> dict[str, str]:
        """Return by shard the place of what comes next. Kinesis does not say which number its last record has."""
        open_shards, ends = set(self.client.open_shards(self.stream)), {}
        for shard in self.client.shards(self.stream):
            ends[shard] = CLOSED
            if shard in open_shards:
                iterator = self.client.iterator(self.stream, shard, {"ShardIteratorType": "LATEST"})
                moment = self._page(shard, iterator, EARLIEST, 1).told_at - _RECENT
                pages = [page for page in self.pages(shard, shard_positions.since(moment)) if page.records]
                ends[shard] = _behind(pages[-1]) if pages else shard_positions.since(moment)
        return ends

    def first_since(self, shard: str, place: str) -> str | None:
        """Return the sequence number of a shard's first record from a place on; `None` if there is none."""
        numbers = (each["SequenceNumber"] for page in self.pages(shard, place, 1) for each in page.records)
        return next(numbers, None)


def _behind(page: Page) -> str:
    return shard_positions.after(page.records[-1]["SequenceNumber"])


def as_arrow(shard: str, records: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Return records of a shard as rows."""
    columns = [
        pa.array([each["PartitionKey"] for each in records], pa.string()),
        pa.array([each["Data"] for each in records], pa.binary()),
        pa.array([shard] * len(records), pa.string()),
        pa.array([each["SequenceNumber"] for each in records], pa.string()),
        pa.array([each["ApproximateArrivalTimestamp"] for each in records], pa.timestamp("us", "UTC")),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=COLUMNS)


def stream(spark: SparkSession, shards: Shards) -> DataFrame:
    """Return a streaming DataFrame of the records of a stream, with the columns of `COLUMNS`."""
    from pyspark.sql.datasource import SimpleDataSourceStreamReader
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

    class Records(SimpleDataSourceStreamReader, SupportsTriggerAvailableNow):
        def __init__(self) -> None:
            self.shards = shards

        def initialOffset(self) -> Position:
            return self.shards.first()

        def prepareForTriggerAvailableNow(self) -> None:
            self.shards.stop_at_end()

        def read(self, start: Position) -> tuple[Iterator[pa.RecordBatch], Position]:
            # Spark keeps these records for the batch: none is read twice, unless there is a crash.
            batches, end = self.shards.following(start)
            return iter(batches), end

        def readBetweenOffsets(self, start: Position, end: Position) -> Iterator[pa.RecordBatch]:
            return self.shards.between(start, end)

        def commit(self, end: Position) -> None:
            pass

    name = f"weft_kinesis_{next(_numbers)}"
    frame: DataFrame = read_source(spark, name, from_arrow_schema(COLUMNS), Records, follow=True)
    return frame
