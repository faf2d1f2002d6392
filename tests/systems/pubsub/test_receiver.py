"""A receiver takes each message, keeps what it holds, gives back what cannot be parsed, and survives its server. Stored
messages are not stored again when they are delivered again."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import grpc
import pytest
from google.pubsub_v1.types import PubsubMessage

import weft
from broker_pipelines import check_receiver_killed
from faults.schedulers import Wire
from pubsub_server import PubSubServer
from servers import wait_until
from weft.project import Project
from weft.systems import received as received_module
from weft.systems.pubsub import client as client_module
from weft.systems.pubsub import receiver as module
from weft.systems.pubsub.client import client
from weft.systems.pubsub.receiver import SubscriptionReceiver
from weft.systems.pubsub.stream_source import PubSubSource
from weft.systems.received import Received, store
from weft.systems.stream_source import SourceSettings


@pytest.fixture
def opened() -> Iterator[Any]:
    """`opened(connection, subscription)` is a receiver, closed at the end."""
    receivers = []

    def make(connection: Any, subscription: str) -> SubscriptionReceiver:
        receivers.append(SubscriptionReceiver(connection.resolved(), subscription))
        return receivers[-1]

    yield make
    for each in receivers:
        each.close()


def take(receiver: SubscriptionReceiver, count: int, most: int = 1000, *, acknowledges: bool = False) -> list[Received]:
    """So many messages."""
    found: list[Received] = []

    def is_enough() -> bool:
        found.extend(receiver.receive(most, 0.05))
        if acknowledges:
            receiver.acknowledge()
        return len(found) >= count

    wait_until(is_enough, f"{count} messages", 30)
    return found


def test_messages(pubsub: Any, connection: Any, opened: Any) -> None:
    topic, subscription = pubsub.create_queue(enable_message_ordering=True)
    for n in range(24):
        pubsub.publish(topic, [str(n).encode()], key=f"key-{n % 2}", source="web")
    receiver = opened(connection, subscription)
    found = take(receiver, 24, 5, acknowledges=True)
    for key in (0, 1):
        assert [int(each.value) for each in found if each.about["key"] == f"key-{key}"] == [*range(key, 24, 2)]
    assert len({each.identity for each in found}) == 24
    assert found[0].about["attributes"] == {"source": "web"}
    assert all(abs(each.sent_at - datetime.now(UTC)) < timedelta(minutes=5) for each in found)
    assert list(receiver.receive(1000, 0)) == [] and receiver.waiting() is None
    assert list(receiver.receive(0, 0)) == []
    receiver.close()
    assert pubsub.pull(subscription) == []


def test_what_is_not_acknowledged_is_given_back(pubsub: Any, connection: Any, opened: Any) -> None:
    topic, subscription = pubsub.create_queue(ack_deadline_seconds=600)
    pubsub.publish(topic, [b"1", b"2", b"3"])
    receiver = opened(connection, subscription)
    take(receiver, 3)
    receiver.close()
    assert sorted(each.data for each in pubsub.messages(subscription, 3)) == [b"1", b"2", b"3"]


def test_no_more_is_held_than_prefetch(pubsub: Any, opened: Any) -> None:
    """A log that is full takes none, and the others stay in the subscription."""
    connection = weft.PubSubConnection(**pubsub.fields(), prefetch=20)
    topic, subscription = pubsub.create_queue()
    pubsub.publish(topic, [b"x"] * 100)
    receiver = opened(connection, subscription)
    wait_until(lambda: len(receiver._got) == 20, "20 messages")
    assert list(receiver.receive(0, 0.2)) == []
    assert len(receiver._got) == 20
    assert len(pubsub.messages(subscription, 80)) == 80


@pytest.mark.timing
@pytest.mark.full
def test_deadlines_are_extended(pubsub: Any, connection: Any, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being stored for longer than the subscription waits is not delivered to another one."""
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0.0)
    topic, subscription = pubsub.create_queue(ack_deadline_seconds=10)
    pubsub.publish(topic, [b"1"])
    receiver = opened(connection, subscription)
    take(receiver, 1)
    ends = time.monotonic() + 11.5
    while time.monotonic() < ends:
        assert pubsub.pull(subscription) == [] and list(receiver.receive(1000, 0.2)) == []
    receiver.acknowledge()


def test_bad_messages_go_to_the_policy(pubsub: Any, opened: Any) -> None:
    topic, subscription = pubsub.create_queue()
    failed, letters = pubsub.create_queue()
    policy = {"topic": failed, "max_delivery_attempts": 5}
    connection = weft.PubSubConnection(**pubsub.fields(), dead_letter_policy=policy, name="events")
    pubsub.publish(topic, [b'{"n": 1}', b"{", b'{"n": 2}', b'{"n": "text"}'])
    source = PubSubSource(connection, SourceSettings(subscription))
    open_receiver = source.opener()
    assert client(connection).subscription(subscription).dead_letter_policy.max_delivery_attempts == 5
    source.opener()  # it has the policy already
    receiver: Any = open_receiver()
    try:
        assert sorted(each.value for each in take(receiver, 3)) == [b'{"n": "text"}', b'{"n": 1}', b'{"n": 2}']
        receiver.acknowledge()
        found: list[Any] = []

        def is_there() -> bool:
            assert list(receiver.receive(1000, 0.05)) == []
            found.extend(pubsub.pull(letters))
            return bool(found)

        wait_until(is_there, "the dead letter", 30)
        assert [each.message.data for each in found] == [b"{"]
    finally:
        receiver.close()
    other = weft.PubSubConnection(**pubsub.fields(), dead_letter_policy={"topic": topic}, name="events")
    with pytest.raises(weft.DeclarationError, match=f"another dead_letter_policy .*: {failed} after 5 attempts"):
        PubSubSource(other, SourceSettings(subscription)).opener()


def test_a_message_that_is_delivered_again(pubsub: Any, connection: Any, opened: Any, here: Project) -> None:
    """It is stored, and its receiver ends before it acknowledges it."""
    topic, subscription = pubsub.create_queue()
    pubsub.publish(topic, [b'{"n": 1}', b'{"n": 1}'])
    offsets = PubSubSource(connection, SourceSettings(subscription))._offsets
    log = offsets.made()
    for _ in range(2):
        receiver = opened(connection, subscription)
        store(offsets, log, take(receiver, 2))
        receiver.close()
    assert log.extent(0, log.head(), 100) == 2


def test_ids_that_a_server_gives_again() -> None:
    """An emulator that is started again counts its messages from 1."""
    message = PubsubMessage.pb(PubsubMessage(data=b"1", message_id="1", publish_time=datetime(2026, 1, 1, tzinfo=UTC)))
    later = PubsubMessage.pb(PubsubMessage(data=b"1", message_id="1", publish_time=datetime(2026, 1, 2, tzinfo=UTC)))
    other = PubsubMessage.pb(PubsubMessage(data=b"2", message_id="1", publish_time=datetime(2026, 1, 1, tzinfo=UTC)))
    assert module.received(message).identity == module.received(message).identity
    assert len({module.received(each).identity for each in (message, later, other)}) == 3


@pytest.mark.parametrize("name", ["traceparent", "googclient_traceparent"])
def test_the_span_that_a_message_names(name: str) -> None:
    about = module.received(PubsubMessage.pb(PubsubMessage(data=b"1", attributes={name: "00-1-2-01"}))).about
    assert about is not None and about["traceparent"] == "00-1-2-01"
    about = module.received(PubsubMessage.pb(PubsubMessage(data=b"1", attributes={"other": "x"}))).about
    assert about is not None and "traceparent" not in about


def test_which_subscriptions_share_a_log(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def log_of(name: str = "orders", **fields: Any) -> str:
        connection = weft.PubSubConnection(project_id="p", **fields)
        return PubSubSource(connection, SourceSettings(name))._offsets.name

    google = log_of()
    assert log_of("projects/p/subscriptions/orders") == google
    assert log_of(endpoint="https://europe-west1-pubsub.googleapis.com:443/") == google
    emulator = log_of(endpoint="http://localhost:8085")
    others = {emulator, log_of(endpoint="https://pubsub.example"), log_of("projects/q/subscriptions/orders")}
    assert len({google, *others}) == 4
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", "localhost:8085")
    assert log_of() == emulator


def test_a_subscription_that_is_deleted(pubsub: Any, connection: Any, opened: Any) -> None:
    _, subscription = pubsub.create_queue()
    receiver = opened(connection, subscription)
    assert list(receiver.receive(1000, 0.1)) == []
    pubsub.delete_subscription(subscription)
    with pytest.raises(weft.NotFoundError, match=f"no subscription of the connection 'events' named '{subscription}'"):
        take(receiver, 1)
    source = PubSubSource(connection, SourceSettings(subscription))
    with pytest.raises(weft.NotFoundError, match=r"is gone, and copies reads it"):
        source.check("copies", "")


@pytest.mark.timing
@pytest.mark.full
def test_a_server_that_restarts(need_server: Any, opened: Any) -> None:
    need_server("pubsub")
    server = PubSubServer()
    server.start()
    try:
        connection = weft.PubSubConnection(**server.fields(), name="events")
        topic = server.create_topic()
        server.create_subscription(topic, "orders")
        receiver = opened(connection, "orders")
        server.kill()
        with pytest.raises(weft.ConnectionFailedError, match="weft connections check events"):
            take(receiver, 1)
        server.start()
        server.create_subscription(server.create_topic("again"), "orders")
        server.publish("again", [b"1"])
        assert [each.value for each in take(opened(connection, "orders"), 1)] == [b"1"]
    finally:
        server.kill()


@pytest.mark.timing
@pytest.mark.full
def test_a_connection_that_is_cut(pubsub: Any, here: Project) -> None:
    """Three times in the middle: each message is stored once. What was on its way is delivered again."""
    topic, subscription = pubsub.create_queue(ack_deadline_seconds=10)
    wire = Wire(pubsub.port)
    fields = {**pubsub.fields(), "endpoint": f"http://127.0.0.1:{wire.port}"}
    source = PubSubSource(weft.PubSubConnection(**fields, keep_days=1), SourceSettings(subscription, wait_seconds=0.05))
    offsets = replace(source._offsets, consumer="copies", open=source.opener())
    try:
        for number in range(3):
            head = offsets.made().head()
            pubsub.publish(topic, [b"%d" % n for n in range(1000 * number, 1000 * (number + 1))])
            wait_until(lambda head=head: offsets.following(head) > head, "some messages", 60)
            wire.cut()
            wire.mend()
        wait_until(lambda: offsets.following(0) >= 3000, "all messages", 60)
        values = [each for batch in offsets.log.read_arrow(0, offsets.log.head(), ["value"]) for each in batch["value"]]
        assert sorted(int(each.as_py()) for each in values) == list(range(3000))
    finally:
        offsets.stop()
        wire.close()


@pytest.mark.timing
@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_receiver_that_is_killed(pubsub: Any, here: Project, count: Any) -> None:
    topic, subscription = pubsub.create_queue(ack_deadline_seconds=10)
    connection = {"kind": "pubsub", "name": "events", **pubsub.fields()}
    check_receiver_killed(count(60), connection, subscription, partial(pubsub.publish, topic))


class _Gate:
    """Passes calls on to a server, until it answers all of them with an error, as Google does for an account that is
    removed or loses a role."""

    def __init__(self, port: int) -> None:
        self.refuses: grpc.StatusCode | None = None
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._server = grpc.server(ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers([self])
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def service(self, call: Any) -> Any:
        def answer(request: bytes, context: Any) -> bytes:
            if self.refuses is not None:
                context.abort(self.refuses, "The account was refused.")
            try:
                passed_on = self._channel.unary_unary(call.method)
                answered: bytes = passed_on(request, context.time_remaining(), call.invocation_metadata)
                return answered
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
                raise

        return grpc.unary_unary_rpc_method_handler(answer)

    def close(self) -> None:
        self._server.stop(None)
        self._channel.close()


def test_credentials_that_are_revoked(
    pubsub: Any, connection: Any, here: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline tries for a while, and fails with what to do. What was received is kept, what came later waits."""
    topic, subscription = pubsub.create_queue()
    gate = _Gate(pubsub.port)
    passing = replace(connection, endpoint=f"http://127.0.0.1:{gate.port}")

    def received_by(position: int) -> tuple[Any, int]:
        """Offsets that have received one message more."""
        source = PubSubSource(passing, SourceSettings(subscription, wait_seconds=0.05))
        offsets = replace(source._offsets, consumer="copies", open=source.opener())
        wait_until(lambda: offsets.following(position) > position, "a message", 120)
        return offsets, offsets.log.head()

    try:
        position = 0
        for code, hint in (
            (grpc.StatusCode.UNAUTHENTICATED, "Check project_id, endpoint and credentials."),
            (grpc.StatusCode.PERMISSION_DENIED, "needs the role pubsub.subscriber to read"),
        ):
            pubsub.publish(topic, [b"1"])
            offsets, position = received_by(position)
            with monkeypatch.context() as hasty:
                hasty.setattr(received_module, "PATIENCE", 0.5)
                gate.refuses = code
                with pytest.raises(weft.ConnectionFailedError, match=f"'events'.*{code.name}") as told:
                    wait_until(lambda: offsets.following(position) < 0, "the error", 120)  # noqa: B023 - called here
            assert hint in str(told.value) and str(told.value).endswith("Then: weft connections check events")
            offsets.stop()
            gate.refuses = None
        pubsub.publish(topic, [b"2"])
        received_by(position)[0].stop()
    finally:
        gate.close()


class _SlowNetwork:
    """Passes bytes on to a server; the first answer takes a while."""

    def __init__(self, port: int, seconds: float) -> None:
        self._port, self._seconds = port, seconds
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                one, _ = self._listening.accept()
                other = socket.create_connection(("127.0.0.1", self._port))
                threading.Thread(target=self._pass_on, args=(one, other, 0.0), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(other, one, self._seconds), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, seconds: float) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                time.sleep(seconds)
                seconds = 0.0
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self._listening.close()


def test_once_on_a_slow_network(pubsub: Any, here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """To open the connection takes longer than to find that there are no messages."""
    monkeypatch.setattr(client_module, "PULL_SECONDS", 0.2)
    topic, subscription = pubsub.create_queue()
    pubsub.publish(topic, [b"%d" % n for n in range(20)])
    network = _SlowNetwork(pubsub.port, 2.0)
    fields = {**pubsub.fields(), "endpoint": f"http://127.0.0.1:{network.port}"}
    source = PubSubSource(weft.PubSubConnection(**fields, name="events"), SourceSettings(subscription))
    offsets = replace(source._offsets, consumer="copies", open=source.opener())
    offsets.store = source._offsets.store
    try:
        offsets.stop_at_head()
        position = offsets.first()
        while (upto := offsets.following(position)) > position:
            position = upto
        assert offsets.log.head() == position == 20
        assert pubsub.pull(subscription) == []
    finally:
        offsets.stop()
        network.close()
