"""Durable streams: declare, publish, subscribe, consume, acknowledge. Written once over the log protocol of
`weft.systems.log`."""

from weft.streams.consuming import (
    ack,
    ack_sync,
    consume,
    consume_sync,
    groups,
    groups_sync,
    nack,
    nack_sync,
    reset,
    reset_sync,
)
from weft.streams.declare import Stream, stream
from weft.streams.publishing import publish, publish_sync
from weft.streams.retention import trim, trim_sync
from weft.streams.runtime import close
from weft.streams.subscription import Subscription, subscribe

__all__ = [
    "Stream",
    "Subscription",
    "ack",
    "ack_sync",
    "close",
    "consume",
    "consume_sync",
    "groups",
    "groups_sync",
    "nack",
    "nack_sync",
    "publish",
    "publish_sync",
    "reset",
    "reset_sync",
    "stream",
    "subscribe",
    "trim",
    "trim_sync",
]
