"""A queue as a source of streaming pipelines. The position `{"line": 7}` means that seven lines were read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa

from weft.errors import DeclarationError
from weft.spark_support import outcome
from weft.systems.codec import codec_of
from weft.systems.dead_letter_store import DeadLetter
from weft.systems.stream_source import EVENT_TIME, MAX_ROWS, OFFSET, FrameRows, Rewind, StreamSource, counted
from weft_spool.queue_file import Queue


@dataclass(frozen=True)
class SpoolRows(FrameRows):
    """The messages of a micro-batch as rows."""

    numbered: Any = None

    def with_offsets(self) -> Any:
        """Return the rows with the line of each."""
        return self.numbered


class SpoolSource(StreamSource):
    """Follows one queue."""

    unit = "messages"

    @property
    def queue(self) -> Queue:
        """The queue, or an error if there is none."""
        queue: Queue = self.connection.existing_queue(self.name)
        return queue

    def follow(self, spark: Any, start: str) -> Any:
        """Return the lines of the queue as Spark reads them."""
        from weft_spool.data_source import SpoolDataSource

        first = 1 if start == "earliest" else int(start)
        limit = self.settings.max_rows or MAX_ROWS
        spark.dataSource.register(SpoolDataSource)
        reader = spark.readStream.format(SpoolDataSource.name())
        return reader.options(folder=self.queue.folder, after=first - 1, max_rows=limit).load()

    def take(self, frame: Any) -> SpoolRows:
        """Return the messages of a micro-batch as rows, and those that are not JSON objects as dead letters."""
        with outcome.explained(f"read the queue {self.name}"):
            messages = frame.toArrow()
        parsed = codec_of("json").decoder({}).parse(messages["value"].combine_chunks())
        good = messages.take(pa.array(parsed.good, pa.int64()))
        columns = {name: values for name, values in parsed.columns.items() if name.lower() != EVENT_TIME}
        columns |= {EVENT_TIME: good["sent_at"], OFFSET: good["line"].cast(pa.string())}
        numbered = frame.sparkSession.createDataFrame(pa.table(columns))
        rejected = messages.take(pa.array(parsed.bad, pa.int64())).to_pylist()
        bad = tuple(
            DeadLetter("read", error, self.name, row["value"].decode(errors="backslashreplace"), str(row["line"]))
            for row, error in zip(rejected, parsed.bad.values(), strict=True)
        )
        return SpoolRows(self.name, numbered.drop(OFFSET), good.num_rows, bad, numbered=numbered)

    def check(self, pipeline: str, message: str) -> None:
        """Raise if the queue is gone."""
        self.connection.existing_queue(self.name)

    def validate(self) -> str:
        """Raise if there is no such queue."""
        return counted(self.queue.count(), self.unit)

    # -------------------------------------------------------------------------------------------------------- positions

    @classmethod
    def show(cls, position: Any, source_log: Any) -> str | None:
        """Return the last line that was read."""
        return f"line {position['line']}" if isinstance(position, dict) and set(position) == {"line"} else None

    def lag(self, position: Any, source_log: Any) -> int | None:
        """Return how many messages come after a position, or after the declared start."""
        start = self.settings.start
        if position is None and start == "latest":
            return None
        read = position["line"] if position else 0 if start == "earliest" else int(start) - 1
        return max(self.queue.count() - read, 0)

    def end(self) -> str:
        """Return the line that the next message will have."""
        return str(self.queue.count() + 1)

    def check_start(self) -> None:
        """Raise if the declared start is after the next message."""
        start, end = self.settings.start, self.end()
        if start.isdecimal() and not 1 <= int(start) <= int(end):
            raise DeclarationError(f"The queue {self.name!r} cannot start at {start}: its next line is {end}.")

    def stay(self, position: Any, source_log: Any) -> Rewind:
        """Return the position itself."""
        return Rewind(position, position and position["line"] + 1)

    def rewind_to_offset(self, position: Any, offset: str, source_log: Any) -> Rewind:
        """Return the position before a line."""
        if not offset.isdecimal() or not int(offset):
            raise DeclarationError(f"{offset!r} is no line of the queue {self.name}: lines are numbered from 1 on.")
        return self._before(position, int(offset))

    def rewind_to_time(self, position: Any, moment: datetime, source_log: Any) -> Rewind:
        """Return the position before the first message since a moment."""
        since = (each.line for each in self.queue.read() if each.sent_at >= moment)
        return self._before(position, next(since, self.queue.count() + 1))

    def _before(self, position: Any, line: int) -> Rewind:
        if position is None:
            raise self.never_read()
        if line > position["line"]:
            raise self.after_position(f"line {position['line']}", f"line {line}")
        return Rewind({"line": line - 1}, line, f"line {line} of {self.name}; it was at line {position['line']}")
