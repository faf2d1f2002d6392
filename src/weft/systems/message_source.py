"""What the sources of all brokers share: a batch of messages becomes rows, with those apart that are none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from weft.spark_support import outcome
from weft.spark_support.lazy import F
from weft.systems import messages
from weft.systems.codec import Codec, codec_of
from weft.systems.codecs.columns import message_type
from weft.systems.dead_letter_store import DeadLetter
from weft.systems.stream_source import EVENT_TIME, OFFSET, BatchRows, FrameRows, Packed, StreamSource, UntypedRows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

# With more rejected messages than this, types are not looked for again.
_MOST_REJECTED = 10_000


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
        with outcome.explained(f"read the messages of {self.source}"):
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

    def __init__(self, source: MessageSource, frame: DataFrame) -> None:
        super().__init__(source.name)
        self._source, self._frame = source, frame
        self._rows: MessageRows | None = None

    def read(self, known: Mapping[str, DataType], *, widens: bool, again: bool = False) -> MessageRows:
        if self._rows is None or again:
            self.close()
            self._rows = self._source.read(self._frame, known, widens=widens)
            self.size = self._rows.size
        return self._rows

    def split(self, known: Mapping[str, DataType], *, widens: bool, grows: bool) -> MessageRows | None:
        """Return the rows without those whose numbers or keys made types of columns wider, unless it `grows`."""
        if grows or self._rows is None or not self._rows.parsed.is_wider:
            return None
        return self._source.read(self._frame, known, widens=widens, grows=grows)

    @property
    def traceparents(self) -> Collection[str]:
        """The spans that published them, when they have been read."""
        return () if self._rows is None else self._rows.parsed.traceparents

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()


class MessageSource(StreamSource):
    """A source whose streaming DataFrame has messages: value, partition, offset, timestamp."""

    unit = "messages"
    brings_keys = True
    noun: ClassVar[str]
    """How errors call what is read: a topic, a stream."""

    @property
    def added_columns(self) -> Mapping[str, str]:
        """The columns that rows get of their messages: by name, the column of the streaming DataFrame."""
        return {}

    @property
    def codec(self) -> Codec:
        """What parses the messages."""
        return codec_of(self.connection.resolved().payload_format)

    def payload_text(self, value: bytes) -> str:
        """Return a message that is no row as the text that a dead letter holds."""
        return value.decode(errors="backslashreplace")

    def take(self, frame: DataFrame) -> Messages:
        return Messages(self, frame)

    def traceparents(self, rows: BatchRows) -> Collection[str]:
        return rows.traceparents if isinstance(rows, Messages) else ()

    def read(self, frame: DataFrame, known: Mapping[str, DataType], *, widens: bool, grows: bool = True) -> MessageRows:
        """Return the messages of a micro-batch as rows, under the types that columns had before."""
        from pyspark.sql.pandas.types import to_arrow_type

        before = {
            name: to_arrow_type(kind, timezone="UTC")
            for name, kind in known.items()
            if name.lower() != EVENT_TIME and name not in self.settings.columns and name not in self.added_columns
        }
        declared = {name: message_type(kind) for name, kind in self.settings.columns.items()}
        with outcome.explained(f"read the {self.noun} {self.name}"):

            def parse(frame: DataFrame) -> messages.ParsedMessages:
                return messages.rows(
                    frame,
                    self.connection,
                    declared,
                    before,
                    widens=widens,
                    grows=grows,
                    added=self.added_columns,
                    codec=self.codec,
                )

            parsed = parse(frame)
            bad = tuple(
                DeadLetter(
                    "read",
                    each["error"],
                    self.name,
                    self.payload_text(each["payload"]),
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


def _struct(columns: pa.Schema) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(columns, prefer_timestamp_ntz=True)
