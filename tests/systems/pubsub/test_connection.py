"""A connection refuses what cannot be, says what answered, and keeps its secrets. Messages are sent by their keys."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import Row

import weft
from weft.cli import cli
from weft.systems.pubsub import client as module
from weft.systems.pubsub.client import Outgoing, client
from weft.systems.pubsub.target import PubSubTarget


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"payload_format": "jsn"}, r"Did you mean 'json'\?"),
        ({"endpoint": "localhost:8085"}, "http://host:port"),
        ({"credentials_file": "key.json", "credentials_json": "{}"}, "both credentials_file and credentials_json"),
        ({"ordering_key": ""}, "1 to 1024 bytes"),
        ({"ordering_key": "é" * 513}, "1 to 1024 bytes"),
        ({"payload_format": "raw_bytes", "metadata_columns": True}, "are not parsed"),
        ({"dead_letter_policy": {"topic": "x", "attempts": 5}}, "has no key 'attempts'"),
        ({"dead_letter_policy": {"max_delivery_attempts": 5}}, "names no topic"),
        ({"dead_letter_policy": {"topic": "x", "max_delivery_attempts": 4}}, "are 5 to 100"),
        ({"prefetch": 0}, "prefetch .* at least 1"),
        ({"keep_days": -1}, "less than 0"),
        ({"project": "shop"}, r"Did you mean 'project_id'\?"),
        ({"project_id": 1}, "project_id must be str"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(weft.DeclarationError, match=message):
        weft.PubSubConnection(**fields)


def test_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", '{"private_key": "hunter2"}')
    made = weft.PubSubConnection(project_id="shop", credentials_json="${KEY}")
    assert made.secrets() == {'{"private_key": "hunter2"}'}
    assert "hunter" not in repr(made) + repr(made.resolved()) + made.target
    with pytest.raises(weft.ConnectionFailedError) as told:
        made.check()
    assert "hunter" not in str(told.value)


def test_one_place() -> None:
    one = weft.PubSubConnection(project_id="shop", name="one")
    assert one.is_same_place(weft.PubSubConnection(project_id="shop", ordering_key="x", metadata_columns=True))
    assert not one.is_same_place(weft.PubSubConnection(project_id="other"))


def test_check(pubsub: Any, connection: Any) -> None:
    topic, subscription = pubsub.create_queue()
    report = connection.check()
    assert (report["server"], report["database"]) == ("Pub/Sub", "weft-tests")
    assert report["topics"] >= 1 and report["latency_ms"] > 0
    report = weft.PubSubConnection(**pubsub.fields(), subscription=subscription).check()
    assert (report["subscription"], report["topic"]) == (subscription, topic)
    assert weft.PubSubConnection(**pubsub.fields(), topic=topic).check()["subscriptions"] == 1
    with pytest.raises(weft.NotFoundError, match="no topic of a pubsub connection named 'nothing'"):
        weft.PubSubConnection(**pubsub.fields(), topic="nothing").check()
    with pytest.raises(weft.NotFoundError, match=f"no subscription .* named '{subscription}x'.\n.*'{subscription}'"):
        weft.PubSubConnection(**pubsub.fields(), subscription=f"{subscription}x").check()


def test_check_by_a_command(pubsub: Any, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may be named as Google's own tools name an emulator."""
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", pubsub.url().removeprefix("http://"))
    Path("weft.toml").write_text('[connections.events]\nkind = "pubsub"\nproject_id = "weft-tests"\n')
    done = CliRunner().invoke(cli, ["connections", "check", "events", "--format", "json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["server"] == "Pub/Sub"


def test_nobody_answers() -> None:
    with socket.socket() as taken:  # bound, so that nobody else is there, and not listening
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        made = weft.PubSubConnection(endpoint=endpoint, project_id="shop", name="events")
        with pytest.raises(weft.ConnectionFailedError, match=rf"'events' \(Pub/Sub in shop at {endpoint}\)") as told:
            made.check()
        assert "weft connections check events" in str(told.value)


def test_no_project(pubsub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    with pytest.raises(weft.ConnectionFailedError, match="names no project"):
        weft.PubSubConnection(endpoint=pubsub.url(), name="events").check()


def test_credentials_that_are_none(project: Path) -> None:
    Path("key.json").write_text("{}")
    for fields in ({"credentials_file": "key.json"}, {"credentials_file": "none.json"}, {"credentials_json": "[]"}):
        with pytest.raises(weft.ConnectionFailedError, match="'events'"):
            weft.PubSubConnection(project_id="shop", name="events", **fields).check()


def test_a_declared_connection_imports_no_client() -> None:
    """Google's client takes a second to import."""
    program = (
        "import sys, weft; made = weft.PubSubConnection(project_id='shop', name='events'); weft.register_connection("
        "made); weft.streaming_pipeline(name='out', source=weft.stream(name='e', fields={'n': 'int64'})(lambda: 0), "
        "targets=[weft.Target(connection=made, stream='t')])(lambda: 0); print('grpc' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_messages_of_rows(connection: Any) -> None:
    """What is sent for a row says of which batch it is, and names it by its content."""

    def sent(rows: list[tuple[str | None, str]], **fields: Any) -> list[Outgoing]:
        made = weft.PubSubConnection(project_id="shop", **fields)
        return list(PubSubTarget(made)._messages(iter([Row(key=key, value=value) for key, value in rows]), "q 7"))

    rows = [("é", '{"n":1}'), (None, '{"n":1}'), ("é" * 600, '{"n":2}')]
    one, two, long = sent(rows)
    assert one == (b'{"n":1}', {"weft-batch-id": "q 7", "weft-row": one.attributes["weft-row"]}, "é")
    # A row that is there twice has two names.
    assert two.attributes["weft-row"] == f"{one.attributes['weft-row']}-2"
    assert two.key == "" and 0 < len(long.key) <= 256
    assert [each.key for each in sent(rows[:2], ordering_key="all")] == ["é", "all"]
    # In another order the rows have the same names.
    again = {each.attributes["weft-row"] for each in sent([rows[2], rows[1], rows[0]])}
    assert again == {each.attributes["weft-row"] for each in (one, two, long)}


def test_messages_stay_in_order(pubsub: Any, connection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request has messages of one key alone, and those of a key come one request after the other."""
    monkeypatch.setattr(module, "_WINDOW", 50)
    monkeypatch.setattr(module, "_MOST_MESSAGES", 7)
    topic, subscription = pubsub.create_queue(enable_message_ordering=True)
    messages = [Outgoing(str(n).encode(), {}, f"key-{n % 3}") for n in range(120)]
    assert client(connection).send(topic, iter(messages)) == 120
    found: dict[str, list[int]] = {}
    for each in pubsub.messages(subscription, 120):
        found.setdefault(each.ordering_key, []).append(int(each.data))
    assert found == {f"key-{n}": list(range(n, 120, 3)) for n in range(3)}


def test_messages_that_are_too_large(pubsub: Any, connection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests have as many as fit."""
    monkeypatch.setattr(module, "_MOST_BYTES", 3_000_000)
    topic, subscription = pubsub.create_queue()
    assert client(connection).send(topic, [Outgoing(b"x" * 1_400_000, {}) for _ in range(5)]) == 5
    assert len(pubsub.messages(subscription, 5)) == 5
    with pytest.raises(weft.StorageError, match=f"topic '{topic}' has 4,000,100 bytes, and Pub/Sub takes 3,000,000"):
        client(connection).send(topic, [Outgoing(b"x" * 4_000_000, {})])


def test_a_topic_that_keeps_no_letters(pubsub: Any, connection: Any) -> None:
    from weft.systems.pubsub.dead_letters import PubSubLetters

    topic = pubsub.create_topic()
    with pytest.raises(weft.NotFoundError, match=r"has no subscription.*\n.*gcloud pubsub subscriptions create"):
        list(PubSubLetters(connection, topic, "copies", lambda: None).records())
    assert PubSubTarget(connection).validate(topic) == "0 subscriptions, so nobody gets what is written"
    for _ in range(2):
        pubsub.create_subscription(topic)
    with pytest.raises(weft.NotFoundError, match="has 2 subscriptions"):
        list(PubSubLetters(connection, topic, "copies", lambda: None).records())
    pubsub.create_subscription(topic, topic)
    assert list(PubSubLetters(connection, topic, "copies", lambda: None).records()) == []
