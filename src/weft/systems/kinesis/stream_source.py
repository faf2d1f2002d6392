"""A stream of Kinesis as a source of streaming pipelines. A position is the place of each shard: see `places`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.errors import DeclarationError, NotFoundError, StorageError, WeftError
from weft.spark_support.folder import Location
from weft.systems.kinesis import shard_positions
from weft.systems.kinesis.client import client
from weft.systems.kinesis.shard_positions import CLOSED, EARLIEST
from weft.systems.kinesis.shards import Position, Shards, stream
from weft.systems.message_source import Messages, MessageSource
from weft.systems.messages import MOST_HERE
from weft.systems.stream_source import MAX_ROWS, Rewind

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_METADATA = {"_partition_key": "key", "_shard_id": "partition", "_sequence_number": "offset"}
# What Kinesis answers to a sequence number that is not one of this stream's.
_FOREIGN = "StartingSequenceNumber"


class KinesisSource(MessageSource):
    """Follows one stream."""

    messaging_system = "aws_kinesis"
    noun = "stream"

    @property
    def added_columns(self) -> Mapping[str, str]:
        return _METADATA if self.connection.metadata_columns else {}

    def _shards(self, start: str | None = None) -> Shards:
        most = self.settings.max_rows or MAX_ROWS
        return Shards(self.connection, self.name, start or self.settings.start, most)

    def follow(self, spark: SparkSession, start: str) -> DataFrame:
        client(self.connection).shards(self.name)  # raises for a stream that does not exist
        # Resolved here: the processes of Spark need not have this one's variables.
        shards = replace(self._shards(start), connection=self.connection.resolved())
        return stream(spark, shards)

    def take(self, frame: DataFrame) -> Messages:
        return Messages(self, frame, partial(_few, frame))

    def check(self, pipeline: str, message: str) -> None:
        """Raise if the stream is another one, or gone. A service that does not answer proves nothing."""
        try:
            client(self.connection).shards(self.name)
        except NotFoundError:
            raise NotFoundError(
                f"The stream {self.name!r} of {self.connection.label} is gone, and {pipeline} reads it.",
                hint=f"Make it again, and have {pipeline} begin again with it: weft checkpoints reset {pipeline}. "
                "Or name another stream.",
            ) from None
        except WeftError:
            return
        if _FOREIGN in message:
            raise StorageError(
                f"The stream {self.name!r} of {self.connection.label} does not have what {pipeline} is to read: "
                "Kinesis removed it, or it is another stream of that name.",
                hint=f"To begin with what it has now: weft checkpoints reset {pipeline}.",
            )

    def validate(self) -> str:
        return show_shards(self.connection, self.name)

    # -------------------------------------------------------------------------------------------------------- positions

    @classmethod
    def show(cls, position: Any, source_log: Location | None) -> str | None:
        if isinstance(position, Mapping) and set(position) == {"shards"}:
            return shard_positions.show(position["shards"])
        return None

    def lag(self, position: Position | None, source_log: Location | None) -> int | None:
        """Return how many records come after a position: Kinesis does not say, so they are read."""
        if position is None and self.settings.start == "latest":
            return None
        shards = self._shards()
        return shards.count(position if position is not None else shards.first())

    def check_start(self) -> None:
        start = self.settings.start
        if start in (EARLIEST, "latest"):
            return
        for shard, place in self._shards().first()["shards"].items():
            if place.startswith("@") and shard_positions.parse_time(place[1:]) > datetime.now(UTC):
                raise DeclarationError(
                    f"The stream {self.name!r} cannot start at {place[1:]}, which is in the future.",
                    hint="latest begins with what comes next.",
                )
            if place == CLOSED:
                continue
            try:
                client(self.connection).iterator(self.name, shard, shard_positions.iterator_arguments(place))
            except StorageError as error:  # a number that is not of this shard
                raise DeclarationError(
                    f"The stream {self.name!r} cannot start at {shard}:{place}: {error.what}",
                    hint="latest begins with what comes next.",
                ) from None

    def end(self) -> str:
        return shard_positions.show(self._shards().ends())

    def stay(self, position: Position | None, source_log: Location) -> Rewind:
        return Rewind(position, None if position is None else position["shards"])

    def rewind_to_offset(self, position: Position | None, offset: str, source_log: Location) -> Rewind:
        """Return the position of a record in the only shard, or in those that are named."""
        at = self._places(position)
        wanted = shard_positions.parse(self.name, offset, at)
        for shard, place in wanted.items():
            first, now = shard_positions.sequence(place), shard_positions.sequence(at[shard])
            if first is None:
                raise DeclarationError(
                    f"{place!r} is not a sequence number of the stream {self.name}.", hint="For a time: --to-time."
                )
            if at[shard] != CLOSED and (now is None or first > now):
                raise self.after_position(shard_positions.show(at), f"{shard}:{place}")
        return self._from(at, wanted)

    def rewind_to_time(self, position: Position | None, moment: datetime, source_log: Location) -> Rewind:
        at, shards, wanted = self._places(position), self._shards(), {}
        for shard, place in at.items():
            first = None if moment > datetime.now(UTC) else shards.first_since(shard, shard_positions.since(moment))
            now = shard_positions.sequence(place)
            if first is not None and (place == CLOSED or (now is not None and int(first) <= now)):
                wanted[shard] = first
        if not wanted:
            raise DeclarationError(f"No record of {self.name} that was read is of {moment:%Y-%m-%d %H:%M:%S} or later.")
        return self._from(at, wanted)

    def _from(self, at: Mapping[str, str], wanted: Mapping[str, str]) -> Rewind:
        shards, parents = self._shards(), client(self.connection).shards(self.name)
        gone = {}
        for shard, place in wanted.items():
            first = shards.first_since(shard, EARLIEST)
            if first is not None and int(first) > (shard_positions.sequence(place) or 0):
                gone[shard] = first
        note = f"Kinesis removed the records of {self.name} before {shard_positions.show(gone)}." if gone else None
        # Child shards are read again too, after the records of their parents.
        again: set[str] = set()
        for shard, of in parents.items():
            if any(each in again or each in wanted for each in of):
                again.add(shard)
        moved = {**at, **wanted, **gone}
        moved = {shard: place for shard, place in moved.items() if shard in wanted or shard not in again}
        summary = f"{shard_positions.show(moved)} of {self.name}; it was at {shard_positions.show(at)}"
        return Rewind({"shards": moved}, moved, summary, note)

    def _places(self, position: Position | None) -> dict[str, str]:
        """Return the places of the shards that Kinesis still has."""
        if position is None:
            raise self.never_read()
        listed = client(self.connection).shards(self.name)
        return {shard: place for shard, place in position["shards"].items() if shard in listed}


def _few(records: DataFrame) -> pa.Table | None:
    """Return the records of a batch, if they are few. Spark's process that found them keeps them, and no more than 64
    megabytes, so that it takes one short job to look."""
    few = records.limit(MOST_HERE + 1).toArrow()
    return few if few.num_rows <= MOST_HERE else None


def show_shards(connection: Any, name: str) -> str:
    """Return how many shards of a stream take records; raise if there is no such stream."""
    count = len(client(connection).open_shards(name))
    return f"{count} shard{'' if count == 1 else 's'}"
