"""Every stream source: positions are JSON and are shown, lag is counted from them, a rewind goes back, never forward.

A new system adds a function to `SOURCES`. Nothing here starts Spark: the positions are what Spark's log would have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

import weft
from systems.contracts.conftest import by_name
from weft.engine.streaming.sources import open_source, show_position
from weft.project import Project
from weft.spark_support.folder import LocalFolder, Location
from weft.systems.pubsub.stream_source import PubSubSource
from weft.systems.received import Received, store
from weft.systems.stream_source import StreamSource

BEFORE, LATER = datetime(2020, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)


@dataclass
class Followed:
    """A source under test."""

    declared: weft.Source
    add: Callable[[int], None]
    """Adds so many units: events, messages, files, versions."""
    read_all: Callable[[Location], Any]
    """Returns the position of a pipeline that has read all there is, and writes what Spark keeps of the source."""

    @property
    def opened(self) -> StreamSource:
        return open_source(self.declared)


def _stream(project: Path, request: pytest.FixtureRequest) -> Followed:
    events = weft.stream(name="events", fields={"n": "int64"})(lambda: None)

    def add(count: int) -> None:
        weft.publish_sync(events, [{"n": n} for n in range(count)])

    return Followed(weft.Source(query=events), add, lambda _: int(open_source(weft.Source(query=events)).end()) - 1)


def _topic(project: Path, request: pytest.FixtureRequest) -> Followed:
    kafka = request.getfixturevalue("kafka")
    broker = weft.KafkaConnection(kafka.bootstrap, name="broker")
    topic = kafka.create_topic()
    source = weft.Source(connection=broker, query=topic)

    def position(_: Location) -> Any:
        return {topic: {"0": int(open_source(source).end().removeprefix("0:"))}}

    return Followed(source, lambda count: kafka.produce(topic, [b"{}"] * count), position)


def _kinesis(project: Path, request: pytest.FixtureRequest) -> Followed:
    kinesis = request.getfixturevalue("kinesis")
    stream = kinesis.create_stream()
    connection = weft.KinesisConnection(**kinesis.fields(), name="kinesis")

    def position(_: Location) -> Any:
        return {"shards": {"shardId-000000000000": f">{len(kinesis.records(stream))}"}}

    source = weft.Source(connection=connection, query=stream)
    return Followed(source, lambda count: kinesis.put(stream, [b"{}"] * count), position)


def _pubsub(project: Path, request: pytest.FixtureRequest) -> Followed:
    """Pub/Sub does not say what it has, so positions and lag are those of what was received."""
    source = weft.Source(connection=weft.PubSubConnection(project_id="shop", name="pubsub"), query="orders")

    def add(count: int) -> None:
        offsets = cast(PubSubSource, open_source(source))._offsets
        store(offsets, offsets.made(), [Received(b"{}")] * count)

    return Followed(source, add, lambda _: int(open_source(source).end()) - 1)


def _rabbitmq(project: Path, request: pytest.FixtureRequest) -> Followed:
    rabbitmq = request.getfixturevalue("rabbitmq")
    connection = weft.RabbitMQConnection(rabbitmq.url(), name="broker", keep_days=1)
    source = weft.Source(connection=connection, query=rabbitmq.create_queue())

    def add(count: int) -> None:
        """Publish messages and receive them: what waits in the queue has no position yet."""
        rabbitmq.publish(source.name, [b"{}"] * count)
        opened: Any = open_source(source, 0.01)
        offsets = replace(opened._offsets, consumer="copies", open=opened.opener())
        offsets.store, after = opened._offsets.store, offsets.first()
        offsets.stop_at_head()
        while (upto := offsets.following(after)) > after:
            after = upto

    return Followed(source, add, lambda _: int(open_source(source).end()) - 1)


def _files(project: Path, request: pytest.FixtureRequest) -> Followed:
    lake = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake")
    folder = project / "lake/raw"
    folder.mkdir(parents=True)

    def add(count: int) -> None:
        for _ in range(count):
            (folder / f"{len(os.listdir(folder))} é.csv").write_text("n\n1\n")

    def position(log: Location) -> Any:
        lines = [
            json.dumps({"path": each.as_uri(), "timestamp": int(each.stat().st_mtime * 1000), "batchId": 0})
            for each in folder.iterdir()
        ]
        log.at("0").write("\n".join(["v1", *lines]))
        return {"logOffset": 0}

    return Followed(weft.Source(connection=lake, query="raw"), add, position)


def _versions(project: Path, request: pytest.FixtureRequest) -> Followed:
    lake = weft.DeltaLocalConnection(str(project / "lake"), name="delta")
    log = project / "lake/numbers/_delta_log"
    log.mkdir(parents=True)

    def add(count: int) -> None:
        for _ in range(count):
            commit = {"commitInfo": {"timestamp": int(datetime.now(UTC).timestamp() * 1000)}}
            (log / f"{len(os.listdir(log)):020}.json").write_text(json.dumps(commit))

    def position(_: Location) -> Any:
        known = {"sourceVersion": 1, "reservoirId": "1", "index": -1, "isStartingVersion": False}
        return {**known, "reservoirVersion": len(os.listdir(log))}

    return Followed(weft.Source(connection=lake, query="numbers"), add, position)


def _queue(project: Path, request: pytest.FixtureRequest) -> Followed:
    spool = request.getfixturevalue("spool")
    queue = spool.queue("numbers")

    def add(count: int) -> None:
        queue.append([b"{}"] * count)

    return Followed(weft.Source(connection=spool, query="numbers"), add, lambda _: {"line": queue.count()})


SOURCES = {
    "stream": _stream,
    "topic": _topic,
    "kinesis": _kinesis,
    "pubsub": _pubsub,
    "rabbitmq": _rabbitmq,
    "files": _files,
    "delta": _versions,
    "third_party": _queue,
}


@pytest.fixture(params=by_name(SOURCES))
def followed(request: pytest.FixtureRequest, here: Project, project: Path) -> Followed:
    return SOURCES[request.param](project, request)


@pytest.fixture
def log(project: Path) -> Location:
    """What Spark keeps of a source in a checkpoint."""
    return Location(LocalFolder(), str(project / "checkpoint/sources/0"))


def test_lag_is_counted_from_a_position(followed: Followed, log: Location) -> None:
    followed.add(3)
    assert followed.opened.lag(None, log) == 3
    position = followed.read_all(log)
    source = followed.opened
    assert source.lag(position, log) == 0
    followed.add(2)
    assert source.lag(position, log) == 2
    partitions = source.lag_by_partition(position)  # where it has some
    assert partitions is None or sum(partitions.values()) == 2


def test_positions_are_json_and_shown(followed: Followed, log: Location) -> None:
    followed.add(3)
    position = followed.read_all(log)
    assert json.loads(json.dumps(position)) == position
    shown = followed.opened.show(position, log)
    assert shown
    assert show_position(position, log, followed.declared) == shown
    # Also where nobody declares the pipeline.
    assert show_position(position, log) == shown
    assert show_position(None, log) == "nothing yet"


def test_a_source_that_stays(followed: Followed, log: Location) -> None:
    followed.add(3)
    position = followed.read_all(log)
    followed.add(1)
    stays = followed.opened.stay(position, log)
    assert (stays.summary, stays.note) == ("", None)
    assert _lag_after(followed, stays, log) == 1


def test_a_rewind_to_a_time(followed: Followed, log: Location) -> None:
    followed.add(3)
    position = followed.read_all(log)
    rewind = followed.opened.rewind_to_time(position, BEFORE, log)
    assert followed.declared.name in rewind.summary
    assert _lag_after(followed, rewind, log) == 3
    with pytest.raises(weft.DeclarationError):
        followed.opened.rewind_to_time(position, LATER, log)


def test_a_rewind_to_an_offset(followed: Followed, log: Location) -> None:
    followed.add(3)
    position, source = followed.read_all(log), followed.opened
    if source.unit == "files":
        with pytest.raises(weft.DeclarationError, match="no offsets"):
            source.rewind_to_offset(position, "1", log)
        return
    rewind = source.rewind_to_offset(position, "1", log)
    assert 0 < (_lag_after(followed, rewind, log) or 0) <= 3
    for offset in ("1000", "x", "0:1000"):
        with pytest.raises(weft.DeclarationError):
            source.rewind_to_offset(position, offset, log)


def test_nothing_to_go_back_to(followed: Followed, log: Location) -> None:
    followed.add(1)
    for rewind in (
        lambda: followed.opened.rewind_to_time(None, BEFORE, log),
        lambda: followed.opened.rewind_to_offset(None, "1", log),
    ):
        with pytest.raises(weft.DeclarationError):
            rewind()


def test_a_start_at_the_end(followed: Followed, log: Location) -> None:
    if followed.opened.unit == "files":
        with pytest.raises(weft.DeclarationError, match="files are read from the first on"):
            replace(followed.declared, start="latest")
        return
    followed.add(3)
    starts = open_source(replace(followed.declared, start=followed.opened.end()))
    starts.check_start()
    assert starts.lag(None, log) == 0
    followed.add(2)
    assert starts.lag(None, log) == 2


def _lag_after(followed: Followed, rewind: Any, log: Location) -> int | None:
    """Return the lag of a checkpoint that begins at a rewind."""
    if rewind.source_log:
        log.at("0").write(rewind.source_log)
    return followed.opened.lag(rewind.position, log)
