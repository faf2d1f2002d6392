"""Every target that Spark writes: when `write` returns the rows are there, a load that is tried again is there once
where the target is `exactly_once`, and what it cannot do is refused before anything runs.

A new system adds a function to `TARGETS`. SQL tables have contracts of their own, in `systems/tables`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import weft
from systems.contracts.conftest import by_name
from weft.engine import connectors
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.endpoints import delivery_to
from weft.project import Project
from weft.systems.base import system_for
from weft.systems.load import Counts, Load
from weft.systems.target import SparkTarget

ROWS = [(1, "é"), (2, None)]


@dataclass
class Written:
    """A target under test, and the load that goes to it."""

    connection: Any
    load: Load
    declared: weft.Target
    rows: Callable[[Any], list[tuple[int, str | None]]]
    """Returns the rows that are there, in any order."""

    @property
    def opened(self) -> SparkTarget:
        target: SparkTarget = system_for(self.connection.kind).load("target")(self.connection)
        return target


def _load(target: Any, **options: Any) -> Load:
    return Load.declare(target=target, mode="append", moment=datetime(2026, 1, 31, tzinfo=UTC), **options)


def _read_back(connection: Any, path: str) -> Callable[[Any], list[tuple[int, str | None]]]:
    def rows(spark: Any) -> list[tuple[int, str | None]]:
        target = system_for(connection.kind).load("target")(connection)
        return [(row.id, row.name) for row in target.read(path, spark).collect()]

    return rows


def _parsed(values: list[bytes]) -> list[tuple[int, str | None]]:
    return [(each["id"], each.get("name")) for each in map(json.loads, values)]


def _files(project: Path, request: pytest.FixtureRequest) -> Written:
    lake = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake")
    load = _load(("sales", "orders"), commit_key="monday")
    return Written(lake, load, weft.Target(connection=lake, prefix="sales/orders"), _read_back(lake, "sales/orders"))


def _delta(project: Path, request: pytest.FixtureRequest) -> Written:
    lake = weft.DeltaLocalConnection(str(project / "lake"), name="delta")
    load = _load(("sales", "orders"), commit_key="monday")
    return Written(lake, load, weft.Target(connection=lake, table="sales.orders"), _read_back(lake, "sales/orders"))


def _topic(project: Path, request: pytest.FixtureRequest) -> Written:
    kafka = request.getfixturevalue("kafka")
    broker, topic = weft.KafkaConnection(kafka.bootstrap, name="broker"), kafka.create_topic()

    def rows(_: Any) -> list[tuple[int, str | None]]:
        return _parsed([each.value() for each in kafka.messages(topic)])

    return Written(broker, _load(topic), weft.Target(connection=broker, stream=topic), rows)


def _kinesis(project: Path, request: pytest.FixtureRequest) -> Written:
    kinesis = request.getfixturevalue("kinesis")
    connection, stream = weft.KinesisConnection(**kinesis.fields(), name="kinesis"), kinesis.create_stream(2)

    def rows(_: Any) -> list[tuple[int, str | None]]:
        return _parsed([each["Data"] for each in kinesis.records(stream)])

    return Written(connection, _load(stream), weft.Target(connection=connection, stream=stream), rows)


def _pubsub(project: Path, request: pytest.FixtureRequest) -> Written:
    pubsub = request.getfixturevalue("pubsub")
    connection, (topic, subscription) = weft.PubSubConnection(**pubsub.fields(), name="pubsub"), pubsub.create_queue()

    def rows(_: Any) -> list[tuple[int, str | None]]:
        return _parsed([each.data for each in pubsub.messages(subscription, len(ROWS))])

    return Written(connection, _load(topic), weft.Target(connection=connection, stream=topic), rows)


def _rabbitmq(project: Path, request: pytest.FixtureRequest) -> Written:
    rabbitmq = request.getfixturevalue("rabbitmq")
    connection, queue = weft.RabbitMQConnection(rabbitmq.url(), name="broker"), rabbitmq.create_queue()

    def rows(_: Any) -> list[tuple[int, str | None]]:
        return _parsed([body for _, _, body in rabbitmq.messages(queue)])

    target = f"/queues/{queue}"
    return Written(connection, _load(target), weft.Target(connection=connection, stream=target), rows)


def _queue(project: Path, request: pytest.FixtureRequest) -> Written:
    spool = request.getfixturevalue("spool")

    def rows(_: Any) -> list[tuple[int, str | None]]:
        return _parsed([each.value for each in spool.queue("orders").read()])

    return Written(spool, _load("orders"), weft.Target(connection=spool, stream="orders"), rows)


TARGETS = {
    "files": _files,
    "delta": _delta,
    "topic": _topic,
    "kinesis": _kinesis,
    "pubsub": _pubsub,
    "rabbitmq": _rabbitmq,
    "third_party": _queue,
}


@pytest.fixture(params=by_name(TARGETS))
def written(request: pytest.FixtureRequest, here: Project, project: Path) -> Written:
    return TARGETS[request.param](project, request)


def frame(spark: Any, rows: list[tuple[int, str | None]] = ROWS) -> Any:
    return spark.createDataFrame(rows, "id long, name string")


@pytest.mark.brief("files", "kinesis", "pubsub", "rabbitmq", "third_party", "topic")
def test_a_load_and_the_same_load_again(spark: Any, written: Written) -> None:
    target, load = written.opened, written.load
    spark = connectors.ready(spark, written.connection)
    target.check(load)
    assert not target.has(load, spark)
    assert target.columns(load, spark) is None

    counts = target.write(frame(spark), load, spark)
    assert (counts.rows_read, counts.inserted, counts.replayed) == (2, 2, False)
    assert sorted(written.rows(spark)) == ROWS
    if not target.exactly_once:
        target.write(frame(spark), load, spark)
        assert set(written.rows(spark)) == set(ROWS)
        return
    assert target.has(load, spark)
    assert target.columns(load, spark) == ["id", "name"]
    assert target.write(frame(spark, [(3, "other")]), load, spark) == Counts(replayed=True)
    assert sorted(written.rows(spark)) == ROWS

    # Another batch of the same key is another load.
    later = replace(load, batch_id=1)
    assert not target.has(later, spark)
    assert target.write(frame(spark, [(3, "c")]), later, spark).inserted == 1
    assert sorted(written.rows(spark)) == [*ROWS, (3, "c")]
    stored = target.stored(later, spark)
    assert stored is not None and stored.count() == 3


def test_what_it_promises_and_refuses(written: Written) -> None:
    target = written.opened
    assert "append" in target.modes
    assert isinstance(target.validate(written.declared.name), str)
    events = weft.stream(name="events", fields={"id": "int64"})(lambda: None)
    pipeline = make(name="copies", source=events, target=written.declared)
    promised = "exactly_once" if target.exactly_once else "at_least_once"
    assert delivery_to(pipeline, pipeline.targets[0]) == promised
    with pytest.raises(weft.DeclarationError):
        make(name="other", source=events, target=replace(written.declared, mode="no such mode"))
