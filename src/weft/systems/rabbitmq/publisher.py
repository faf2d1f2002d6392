"""Publishes messages, each confirmed by the broker, and many on their way at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from weft.errors import StorageError
from weft.systems.base import require
from weft.systems.rabbitmq import client
from weft.systems.rabbitmq.connection import RabbitMQConnection

# The most messages that wait for their confirmation.
_MOST_OPEN = 1000


class OutgoingMessage(NamedTuple):
    routing_key: str
    body: bytes
    properties: dict[str, Any]


def publish(connection: RabbitMQConnection, exchange: str, messages: Iterable[OutgoingMessage]) -> int:
    """Publish durable messages and return how many. When this returns, queues have them all."""
    return _Publisher(connection.resolved(), exchange, iter(messages)).run()


class _Publisher:
    def __init__(self, connection: RabbitMQConnection, exchange: str, messages: Iterator[OutgoingMessage]) -> None:
        self._connection, self._exchange, self._messages = connection, exchange, messages
        self._pika = require("pika", connection.kind)
        self._open: set[int] = set()
        self._sent = 0
        self._is_exhausted = False
        self._is_closing = False
        self._failure: BaseException | None = None
        self._channel: Any = None
        self._opened: Any = None

    def run(self) -> int:
        self._opened = self._pika.SelectConnection(
            client.parameters(self._connection),
            on_open_callback=lambda opened: opened.channel(on_open_callback=self._begin),
            on_open_error_callback=lambda _, error: self._fail(error),
            on_close_callback=lambda _, error: self._fail(error),
        )
        try:
            self._opened.ioloop.start()
        finally:
            self._is_closing = True
            with suppress(Exception):
                if self._opened.is_open:
                    self._opened.close()
                    self._opened.ioloop.start()  # until it is closed
            self._opened.ioloop.close()
        if self._failure is not None:
            with client.explained(self._connection):
                raise self._failure
        return self._sent

    def _begin(self, channel: Any) -> None:
        self._channel = channel
        channel.add_on_close_callback(self._channel_closed)
        channel.add_on_return_callback(self._returned)
        channel.confirm_delivery(self._confirmed, callback=lambda _: self._fill())

    def _channel_closed(self, _: Any, error: BaseException) -> None:
        if not self._is_closing:
            self._fail(error)

    def _fill(self) -> None:
        try:
            while len(self._open) < _MOST_OPEN and not self._is_exhausted and self._failure is None:
                message = next(self._messages, None)
                if message is None:
                    self._is_exhausted = True
                    break
                self._sent += 1
                self._open.add(self._sent)
                properties = self._pika.BasicProperties(delivery_mode=2, **message.properties)
                self._channel.basic_publish(
                    self._exchange, message.routing_key, message.body, properties, mandatory=True
                )
        except BaseException as error:
            self._fail(error)
            return
        if self._is_exhausted and not self._open:
            self._opened.ioloop.stop()

    def _confirmed(self, frame: Any) -> None:
        method = frame.method
        tags = (
            {each for each in self._open if each <= method.delivery_tag} if method.multiple else {method.delivery_tag}
        )
        self._open -= tags
        if isinstance(method, self._pika.spec.Basic.Nack):
            self._fail(
                StorageError(
                    f"{self._connection.label} did not take {len(tags):,} messages for {self._exchange or 'a queue'}.",
                    hint="A queue of it may be full, or lack a majority of its nodes.",
                )
            )
            return
        self._fill()

    def _returned(self, _: Any, method: Any, __: Any, ___: bytes) -> None:
        where = f"the exchange {self._exchange!r}" if self._exchange else f"the queue {method.routing_key!r}"
        self._fail(
            StorageError(
                f"No queue takes what is written to {where} of {self._connection.label} with the routing key "
                f"{method.routing_key!r}.",
                hint="Bind a queue to the exchange, or give it an alternate exchange.",
            )
        )

    def _fail(self, error: BaseException) -> None:
        if self._failure is None and not self._is_closing:
            self._failure = error
        self._opened.ioloop.stop()
