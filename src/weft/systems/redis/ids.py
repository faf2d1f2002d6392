"""Offsets and entries' ids, and the names of a stream's keys.

An entry's id is `ms-seq`. Its offset is `ms << 20 | seq`, which fits 63 bits until the year 2248, with a million
entries a millisecond.
"""

from __future__ import annotations

from weft.errors import SchemaError

_BITS = 20
_SEQUENCES = 1 << _BITS
_MILLISECONDS = 1 << (63 - _BITS)
# Streams of this schema have their own name as their key, as those of other tools have.
_DEFAULT_SCHEMA = "events"
CATALOGUE = "weft::streams"


def to_id(offset: int) -> str:
    return f"{offset >> _BITS}-{offset & (_SEQUENCES - 1)}"


def to_offset(entry_id: bytes | str, stream: str) -> int:
    """Return the offset of an id; `stream` is named where it has none."""
    text = entry_id if isinstance(entry_id, str) else entry_id.decode()
    ms, _, seq = text.partition("-")
    milliseconds, sequence = int(ms), int(seq)
    if milliseconds >= _MILLISECONDS or sequence >= _SEQUENCES:
        raise SchemaError(
            f"Entry {text} of the Redis stream {stream!r} has no offset: an id may have {_MILLISECONDS - 1} before the "
            f"dash and {_SEQUENCES - 1} after it, at most.",
            hint="Somebody chose that id. Let Redis choose: XADD stream * …. To go on, delete the entry (XDEL) and set "
            "the last id back (XSETID stream ID, of the entry before it).",
        )
    return milliseconds << _BITS | sequence


def first_of(milliseconds: int) -> int:
    """Return the first offset that an entry of this millisecond can have."""
    return milliseconds << _BITS


def milliseconds_of(offset: int) -> int:
    """Return the milliseconds at which an entry was added."""
    return offset >> _BITS


class Keys:
    """The keys of one stream. All have the same hash tag, so that a cluster has them in one slot."""

    def __init__(self, stream: str) -> None:
        self.stream, self.meta = stream, f"weft:{{{stream}}}"
        """The stream, and a hash: what retention removed, and each consumer's counters."""
        self.fields = f"{self.meta}:fields"
        """A hash: the stream's fields, each with its number and type."""
        self.seen = f"{self.meta}:keys"
        """A sorted set: idempotency keys by when they were seen."""
        self.trims = f"{self.meta}:trims"
        """A sorted set: up to which ids retention removed entries, by how many it had removed then."""
        self.ages = f"{self.meta}:ages"
        """A sorted set: last ids that are of the future, by the millisecond at which they were seen."""

    @classmethod
    def of(cls, schema: str, name: str) -> Keys:
        return cls(name if schema == _DEFAULT_SCHEMA else f"{schema}:{name}")

    def books(self, consumer: str) -> list[str]:
        """Return the keys of a consumer's bookkeeping, in the order of the scripts' `books`."""
        kinds = ("held", "leases", "ends", "returned", "reasons")
        return [f"{self.meta}:{kind}:{consumer}" for kind in kinds]
