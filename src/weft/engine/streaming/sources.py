"""Where the rows of a streaming pipeline come from, once its sources are opened."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from weft.engine import connectors, files, outcome
from weft.engine.given import Memory, Packed
from weft.engine.readers import Reader, StreamReader, stream_reader
from weft.engine.streaming import ticks
from weft.engine.streaming.letter import Letter
from weft.engine.streaming.whence import PLACE
from weft.errors import DeclarationError, NotFoundError, StorageError, WeftError
from weft.pipelines.streaming.spec import Source
from weft.project import current
from weft.streams import runtime
from weft.streams.declare import Stream
from weft.systems.base import Connection, system_for
from weft.systems.log import PUBLISHED_AT, ROWID, Log
from weft.systems.objects.following import Dated
from weft.systems.objects.reading import BAD

# Of one batch: enough to be worth a job, and not so many that a crash repeats hours of work.
_MAX_FILES = 1000
SMALL = 20_000
"""So few rows are read and written by the driver itself: to plan a job takes longer than to carry it out."""
EVENT_TS = "_event_ts"
"""When a row happened, as its source tells it: every source has this column."""


@dataclass(frozen=True)
class Taken:
    """What a micro-batch has of one source: a reader of rows elsewhere, or a DataFrame."""

    source: str
    reader: Reader | None = None
    frame: Any = None
    read: Callable[[Mapping[str, Any], str | None], Dated | None] | None = None
    """Of files: looks at them, and makes the DataFrame later, of the types that columns had before, with the file of
    each row in a column if one is named; `None` where there are no rows."""
    dated: Dated | None = None
    """Of files that were looked at."""
    sift: Callable[[Mapping[str, Any]], Taken] | None = None
    """Of files: the same, but with the rows that cannot be read told apart. It reads and holds all of them."""
    files: Collection[str] | None = None
    """Of files: the paths of those that were there."""
    packed: Packed | None = None
    """The rows of the DataFrame in a form that is faster to write, where they are written as they are."""
    size: int | None = None
    """How many rows it may have, where that is known; of many not all are counted."""
    gather: Callable[[], Memory] | None = None
    """Reads the rows of a reader in this process, where they are few."""
    bad: tuple[Letter, ...] = ()
    """What could not be read as rows."""
    placed: Callable[[], Any] | None = None
    """Makes the DataFrame once more, with the place of each row in its source: what takes time where nothing is bad."""
    close: Callable[[], None] = lambda: None
    """Lets go of the rows, whatever became of them."""


class Origin(Protocol):
    """An opened source."""

    name: str

    def stream(self, spark: Any, start: str) -> Any:
        """The streaming DataFrame by which Spark follows it, from `start` on where its checkpoint is new."""

    def take(self, frame: Any) -> Taken:
        """What the DataFrame of one micro-batch stands for."""


def open_source(source: Source, wait_seconds: float) -> Origin:
    """The source, looked up and checked. One of ours waits so long for news by itself."""
    if isinstance(source.query, Stream):
        return LogOrigin(source, wait_seconds)
    connection = current().connection(source.connection)
    if connection.kind.startswith("object_store"):
        return FileOrigin(source, connection)
    if connection.kind.startswith("delta"):
        return DeltaOrigin(source, connection)
    if connection.kind == "kafka":
        return KafkaOrigin(source, connection)
    if system_for(connection.kind).log is not None:
        return LogOrigin(source, wait_seconds)
    raise DeclarationError(
        f"{connection.label} ({connection.kind}) is no source of streaming pipelines.",
        hint="Sources are streams of Weft (SQL databases, Redis), topics (kafka), files (object_store_local, "
        "object_store_s3) and Delta tables (delta_local, delta_s3).",
    )


# --------------------------------------------------------------------------------------------------------- our own logs


_RESET = "To begin with what is left: weft checkpoints reset. Keep events for longer than the pipeline may be away."


@dataclass(frozen=True)
class EventReader(StreamReader):
    """The events of a range, with the column that every source has."""

    columns: tuple[str, ...] | None = None
    """Those that are read; all where nothing is said."""

    @property
    def schema(self) -> pa.Schema:
        """The fields, then what Weft adds."""
        named = [field.with_name(EVENT_TS) if field.name == PUBLISHED_AT else field for field in super().schema]
        return pa.schema(named if self.columns is None else [field for field in named if field.name in self.columns])

    def selecting(self, columns: Sequence[str]) -> EventReader:
        """The same events with these columns alone."""
        return dataclasses.replace(self, columns=tuple(columns))

    def read(self, part: Any, conditions: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
        """The events of a part."""
        return self._named(self._plain.read(part, conditions))

    def gathered(self, log: Log) -> Memory:
        """All of them, read here from a stream that is open: for a few, opening it again would take longest."""
        return Memory(self.schema, list(self._named(self._plain.read_from(log, self.after, self.upto))))

    @property
    def _stored(self) -> list[str]:
        return [PUBLISHED_AT if name == EVENT_TS else name for name in self.schema.names]

    @property
    def _plain(self) -> StreamReader:
        # By the offsets it can tell whether some are missing.
        needed = {*self._stored, ROWID}
        types = tuple(each for each in self.types if each[0] in needed)
        place = (self.connection, self.stream_schema, self.stream)
        return StreamReader(*place, types, self.after, self.upto, self.advice)

    def _named(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stored, schema = self._stored, self.schema
        for batch in batches:
            yield pa.RecordBatch.from_arrays([batch.column(name) for name in stored], schema=schema)


class LogOrigin:
    """A stream of ours."""

    def __init__(self, source: Source, wait_seconds: float) -> None:
        self._source, self._wait_seconds = source, wait_seconds
        self.name = source.name

    def stream(self, spark: Any, start: str) -> Any:
        """The ranges of offsets that are there."""
        now = stream_reader(self._source.query, self._source.connection)
        offsets = ticks.Offsets(
            now.connection,
            now.stream_schema,
            now.stream,
            start,
            self._source.max_rows or ticks.MAX_ROWS,
            self._wait_seconds,
        )
        return ticks.stream(spark, offsets)

    def take(self, frame: Any) -> Taken:
        """The events between two offsets, with the columns that the stream has now."""
        ranges = frame.collect()
        if not ranges:
            return Taken(self.name, size=0)
        after, upto = min(each[0] for each in ranges), max(each[1] for each in ranges)
        now = stream_reader(self._source.query, self._source.connection)
        reader = EventReader(now.connection, now.stream_schema, now.stream, now.types, after, upto, _RESET)
        log = runtime.open_stream(self._source.query, self._source.connection).log
        size = log.extent(after, upto, SMALL + 1)
        if not size and log.floor() > after:
            size = 1  # all of them were removed: who reads them is told so
        return Taken(self.name, reader, size=size, gather=lambda: reader.gathered(log))


# ------------------------------------------------------------------------------------------------------ files and Delta


class FileOrigin:
    """The files under a prefix of a folder or bucket."""

    def __init__(self, source: Source, connection: Any) -> None:
        self._source = source
        self.name = source.name
        # One that says nothing of its files has no format either: then the names of the files do.
        self.connection = source.connection_with_options(connection)

    def stream(self, spark: Any, start: str) -> Any:
        """The files that are there, each once."""
        from weft.systems.objects import following

        files.refuse_elsewhere(self.connection)
        spark = connectors.ready(spark, self.connection)
        return following.follow(spark, self.connection, self.name, self._source.max_files or _MAX_FILES)

    def take(self, frame: Any) -> Taken:
        """The rows of the files, with the columns that these have."""
        from weft.systems.objects import following

        changed = dict(map(tuple, frame.collect()))
        if not changed:
            return Taken(self.name, size=0, files=())

        def read(known: Mapping[str, Any], place: str | None, bad: str | None = None) -> Any:
            spark = frame.sparkSession
            with outcome.explained(f"read the files of {self.name}"):
                return following.read_files(spark, self.connection, self.name, changed, EVENT_TS, known, place, bad)

        def sift(known: Mapping[str, Any]) -> Taken:
            rows = read(known, PLACE, BAD)
            if rows is None:
                return taken
            # Whether a row can be read depends on the columns that are asked for. Here it is all of them, once.
            rows = rows(True).persist()
            with outcome.explained(f"read the files of {self.name}"):
                told = rows.where(f"{BAD} IS NOT NULL").selectExpr(f"{BAD}.error", f"binary({BAD}.payload)", PLACE)
                found = told.toArrow().to_pydict().values()
            bad = [
                Letter("read", why, self.name, payload.decode(errors="backslashreplace"), place)
                for why, payload, place in zip(*found, strict=True)
            ]
            good = rows.where(f"{BAD} IS NULL").drop(BAD)
            return Taken(
                self.name,
                frame=good.drop(PLACE),
                files=taken.files,
                bad=tuple(bad),
                placed=lambda: good,
                close=rows.unpersist,
            )

        taken = Taken(self.name, read=read, sift=sift, files=tuple(changed))
        return taken


class DeltaOrigin:
    """What is added to a Delta table."""

    def __init__(self, source: Source, connection: Connection) -> None:
        self._source, self.connection = source, connection
        self.name = source.name

    def stream(self, spark: Any, start: str) -> Any:
        """The rows of the table's commits."""
        from pyspark.sql import functions as F

        from weft.systems.delta import source as delta

        files.refuse_elsewhere(self.connection)
        ready = connectors.ready(spark, self.connection)
        found = delta.follow(ready, self.connection, self.name, self._source.max_files or _MAX_FILES, start)
        # Its rows do not tell when they came. The moment of the batch is in Spark's log, the same in every try of it.
        return found.select("*", F.current_timestamp().alias(EVENT_TS))

    def take(self, frame: Any) -> Taken:
        """The rows themselves."""
        return Taken(self.name, frame=frame)


# --------------------------------------------------------------------------------------------------------------- topics


# What Spark says of messages that are no longer there.
_LOST = "not available in Kafka any more"


class KafkaOrigin:
    """A topic of Kafka."""

    def __init__(self, source: Source, connection: Any) -> None:
        self._source, self.connection = source, connection
        self.name = source.name

    def stream(self, spark: Any, start: str) -> Any:
        """The messages, as Spark's own connector gives them."""
        from weft.systems.kafka import source as kafka

        connectors.add(spark, "kafka")
        most = self._source.max_rows or ticks.MAX_ROWS
        return kafka.stream(spark, self.connection, self.name, start=start, max_rows=most)

    def take(self, frame: Any) -> Taken:
        """The messages as rows, and those that are none."""
        from weft.systems.kafka import source as kafka

        with outcome.explained(f"read the topic {self.name}"):
            found = kafka.rows(frame, self.connection)
            bad = tuple(
                Letter(
                    "read",
                    each["error"],
                    self.name,
                    each["payload"].decode(errors="backslashreplace"),
                    f"{each['partition']}:{each['offset']}",
                )
                for each in (found.bad.toArrow().to_pylist() if found.bad_rows else ())
            )
        packed = None
        if found.packed is not None and found.columns is not None:
            packed = Packed(found.packed, found.columns, kafka.unpack)
        return Taken(
            self.name,
            frame=found.good,
            packed=packed,
            size=found.good_rows,
            bad=bad,
            placed=lambda: kafka.placed(frame, found, PLACE),
            close=found.release,
        )

    def check(self, pipeline: str, said: str) -> None:
        """Raise where the topic is gone, or messages of it, as Spark `said`. Brokers that are away tell nothing."""
        from weft.systems.kafka.client import admin

        try:
            admin(self.connection).partitions(self.name)
        except NotFoundError:
            raise NotFoundError(
                f"The topic {self.name!r} of {self.connection.label} is gone, and {pipeline} reads it.",
                hint=f"Make it again, and have {pipeline} begin anew with it: weft checkpoints reset {pipeline}. "
                "Or name another topic.",
            ) from None
        except WeftError:
            return
        if _LOST in said and f"{self.name}-" in said:
            raise StorageError(
                f"The topic {self.name!r} of {self.connection.label} no longer has what {pipeline} is to read: its "
                "brokers removed it, or it is another topic of that name.",
                hint=f"To begin with what it has now: weft checkpoints reset {pipeline}.",
            )

    def reached(self, end: dict[str, dict[str, int]]) -> None:
        """Tell the consumer group, for those who watch its lag: every target has what comes before."""
        from weft.systems.kafka import source as kafka

        kafka.commit_offsets(
            self.connection, self.name, {int(partition): offset for partition, offset in end[self.name].items()}
        )
