"""A topic of Kafka as a source of streaming pipelines. A position is the next offset of each partition."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from weft.errors import DeclarationError, NotFoundError, StorageError, WeftError
from weft.spark_support import outcome
from weft.spark_support.folder import Location
from weft.spark_support.lazy import F
from weft.systems.codecs.columns import message_type
from weft.systems.dead_letter_store import DeadLetter
from weft.systems.kafka import messages
from weft.systems.kafka.client import Admin, admin
from weft.systems.kafka.options import partition_offsets
from weft.systems.stream_source import (
    EVENT_TIME,
    MAX_ROWS,
    OFFSET,
    FrameRows,
    Packed,
    Rewind,
    StreamSource,
    UntypedRows,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

_log = logging.getLogger("weft.kafka")
# With more rejected messages than this, types are not looked for again.
_MOST_REJECTED = 10_000
# What Spark's connector reports of messages that the brokers removed.
_LOST = "not available in Kafka any more"


@dataclass(frozen=True)
class MessageRows(FrameRows):
    """The messages of a micro-batch as rows."""

    messages: Any = None
    """The messages as Spark's connector reads them."""
    parsed: Any = None
    parse: Any = None
    """Parses messages as these were."""

    def found_without(self, offsets: Collection[str]) -> StructType | None:
        if len(offsets) > _MOST_REJECTED or self.parsed.found is None:
            return None
        rejected = F.concat_ws(":", "partition", "offset").isin(list(offsets))
        with outcome.explained(f"read the topic {self.source}"):
            parsed = self.parse(self.messages.where(~rejected))
        parsed.close()
        return _struct(parsed.found)

    def with_offsets(self) -> DataFrame:
        """Return the rows with partition:offset of each: the messages are read and parsed again."""
        return messages.with_offsets(self.messages, self.parsed, OFFSET)

    def close(self) -> None:
        self.parsed.close()


class Messages(UntypedRows):
    """The messages of a micro-batch."""

    def __init__(self, source: KafkaSource, frame: DataFrame) -> None:
        super().__init__(source.name)
        self._source, self._frame = source, frame
        self._rows: MessageRows | None = None

    def read(self, known: Mapping[str, DataType], *, widens: bool) -> MessageRows:
        if self._rows is None:
            self._rows = self._source.read(self._frame, known, widens=widens)
            self.size = self._rows.size
        return self._rows

    def split(self, known: Mapping[str, DataType], *, widens: bool, grows: bool) -> MessageRows | None:
        """Return the rows without those whose numbers or keys made types of columns wider, unless it `grows`."""
        if grows or self._rows is None or not self._rows.parsed.is_wider:
            return None
        return self._source.read(self._frame, known, widens=widens, grows=grows)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()


class KafkaSource(StreamSource):
    """Follows one topic."""

    unit = "messages"
    wants_commits = True
    brings_keys = True

    @property
    def _admin(self) -> Admin:
        return admin(self.connection)

    def follow(self, spark: SparkSession, start: str) -> DataFrame:
        most = self.settings.max_rows or MAX_ROWS
        return messages.stream(spark, self.connection, self.name, start=start, max_rows=most)

    def take(self, frame: DataFrame) -> Messages:
        return Messages(self, frame)

    def read(self, frame: DataFrame, known: Mapping[str, DataType], *, widens: bool, grows: bool = True) -> MessageRows:
        """Return the messages of a micro-batch as rows, under the types that columns had before."""
        from pyspark.sql.pandas.types import to_arrow_type

        before = {
            name: to_arrow_type(kind, timezone="UTC")
            for name, kind in known.items()
            if name.lower() != EVENT_TIME and name not in self.settings.columns
        }
        declared = {name: message_type(kind) for name, kind in self.settings.columns.items()}
        with outcome.explained(f"read the topic {self.name}"):

            def parse(frame: DataFrame) -> messages.ParsedMessages:
                return messages.rows(frame, self.connection, declared, before, widens=widens, grows=grows)

            parsed = parse(frame)
            bad = tuple(
                DeadLetter(
                    "read",
                    each["error"],
                    self.name,
                    each["payload"].decode(errors="backslashreplace"),
                    f"{each['partition']}:{each['offset']}",
                )
                for each in (parsed.bad.toArrow().to_pylist() if parsed.bad_rows else ())
            )
        packed = None
        if parsed.packed is not None and parsed.columns is not None:
            packed = Packed(parsed.packed, parsed.columns, messages.unpack)
        found = None if parsed.found is None else _struct(parsed.found)
        return MessageRows(
            self.name,
            parsed.good,
            parsed.good_rows,
            bad,
            packed,
            found,
            parsed.newest,
            messages=frame,
            parsed=parsed,
            parse=parse,
        )

    def committed(self, position: Mapping[str, Mapping[str, int]]) -> None:
        """Commit the offsets to the consumer group, for tools that show its lag. Nothing depends on it."""
        ends = self._offsets(position)
        try:
            if ends:
                self._admin.commit(self.connection.resolved().group, self.name, ends)
        except WeftError as error:
            _log.warning("The offsets of %s were not committed: %s", self.name, error.what)

    def check(self, pipeline: str, message: str) -> None:
        """Raise if the topic or messages of it are gone. Brokers that do not answer prove nothing."""
        try:
            self._admin.partitions(self.name)
        except NotFoundError:
            raise NotFoundError(
                f"The topic {self.name!r} of {self.connection.label} is gone, and {pipeline} reads it.",
                hint=f"Make it again, and have {pipeline} begin again with it: weft checkpoints reset {pipeline}. "
                "Or name another topic.",
            ) from None
        except WeftError:
            return
        if _LOST in message and f"{self.name}-" in message:
            raise StorageError(
                f"The topic {self.name!r} of {self.connection.label} no longer has what {pipeline} is to read: its "
                "brokers removed it, or it is another topic of that name.",
                hint=f"To begin with what it has now: weft checkpoints reset {pipeline}.",
            )

    def validate(self) -> str:
        return show_partitions(self.connection, self.name)

    # -------------------------------------------------------------------------------------------------------- positions

    @classmethod
    def show(cls, position: Any, source_log: Location | None) -> str | None:
        if isinstance(position, Mapping) and len(position) == 1:
            offsets = next(iter(position.values()))
            if isinstance(offsets, Mapping) and all(str(number).isdecimal() for number in offsets):
                return _show(offsets)
        return None

    def lag(self, position: Mapping[str, Mapping[str, int]] | None, source_log: Location | None) -> int | None:
        """Return the offsets between a position and the end; transactions and compaction leave some of them empty."""
        if position is None and self.settings.start == "latest":
            return None
        ends = self._admin.latest(self.name)
        offsets = self._offsets(position) if position is not None else self._first()
        return sum(max(end - offsets.get(number, 0), 0) for number, end in ends.items())

    def _first(self) -> dict[int, int]:
        """Return where a new checkpoint begins."""
        start, floors = self.settings.start, self._admin.earliest(self.name)
        return floors if start == "earliest" else {**floors, **partition_offsets(self.name, start, floors)}

    def check_start(self) -> None:
        start = self.settings.start
        if start in ("earliest", "latest"):
            return
        ends = self._admin.latest(self.name)
        for number, offset in partition_offsets(self.name, start, ends).items():
            if offset > ends[number]:
                raise DeclarationError(
                    f"The topic {self.name!r} cannot start at {number}:{offset}: its next message is "
                    f"{number}:{ends[number]}.",
                    hint="latest begins with what comes next.",
                )

    def end(self) -> str:
        return ",".join(f"{number}:{end}" for number, end in self._admin.latest(self.name).items())

    def stay(self, position: Any | None, source_log: Location) -> Rewind:
        return Rewind(position, None if position is None else position[self.name])

    def rewind_to_offset(self, position: Any | None, offset: str, source_log: Location) -> Rewind:
        """Return the position of a message in the only partition, or in those that are named."""
        offsets = self._offsets(position)
        wanted = partition_offsets(self.name, offset, offsets)
        for number, first in wanted.items():
            if first > offsets[number]:
                raise self.after_position(_show(offsets), f"{number}:{first}")
        return self._from(offsets, wanted)

    def rewind_to_time(self, position: Any | None, moment: datetime, source_log: Location) -> Rewind:
        offsets = self._offsets(position)
        since = self._admin.first_since(self.name, moment)
        wanted = {number: offset for number, offset in since.items() if offset < offsets.get(number, 0)}
        if not wanted:
            raise DeclarationError(
                f"No message of {self.name} that was read is of {moment:%Y-%m-%d %H:%M:%S} or later."
            )
        return self._from(offsets, wanted)

    def _from(self, offsets: dict[int, int], wanted: dict[int, int]) -> Rewind:
        floors = self._admin.earliest(self.name)
        gone = {number: floors[number] for number, first in wanted.items() if first < floors.get(number, 0)}
        note = f"the brokers removed the messages of {self.name} before {_show(gone)}." if gone else None
        moved = {**offsets, **wanted, **{number: min(floor, offsets[number]) for number, floor in gone.items()}}
        position = {self.name: {str(number): offset for number, offset in moved.items()}}
        summary = f"{_show(moved)} of {self.name}; it was at {_show(offsets)}"
        return Rewind(position, position[self.name], summary, note)

    def _offsets(self, position: Any | None) -> dict[int, int]:
        if position is None:
            raise self.never_read()
        return {int(number): offset for number, offset in position[self.name].items()}


def _struct(columns: pa.Schema) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(columns, prefer_timestamp_ntz=True)


def show_partitions(connection: Any, topic: str) -> str:
    """Return how many partitions a topic has; raise if there is no such topic."""
    count = len(admin(connection).partitions(topic))
    return f"{count} partition{'' if count == 1 else 's'}"


def _show(offsets: Mapping[Any, int]) -> str:
    return ", ".join(f"{number}:{offsets[number]}" for number in sorted(offsets, key=int))
