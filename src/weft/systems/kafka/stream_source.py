"""A topic of Kafka as a source of streaming pipelines. A position is the next offset of each partition."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from weft import tracing
from weft.errors import DeclarationError, NotFoundError, StorageError, WeftError
from weft.spark_support.folder import Location
from weft.spark_support.lazy import F
from weft.systems.codec import REGISTERED, Codec
from weft.systems.kafka import options
from weft.systems.kafka.client import Admin, admin
from weft.systems.kafka.connection import KafkaConnection
from weft.systems.kafka.options import partition_offsets
from weft.systems.kafka.tail import Tail
from weft.systems.message_source import Messages, MessageSource
from weft.systems.messages import MOST_HERE, TRACEPARENT
from weft.systems.stream_source import MAX_ROWS, Rewind

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger("weft.kafka")
# What Spark's connector reports of messages that the brokers removed.
_LOST = "not available in Kafka any more"
_FETCH = {
    # Java's own choice, a megabyte and 500 messages at a time, takes a quarter more CPU, half of it the broker's.
    "kafka.max.partition.fetch.bytes": str(8 << 20),
    "kafka.max.poll.records": "10000",
    # A task that has its messages has asked for the next ones already, and the broker holds that request for so long:
    # with Java's 500 ms each small batch took half a second more. Between batches nothing asks.
    "kafka.fetch.max.wait.ms": "10",
}


def stream(
    spark: SparkSession,
    connection: KafkaConnection,
    topic: str,
    *,
    start: str = "earliest",
    max_rows: int | None = None,
) -> DataFrame:
    """Return a streaming DataFrame of a topic: key, value, topic, partition, offset, timestamp, timestampType.

    Messages that the brokers removed before they were read are an error. A new checkpoint begins at `start`
    ("earliest", "latest" or offsets); `max_rows` bounds a micro-batch. Where somebody traces, also `TRACEPARENT`.
    """
    partitions = admin(connection).partitions(topic)  # raises for a topic that does not exist
    if start not in ("earliest", "latest"):
        # Spark wants to know it of all partitions: -2 is the earliest.
        offsets = {**dict.fromkeys(partitions, -2), **options.partition_offsets(topic, start, partitions)}
        start = json.dumps({topic: {str(number): offset for number, offset in offsets.items()}})
    reader = spark.readStream.format("kafka").options(**options.for_spark(connection))
    reader = reader.options(
        **_FETCH,
        subscribe=topic,
        startingOffsets=start,
        failOnDataLoss="true",
        groupIdPrefix=connection.resolved().group,
    )
    if max_rows is not None:
        reader = reader.option("maxOffsetsPerTrigger", str(max_rows))
    if tracing.tracer is None:
        return reader.load()
    frame = reader.option("includeHeaders", "true").load()
    last = f"element_at(filter(headers, each -> each.key = '{TRACEPARENT}'), -1).value"
    return frame.withColumn(TRACEPARENT, F.expr(last)).drop("headers")


class KafkaSource(MessageSource):
    """Follows one topic."""

    messaging_system = "kafka"
    noun = "topic"
    wants_commits = True
    _tail: Tail | None = None

    @property
    def _admin(self) -> Admin:
        return admin(self.connection)

    def follow(self, spark: SparkSession, start: str) -> DataFrame:
        most = self.settings.max_rows or MAX_ROWS
        return stream(spark, self.connection, self.name, start=start, max_rows=most)

    def take_between(self, frame: DataFrame, before: Any | None, position: Any | None) -> Messages:
        return Messages(self, frame, partial(self._few, before, position))

    def _few(self, before: Any | None, position: Any | None) -> pa.Table | None:
        """Return the messages between two positions, if they are few."""
        starts, ends = ({} if each is None else self._offsets(each) for each in (before, position))
        # Leave a partition that is new, or gone, to Spark's connector.
        is_known = bool(ends) and starts.keys() == ends.keys() and all(starts[each] <= ends[each] for each in ends)
        if not is_known or sum(ends.values()) - sum(starts.values()) > MOST_HERE:
            self.close()  # it would go on to read what Spark reads
            return None
        if self._tail is None:
            self._tail = Tail(self.connection, self.name)
        return self._tail.between(starts, ends)

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()

    @property
    def codec(self) -> Codec:
        return options.codec(self.connection, self.name)

    @property
    def _is_binary(self) -> bool:
        return self.connection.resolved().payload_format in REGISTERED

    def payload_text(self, value: bytes) -> str:
        return base64.b64encode(value).decode() if self._is_binary else value.decode(errors="backslashreplace")

    def why_not_replayed(self, offset: str | None) -> str | None:
        if self._is_binary:
            return f"it is a message of bytes: rewind the pipeline to read {offset} of {self.name} again"
        return super().why_not_replayed(offset)

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

    def first(self, source_log: Location) -> Any | None:
        # A zero byte, a version and the offsets, as in Spark's class KafkaSourceInitialOffsetWriter.
        lines = (source_log.at("0").read() or "").splitlines()
        with suppress(ValueError):
            noted = json.loads(lines[-1]) if lines else None
            return noted if isinstance(noted, dict) and self.name in noted else None
        return None

    @classmethod
    def show(cls, position: Any, source_log: Location | None) -> str | None:
        if isinstance(position, Mapping) and len(position) == 1:
            offsets = next(iter(position.values()))
            if isinstance(offsets, Mapping) and all(str(number).isdecimal() for number in offsets):
                return _show(offsets)
        return None

    def lag(self, position: Mapping[str, Mapping[str, int]] | None, source_log: Location | None) -> int | None:
        """Return the offsets between a position and the end; transactions and compaction leave some of them empty."""
        lags = self.lag_by_partition(position)
        return None if lags is None else sum(lags.values())

    def lag_by_partition(self, position: Mapping[str, Mapping[str, int]] | None) -> dict[str, int] | None:
        if position is None and self.settings.start == "latest":
            return None
        ends = self._admin.latest(self.name)
        offsets = self._offsets(position) if position is not None else self._first()
        return {str(number): max(end - offsets.get(number, 0), 0) for number, end in sorted(ends.items())}

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


def show_partitions(connection: Any, topic: str) -> str:
    """Return how many partitions a topic has, and its newest schema; raise if there is no such topic."""
    count = len(admin(connection).partitions(topic))
    shown = f"{count} partition{'' if count == 1 else 's'}"
    resolved = connection.resolved()
    if resolved.payload_format not in REGISTERED:
        return shown
    newest = options.registry_of(resolved).newest(options.subject(resolved, topic))
    return f"{shown}, {'no schema yet' if newest is None else f'newest schema {newest.number}'}"


def _show(offsets: Mapping[Any, int]) -> str:
    return ", ".join(f"{number}:{offsets[number]}" for number in sorted(offsets, key=int))
