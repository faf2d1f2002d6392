"""The size of a message as brokers count it for `max.message.bytes`: alone in a batch of records (format 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.spark_support.lazy import F

if TYPE_CHECKING:
    from pyspark.sql import Column

# The header of a batch, and of its only record the attributes and three numbers that are zero, or of one byte.
_BATCH, _RECORD = 61, 4
# Below these a length takes one byte, two, three or four; else five.
_LENGTHS = (1 << 6, 1 << 13, 1 << 20, 1 << 27)


def stored(key: bytes | None, value: bytes | None) -> int:
    """Return the size of a message without headers."""
    record = _RECORD + sum(_length(len(each or b"")) + len(each or b"") for each in (key, value))
    return _BATCH + _length(record) + record


def stored_column(key: Column, value: Column, headers: dict[str, str]) -> Column:
    """Return the size of messages with the same headers."""
    record = F.lit(_RECORD)
    for text in (key, value, *(F.lit(each) for header in headers.items() for each in header)):
        size = F.coalesce(F.octet_length(text), F.lit(0))
        record = record + _length_column(size) + size
    return F.lit(_BATCH) + _length_column(record) + record


def _length(size: int) -> int:
    return 1 + sum(size >= each for each in _LENGTHS)


def _length_column(size: Column) -> Column:
    length = F.lit(1)
    for each in _LENGTHS:
        length = length + (size >= each).cast("int")
    return length
