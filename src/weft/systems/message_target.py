"""What the targets of brokers share: a row is a JSON object with a key, and a name by which readers drop repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from weft.errors import DeclarationError, did_you_mean
from weft.spark_support.lazy import F
from weft.spark_support.sessions import quoted
from weft.systems.codecs.json import JsonCodec
from weft.systems.dead_letter_store import digest
from weft.systems.load import Load

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

BATCH_HEADER, ROW_HEADER = "weft-batch-id", "weft-row"
_JSON = JsonCodec()


def messages_of(frame: DataFrame, load: Load, noun: str = "messages") -> Iterator[Any]:
    """Return the `key` and `value` of each row."""
    key = key_of(frame, load, noun)
    return _computed(frame.select(key.alias("key"), _JSON.encoded(frame.columns).alias("value")))


def _computed(messages: DataFrame) -> Iterator[Any]:
    """Yield rows once all are computed: before one that fails, none is sent."""
    messages = messages.persist()
    try:
        messages.count()
        yield from messages.toLocalIterator()
    finally:
        messages.unpersist()


def key_of(frame: DataFrame, load: Load, noun: str = "messages") -> Column:
    """Return the key of each row: the text of the key column, or a JSON object of several. Rows of one key stay in
    order, in one partition or shard."""
    for name in load.keys:
        if name not in frame.columns:
            raise DeclarationError(
                f"The key {name!r} of {noun} for {load.table!r} is not a column of the rows.",
                hint=did_you_mean(name, frame.columns, f"They have {', '.join(frame.columns)}."),
            )
    if len(load.keys) > 1:
        return _JSON.encoded(load.keys)
    return (F.col(quoted(load.keys[0])) if load.keys else F.lit(None)).cast("string")


def batch_of(load: Load) -> str:
    """Return the name of a batch."""
    return f"{load.checkpoint_id} {load.batch_id}"


def named(rows: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Yield rows with the name of each. It is of the content, since Spark may compute the rows in another order when a
    batch is tried again; equal rows are numbered."""
    seen = Counter[str]()
    for row in rows:
        name = digest(row.value)
        seen[name] += 1
        yield row, name if seen[name] == 1 else f"{name}-{seen[name]}"
