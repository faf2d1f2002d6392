"""The capability of a system to be a source of streaming pipelines.

A system names its class of sources in `System.stream_source`. One source is one topic, folder, table or queue of a
connection. Spark's query follows it and decides what a micro-batch has; the batch then takes the rows, with those that
cannot be parsed apart. Spark's log keeps the position that each batch reached, in the form that the source gave it: a
number, or what JSON can hold. A position may be moved back, never forward: a pipeline skips nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from weft.errors import DeclarationError
from weft.spark_support.folder import Location
from weft.systems.dead_letter_store import DeadLetter
from weft.systems.log import EVENT_TIME as EVENT_TIME
from weft.types import FieldType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

OFFSET = "_weft_offset"
"""The column of `FrameRows.with_offsets`: the offset, partition and offset, or file of a row, as a text."""
MAX_ROWS = 1_000_000
"""The rows of a micro-batch where a source declares no limit: what one transaction of a database takes well."""
MAX_FILES = 1000
"""The files of a micro-batch without a limit: worth a job, and few enough that a crash repeats no hours of work."""


@dataclass(frozen=True)
class SourceSettings:
    """What a pipeline declares about one of its sources."""

    name: str
    """The name of the topic, stream, prefix, table or queue."""
    start: str = "earliest"
    """Where a new checkpoint begins."""
    max_rows: int | None = None
    max_files: int | None = None
    columns: Mapping[str, FieldType] = field(default_factory=dict)
    """The types that columns have by declaration; a row with a value that does not fit is a bad one."""
    wait_seconds: float = 0.0
    """How long a source that waits for rows by itself waits before it reports that there are none."""


@dataclass(frozen=True)
class Rewind:
    """A position that a source is moved back to."""

    position: Any
    first: Any
    """The first event or version that is read again, the first of each partition, or how many files."""
    summary: str = ""
    """`first` in words; empty where a source goes on where it is."""
    note: str | None = None
    source_log: str = ""
    """The contents of Spark's own log of this source, where it keeps one."""


class StreamSource(ABC):
    """One source of a streaming pipeline. To make one opens nothing."""

    unit: ClassVar[str]
    """The unit of lag: events, messages, files, versions."""
    messaging_system: ClassVar[str | None] = None
    """What OpenTelemetry calls the broker of its messages."""
    waits: ClassVar[bool] = False
    """Whether it waits for new rows by itself, so that Spark need not pause before it asks again."""
    wants_commits: ClassVar[bool] = False
    """Whether `committed` does something."""
    brings_keys: bool = False
    """Whether any row may have columns of its own, as messages of JSON do."""
    wants_reader: ClassVar[bool] = False
    """Whether `read_as` does something."""
    read_by_workers: ClassVar[bool] = True
    """Whether Spark's workers open the connection themselves."""

    @property
    def opened_by_workers(self) -> Any:
        """The connection that Spark's workers open."""
        return self.connection

    @property
    def may_grow(self) -> bool:
        """Whether rows may bring columns that `stored_schema` does not have yet."""
        return False

    @property
    def sends_json(self) -> bool:
        """Whether its rows are objects of JSON, whose types nobody has written down."""
        return False

    def declared_columns(self) -> frozenset[str] | None:
        """Return which columns of `stored_schema` are declared; `None` where all of them count as such."""
        return None

    def __init__(self, connection: Any, settings: SourceSettings) -> None:
        self.connection: Any = connection
        self.settings = settings
        self.name = settings.name

    def read_as(self, reader: str) -> None:  # noqa: B027 - optional
        """Take the name of the checkpoint that is to follow the source. No other checkpoint has this name. Called
        before `end` and `follow`."""

    # ------------------------------------------------------------------------------------------------------------- rows

    @abstractmethod
    def follow(self, spark: SparkSession, start: str) -> DataFrame:
        """Return the streaming DataFrame by which Spark follows the source, from `start` where its checkpoint is new.

        The session has the jars and the settings of the connection."""

    @abstractmethod
    def take(self, frame: DataFrame) -> BatchRows:
        """Return the rows of a micro-batch, of which `frame` is Spark's part of the streaming DataFrame."""

    def take_between(self, frame: DataFrame, before: Any | None, position: Any | None) -> BatchRows:
        """Return the rows of a micro-batch whose first and last positions Spark's log has; `None` is not known."""
        return self.take(frame)

    def committed(self, position: Any) -> None:  # noqa: B027 - optional
        """Take note that every target has the rows before a position."""

    def close(self) -> None:  # noqa: B027 - optional
        """Close what batches have left open."""

    def check(self, pipeline: str, message: str) -> None:  # noqa: B027 - optional
        """Raise if the source, or what it had, is gone: the reason for an error of which Spark reports `message`."""

    def validate(self) -> str:
        """Raise if the pipeline could not read the source; return what is worth to be shown of it. Changes nothing."""
        return ""

    def stored_schema(self) -> pa.Schema | None:
        """Return the columns of its rows as they are stored now; `None` where rows bring their own columns."""
        return None

    def why_not_replayed(self, offset: str | None) -> str | None:
        """Return why the text of a row that could not be parsed cannot be parsed alone; `None` where it can."""
        return None

    def removed(
        self, read: Collection[str], source_log: Location, before: Any | None, position: Any | None
    ) -> Iterable[str]:
        """Return the files that Spark planned to read between two positions, and that were gone by then."""
        return ()

    # -------------------------------------------------------------------------------------------------------- positions

    def first(self, source_log: Location) -> Any | None:
        """Return the position at which the first batch of a checkpoint begins; `None` if Spark's log does not say."""
        return None

    @classmethod
    def show(cls, position: Any, source_log: Location | None) -> str | None:
        """Return a position in words; `None` if it is not a position of such a source."""
        return None

    @abstractmethod
    def lag(self, position: Any | None, source_log: Location | None) -> int | None:
        """Return at most how many units come after a position (`None` before the first batch); `None` if unknown."""

    def lag_by_partition(self, position: Any | None) -> dict[str, int] | None:
        """Return the lag by partition; `None` if unknown, or if the source has no partitions."""
        return None

    @abstractmethod
    def end(self) -> str:
        """Return the `start` by which a new checkpoint begins with what comes next."""

    def check_start(self) -> None:  # noqa: B027 - optional
        """Raise if a new checkpoint cannot begin at the declared start."""

    def reached(self, rows: BatchRows, reported: Any | None) -> Any | None:
        """Return the position after a batch. `reported`: what Spark reported last, which may be of an earlier one."""
        return reported

    def count(self, rows: BatchRows) -> int:
        """Return how many rows a batch had, at most, as far as it is known."""
        return rows.size or 0

    def publish_ids(self, rows: BatchRows) -> Collection[str]:
        """Return the publishes that the rows of a batch are from, where rows name them: some if there are many."""
        return ()

    def traceparents(self, rows: BatchRows) -> Collection[str]:
        """Return the spans that published the messages of a batch, as W3C writes them. Called once these are read."""
        return ()

    def planned(self, position: Any | None, source_log: Location) -> Any:
        """Return what distinguishes the end of a batch from that of any other one, also of one that was planned
        after an older checkpoint was brought back. For JSON."""
        return position

    @abstractmethod
    def stay(self, position: Any | None, source_log: Location) -> Rewind:
        """Return the position itself, for a source that goes on where it is while another one is moved back."""

    @abstractmethod
    def rewind_to_offset(self, position: Any | None, offset: str, source_log: Location) -> Rewind:
        """Return the position from which the row of an offset is read again."""

    @abstractmethod
    def rewind_to_time(self, position: Any | None, moment: datetime, source_log: Location) -> Rewind:
        """Return the position from which everything since a moment is read again."""

    def after_position(self, position: str, wanted: str) -> DeclarationError:
        """Return the error for a rewind that would go forward."""
        return DeclarationError(
            f"{self.name} is at {position}, and {wanted} comes after that.",
            hint="A rewind goes back, and skips nothing.",
        )

    def never_read(self) -> DeclarationError:
        """Return the error for a rewind of a source without a position."""
        return DeclarationError(f"{self.name} was not read yet, so there is nothing to go back to.")


# ------------------------------------------------------------------------------------------------ rows of a micro-batch


@dataclass(frozen=True)
class Packed:
    """Rows as Arrow's own bytes, many in each value of a DataFrame's only column, so that none crosses the JVM."""

    frame: Any
    schema: pa.Schema
    unpack: Callable[[pa.Schema, Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
    """Makes the rows, in a task."""


@dataclass(frozen=True)
class ReaderRows:
    """Rows that any task can read by a `weft.engine.readers.RowReader`: none of them passes through Spark's query."""

    source: str
    reader: Any
    size: int | None = None
    """How many there are at most, where that is known."""
    bad: tuple[DeadLetter, ...] = ()
    stored: Callable[[], pa.Schema] | None = None
    """Returns the columns where there is no reader, because there are no rows."""
    declared: frozenset[str] = frozenset()
    """The columns whose types are declared."""

    def columns(self) -> pa.Schema:
        """Return the columns that the rows have, or would have."""
        if self.reader is not None:
            return self.reader.schema
        return pa.schema([]) if self.stored is None else self.stored()

    def gather(self) -> pa.Table | None:
        """Return all rows, read by this process; `None` where only tasks can."""
        return None

    def close(self) -> None:
        """Release the rows."""


@dataclass(frozen=True)
class FrameRows:
    """Rows that are a DataFrame, and the rejected ones apart."""

    source: str
    data: Any
    size: int | None = None
    bad: tuple[DeadLetter, ...] = ()
    """The rows that could not be parsed."""
    packed: Packed | None = None
    """The same rows in a form that is faster to write, where they are written as they are."""
    found: Any = None
    """The columns as a checkpoint keeps them (a `StructType`), if those of the DataFrame say more than is known."""
    newest: Mapping[str, int] = field(default_factory=dict)
    """By partition, the greatest `EVENT_TIME` in microseconds since 1970, where a source has partitions: one that is
    behind the others holds the watermark."""
    documents: Collection[str] = ()
    """The columns, in small letters, that are JSON as it was sent."""
    time_is_costly: ClassVar[bool] = False
    """Whether `frame(timed=False)` is cheaper."""

    def frame(self, *, timed: bool = True) -> Any:
        """Return the rows. Where they are not `timed`, `EVENT_TIME` may be null."""
        return self.data

    def gather(self) -> pa.Table | None:
        """Return all rows, where they are few and this process has them."""
        return None

    def newest_until(self, latest: int) -> Mapping[str, int]:
        """Return `newest` without what is later than this: it may read the rows again."""
        return self.newest

    def with_offsets(self) -> Any:
        """Return the rows again, with the column `OFFSET` where the source has offsets: it may read them again."""
        return self.data

    def found_without(self, offsets: Collection[str]) -> Any | None:
        """Return `found` as it would be without the rows of these offsets; `None` where that cannot be known."""
        return None

    def close(self) -> None:
        """Release the rows, also after a failure."""


Documents = Callable[[Collection[str]], Collection[str]]
"""Chooses some of these columns."""


class UntypedRows(ABC):
    """Files and messages, read under the types that their columns had in earlier batches."""

    size: int | None = None
    bad: tuple[DeadLetter, ...] = ()
    documents: Documents | None = None
    """Chooses columns of objects and lists that are read as the JSON that they are, where the source can."""

    def __init__(self, source: str, files: Collection[str] = ()) -> None:
        self.source, self.files = source, files

    @abstractmethod
    def read(self, known: Mapping[str, DataType], *, widens: bool, again: bool = False) -> FrameRows | None:
        """Return the rows; `None` where there are none. `widens`: a column of integers may become one of wider numbers.
        `again`: those that were read before are not used, for they had other types.

        A row that cannot be parsed fails the job that reads it, or is apart already."""

    def split(self, known: Mapping[str, DataType], *, widens: bool, grows: bool) -> FrameRows | None:
        """Return the rows with those that cannot be parsed apart; `None` where that makes no difference to `read`. It
        reads and holds all of them. `grows`: an object may have keys that it did not have before."""
        return None

    def close(self) -> None:  # noqa: B027 - optional
        """Release the rows."""


BatchRows = ReaderRows | FrameRows | UntypedRows


def counted(count: int, unit: str) -> str:
    """Return a count in words."""
    return f"{count:,} {unit.removesuffix('s') if count == 1 else unit}"
