"""Positions that are offsets of a Weft log: the last one that was read. Streams have them, and so have brokers whose
messages are received into a log."""

from __future__ import annotations

from abc import abstractmethod
from datetime import datetime

from weft.errors import DeclarationError
from weft.spark_support.folder import Location
from weft.systems.log import Log
from weft.systems.stream_source import Rewind, StreamSource

MOST_COUNTED = 100_000
"""Lag is counted no further on Redis, where entries are counted one by one."""


class LogPositions(StreamSource):
    """A source that reads a log."""

    @property
    @abstractmethod
    def log(self) -> Log:
        """The log, opened to be read."""

    # -------------------------------------------------------------------------------------------------------- positions

    @classmethod
    def show(cls, position: object, source_log: Location | None) -> str | None:
        return f"{position:,}" if type(position) is int else None

    def lag(self, position: int | None, source_log: Location | None) -> int | None:
        start = self.settings.start
        if position is None and start != "earliest" and not start.isdecimal():
            return None
        log = self.log
        if position is None:
            position = log.floor() if start == "earliest" else int(start) - 1
        return log.extent(position, log.head(), MOST_COUNTED)

    def end(self) -> str:
        return str(self.log.head() + 1)

    def stay(self, position: int | None, source_log: Location) -> Rewind:
        return Rewind(position, None if position is None else position + 1)

    def rewind_to_offset(self, position: int | None, offset: str, source_log: Location) -> Rewind:
        if not offset.isdecimal() or not int(offset):
            raise DeclarationError(f"{offset!r} is not an offset of {self.name}: an offset is one number.")
        return self._from(position, int(offset))

    def rewind_to_time(self, position: int | None, moment: datetime, source_log: Location) -> Rewind:
        return self._from(position, self.log.first_since(moment))

    def _from(self, position: int | None, first: int) -> Rewind:
        if position is None:
            raise self.never_read()
        if first > position:
            raise self.after_position(f"{position:,}", f"{first:,}")
        floor, note = self.log.floor(), None
        if first <= floor:
            note = f"retention removed the {self.unit} of {self.name} up to {floor:,}."
            first = floor + 1
        return Rewind(first - 1, first, f"{self.unit[:-1]} {first:,} of {self.name}; it was at {position:,}", note)
