"""A load into a database with one writer does not hold it while it waits for its source."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from weft.engine.readers import read_first

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])


def batches(count: int, seen: list[int]) -> Iterator[pa.RecordBatch]:
    for number in range(count):
        seen.append(number)
        yield pa.RecordBatch.from_pylist([{"n": number, "text": None if number % 2 else "ä"}], schema=SCHEMA)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_everything_is_read_before_the_first_batch_comes(count: int) -> None:
    seen: list[int] = []
    found = read_first(SCHEMA, batches(count, seen))
    assert seen == list(range(count))
    assert pa.Table.from_batches(found, SCHEMA) == pa.Table.from_batches(batches(count, []), SCHEMA)


def test_an_error_of_the_source_comes_through() -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield from batches(2, [])
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        read_first(SCHEMA, broken())
