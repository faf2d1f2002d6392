"""The quarantine of a stream of Redis: a stream of entries that do not fit a schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.systems.log import QUARANTINE_SUFFIX
from weft.systems.pages import Rejected
from weft.systems.redis.group_member import LARGEST, order_of, text_of
from weft.systems.redis.wire import Key, ReplyError, Wire, Word

ERROR_FIELD = "_weft_error"
SOURCE_FIELD = "_weft_entry"
_ENTRIES_A_PAGE = 1000


def quarantine_of(stream: Key) -> Key:
    return stream + QUARANTINE_SUFFIX if isinstance(stream, str) else stream + QUARANTINE_SUFFIX.encode()


def is_quarantine(entries: Any) -> bool:
    """Return whether these are entries of a quarantine, not of a stream that has such a name."""
    return any(SOURCE_FIELD.encode() in fields for _, fields in entries)


class Quarantine:
    """The stream of the entries that a feed rejects. It gets each of them once."""

    def __init__(self, source: Wire, stream: Key) -> None:
        self._source, self._stream = source, stream
        # A connection of its own: on a cluster it may be another node.
        self._wire = Wire(source.connection, quarantine_of(stream), source.stopped)
        self._held: set[str] = set()
        self._read_up_to = "-"

    def put(self, rejected: Sequence[Rejected]) -> None:
        """Store entries, under their own ids where nothing newer is there."""
        for each in rejected:
            entries = self._source.query("XRANGE", self._stream, each.id, each.id)
            if entries:  # else it was deleted meanwhile
                self._add(each.id, [*entries[0][1], ERROR_FIELD, each.why, SOURCE_FIELD, each.id])

    def _add(self, source: str, fields: list[Word]) -> None:
        place = source
        while True:
            try:
                # Never as `*`: what is sent again after a lost reply would be there twice.
                self._wire.run("XADD", self._wire.key, place, *fields)
                return
            except ReplyError as error:
                if "equal or smaller" not in str(error):
                    raise self._wire.explained(error) from None
            if self._holds(source):
                return
            milliseconds, sequence = order_of(self._wire.last_id(self._wire.key))
            place = f"{milliseconds}-{sequence + 1}" if sequence < LARGEST else f"{milliseconds + 1}-0"

    def _holds(self, source: str) -> bool:
        """Return whether the quarantine has an entry, under any id. Entries added since the last look are read."""
        while True:
            entries = self._wire.query("XRANGE", self._wire.key, self._read_up_to, "+", "COUNT", _ENTRIES_A_PAGE)
            for identifier, fields in entries:
                self._held.add(text_of(fields[-1]))
                self._read_up_to = f"({text_of(identifier)}"
            if len(entries) < _ENTRIES_A_PAGE:
                return source in self._held

    def close(self) -> None:
        """Let go of the connection."""
        self._wire.close()
