"""Deliveries, read straight from the bytes of a broker. Pika makes three frames of each and passes them through its
channel, which takes a receiver longer than all the rest that it does."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from pika import data, spec

_FRAME, _NUMBER, _LONG = struct.Struct(">BHL"), struct.Struct(">L"), struct.Struct(">Q")
_MOST_BYTES = 1 << 16
"""Of a content that is read here. A larger one comes in many pieces, and pika puts it together."""


class Delivery(NamedTuple):
    """What a broker says of a message that it delivers, by pika's names."""

    delivery_tag: int
    exchange: Any
    routing_key: Any


Message = tuple[Delivery, Any, bytes]
"""The delivery, its properties as pika has them, and its content."""


def taken(buffer: bytes, channel: int) -> tuple[list[Message], int]:
    """Return the messages of a channel that a buffer begins with, and how many bytes they take. What is not whole, is
    large or of another kind, or cannot be read, is left to pika."""
    found: list[Message] = []
    start = 0
    while (each := _first(buffer, start, channel)) is not None:
        message, start = each
        found.append(message)
    return found, start


def _first(buffer: bytes, start: int, channel: int) -> tuple[Message, int] | None:
    try:
        at, header = _frame(buffer, start, spec.FRAME_METHOD, channel)
        if _NUMBER.unpack_from(buffer, at)[0] != spec.Basic.Deliver.INDEX:
            return None
        about, content = _frame(buffer, header, spec.FRAME_HEADER, channel)
        (size,) = _LONG.unpack_from(buffer, about + 4)
        body = b""
        if size > _MOST_BYTES:
            return None
        end = content
        if size:
            first, end = _frame(buffer, content, spec.FRAME_BODY, channel)
            body = buffer[first : end - 1]
        if len(body) != size:
            return None
        at += 5 + buffer[at + 4]
        (tag,) = _LONG.unpack_from(buffer, at)
        exchange, at = data.decode_short_string(buffer, at + 9)
        routing_key, _ = data.decode_short_string(buffer, at)
        properties = spec.BasicProperties().decode(buffer, about + 12)
    except Exception:  # the end of what is there, or something that pika reports
        return None
    return (Delivery(tag, exchange, routing_key), properties, body), end


def _frame(buffer: bytes, start: int, kind: int, channel: int) -> tuple[int, int]:
    """Return where the content of a frame begins, and where the next frame does; raise if it is another one."""
    found, number, size = _FRAME.unpack_from(buffer, start)
    first = start + spec.FRAME_HEADER_SIZE
    if found != kind or number != channel or buffer[first + size] != spec.FRAME_END:
        raise ValueError
    return first, first + size + spec.FRAME_END_SIZE
