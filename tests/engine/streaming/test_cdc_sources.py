"""Changes from the other sources than Kafka, each into a mirror."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import weft
from engine.streaming.conftest import rows, run_once

pytestmark = pytest.mark.usefixtures("plain_spark", "here")

Send = Callable[[list[dict[str, Any]]], object]


def change(op: str, before: Any, after: Any, lsn: int) -> dict[str, Any]:
    return {"op": op, "before": before, "after": after, "source": {"lsn": lsn, "ts_ms": 1_770_000_000_000 + lsn}}


FIRST = [
    change("r", None, {"id": 1, "name": "Ann"}, 1),
    change("c", None, {"id": 2, "name": "Bob"}, 2),
    change("u", {"id": 1, "name": "Ann"}, {"id": 1, "name": "Anna"}, 3),
]
# One comes again, and one late.
THEN = [FIRST[1], change("d", {"id": 2}, None, 5), change("c", None, {"id": 3, "name": "Cid"}, 6), FIRST[0]]


def files(request: pytest.FixtureRequest) -> tuple[Any, Send]:
    folder: Path = request.getfixturevalue("project") / "inbox" / "changes"
    folder.mkdir(parents=True)

    def send(changes: list[dict[str, Any]]) -> None:
        lines = "".join(f"{json.dumps(each)}\n" for each in changes)
        (folder / f"{len(list(folder.iterdir()))}.jsonl").write_text(lines)

    return weft.Source(connection=weft.ObjectStoreLocalConnection(str(folder.parent)), query="changes"), send


def stream_of_redis(request: pytest.FixtureRequest) -> tuple[Any, Send]:
    stack = ExitStack()
    request.addfinalizer(stack.close)
    connection = weft.connect(url=stack.enter_context(request.getfixturevalue("shared_server")("redis").database()))
    fields = {"op": "string", "before": "json?", "after": "json?", "source": "json?"}
    stream = weft.stream(name="changes", connection=connection, fields=fields)(lambda: None)
    return stream, lambda changes: weft.publish_sync(stream, changes)


def rabbitmq(request: pytest.FixtureRequest) -> tuple[Any, Send]:
    server = request.getfixturevalue("rabbitmq")
    queue = server.create_queue()
    source = weft.Source(connection=weft.RabbitMQConnection(server.url(), name="broker"), query=queue)
    return source, lambda changes: server.publish(queue, encoded(changes))


def kinesis(request: pytest.FixtureRequest) -> tuple[Any, Send]:
    server = request.getfixturevalue("kinesis")
    stream = server.create_stream()
    source = weft.Source(connection=weft.KinesisConnection(**server.fields(), name="events"), query=stream)
    return source, lambda changes: server.put(stream, encoded(changes))


def pubsub(request: pytest.FixtureRequest) -> tuple[Any, Send]:
    server = request.getfixturevalue("pubsub")
    topic, subscription = server.create_queue()
    source = weft.Source(connection=weft.PubSubConnection(**server.fields(), name="events"), query=subscription)
    return source, lambda changes: server.publish(topic, encoded(changes))


def encoded(changes: list[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(each).encode() for each in changes]


@pytest.mark.brief("files")
@pytest.mark.parametrize(
    "kind",
    [
        files,
        stream_of_redis,
        pytest.param(rabbitmq, marks=pytest.mark.queues),
        kinesis,
        pytest.param(pubsub, marks=pytest.mark.queues),
    ],
    ids=lambda each: each.__name__,
)
def test_a_mirror(kind: Callable[[pytest.FixtureRequest], tuple[Any, Send]], request: pytest.FixtureRequest) -> None:
    source, send = kind(request)
    mirror: dict[str, Any] = {
        "name": "mirror",
        "source": source,
        "target_table": (None, "copies"),
        "cdc": weft.CDC(envelope="debezium", key_field="after.id"),
    }
    send(FIRST)
    run_once(**mirror)
    assert rows("copies", "id, name") == [(1, "Anna"), (2, "Bob")]
    send(THEN)
    run_once(**mirror)
    assert rows("copies", "id, name") == [(1, "Anna"), (3, "Cid")]
