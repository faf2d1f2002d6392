"""A private server that speaks Pub/Sub, for the tests: Google's emulator where it is installed, else one that Go builds
of Google's own test package.

    server = PubSubServer()
    server.start()
    topic = server.create_topic()
    subscription = server.create_subscription(topic)
    server.publish(topic, [b"{}"])

A killed one comes back empty.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kafka_server import KafkaServer
from servers import EXECUTABLES, KINDS, MissingServerError, Server, wait_until

PROJECT = "weft-tests"
_EMULATOR = "google-cloud-sdk/platform/pubsub-emulator/lib"
_FAKE = "pubsub_fake"
EXECUTABLES.add(_FAKE)


class PubSubServer(Server):
    """Topics and subscriptions in memory."""

    name = "Pub/Sub's emulator"
    package = "google-cloud-cli-pubsub-emulator"
    user = "root"

    @classmethod
    def programs(cls) -> list[str]:
        return ["java"] if _emulator() else ["go"]

    @classmethod
    def search_path(cls) -> list[str]:
        return KafkaServer.search_path()

    def initialise(self) -> None:
        self.jar = _emulator()
        if self.jar is None:
            self.program = str(_built(self.program))

    def command(self) -> list[str]:
        if self.jar is None:
            return [self.program, f"127.0.0.1:{self.port}"]
        quick = ("-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
        return [self.program, *quick, "-jar", str(self.jar), "--host=127.0.0.1", f"--port={self.port}"]

    def connect(self, database: str | None = None) -> Any:
        import grpc

        channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", [("grpc.max_receive_message_length", -1)])
        try:
            grpc.channel_ready_future(channel).result(2)
        except BaseException:
            channel.close()
            raise
        return channel

    def url(self, database: str | None = None) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fields(self) -> dict[str, str]:
        """What a connection needs."""
        return {"project_id": PROJECT, "endpoint": self.url()}

    # Seen by Google's own client.

    @functools.cached_property
    def _channel(self) -> Any:
        return self.connect()

    @functools.cached_property
    def publisher(self) -> Any:
        from google.pubsub_v1.services.publisher import PublisherClient
        from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

        return PublisherClient(transport=PublisherGrpcTransport(channel=self._channel))

    @functools.cached_property
    def subscriber(self) -> Any:
        from google.pubsub_v1.services.subscriber import SubscriberClient
        from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

        return SubscriberClient(transport=SubscriberGrpcTransport(channel=self._channel))

    def create_topic(self, name: str | None = None) -> str:
        """Make a topic and give its name."""
        name = name or f"topic-{next(self.numbers)}"
        self.publisher.create_topic(name=_topic(name))
        return name

    def create_subscription(self, topic: str, name: str | None = None, **settings: Any) -> str:
        """Make a subscription to a topic and give its name."""
        name = name or f"subscription-{next(self.numbers)}"
        request = {"name": _subscription(name), "topic": _topic(topic), "ack_deadline_seconds": 60, **settings}
        self.subscriber.create_subscription(request=request)
        return name

    def create_queue(self, **settings: Any) -> tuple[str, str]:
        """Make a topic with a subscription and give the names of both."""
        topic = self.create_topic()
        return topic, self.create_subscription(topic, **settings)

    def delete_subscription(self, name: str) -> None:
        self.subscriber.delete_subscription(subscription=_subscription(name))

    def publish(self, topic: str, values: Iterable[bytes], key: str = "", **attributes: str) -> None:
        """Send messages in this order."""
        messages = [{"data": each, "ordering_key": key, "attributes": attributes} for each in values]
        for first in range(0, len(messages), 1000):
            self.publisher.publish(topic=_topic(topic), messages=messages[first : first + 1000])

    def messages(self, subscription: str, count: int) -> list[Any]:
        """Take so many messages of a subscription, and acknowledge them."""
        found: list[Any] = []

        def is_enough() -> bool:
            received = self.pull(subscription)
            found.extend(each.message for each in received)
            if received:
                ids = [each.ack_id for each in received]
                self.subscriber.acknowledge(subscription=_subscription(subscription), ack_ids=ids)
            return len(found) >= count

        wait_until(is_enough, f"{count} messages of {subscription}")
        return found

    def pull(self, subscription: str) -> list[Any]:
        """What a subscription gives at once."""
        request: Mapping[str, Any] = {
            "subscription": _subscription(subscription),
            "max_messages": 1000,
            "return_immediately": True,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of not waiting
            return list(self.subscriber.pull(request=request).received_messages)

    def give_back(self, subscription: str, received: Iterable[Any]) -> None:
        """Have a subscription give messages again that were pulled."""
        ids = [each.ack_id for each in received]
        request = {"subscription": _subscription(subscription), "ack_ids": ids, "ack_deadline_seconds": 0}
        self.subscriber.modify_ack_deadline(request=request)


def _topic(name: str) -> str:
    return f"projects/{PROJECT}/topics/{name}"


def _subscription(name: str) -> str:
    return f"projects/{PROJECT}/subscriptions/{name}"


def _emulator() -> Path | None:
    found = (jar for root in ("/usr/lib", "/opt") for jar in Path(root, _EMULATOR).glob("cloud-pubsub-emulator-*.jar"))
    return next(found, None)


def _built(go: str) -> Path:
    """The program that Go builds, kept in the cache that Spark's jars are kept in."""
    from weft.engine.jars import cache_folder

    source = Path(__file__).with_name(_FAKE)
    files = [source / name for name in ("main.go", "go.mod", "go.sum")]
    version = hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:16]
    program = cache_folder() / f"{_FAKE}-{version}" / _FAKE
    if program.exists():
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=program.parent))
    try:
        build = [go, "build", "-buildvcs=false", "-o", str(work / _FAKE), "."]
        environment = {"HOME": str(work), **os.environ}
        done = subprocess.run(build, cwd=source, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise MissingServerError(f"{KINDS['pubsub'].name}, which Go cannot build,", PubSubServer.package)
        os.replace(work / _FAKE, program)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return program


KINDS["pubsub"] = PubSubServer
