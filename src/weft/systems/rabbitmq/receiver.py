"""A consumer of one queue. Spark's Python processes import this module."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from weft.errors import ConnectionFailedError, StorageError
from weft.systems.codec import codec_of
from weft.systems.messages import TRACEPARENT
from weft.systems.rabbitmq import client
from weft.systems.rabbitmq.connection import RabbitMQConnection
from weft.systems.received import MOST_BYTES, Received, unparsable

MOST_HELD = 4 * MOST_BYTES
"""The most bytes of messages that wait to be taken: the broker limits only their number."""
_LOOK_SECONDS = 10.0
_MOST_NESTED = 100
"""Headers with more tables and lists in one another are left out: what reads them calls itself for each."""
# In seconds this is the year 5138: somebody wrote milliseconds.
_MILLISECONDS = 100_000_000_000


class QueueReceiver:
    """Receives the messages of one queue. See `weft.systems.received.Receiver`."""

    def __init__(self, connection: RabbitMQConnection, queue: str) -> None:
        self._connection, self._queue = connection, queue
        self._got: deque[tuple[Any, Any, bytes]] = deque()
        self._held = 0
        """The bytes of these messages."""
        self._read_at = 0.0
        self._last: int | None = None
        self._is_cancelled = False
        self._codec = codec_of(connection.payload_format)
        self._opened = client.opened(connection)
        self._look_seconds = min(_LOOK_SECONDS, (client.heartbeat(self._opened) or math.inf) / 3)
        try:
            with client.missing_queue(connection, queue), client.explained(connection):
                self._channel = self._opened.channel()
                self._channel.basic_qos(prefetch_count=connection.prefetch)
                self._channel.add_on_cancel_callback(self._cancelled)
                # Before messages come: the answer would wait for all that the broker gives.
                declared = self._channel.queue_declare(queue, passive=True)
                self._found = int(declared.method.message_count)
                client.deliver_to(self._opened, self._channel, self._arrived)
                self._channel.basic_consume(queue, _passed_by)
        except BaseException:
            self.close()
            raise

    def _cancelled(self, _: Any) -> None:
        self._is_cancelled = True

    def _arrived(self, messages: Sequence[tuple[Any, Any, bytes]]) -> None:
        self._got.extend(messages)
        self._held += sum(len(body) for _, _, body in messages)

    def _read(self, seconds: float) -> None:
        """Take what the broker gives, as soon as there is any. While much is held the socket is left alone, so that the
        broker waits; a look now and then keeps the connection."""
        now = time.monotonic()
        if self._held >= MOST_HELD and now - self._read_at < self._look_seconds:
            time.sleep(seconds)
            return
        self._read_at = now
        self._opened.process_data_events(time_limit=seconds if self._held < MOST_HELD else 0)

    def receive(self, most: int, seconds: float) -> Sequence[Received]:
        with client.explained(self._connection):
            return self._receive(most, seconds)

    def _receive(self, most: int, seconds: float) -> Sequence[Received]:
        # While these are stored, the broker gives as many.
        most = min(most, max(1, self._connection.prefetch // 2))
        deadline = time.monotonic() + seconds
        while most == 0 or not self._got:
            if self._is_cancelled:
                # The queue was deleted, or moved to another node: the next receiver finds out.
                why = ConnectionFailedError(f"the broker ended the consumer of the queue {self._queue!r}")
                raise self._connection.unreachable(why, answered=False)
            left = deadline - time.monotonic()
            if left <= 0:
                return []
            self._read(left)
        before = 0
        while before < len(self._got) < most and self._held < MOST_HELD:  # what is there already
            before = len(self._got)
            self._read(0)
        size = 0
        deliveries: list[tuple[Any, Any, bytes]] = []
        while self._got and len(deliveries) < most and size < MOST_BYTES:
            deliveries.append(self._got.popleft())
            size += len(deliveries[-1][2])
        self._held -= size
        if self._connection.rejects_bad:
            deliveries = self._without_bad(deliveries)
        if deliveries:
            self._last = deliveries[-1][0].delivery_tag
        return [received(*each) for each in deliveries]

    def _without_bad(self, deliveries: list[tuple[Any, Any, bytes]]) -> list[tuple[Any, Any, bytes]]:
        """Return the messages that can be parsed; the broker routes the others to its dead-letter exchange."""
        bad = unparsable(self._codec, [body for _, _, body in deliveries])
        for number in bad:
            self._channel.basic_nack(deliveries[number][0].delivery_tag, requeue=False)
        return [each for number, each in enumerate(deliveries) if number not in bad]

    def acknowledge(self) -> None:
        with client.explained(self._connection):
            if self._last is not None:
                self._channel.basic_ack(self._last, multiple=True)
                self._last = None

    def waiting(self) -> int:
        return self._found

    def is_drained(self) -> bool:
        with client.missing_queue(self._connection, self._queue), client.explained(self._connection):
            declared = self._channel.queue_declare(self._queue, passive=True)
            self._read(0)  # what was delivered before that answer
            return not declared.method.message_count and not self._got

    def close(self) -> None:
        with suppress(Exception):
            self._opened.close()


def _passed_by(*_: Any) -> None:
    """Called by pika for a message that did not go to the receiver: the next acknowledgement would be for it too."""
    raise StorageError(
        "The installed version of pika does not give messages to Weft's receiver.", hint="Install pika 1.3 or 1.4."
    )


def received(method: Any, properties: Any, body: bytes) -> Received:
    """Return a message of pika as a `Received`."""
    key, exchange, name = _plain(method.routing_key), _plain(method.exchange), _plain(properties.message_id)
    about: dict[str, Any] = {}
    if key:
        about["key"] = key
    if exchange:
        about["exchange"] = exchange
    if name:
        about["message_id"] = name
    if properties.headers and _depth(properties.headers) <= _MOST_NESTED:
        about["headers"] = headers = _plain(properties.headers)
        if isinstance(traced := headers.get(TRACEPARENT), str) and traced:
            about[TRACEPARENT] = traced
    # Also its content: some publishers begin to count again.
    identity = f"{name}\0{exchange}\0{key}\0".encode() + body if name else None
    return Received(body, sent_at(properties.timestamp) if properties.timestamp is not None else None, about, identity)


def sent_at(timestamp: Any) -> datetime | None:
    """Return the time of a message; `None` where it has none, or one that is no time."""
    if isinstance(timestamp, datetime):
        return timestamp.replace(tzinfo=UTC) if timestamp.tzinfo is None else timestamp
    if not isinstance(timestamp, int):
        return None
    try:
        return datetime.fromtimestamp(timestamp / 1000 if timestamp >= _MILLISECONDS else timestamp, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _depth(value: Any) -> int:
    """Return how many tables and lists are in one another."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, Mapping | list | tuple)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, Mapping) else each)]
    return depth


def _plain(value: Any) -> Any:
    """Return a header as JSON has it."""
    if value is None or type(value) is str:
        return value
    if isinstance(value, Mapping):
        return {str(_plain(name)): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)  # pika has a class of its own for some
    return value if value is None or isinstance(value, str | float | bool) else str(value)
