"""What the sources of all brokers share: a batch of messages becomes rows, with those apart that are none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from weft.spark_support import outcome
from weft.spark_support.columns import struct_of
from weft.spark_support.lazy import F
from weft.systems import messages
from weft.systems.codec import Codec, codec_of
from weft.systems.codecs.columns import message_type
from weft.systems.codecs.json import JsonCodec
from weft.systems.dead_letter_store import DeadLetter
from weft.systems.stream_source import (
    EVENT_TIME,
    OFFSET,
    BatchRows,
    Documents,
    FrameRows,
    Packed,
    StreamSource,
    UntypedRows,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

_PLACE = ("partition", "offset")
# With more rejected messages than this, types are not looked for again.
_MOST_REJECTED = 10_000


@dataclass(frozen=True)
class MessageRows(FrameRows):
    """The messages of a micro-batch as rows."""

    messages: Any = None
    """The messages as Spark's connector reads them."""
    here: pa.Table | None = None
    """The same messages, where this process has them."""
    parsed: Any = None
    parse: Any = None
    """Parses messages as these were."""

    def frame(self, *, timed: bool = True) -> DataFrame:
        frame: DataFrame = self.parsed.good
        return frame

    def gather(self) -> pa.Table | None:
        rows: pa.Table | None = self.parsed.gather()
        return rows

    def found_without(self, offsets: Collection[str]) -> StructType | None:
        if len(offsets) > _MOST_REJECTED or self.parsed.codec is None:
            return None
        with outcome.explained(f"read the messages of {self.source}"):
            if self.here is not None:
                places = pc.binary_join_element_wise(*(self.here[name].cast(pa.string()) for name in _PLACE), ":")
                left = self.here.filter(pc.invert(pc.is_in(places, pa.array(offsets, pa.string()))))
                parsed = self.parse(self.messages, left)
            else:
                rejected = F.concat_ws(":", *_PLACE).isin(list(offsets))
                parsed = self.parse(self.messages.where(~rejected), None)
        parsed.close()
        return struct_of(parsed.found)

    def newest_until(self, latest: int) -> Mapping[str, int]:
        if all(each <= latest for each in self.newest.values()):
            return self.newest
        if self.here is not None:
            return messages.newest_of(self.here.filter(self.here["value"].is_valid()), latest)
        valid = self.messages.where(F.col("value").isNotNull() & (F.unix_micros("timestamp") <= latest))
        with outcome.explained(f"read the messages of {self.source}"):
            found = valid.groupBy("partition").agg(F.max("timestamp").alias("timestamp")).toArrow()
        return messages.newest_of(found)

    def with_offsets(self) -> DataFrame:
        """Return the rows with partition:offset of each: the messages are parsed again."""
        return messages.with_offsets(self.messages, self.parsed, OFFSET, self.here)

    def close(self) -> None:
        self.parsed.close()


class Messages(UntypedRows):
    """The messages of a micro-batch."""

    def __init__(
        self, source: MessageSource, frame: DataFrame, few: Callable[[], pa.Table | None] = lambda: None
    ) -> None:
        """`few` returns the messages if they are few, read by this process; it need not."""
        super().__init__(source.name)
        self._source, self._frame, self._few = source, frame, few
        self._rows: MessageRows | None = None

    @cached_property
    def _here(self) -> pa.Table | None:
        return self._few()

    def read(self, known: Mapping[str, DataType], *, widens: bool, again: bool = False) -> MessageRows:
        if self._rows is None or again:
            self.close()
            self._rows = self._source.read(self._frame, known, widens=widens, here=self._here, documents=self.documents)
            self.size = self._rows.size
        return self._rows

    def split(self, known: Mapping[str, DataType], *, widens: bool, grows: bool) -> MessageRows | None:
        """Return the rows without those whose numbers or keys made types of columns wider, unless it `grows`."""
        if grows or self._rows is None or not self._rows.parsed.is_wider:
            return None
        return self._source.read(
            self._frame, known, widens=widens, grows=grows, here=self._here, documents=self.documents
        )

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

    @property
    def sends_json(self) -> bool:
        return isinstance(self.codec, JsonCodec)

    def payload_text(self, value: bytes) -> str:
        """Return a message that is no row as the text that a dead letter holds."""
        return value.decode(errors="backslashreplace")

    def take(self, frame: DataFrame) -> Messages:
        return Messages(self, frame)

    def traceparents(self, rows: BatchRows) -> Collection[str]:
        return rows.traceparents if isinstance(rows, Messages) else ()

    def read(
        self,
        frame: DataFrame,
        known: Mapping[str, DataType],
        *,
        widens: bool,
        grows: bool = True,
        here: pa.Table | None = None,
        documents: Documents | None = None,
    ) -> MessageRows:
        """Return the messages of a micro-batch as rows, under the types that columns had before. `here`: the same
        messages, where this process has them."""
        from pyspark.sql.pandas.types import to_arrow_type

        before = {
            name: to_arrow_type(kind, timezone="UTC")
            for name, kind in known.items()
            if name.lower() != EVENT_TIME and name not in self.settings.columns and name not in self.added_columns
        }
        declared = {name: message_type(kind) for name, kind in self.settings.columns.items()}

        def parse(frame: DataFrame, here: pa.Table | None) -> messages.ParsedMessages:
            return messages.rows(
                frame,
                self.connection,
                declared,
                before,
                widens=widens,
                grows=grows,
                added=self.added_columns,
                codec=self.codec,
                here=here,
                documents=documents,
            )

        with outcome.explained(f"read the {self.noun} {self.name}"):
            parsed = parse(frame, here)
            bad = tuple(
                DeadLetter(
                    "read",
                    each["error"],
                    self.name,
                    self.payload_text(each["payload"]),
                    f"{each['partition']}:{each['offset']}",
                )
                for each in parsed.rejected()
            )
        packed = None
        if parsed.packed is not None and parsed.columns is not None:
            packed = Packed(parsed.packed, parsed.columns, messages.unpack)
        return MessageRows(
            self.name,
            None,
            parsed.good_rows,
            bad,
            packed,
            None if parsed.found is None else struct_of(parsed.found),
            parsed.newest,
            parsed.documents,
            messages=frame,
            here=here,
            parsed=parsed,
            parse=parse,
        )
