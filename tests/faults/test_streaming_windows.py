"""Windows and joins over rows of every source, into every target, with their state in every place."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import cycle
from typing import Any

import pytest

import weft
from engine.streaming.conftest import declare, here, run_once  # noqa: F401 - fixture
from faults.test_streaming_odd_messages import SOURCES, TARGETS, Made, Message, Source, made  # noqa: F401 - fixture

pytest.importorskip("pyspark")
pytestmark = [pytest.mark.full, pytest.mark.kafka, pytest.mark.usefixtures("here", "spark")]

START = datetime(1970, 1, 1, tzinfo=UTC)
SQL = "SELECT id, amount, timestamp_seconds(amount) AS at FROM source"


class Broker(Source):
    """A broker that takes messages by a function."""

    def __init__(self, connection: Any, query: str, publish: Callable[[list[bytes]], Any]) -> None:
        self.declared = {"source": weft.Source(connection=connection, query=query)}
        self._publish, self._texts = publish, list[bytes]()

    def send(self, message: Message | str) -> None:
        self._texts.append(json.dumps(message).encode())

    def flush(self) -> None:
        self._publish(self._texts)
        self._texts = []


def of_kinesis(made: Made) -> Source:  # noqa: F811 - the fixture
    server = made.get("kinesis")
    stream = server.create_stream()
    return Broker(weft.KinesisConnection(**server.fields()), stream, lambda texts: server.put(stream, texts, "a"))


def of_rabbitmq(made: Made) -> Source:  # noqa: F811
    server = made.get("rabbitmq")
    queue = server.create_queue()
    return Broker(weft.RabbitMQConnection(server.url()), queue, lambda texts: server.publish(queue, texts))


def of_pubsub(made: Made) -> Source:  # noqa: F811
    server = made.get("pubsub")
    topic, subscription = server.create_queue(enable_message_ordering=True)
    return Broker(
        weft.PubSubConnection(**server.fields()), subscription, lambda texts: server.publish(topic, texts, "a")
    )


ALL = {**SOURCES, "kinesis": of_kinesis, "rabbitmq": of_rabbitmq, "pubsub": of_pubsub}
PLACES = ["its own", "files", "sqlite", "postgres", "mysql", "duckdb"]
CASES = list(zip(ALL, cycle(TARGETS), cycle(PLACES), strict=False))


def state_in(made: Made, place: str) -> weft.StateStore | None:  # noqa: F811
    if place == "its own":
        return None
    if place == "files":
        return weft.StateStore(kind="files")
    return weft.StateStore(connection=weft.connect(name="states", url=made.url(place)))


def send(source: Source, *seconds: int) -> None:
    for second in seconds:
        message = {"id": f"m{second}", "valid": True, "amount": second, "name": "n", "tags": [], "o": {}}
        source.send(source.adapted(message))
    source.flush()


def source_of(opened: Source) -> weft.Source:
    declared = opened.declared
    if isinstance(declared["source"], weft.Source):
        return declared["source"]
    if "source_query" in declared:
        return weft.Source(connection=declared["source"], query=declared["source_query"])
    return weft.Source(query=declared["source"])


def since_start(moment: Any) -> timedelta:
    """When something was, of a target that may hold times as texts."""
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - START


@pytest.mark.parametrize(("source", "target", "place"), CASES)
def test_windows(source: str, target: str, place: str, made: Made) -> None:  # noqa: F811
    opened, (into, read), store = ALL[source](made), made.target(target), state_in(made, place)
    window = weft.Window(
        kind="tumbling",
        duration_ms=60_000,
        event_time_column="at",
        aggregations=[weft.Aggregation(agg="count", as_="n"), weft.Aggregation(agg="sum", column="amount")],
    )
    for seconds in ((3, 5, 61), (30, 62, 150), (), (119, 240)):  # 30 and 119 are late
        if seconds:
            send(opened, *seconds)
        run_once(
            name="per_minute",
            sources=[source_of(opened)],
            targets=[into],
            transform_sql=SQL,
            window=window,
            state_store=store,
        )
    found = sorted(
        (since_start(row["window_start"]).total_seconds(), int(row["n"]), int(row["sum_amount"])) for row in read()
    )
    assert found == [(0, 2, 8), (60, 2, 123), (120, 1, 150)]


@pytest.mark.parametrize(
    ("source", "target", "place"), list(zip(ALL, cycle(TARGETS[3:]), cycle(PLACES[2:]), strict=False))
)
def test_joins(source: str, target: str, place: str, made: Made) -> None:  # noqa: F811
    opened, (into, read), store = ALL[source](made), made.target(target), state_in(made, place)
    left, others = source_of(opened), declare("others", id="string", amount="int64")
    join = weft.Join(
        left_source=left.name,
        right_source="others",
        left_keys="id",
        right_keys="id",
        kind="left_outer",
        left_event_time_column="at",
        right_event_time_column="at",
        time_window_ms=60_000,
    )
    # By batches: partners in the same one, in a later one, in an earlier one; m7 has none, and waits until 900.
    for own, other in (((1, 2, 7), (1, 3)), ((3,), (2,)), ((900,), (900,))):
        send(opened, *own)
        weft.publish_sync(others, [{"id": f"m{second}", "amount": second} for second in other])
        run_once(
            name="pairs",
            sources=[left, weft.Source(query=others)],
            targets=[into],
            transform_sql=SQL,
            join=join,
            watermark=weft.Watermark(lateness_ms=10_000),
            state_store=store,
        )
    found = Counter((row["left_id"], row.get("right_id") or None) for row in read())
    assert found == Counter([*((f"m{each}",) * 2 for each in (1, 2, 3, 900)), ("m7", None)])
