"""Every dead-letter store: letters come back once and unchanged, what is removed is gone, others may put records too.

A new system adds how it is declared to `STORES`. `engine/streaming/test_replay.py` has the stores that need Spark or a
bucket.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import weft
from systems.contracts.conftest import by_name
from weft.engine.streaming.dead_letters import open_store
from weft.engine.streaming.validate import validate
from weft.pipelines.streaming.declare import make
from weft.project import Project
from weft.systems.dead_letter_store import DeadLetterStore, StoredLetter

MOMENT = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)


def _topic(request: pytest.FixtureRequest, project: Path) -> dict[str, Any]:
    kafka = request.getfixturevalue("kafka")
    broker = weft.KafkaConnection(kafka.bootstrap, name="broker")
    return {"dead_letter_topic": kafka.create_topic(3), "dead_letter_connection": broker}


def _kinesis(request: pytest.FixtureRequest, project: Path) -> dict[str, Any]:
    kinesis = request.getfixturevalue("kinesis")
    connection = weft.KinesisConnection(**kinesis.fields(), name="kinesis")
    return {"dead_letter_topic": kinesis.create_stream(3), "dead_letter_connection": connection}


def _pubsub(request: pytest.FixtureRequest, project: Path) -> dict[str, Any]:
    pubsub = request.getfixturevalue("pubsub")
    connection = weft.PubSubConnection(**pubsub.fields(), name="pubsub")
    return {"dead_letter_topic": pubsub.create_queue()[0], "dead_letter_connection": connection}


def _rabbitmq(request: pytest.FixtureRequest, project: Path) -> dict[str, Any]:
    rabbitmq = request.getfixturevalue("rabbitmq")
    connection = weft.RabbitMQConnection(rabbitmq.url(), name="broker")
    return {"dead_letter_topic": f"failed-{next(rabbitmq.numbers)}", "dead_letter_connection": connection}


def _folder(request: pytest.FixtureRequest, project: Path) -> dict[str, Any]:
    lake = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake")
    return {"dead_letter_path": "bad/rows", "dead_letter_connection": lake}


def _duckdb(request: pytest.FixtureRequest, project: Path) -> dict[str, Any]:
    pytest.importorskip("duckdb")
    duck = weft.DuckDBConnection(str(project / "letters.duckdb"), name="duck")
    return {"dead_letter_table": ("main", "failed"), "dead_letter_connection": duck}


def _queue(request: pytest.FixtureRequest, project: Path) -> dict[str, Any]:
    return {"dead_letter_topic": "failed", "dead_letter_connection": request.getfixturevalue("spool")}


STORES: dict[str, Callable[[pytest.FixtureRequest, Path], dict[str, Any]]] = {
    "table": lambda *_: {"dead_letter_table": "failed"},
    "stream": lambda *_: {"dead_letter_stream": "failed"},
    "path": lambda *_: {"dead_letter_path": "failed"},
    "folder": _folder,
    "topic": _topic,
    "kinesis": _kinesis,
    "pubsub": _pubsub,
    "rabbitmq": _rabbitmq,
    "duckdb": _duckdb,
    "third_party": _queue,
}

# Others make their place with the first letter.
NEVER_MADE = ("topic", "kinesis", "pubsub")


@pytest.fixture(params=by_name(STORES))
def declared(request: pytest.FixtureRequest, here: Project, project: Path) -> dict[str, Any]:
    return STORES[request.param](request, project)


def options(declared: dict[str, Any]) -> dict[str, Any]:
    events = weft.stream(name="events", fields={"n": "int64"})(lambda: None)
    return {"name": "copies", "source": events, "target": "default", "target_table": "copies", **declared}


def opened(declared: dict[str, Any]) -> DeadLetterStore:
    store = open_store(make(**options(declared)))
    assert store is not None
    return store


def letter(number: int, **fields: Any) -> StoredLetter:
    named: dict[str, Any] = {"stage": "read", "error": f"No {number}", "source": "events", "payload": "{", **fields}
    return StoredLetter(**named, failed_at=MOMENT, letter_id=f"id{number}", pipeline="copies")


def letters_of(store: DeadLetterStore) -> list[StoredLetter]:
    """Return the letters, each once: a store may hold one twice."""
    letters = {each.letter_id: each for record in store.records() if (each := StoredLetter.of(record))}
    return sorted((each for each in letters.values() if each.stage != "gone"), key=lambda each: each.letter_id)


def test_an_empty_store(declared: dict[str, Any]) -> None:
    store = opened(declared)
    assert letters_of(store) == []
    assert store.name


def test_letters_come_back_unchanged(declared: dict[str, Any]) -> None:
    odd = letter(2, payload='{"a": "é\\u0000 \\n"}', offset="0:7", target="public.copies", error="it's\nbad: “x”")
    opened(declared).put([letter(1), odd])
    assert letters_of(opened(declared)) == [letter(1), odd]


def test_letters_that_are_put_again(declared: dict[str, Any]) -> None:
    store = opened(declared)
    store.put([letter(1), letter(2)])
    store.put([letter(1), letter(2)])
    store.put([letter(3)])
    assert letters_of(store) == [letter(1), letter(2), letter(3)]


def test_letters_that_are_removed(declared: dict[str, Any]) -> None:
    store = opened(declared)
    many = [letter(number) for number in range(1001)]
    store.put(many)
    store.remove([each.letter_id for each in many[1:]] + ["unknown"])
    assert letters_of(opened(declared)) == [letter(0)]
    store.put([letter(2000)])
    assert letters_of(store) == [letter(0), letter(2000)]


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("declared", by_name(NEVER_MADE), indirect=True)
def test_a_place_that_is_missing(declared: dict[str, Any]) -> None:
    there, missing = options(declared), options({**declared, "dead_letter_topic": "missing"})
    *_, checked = validate(make(**there))
    assert checked.problem is None
    *_, checked = validate(make(**missing))
    assert checked.problem is not None and re.search("There is no .*'missing'", checked.problem)
    with pytest.raises(weft.NotFoundError, match=r"There is no .*'missing'"):
        weft.run_streaming_pipeline(**missing, once=True)
    weft.run_streaming_pipeline(**there, once=True)
