"""Clients of confluent-kafka for a connection: metadata, offsets, groups, single messages, and their errors."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from weft import settings
from weft.errors import NOTHING_STORED, ConnectionFailedError, StorageError, WeftError, unknown
from weft.systems.base import require
from weft.systems.kafka import options, sizes

if TYPE_CHECKING:
    from weft.systems.kafka.connection import KafkaConnection

SECONDS = 10.0
"""How long brokers may take to answer."""
_STEP = 0.5
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MESSAGES, _MESSAGES_STEP = 1000, 0.1
_Found = TypeVar("_Found")


class Admin:
    """Asks the brokers of one connection. Thread-safe."""

    def __init__(self, connection: KafkaConnection) -> None:
        self.library = require("confluent_kafka", connection.kind)
        self.admin = require("confluent_kafka.admin", connection.kind)
        self.connection = connection
        self.errors: dict[int, str] = {}
        noted = {"error_cb": lambda error: self.errors.update({error.code(): error.str()})}
        self.client = self.admin.AdminClient({**options.for_client(connection), **noted})

    def metadata(self) -> Any:
        """Return the brokers and topics of the cluster."""
        deadline = time.monotonic() + SECONDS
        self.client.poll(0)  # what happened before: brokers that were down may be up again, and slow
        self.errors.clear()
        while True:
            try:
                return self.client.list_topics(timeout=_STEP)
            except self.library.KafkaException as error:
                self.client.poll(0)  # so that it says why
                codes = self.library.KafkaError
                lasting = {codes._AUTHENTICATION, codes._ALL_BROKERS_DOWN}  # neither gets better by waiting
                if lasting & self.errors.keys() or time.monotonic() > deadline:
                    raise self.failed(error) from None

    def partitions(self, topic: str) -> list[int]:
        """Return the numbers of a topic's partitions."""
        topics = self.metadata().topics
        if options.topic_name(topic) not in topics:
            raise unknown(
                f"topic of {self.connection.label}",
                topic,
                [name for name in topics if name[:2] != "__"],
                otherwise="Weft makes no topics: create it, or name another one.",
            )
        return sorted(topics[topic].partitions)

    def most_bytes(self, topic: str) -> int | None:
        """Return how large a message of a topic may be, as `sizes` counts; `None` where we may not know."""
        place = self.admin.ConfigResource("topic", topic)
        with suppress(WeftError):
            config = self.result(self.client.describe_configs([place], request_timeout=SECONDS)[place])
            return int(config["max.message.bytes"].value)
        return None

    def latest(self, topic: str) -> dict[int, int]:
        """Return the offset that each partition's next message will have."""
        return self._offsets(topic, self.admin.OffsetSpec.latest())

    def earliest(self, topic: str) -> dict[int, int]:
        """Return the offset of the first message that each partition still has."""
        return self._offsets(topic, self.admin.OffsetSpec.earliest())

    def first_since(self, topic: str, moment: datetime) -> dict[int, int]:
        """Return the offset of each partition's first message at or after a moment; its end if there is none."""
        since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
        # The next whole one: a message of the same millisecond may be older.
        milliseconds = -(-since // timedelta(milliseconds=1))
        offsets = self._offsets(topic, self.admin.OffsetSpec.for_timestamp(milliseconds))
        ends = self.latest(topic) if -1 in offsets.values() else {}
        return {number: offset if offset >= 0 else ends[number] for number, offset in offsets.items()}

    def _offsets(self, topic: str, which: Any) -> dict[int, int]:
        of = self.library.TopicPartition
        asked = {of(topic, number): which for number in self.partitions(topic)}
        futures = self.client.list_offsets(asked, request_timeout=SECONDS)
        return {place.partition: self.result(future).offset for place, future in futures.items()}

    def commit(self, group: str, topic: str, ends: Mapping[int, int]) -> None:
        """Set the offsets of a consumer group."""
        of = self.library.TopicPartition
        wanted = self.library.ConsumerGroupTopicPartitions(group, [of(topic, *each) for each in ends.items()])
        for future in self.client.alter_consumer_group_offsets([wanted], request_timeout=SECONDS).values():
            for place in self.result(future).topic_partitions:
                if place.error is not None:
                    raise self.failed(self.library.KafkaException(place.error))

    def result(self, future: Future[_Found]) -> _Found:
        """Return the answer of a broker."""
        try:
            return future.result(2 * SECONDS)
        except (self.library.KafkaException, TimeoutError) as error:
            self.client.poll(0)
            raise self.failed(error) from None

    def failed(self, error: BaseException) -> WeftError:
        """Return an error of the client as a `WeftError`, with the reason that its threads reported."""
        codes = self.library.KafkaError
        known = (codes._AUTHENTICATION, codes._SSL, codes._TRANSPORT)
        reason = next((self.errors[code] for code in known if self.errors.get(code)), None)
        refused = codes._AUTHENTICATION in self.errors
        failed = self.connection.unreachable(ConnectionError(reason) if reason else error, answered=refused)
        # The client's own guess, and what OpenSSL says of an answer that is not TLS.
        is_plain = any(words in (reason or "") for words in ("PLAINTEXT broker listener", "wrong version number"))
        if is_plain and self.connection.security_protocol is None:
            protocol = self.connection.protocol
            plain = "SASL_PLAINTEXT" if protocol == "SASL_SSL" else "PLAINTEXT"
            return ConnectionFailedError(
                failed.what,
                hint=f'The protocol is {protocol}. If the listener is not encrypted, say security_protocol="{plain}".',
            )
        return failed


@lru_cache(maxsize=32)
def _admin(connection: KafkaConnection) -> Admin:
    return Admin(connection)


def admin(connection: KafkaConnection) -> Admin:
    """Return the process's client of a connection, as its variables are now."""
    return _admin(connection.resolved())


def send(connection: KafkaConnection, topic: str, records: Sequence[tuple[bytes | None, bytes | None]]) -> int:
    """Store messages (key, value), and return their number once every replica in sync has them. If one is larger than
    the topic takes, none is sent."""
    admin(connection).partitions(topic)  # raises for a topic that does not exist
    most = admin(connection).most_bytes(topic)
    largest = max((sizes.stored(*each) for each in records), default=0)
    if most is not None and largest > most:
        raise StorageError(
            f"The topic {topic!r} of {connection.label} ({connection.target}) takes messages of up to {most:,} bytes, "
            f"and one has {largest:,}.",
            hint=f"{NOTHING_STORED} Let the topic take it: max.message.bytes={largest}, or name another place.",
        )
    library = require("confluent_kafka", connection.kind)
    failures: list[Any] = []
    heard: list[str] = []

    def delivered(error: Any, _: Any) -> None:
        if error is not None:
            failures.append(error)

    producer = library.Producer(
        {
            **options.for_client(connection),
            "acks": "all",
            "enable.idempotence": True,
            "delivery.timeout.ms": int(3 * SECONDS * 1000),
            "linger.ms": 5,
            **({} if most is None else _limits(most)),
            "error_cb": lambda error: heard.append(error.str()),
        }
    )
    with suppress(library.KafkaException):  # then the messages fail, each with its reason
        # A producer that is idempotent asks for its id at once if it has a connection, and else half a second later.
        producer.list_topics(topic, 2 * _STEP)
    count = 0
    for key, value in records:
        count += 1
        while True:
            try:
                producer.produce(topic, value, key, on_delivery=delivered)
                break
            except BufferError:  # as much waits for the brokers as may
                producer.poll(_STEP)
            except library.KafkaException as error:  # larger than a message may be
                failures.append(error.args[0])
                break
    producer.flush()
    if failures:
        why = settings.redact(failures[0].str(), connection.secrets())
        raise ConnectionFailedError(
            f"{len(failures)} of {count} messages were not taken by the topic {topic!r} of {connection.label} "
            f"({connection.target}): {why}" + (f" ({heard[-1]})" if heard else ""),
            hint="The others are stored. Sent again, they are there twice.",
        )
    return count


def _limits(most: int) -> dict[str, int]:
    """Return the settings of a producer for a topic: no limit of its own, and no batch that the topic would refuse."""
    return {"message.max.bytes": min(max(most, 1000), 10**9), "batch.size": min(max(most, 1), 10**6)}


def _watermarks(library: Any, consumer: Any, place: Any) -> tuple[int, int]:
    """Return the first offset of a partition and the one after its last; wait while the partition gets its leader."""
    codes = (library.KafkaError.NOT_LEADER_FOR_PARTITION, library.KafkaError.LEADER_NOT_AVAILABLE)
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return consumer.get_watermark_offsets(place, SECONDS)  # type: ignore[no-any-return]
        except library.KafkaException as error:
            if error.args[0].code() not in codes or time.monotonic() > deadline:
                raise
        time.sleep(_STEP)


def messages(connection: KafkaConnection, topic: str) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Yield key and value of each message that a topic has when this begins, in the order of each partition."""
    library = require("confluent_kafka", connection.kind)
    of = library.TopicPartition
    numbers = admin(connection).partitions(topic)
    settings = {
        **options.for_client(connection),
        # It joins no group and commits nothing. The name must be one's own all the same.
        "group.id": f"weft-{uuid4()}",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
    }
    consumer = library.Consumer(settings)
    try:
        ends = {number: _watermarks(library, consumer, of(topic, number)) for number in numbers}
        left = {number: high for number, (low, high) in ends.items() if high > low}
        consumer.assign([of(topic, number, ends[number][0]) for number in left])
        heard = time.monotonic()
        while left:
            # It waits for so many messages, or for so long: not for as long as brokers may take.
            received = consumer.consume(_MESSAGES, _MESSAGES_STEP)
            if received:
                heard = time.monotonic()
            elif time.monotonic() - heard > SECONDS:
                raise ConnectionFailedError(
                    f"{connection.label} ({connection.target}) sent nothing of the topic {topic!r} "
                    f"for {SECONDS:.0f} seconds."
                )
            for each in received:
                error, place = each.error(), each.partition()
                if error is not None and error.code() != library.KafkaError._PARTITION_EOF:
                    raise library.KafkaException(error)
                # Offsets have gaps, and the last ones may hold no message: the end of a partition is an event.
                if error is not None or each.offset() + 1 >= left.get(place, 0):
                    is_over = left.pop(place, None) is None
                    if error is not None or is_over:
                        continue
                yield each.key(), each.value()
    except library.KafkaException as error:
        raise admin(connection).failed(error) from None
    finally:
        consumer.close()
