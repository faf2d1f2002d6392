"""Connections of pika, whose errors are ours."""

from __future__ import annotations

import logging
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from weft import settings
from weft.errors import ConnectionFailedError, DeclarationError, NotFoundError, SettingsError, StorageError, WeftError
from weft.systems.base import require

if TYPE_CHECKING:
    from weft.systems.rabbitmq.connection import RabbitMQConnection

# A broker that is short of memory or disk takes nothing, and says so.
_BLOCKED_SECONDS = 60
# At a time. Pika reads 4 KB, which ends in the middle of a message as often.
_READ_BYTES = 1 << 16
_NOT_FOUND, _REFUSED, _OTHER = 404, 403, 406


def parameters(connection: RabbitMQConnection) -> Any:
    """Return what pika needs for a resolved connection."""
    pika = require("pika", connection.kind)
    log = logging.getLogger("pika")
    if log.level == logging.NOTSET:
        # It logs each error that it raises, with its traceback: before the two lines of a command came seven more.
        log.setLevel(logging.CRITICAL)
    host, port, vhost = connection.address
    try:
        options = pika.URLParameters(connection.amqp_url)
        options.host, options.port, options.virtual_host = host, port, vhost
        options.blocked_connection_timeout = options.blocked_connection_timeout or _BLOCKED_SECONDS
        if connection.is_encrypted:
            context = ssl.create_default_context(cafile=connection.ssl_ca_location)
            if connection.ssl_certificate_location:
                context.load_cert_chain(
                    connection.ssl_certificate_location, connection.ssl_key_location, connection.ssl_key_password
                )
            options.ssl_options = pika.SSLOptions(context, host)
    except SyntaxError:  # pika reads options as Python; not quoted: the text may have secrets
        raise SettingsError(
            f"The options of the amqp_url of {connection.label} cannot be read.",
            hint="After the ? come names and values, such as heartbeat=60.",
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise connection.failed(error, hint="Check amqp_url and the certificates.") from None
    options.client_properties = {"connection_name": f"weft {connection.name or ''}".strip()}
    return options


def opened(connection: RabbitMQConnection) -> Any:
    """Return a blocking connection to a resolved connection's broker."""
    pika = require("pika", connection.kind)
    options = parameters(connection)
    with explained(connection):
        return pika.BlockingConnection(options, _impl_class=_tolerant())


@cache
def _tolerant() -> Any:
    """Return pika's connection, except that headers which it cannot read (a time that is none, hundreds of tables in
    one another) are left out: it would close the connection, and the broker would deliver the message again and again.
    What a receiver is given goes to it directly: see `deliver_to`."""
    import pika
    from pika import frame, spec
    from pika.exceptions import InvalidFrameError

    from weft.systems.rabbitmq import deliveries

    class Tolerant(pika.SelectConnection):
        receiver: tuple[int, Callable[[list[deliveries.Message]], None]] | None = None

        def _on_data_available(self, data_in: bytes) -> None:
            if self.receiver is None:
                super()._on_data_available(data_in)  # type: ignore[misc]
                return
            channel, receive = self.receiver
            self._frame_buffer: bytes = self._frame_buffer + data_in
            while self._frame_buffer:
                messages, consumed = deliveries.taken(self._frame_buffer, channel)
                if messages:
                    receive(messages)
                else:
                    consumed, other = self._read_frame()
                    if not other:
                        return
                self._trim_frame_buffer(consumed)  # type: ignore[attr-defined]
                if not messages:
                    self._process_frame(other)  # type: ignore[attr-defined]

        def _read_frame(self) -> Any:
            try:
                return super()._read_frame()  # type: ignore[misc]
            except InvalidFrameError:  # where it ends is not known
                raise
            except Exception:
                buffer = self._frame_buffer
                kind, channel_number, size = struct.unpack_from(">BHL", buffer)
                if kind != spec.FRAME_HEADER:
                    raise
                content = buffer[spec.FRAME_HEADER_SIZE :][:size]
                length, properties = struct.unpack_from(">Q", content, 4)[0], spec.BasicProperties()
                properties.decode(without_headers(content[12:]))
                consumed = spec.FRAME_HEADER_SIZE + size + spec.FRAME_END_SIZE
                return consumed, frame.Header(channel_number, length, properties)

    return Tolerant


def deliver_to(connection: Any, channel: Any, receive: Callable[[list[Any]], None]) -> None:
    """Have a connection of `opened` give the messages of all consumers of a channel to a function while it reads, in
    their order. Before there is a consumer, whose own callback is not called."""

    def received(messages: list[Any]) -> None:
        receive(messages)
        connection._request_channel_dispatch(channel.channel_number)  # who waits for events need not wait longer

    # Receives the messages that pika reads. Its own function would queue them behind others that came later,
    # and an acknowledgement of one is for all before it.
    channel._on_consumer_message_delivery = lambda _, *message: received([message])
    connection._impl._transport._MAX_RECV_BYTES = _READ_BYTES
    connection._impl.receiver = channel.channel_number, received


def without_headers(properties: bytes) -> bytes:
    """Return encoded properties of a message without its headers, which come after two short texts."""
    flags, start = struct.unpack_from(">H", properties)[0], 2
    for bit in (15, 14):
        if flags & 1 << bit:
            start += 1 + properties[start]
    size = 4 + struct.unpack_from(">I", properties, start)[0]
    return struct.pack(">H", flags & ~(1 << 13)) + properties[2:start] + properties[start + size :]


@contextmanager
def channel(connection: RabbitMQConnection) -> Iterator[Any]:
    """Give a channel for some requests."""
    connected = opened(connection.resolved())
    try:
        with explained(connection):
            yield connected.channel()
    finally:
        with suppress(Exception):
            connected.close()


def server_properties(opened_channel: Any) -> dict[str, Any]:
    """Return what the broker says of itself."""
    properties: dict[str, Any] = opened_channel.connection._impl.server_properties or {}
    return properties


def heartbeat(opened_connection: Any) -> float | None:
    """Return after how many seconds without a word the broker cuts a connection; `None` if it does not."""
    return opened_connection._impl.params.heartbeat or None


@contextmanager
def explained(connection: RabbitMQConnection) -> Iterator[None]:
    """Turn the errors of pika into ours."""
    exceptions = require("pika.exceptions", connection.kind)
    try:
        yield
    except WeftError:  # some of which are an OSError
        raise
    except (exceptions.AMQPError, OSError) as error:
        _explain(connection, exceptions, error)


def _explain(connection: RabbitMQConnection, exceptions: Any, error: BaseException) -> NoReturn:
    if isinstance(error, exceptions.ChannelClosedByBroker):
        text = f"{connection.label}: {settings.redact(error.reply_text, connection.secrets())}"
        # The queue is there, and the node that has it is down.
        if error.reply_code == _NOT_FOUND and "home node" in error.reply_text:
            raise connection.unreachable(error, answered=False) from None
        if error.reply_code == _NOT_FOUND:
            raise NotFoundError(text) from None
        # Messages that a slow pipeline leaves unacknowledged for half an hour: another channel gets them again.
        if error.reply_code == _OTHER and "timed out" in error.reply_text:
            raise connection.unreachable(error, answered=False) from None
        if error.reply_code == _OTHER:
            raise DeclarationError(text) from None
        hint = "Give the user the right to it: rabbitmqctl set_permissions." if error.reply_code == _REFUSED else None
        raise StorageError(text, hint=hint) from None
    refused = (
        exceptions.ProbableAuthenticationError,
        exceptions.ProbableAccessDeniedError,
        exceptions.ConnectionClosed,
    )
    # Pika leaves out the reason of some.
    why = error if str(error) else error.__cause__ or error.__context__ or error
    why = why if str(why) else ConnectionFailedError(_WORDS.get(type(error).__name__, type(error).__name__))
    raise connection.unreachable(why, answered=isinstance(error, refused)) from None


_WORDS = {
    "AMQPConnectionError": "nobody answers",
    "AMQPHeartbeatTimeout": "it does not answer any more",
    "StreamLostError": "the connection was cut",
}


# --------------------------------------------------------------------------------------------------------------- queues


def depth(connection: RabbitMQConnection, queue: str) -> int:
    """Return how many messages of a queue wait for a consumer; raise if there is no such queue."""
    with missing_queue(connection, queue), channel(connection) as opened_channel:
        return int(opened_channel.queue_declare(queue, passive=True).method.message_count)


@contextmanager
def missing_queue(connection: RabbitMQConnection, queue: str) -> Iterator[None]:
    """Say which queue is not there."""
    try:
        yield
    except NotFoundError:
        raise NotFoundError(
            f"There is no queue {queue!r} of {connection.label}.",
            hint="Declare it at the broker, or give the connection queue_args={…}: then it is made.",
        ) from None


def check_dead_letter_exchange(connection: RabbitMQConnection) -> None:
    """Raise if the exchange for bad messages is not there: the broker would drop them without a word."""
    exchange = connection.dead_letter_exchange
    if not exchange:  # the default exchange is always there
        return
    try:
        with channel(connection) as opened_channel:
            opened_channel.exchange_declare(exchange, passive=True)
    except NotFoundError:
        raise NotFoundError(
            f"There is no exchange {exchange!r} of {connection.label}, its x-dead-letter-exchange: the broker would "
            "drop messages that cannot be parsed.",
            hint="Declare it at the broker and bind a queue to it.",
        ) from None


def make_queue(connection: RabbitMQConnection, queue: str, arguments: dict[str, Any]) -> None:
    """Make a durable queue, unless it is there with the same arguments."""
    try:
        with channel(connection) as opened_channel:
            opened_channel.queue_declare(queue, durable=True, arguments=arguments)
    except DeclarationError as error:
        raise DeclarationError(
            f"The queue {queue!r} was made with other arguments than the queue_args of {connection.label}: "
            f"{error.what}",
            hint="Give it those that it has, or delete it at the broker.",
        ) from None


def is_missing(connection: RabbitMQConnection, queue: str) -> bool:
    """Return whether there is no such queue."""
    try:
        depth(connection, queue)
    except NotFoundError:
        return True
    return False
