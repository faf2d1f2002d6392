"""A consumer of one subscription. Spark's Python processes import this module.

It asks by single requests, not by a stream of answers: on Google's emulator that is as fast, and what it holds is
bounded by what it asks for. One thread asks while the messages before are stored; another keeps them, where storing
takes long, from being delivered to somebody else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from weft.systems.codec import codec_of
from weft.systems.messages import TRACEPARENT
from weft.systems.pubsub.client import PULL_SECONDS, PubSubClient
from weft.systems.pubsub.connection import PubSubConnection
from weft.systems.received import MOST_BYTES, Received, unparsable

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The shortest time for which a subscription leaves a message to a receiver is ten seconds.
_FIRST_SECONDS, _KEPT_SECONDS = 4.0, 60
_TICK_SECONDS = 1.0
_EMPTY_PULLS = 3
"""So many requests in a row that gave nothing mean that there is nothing: Pub/Sub does not ask all of its servers at
once."""
_TRACED = (TRACEPARENT, f"googclient_{TRACEPARENT}")  # the second is that of Google's clients


class SubscriptionReceiver:
    """Receives the messages of one subscription. See `weft.systems.received.Receiver`."""

    def __init__(self, connection: PubSubConnection, subscription: str) -> None:
        self._connection, self._subscription = connection, subscription
        self._codec = codec_of(connection.payload_format)
        self._client = PubSubClient(connection, patience=0.0)  # who uses it opens another one
        self._changed = threading.Condition()
        self._got: deque[Any] = deque()
        self._size = 0
        """The bytes of these messages."""
        self._kept: dict[str, float] = {}
        """By the id of a delivery that is not acknowledged, when to ask for more time."""
        self._taken: list[str] = []
        self._empty_pulls = 0
        """How many requests gave nothing since the last message."""
        self._failure: BaseException | None = None
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._unless_it_fails, args=(work,), name="weft-pubsub", daemon=True)
            for work in (self._pull, self._keep)
        ]
        for each in self._threads:
            each.start()

    # -------------------------------------------------------------------------------------------------- other threads

    def _unless_it_fails(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _pull(self) -> None:
        prefetch = self._connection.prefetch
        self._client.sign_in(self._subscription)
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (len(self._got) < prefetch and self._size < MOST_BYTES) or self._is_closed
                )
                most = prefetch - len(self._got)
            if self._is_closed:
                return
            pulled = self._client.pull(self._subscription, most, waits=True)
            with self._changed:
                due = time.monotonic() + _FIRST_SECONDS
                self._kept.update((each.ack_id, due) for each in pulled)
                self._got.extend(pulled)
                self._empty_pulls = 0 if pulled else self._empty_pulls + 1
                self._size += sum(len(each.message.data) for each in pulled)
                self._changed.notify_all()

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _TICK_SECONDS)
                now = time.monotonic()
                due = [each for each, moment in self._kept.items() if moment <= now]
                self._kept.update(dict.fromkeys(due, now + _KEPT_SECONDS / 2))
            if self._is_closed:
                return
            self._client.extend(self._subscription, due, _KEPT_SECONDS)

    # ---------------------------------------------------------------------------------------------------- the receiver

    def receive(self, most: int, seconds: float) -> Sequence[Received]:
        with self._changed:
            self._changed.wait_for(lambda: self._failure or (most and self._got), seconds)
            if self._failure is not None:
                raise self._failure
            size = 0
            messages: list[Any] = []
            while self._got and len(messages) < most and size < MOST_BYTES:
                messages.append(self._got.popleft())
                size += len(messages[-1].message.data)
            self._size -= size
            self._changed.notify_all()
        if self._connection.dead_letter_policy is not None and messages:
            messages = self._without_bad(messages)
        self._taken += (each.ack_id for each in messages)
        return [received(each.message) for each in messages]

    def _without_bad(self, messages: list[Any]) -> list[Any]:
        """Return the messages that can be parsed. Pub/Sub delivers the others again, and then sends them elsewhere."""
        bad = unparsable(self._codec, [each.message.data for each in messages])
        if bad:
            ids = [messages[number].ack_id for number in bad]
            self._forget(ids)
            self._client.extend(self._subscription, ids, 0)
        return [each for number, each in enumerate(messages) if number not in bad]

    def _forget(self, ids: Iterable[str]) -> None:
        with self._changed:
            for each in ids:
                self._kept.pop(each, None)

    def acknowledge(self) -> None:
        self._client.acknowledge(self._subscription, self._taken)
        self._forget(self._taken)
        self._taken = []

    def waiting(self) -> None:
        """Return `None`: Pub/Sub does not say."""

    def is_drained(self) -> bool:
        with self._changed:
            return not self._got and self._empty_pulls >= _EMPTY_PULLS

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        # The server may give messages to a request that nobody waits for any more, and then they are held for a while.
        for each in self._threads:
            each.join(PULL_SECONDS + 1)
        with suppress(Exception):
            self._client.extend(self._subscription, [*self._kept], 0)
        self._client.close()


def received(message: Any) -> Received:
    """Return a message of Pub/Sub as a `Received`."""
    about: dict[str, Any] = {"message_id": message.message_id}
    if message.ordering_key:
        about["key"] = message.ordering_key
    if message.attributes:
        about["attributes"] = dict(message.attributes)
        if traced := next((message.attributes[each] for each in _TRACED if each in message.attributes), None):
            about[TRACEPARENT] = traced
    moment = message.publish_time
    sent_at = _EPOCH + timedelta(seconds=moment.seconds, microseconds=moment.nanos // 1000)
    # Also when, and its content: an emulator that starts again counts from the beginning.
    identity = f"{message.message_id}\0{moment.seconds}.{moment.nanos}\0".encode() + message.data
    return Received(message.data, sent_at, about, identity)
