"""Deliveries as a broker writes them. What is not whole, or not for this, is left to pika."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pika")

from pika import BasicProperties, frame, spec

from weft.systems.rabbitmq.deliveries import Delivery, Properties, taken

ALL: dict[str, Any] = {
    "content_type": "application/json",
    "content_encoding": "utf-8",
    "headers": {"a": [1, "é"]},
    "delivery_mode": 2,
    "priority": 3,
    "correlation_id": "c",
    "reply_to": "somebody",
    "expiration": "9",
    "message_id": "é1",
    "timestamp": 1_700_000_000,
    "type": "t",
    "user_id": "u",
    "app_id": "a",
    "cluster_id": "d",
}


def written(tag: int, body: bytes, channel: int = 1, **properties: Any) -> bytes:
    """The frames of a delivery."""
    frames = [
        frame.Method(channel, spec.Basic.Deliver("ctag1.0", tag, True, "shop", "orders.é")),
        frame.Header(channel, len(body), BasicProperties(**properties)),
        *([frame.Body(channel, body)] if body else []),
    ]
    return b"".join(each.marshal() for each in frames)


def test_each_property_alone_and_all() -> None:
    for chosen in ([], *([name] for name in ALL), [name for name in ALL if name != "headers"], list(ALL)):
        values = {name: ALL[name] for name in chosen}
        wanted = Properties(*(values.get(name) for name in Properties._fields))
        buffer = written(7, b"{}", **values)
        assert taken(buffer, 1) == ([(Delivery(7, "shop", "orders.é"), wanted, b"{}")], len(buffer)), chosen


def test_what_is_not_whole() -> None:
    first, second = written(1, b"", message_id="1"), written(2, b"[1]", **ALL)
    for end in range(len(second)):
        found, size = taken(first + second[:end], 1)
        assert (len(found), size) == (1, len(first))
    found, size = taken(first + second, 1)
    assert [(about.delivery_tag, body) for about, _, body in found] == [(1, b""), (2, b"[1]")]
    assert size == len(first) + len(second)


def test_what_is_for_pika() -> None:
    ends = [at for at, byte in enumerate(written(1, b"{}")) if byte == spec.FRAME_END]
    assert len(ends) == 3
    for end in ends:  # a frame without its end
        buffer = bytearray(written(1, b"{}"))
        buffer[end] = 0
        assert taken(bytes(buffer), 1) == ([], 0)
    in_parts = written(1, b"{}")[: ends[1] + 1] + frame.Body(1, b"{").marshal() + frame.Body(1, b"}").marshal()
    for buffer in (
        written(1, b"{}", channel=2),
        written(1, b"x" * 70_000),
        in_parts,
        frame.Heartbeat().marshal(),
        frame.Method(1, spec.Basic.CancelOk("ctag1.0")).marshal(),
        b"",
    ):
        assert taken(buffer, 1) == ([], 0)
    odd = {"headers": {"at": 5}}
    broken = written(1, b"{}", **odd).replace(b"\x02atI", b"\x02at?")  # a kind of header that there is not
    assert broken != written(1, b"{}", **odd) and taken(broken, 1) == ([], 0)
