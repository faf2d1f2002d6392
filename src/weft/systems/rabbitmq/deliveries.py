"""Deliveries, read straight from the bytes of a broker. Pika makes three frames of each and passes them through its
channel, which takes a receiver longer than all the rest that it does."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

from pika import data, spec

_METHOD, _HEADER, _BODY = struct.Struct(">BHLLB"), struct.Struct(">BHLLQH"), struct.Struct(">BHL")
_LONG = struct.Struct(">Q")
_START, _END = spec.FRAME_HEADER_SIZE, spec.FRAME_END_SIZE
_MOST_BYTES = 1 << 16
"""The largest content that is read here. A larger one comes in many pieces, and pika puts it together."""
_SHORT_NAMES = 128
"""Routing keys are mostly the same few."""


class Delivery(NamedTuple):
    """What a broker says of a message that it delivers, by pika's names."""

    delivery_tag: int
    exchange: Any
    routing_key: Any


class Properties(NamedTuple):
    """The properties of a message that a receiver uses, by pika's names."""

    headers: dict[str, Any] | None
    message_id: Any
    timestamp: int | None


Message = tuple[Delivery, Any, bytes]
"""The delivery, its properties, and its content."""


def taken(buffer: bytes, channel: int) -> tuple[list[Message], int]:
    """Return the messages of a channel that a buffer begins with, and how many bytes they take. What is not whole, is
    large or of another kind, or cannot be read, is left to pika."""
    messages: list[Message] = []
    start = 0
    try:
        while (each := _first(buffer, start, channel)) is not None:
            message, start = each
            messages.append(message)
    except Exception:  # the end of what is there, or something that pika reports
        pass
    return messages, start


def _first(buffer: bytes, start: int, channel: int) -> tuple[Message, int] | None:
    kind, number, size, method, skipped = _METHOD.unpack_from(buffer, start)
    header = start + _START + size + _END
    if (kind, number, method) != (spec.FRAME_METHOD, channel, spec.Basic.Deliver.INDEX):
        return None
    kind, number, size, _, length, flags = _HEADER.unpack_from(buffer, header)
    end = last = header + _START + size + _END
    if kind != spec.FRAME_HEADER or number != channel or length > _MOST_BYTES or flags & 1:
        return None
    body = b""
    if length:
        kind, number, size = _BODY.unpack_from(buffer, end)
        content = end + _START
        end = content + size + _END
        if kind != spec.FRAME_BODY or number != channel or size != length:
            return None
        body = buffer[content : end - _END]
    if not buffer[header - _END] == buffer[last - _END] == buffer[end - _END] == spec.FRAME_END:
        return None
    at = start + _METHOD.size + skipped  # after the tag of the consumer
    (tag,) = _LONG.unpack_from(buffer, at)
    exchange, routing_key = _names(buffer[at + 9 : header - _END])
    return (Delivery(tag, exchange, routing_key), _properties(buffer, header + _HEADER.size, flags), body), end


@lru_cache(_SHORT_NAMES)
def _names(encoded: bytes) -> tuple[Any, Any]:
    exchange, at = data.decode_short_string(encoded, 0)
    return exchange, data.decode_short_string(encoded, at)[0]


def _properties(buffer: bytes, at: int, flags: int) -> Properties:
    """Return the properties, which are there in the order of their flags."""
    known = spec.BasicProperties
    headers: Any = None
    message_id: Any = None
    timestamp: int | None = None
    for each in (known.FLAG_CONTENT_TYPE, known.FLAG_CONTENT_ENCODING):
        if flags & each:
            at += 1 + buffer[at]
    if flags & known.FLAG_HEADERS:
        headers, at = data.decode_table(buffer, at)
    if flags & known.FLAG_DELIVERY_MODE:
        at += 1
    if flags & known.FLAG_PRIORITY:
        at += 1
    for each in (known.FLAG_CORRELATION_ID, known.FLAG_REPLY_TO, known.FLAG_EXPIRATION):
        if flags & each:
            at += 1 + buffer[at]
    if flags & known.FLAG_MESSAGE_ID:
        message_id, at = data.decode_short_string(buffer, at)
    if flags & known.FLAG_TIMESTAMP:
        (timestamp,) = _LONG.unpack_from(buffer, at)
    return Properties(headers, message_id, timestamp)
