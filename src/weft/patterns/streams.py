"""Consumers of streams, entry by entry."""

from weft.consumers.consumer import Consumer as Consumer
from weft.consumers.consumer import GroupConsumer as GroupConsumer

__all__ = ["Consumer", "GroupConsumer"]
