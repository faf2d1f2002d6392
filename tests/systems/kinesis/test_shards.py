"""Shards are read in order, each record once, also while they are split and merged and where Kinesis refuses requests.
Nothing here starts Spark."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

import weft
from faults.schedulers import Wire
from weft.engine.streaming.sources import open_source
from weft.systems.kinesis import shards as module
from weft.systems.kinesis.client import KinesisClient, client
from weft.systems.kinesis.shards import Position, Shards

ROOT = "shardId-000000000000"


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0.0)


def numbered(*values: int) -> list[bytes]:
    return [json.dumps({"n": n}).encode() for n in values]


def values(batches: Iterable[pa.RecordBatch]) -> list[int]:
    return [json.loads(value)["n"] for batch in batches for value in batch["value"].to_pylist()]


def batches_of(shards: Shards, position: Position) -> Iterator[tuple[list[int], Position]]:
    """Yield the values and the end of each batch, until there are no more."""
    while True:
        batches, end = shards.following(position)
        if end == position:
            assert batches == []
            return
        yield values(batches), end
        position = end


def rest(shards: Shards, position: Position) -> tuple[list[int], Position]:
    """Read all that is there."""
    found = []
    for read, end in batches_of(shards, position):
        found, position = found + read, end
    return found, position


def test_batches_are_bounded(kinesis: Any, connection: Any) -> None:
    stream = kinesis.create_stream()
    kinesis.put(stream, numbered(*range(5)))
    shards = Shards(connection, stream, max_rows=2)
    assert [read for read, _ in batches_of(shards, shards.first())] == [[0, 1], [2, 3], [4]]
    # A batch of one row takes one shard after the other.
    stream = kinesis.create_stream(3)
    for key in range(9):
        kinesis.put(stream, numbered(key), str(key))
    shards = Shards(connection, stream, max_rows=1)
    found = [read for read, _ in batches_of(shards, shards.first())]
    assert sorted(found) == [[n] for n in range(9)]


def test_a_batch_is_bounded_by_its_bytes(kinesis: Any, connection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1)
    monkeypatch.setattr(module, "_PAGE", 3)
    stream = kinesis.create_stream()
    kinesis.put(stream, numbered(*range(5)))
    shards = Shards(connection, stream)
    assert [read for read, _ in batches_of(shards, shards.first())] == [[0, 1, 2], [3, 4]]
    # Also if the shards together have more.
    stream = kinesis.create_stream(3)
    for key in range(9):
        kinesis.put(stream, numbered(key), str(key))
    shards = Shards(connection, stream)
    found = [read for read, _ in batches_of(shards, shards.first())]
    assert len(found) >= 3 and sorted(n for read in found for n in read) == list(range(9))


def test_a_batch_again(kinesis: Any, connection: Any) -> None:
    """Another process reads the records between two positions again, in the same order."""
    stream = kinesis.create_stream(2)
    for n in range(20):
        kinesis.put(stream, numbered(n), str(n))
    shards = Shards(connection, stream, max_rows=6)
    first = shards.first()
    position, again = first, pickle.loads(pickle.dumps(shards))
    for read, end in batches_of(shards, first):
        repeated = list(again.between(json.loads(json.dumps(position)), json.loads(json.dumps(end))))
        assert sorted(values(repeated)) == sorted(read)
        position = end
    assert sorted(values(again.between(first, position))) == list(range(20))
    (batch, *_) = again.between(first, position)
    assert batch.schema.equals(module.COLUMNS)
    assert batch["timestamp"][0].as_py() - datetime.now(UTC) < timedelta(minutes=1)


def test_a_shard_that_is_split_and_merged(kinesis: Any, connection: Any) -> None:
    stream = kinesis.create_stream()
    keys = "abcdef"

    def put(first: int) -> None:
        for n in range(first, first + 12):
            kinesis.put(stream, numbered(n), keys[n % len(keys)])

    put(0)
    shards = Shards(connection, stream, max_rows=5)
    read, position = shards.following(shards.first())
    found = [row for batch in read for row in batch.to_pylist()]
    kinesis.split(stream)
    put(12)
    kinesis.merge(stream, "shardId-000000000001", "shardId-000000000002")
    put(24)
    kinesis.split(stream, "shardId-000000000003")
    put(36)
    # Some by the same process, the rest by one that knows the position alone.
    for _ in range(3):
        read, position = shards.following(position)
        found += [row for batch in read for row in batch.to_pylist()]
    later = Shards(connection, stream)
    while True:
        read, end = later.following(json.loads(json.dumps(position)))
        if end == position:
            break
        found, position = found + [row for batch in read for row in batch.to_pylist()], end
    assert sorted(json.loads(row["value"])["n"] for row in found) == list(range(48))
    for key in keys:
        of_key = [json.loads(row["value"])["n"] for row in found if row["key"] == key]
        assert of_key == sorted(of_key)
    at = position["shards"]
    assert at[ROOT] == at["shardId-000000000001"] == at["shardId-000000000003"] == "closed"
    # What was read is read again between the ends.
    assert sorted(values(later.between(later.first(), position))) == list(range(48))


@pytest.mark.full
def test_a_split_at_any_moment(kinesis: Any, connection: Any) -> None:
    """A model: writes, splits, merges, reads and restarts in any order."""
    dice = random.Random(20)
    stream = kinesis.create_stream(2)
    shards = Shards(connection, stream, max_rows=4)
    position, written = shards.first(), 0
    found: list[dict[str, Any]] = []

    def read() -> None:
        nonlocal position
        batches, position = shards.following(position)
        found.extend(row for batch in batches for row in batch.to_pylist())

    for _ in range(60):
        match dice.choice(["put", "put", "put", "read", "read", "restart", "split", "merge"]):
            case "put":
                kinesis.put(stream, numbered(written), dice.choice("abcdefgh"))
                written += 1
            case "read":
                read()
            case "restart":
                shards = Shards(connection, stream, max_rows=4)
            case "split":
                kinesis.split(stream, dice.choice(client(connection).open_shards(stream)))
            case "merge":
                taking = client(connection).open_shards(stream)
                ranges = {each["ShardId"]: each["HashKeyRange"] for each in kinesis._list(stream)}
                taking.sort(key=lambda each: int(ranges[each]["StartingHashKey"]))
                if len(taking) > 1:
                    number = dice.randrange(len(taking) - 1)
                    kinesis.merge(stream, taking[number], taking[number + 1])
    shards.max_rows = 1000
    while len(found) < written:
        before = len(found)
        read()
        assert len(found) > before, "records are lost"
    read()
    assert sorted(json.loads(row["value"])["n"] for row in found) == list(range(written))
    for key in "abcdefgh":
        of_key = [json.loads(row["value"])["n"] for row in found if row["key"] == key]
        assert of_key == sorted(of_key)


def test_a_run_over_what_is_there(kinesis: Any, connection: Any) -> None:
    """A run with `--once` ends, though records keep coming."""
    stream = kinesis.create_stream(2)
    kinesis.put(stream, numbered(1, 2), "a")
    kinesis.split(stream, client(connection).open_shards(stream)[0])
    kinesis.put(stream, numbered(3), "a")
    shards = Shards(connection, stream, max_rows=100)
    shards.stop_at_end()
    position, found = shards.first(), []
    for read, end in batches_of(shards, position):
        found, position = found + read, end
        kinesis.put(stream, numbered(100), "a")
        assert len(found) < 10
    assert found[:3] == [1, 2, 3]
    assert rest(Shards(connection, stream), position)[0]


def test_requests_that_are_refused(kinesis: Any, connection: Any) -> None:
    stream = kinesis.create_stream()
    kinesis.put(stream, numbered(*range(3)))
    kinesis.refuse(stream, GetRecords=2)
    shards = Shards(connection, stream)
    assert rest(shards, shards.first())[0] == [0, 1, 2]
    assert kinesis.left_to_refuse()["GetRecords"] == 0

    # Without patience the reason is told.
    kinesis.refuse(stream, GetRecords=1)
    impatient = KinesisClient(connection.resolved(), patience=0.0)
    iterator = impatient.iterator(stream, ROOT, {"ShardIteratorType": "TRIM_HORIZON"})
    with pytest.raises(weft.ConnectionFailedError, match="Rate exceeded for shard"):
        impatient.call("get_records", ShardIterator=iterator)


def test_keys_that_are_revoked(kinesis: Any, connection: Any) -> None:
    """It fails at once, with what to do; the next start reads what was not read."""
    stream = kinesis.create_stream()
    kinesis.put(stream, numbered(1, 2))
    shards = Shards(connection, stream)
    position = shards.first()
    kinesis.refuse(stream, Denied=1)
    with pytest.raises(weft.ConnectionFailedError, match=r"UnrecognizedClient.*\n.*weft connections check events"):
        shards.following(position)
    assert rest(shards, position)[0] == [1, 2]


def test_a_request_that_fails(kinesis: Any, connection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another shard gave before is read again."""
    stream = kinesis.create_stream(2)
    for key in range(8):
        kinesis.put(stream, numbered(key), str(key))
    shards = Shards(connection, stream)
    position = shards.first()
    with monkeypatch.context() as patch:
        patch.setattr(client(connection), "patience", 0.0)
        kinesis.refuse(stream, GetRecords=1)
        with pytest.raises(weft.ConnectionFailedError, match="Rate exceeded"):
            shards.following(position)
    assert sorted(rest(shards, position)[0]) == list(range(8))


def test_a_connection_that_is_cut(kinesis: Any, connection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It connects again. Where nobody answers for long it fails, and the next start reads what was not read."""
    stream = kinesis.create_stream()
    kinesis.put(stream, numbered(*range(6)))
    wire = Wire(kinesis.server.port)
    connection = replace(connection, endpoint=f"http://127.0.0.1:{wire.port}")
    try:
        shards = Shards(connection, stream, max_rows=2)
        read, position = shards.following(shards.first())
        wire.cut()
        wire.mend()
        more, position = shards.following(position)
        assert values(read + more) == [0, 1, 2, 3]
        wire.cut()
        with monkeypatch.context() as patch, pytest.raises(weft.ConnectionFailedError) as told:
            patch.setattr(client(connection), "patience", 0.0)
            shards.following(position)
        assert str(told.value).endswith("weft connections check events")
        wire.mend()
        assert rest(shards, position)[0] == [4, 5]
    finally:
        wire.close()


def test_records_of_which_some_are_refused(kinesis: Any, connection: Any) -> None:
    stream = kinesis.create_stream(2)
    kinesis.refuse(stream, PutRecords=2)
    sent = [(str(n), *numbered(n)) for n in range(1100)]
    assert client(connection).send(stream, sent) == 1100
    assert sorted(json.loads(each["Data"])["n"] for each in kinesis.records(stream)) == list(range(1100))
    assert kinesis.left_to_refuse()["PutRecords"] == 0
    kinesis.refuse(stream, PutRecords=1)
    with pytest.raises(weft.StorageError, match=r"1 of 2 records were not taken.*Rate exceeded"):
        KinesisClient(connection.resolved(), patience=0.0).send(stream, sent[:2])


def test_records_that_are_too_large(kinesis: Any, connection: Any) -> None:
    stream = kinesis.create_stream()
    with pytest.raises(weft.StorageError, match="1,048,577 bytes"):
        client(connection).send(stream, [("k", b"x" * (1 << 20))])
    large = [("k", b"x" * ((1 << 20) - 1))] * 6
    assert client(connection).send(stream, large) == 6
    assert len(kinesis.records(stream)) == 6


def test_what_kinesis_removed(kinesis: Any, connection: Any) -> None:
    stream = kinesis.create_stream()
    kinesis.put(stream, numbered(1, 2))
    shards = Shards(connection, stream)
    with pytest.raises(weft.StorageError, match=r"The record 9 .*weft checkpoints reset"):
        list(shards.between(shards.first(), {"shards": {ROOT: ">9"}}))
    with pytest.raises(weft.StorageError, match=r"shardId-000000000007 .* is gone.*weft checkpoints reset"):
        shards.following({"shards": {"shardId-000000000007": ">9"}})
    # A shard that was read to its end may go.
    assert rest(shards, {"shards": {"shardId-000000000007": "closed"}})[0] == [1, 2]


def test_starts(kinesis: Any, connection: Any) -> None:
    stream = kinesis.create_stream()
    kinesis.put(stream, numbered(1, 2, 3))
    begins = kinesis.records(stream)[1]["ApproximateArrivalTimestamp"].astimezone(UTC)

    def read_from(start: str) -> list[int]:
        source = open_source(weft.Source(connection=connection, query=stream, start=start))
        source.check_start()
        shards = Shards(connection, stream, source.settings.start)
        return rest(shards, shards.first())[0]

    assert read_from("earliest") == [1, 2, 3]
    assert read_from("2") == [2, 3]
    assert read_from(f"{ROOT}:>2") == [3]
    assert read_from(begins.isoformat())[-2:] == [2, 3]
    assert read_from("2020-01-31") == [1, 2, 3]
    end = open_source(weft.Source(connection=connection, query=stream)).end()
    assert end == f"{ROOT}:>3"
    kinesis.put(stream, numbered(4))
    assert read_from(end) == [4]
    kinesis.split(stream)
    kinesis.put(stream, numbered(5))
    end = open_source(weft.Source(connection=connection, query=stream)).end()
    kinesis.put(stream, numbered(6))
    assert read_from(end) == [6]
    for start, why in (
        ("2999-01-01", "in the future"),
        (f"{ROOT}:99", "did not come from this stream"),
        ("7", "3 shards"),
        ("shardId-000000000009:1", "no shard"),
        (f"{ROOT}:soon", "not a place"),
        (f"{ROOT}:1,{ROOT}:2", "twice"),
    ):
        with pytest.raises(weft.DeclarationError, match=why):
            read_from(start)
    with pytest.raises(weft.DeclarationError, match="offsets of partitions, which Kafka has"):
        weft.Source(connection=connection, query=stream, start="0:3")


def test_an_end_without_records(kinesis: Any, connection: Any) -> None:
    stream = kinesis.create_stream()
    source = weft.Source(
        connection=connection, query=stream, start=open_source(weft.Source(connection=connection, query=stream)).end()
    )
    kinesis.put(stream, numbered(1))
    shards = Shards(connection, stream, source.start)
    assert rest(shards, shards.first())[0] == [1]


def test_a_rewind_over_a_split(kinesis: Any, connection: Any) -> None:
    """The children are read again, after their parent."""
    stream = kinesis.create_stream()
    kinesis.put(stream, numbered(1, 2, 3))
    kinesis.split(stream)
    kinesis.put(stream, numbered(4))
    shards = Shards(connection, stream)
    found, position = rest(shards, shards.first())
    assert found == [1, 2, 3, 4]
    source: Any = open_source(weft.Source(connection=connection, query=stream))
    rewind = source.rewind_to_offset(position, f"{ROOT}:2", None)
    assert rewind.position == {"shards": {ROOT: "2"}}
    assert rest(Shards(connection, stream), rewind.position)[0] == [2, 3, 4]
    assert source.lag(rewind.position, None) == 3
    rewind = source.rewind_to_time(position, datetime(2020, 1, 1, tzinfo=UTC), None)
    assert rest(Shards(connection, stream), rewind.position)[0] == [1, 2, 3, 4]
    with pytest.raises(weft.DeclarationError, match="each with sequence numbers of its own"):
        source.rewind_to_offset(position, "2", None)
    with pytest.raises(weft.DeclarationError, match="--to-time"):
        source.rewind_to_offset(position, f"{ROOT}:earliest", None)


def test_lag_is_counted_up_to_a_bound(kinesis: Any, connection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_COUNTED", 4)
    stream = kinesis.create_stream()
    kinesis.put(stream, numbered(*range(20)))
    shards = Shards(connection, stream)
    assert shards.count(shards.first()) == 4


def test_an_iterator_that_is_too_old(kinesis: Any, connection: Any) -> None:
    """Iterators end after five minutes."""
    stream = kinesis.create_stream()
    kinesis.put(stream, numbered(1))
    shards = Shards(connection, stream)
    _, position = rest(shards, shards.first())
    kinesis.put(stream, numbered(2))
    kinesis.refuse(stream, Expired=1)
    assert rest(shards, position)[0] == [2]
    assert kinesis.left_to_refuse()["Expired"] == 0


def test_a_stream_that_does_not_exist(kinesis: Any, connection: Any) -> None:
    kinesis.create_stream()
    source = open_source(weft.Source(connection=connection, query="no-such-stream"))
    for ask in (source.validate, source.end, lambda: source.check("copies", "")):
        with pytest.raises(weft.NotFoundError, match="no-such-stream"):
            ask()
