"""Messages that this process parses, and the same ones in tasks of Spark: the same rows, types and bad messages."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from systems.codecs.schemas import AllSchemas
from systems.contracts.test_codec import MESSAGES, SCHEMAS
from systems.kafka.test_odd_messages import odd_message
from weft.columns import UTC_TIME
from weft.systems import messages
from weft.systems.codec import CODECS, REGISTERED, Codec, codec_of

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
OFFSET = "_weft_offset"


def table(values: list[bytes | None]) -> pa.Table:
    """Messages as a source has them, of two partitions."""
    count = range(len(values))
    return pa.table(
        {
            "key": pa.array([b"k"] * len(values), pa.binary()),
            "value": pa.array(values, pa.binary()),
            "partition": pa.array([number % 2 for number in count], pa.int32()),
            "offset": pa.array(count, pa.int64()),
            "timestamp": pa.array([NOON + timedelta(seconds=number) for number in count], UTC_TIME),
            messages.TRACEPARENT: pa.array([b"00-a-b-%02d" % (number % 3) for number in count], pa.binary()),
        }
    )


def batches(codec: str, dice: random.Random) -> Iterator[list[bytes | None]]:
    """The messages of some micro-batches that follow each other, with null, empty and broken ones."""
    if codec == "json":
        for _ in range(2):
            odd: list[bytes | None] = [json.dumps(odd_message(dice)).encode() for _ in range(dice.randrange(1, 12))]
            yield dice.sample([*odd, None, b"", b"{", b"{}"], len(odd) + 4)
        yield [None]
    else:
        yield [*MESSAGES[codec].good, None, *MESSAGES[codec].bad]


def made(codec: str) -> Codec:
    return codec_of(codec, AllSchemas(codec.upper(), [SCHEMAS[codec]])) if codec in REGISTERED else codec_of(codec)


def rows(found: pa.Table) -> list[str]:
    """Rows by their offsets; NaN and -0.0 as they are."""
    return sorted(map(repr, found.to_pylist()))


@pytest.mark.parametrize("codec", CODECS)
def test_both_are_alike(plain_spark: Any, codec: str, count: Callable[..., int]) -> None:
    for seed in range(count(20, brief=1) if codec == "json" else 1):
        dice = random.Random(seed)
        before: dict[str, pa.DataType] = {}
        widens, added = dice.random() < 0.5, dice.choice([{}, {"_key": "key"}])
        declared = dice.choice([{}, {"number": pa.int64(), "name": pa.string()}]) if codec == "json" else {}
        for values in batches(codec, dice):
            here = table(values)
            # Two tasks.
            frame = plain_spark.createDataFrame(here).repartition(2, "partition")
            how: dict[str, Any] = {"widens": widens, "added": added, "codec": made(codec)}
            with (
                closing(messages.rows(frame, None, declared, before, **how)) as there,
                closing(messages.rows(frame, None, declared, before, here=here, **how)) as few,
            ):
                assert few.good.schema == there.good.schema, seed
                assert rows(few.good.toArrow()) == rows(few.gather()), seed
                assert few.gather().schema.equals(few.columns), seed
                with_offsets = [
                    messages.with_offsets(frame, each, OFFSET, where).toArrow()
                    for each, where in ((there, None), (few, here))
                ]
                assert rows(with_offsets[1]) == rows(with_offsets[0]), seed
                assert with_offsets[1].schema.equals(with_offsets[0].schema), seed
                assert sorted(map(repr, few.rejected())) == sorted(map(repr, there.rejected())), seed
                if codec == "raw_bytes":
                    assert (few.good_rows, there.good_rows) == (len(values), None)
                    continue
                for name in ("good_rows", "bad_rows", "tombstones", "newest", "known", "is_wider"):
                    assert getattr(few, name) == getattr(there, name), (seed, name)
                assert sorted(few.traceparents) == sorted(there.traceparents)
                for one, other in ((few.columns, there.columns), (few.found, there.found)):
                    assert one is not None
                    assert other is not None
                    assert {each.name: each.type for each in one} == {each.name: each.type for each in other}, seed
                before |= {each.name: each.type for each in few.found or () if each.name not in added}
