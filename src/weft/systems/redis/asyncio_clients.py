"""Clients of Redis for asyncio: those of redis-py, with consumers of streams, and with names for what streams hold."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from weft import hooks
from weft.systems.base import require
from weft.systems.entries import StreamEntry
from weft.systems.redis.group_member import fields_of

if TYPE_CHECKING:
    from weft.consumers.consumer import Consumer, GroupConsumer

require("redis.asyncio", "redis")

from redis import ConnectionError  # noqa: E402
from redis import asyncio as aio  # noqa: E402

# Each opens the connection again. More than one is rare.
_TRIES = 10
_ENTRY_COMMANDS = ("XRANGE", "XREVRANGE", "XREAD", "XREADGROUP", "XCLAIM", "XAUTOCLAIM")


class StreamPending(NamedTuple):
    """The pending entries of a group: how many, the first, the last, and how many each member has."""

    pending: int
    minimum_identifier: Any
    maximum_identifier: Any
    consumers: dict[Any, int]


class PendingEntry(NamedTuple):
    """A pending entry: who has it, for how many milliseconds, and how often it was delivered."""

    identifier: Any
    consumer: Any
    idle: int
    delivered: int


class _Streams:
    """The methods that both clients add to redis-py's."""

    @overload
    def xconsumer(
        self, *names: Any, streams: Iterable[Any] | None = None, group: Any, consumer: Any, **options: Any
    ) -> GroupConsumer: ...
    @overload
    def xconsumer(self, *names: Any, streams: Iterable[Any] | None = None, **options: Any) -> Consumer: ...
    def xconsumer(
        self, *names: Any, streams: Iterable[Any] | None = None, group: Any = None, consumer: Any = None, **options: Any
    ) -> Consumer | GroupConsumer:
        """Return a `weft.Consumer` of these streams, or with `group` and `consumer` a `weft.GroupConsumer`."""
        opened: Consumer | GroupConsumer = hooks.open_consumer(
            self, *names, streams=streams, group=group, consumer=consumer, **options
        )
        return opened

    async def xack(self, name: Any, groupname: Any, *identifiers: Any) -> int:
        """Acknowledge entries or their identifiers, as a list or one by one; how many were pending."""
        one = (str, bytes, int, StreamEntry)
        listed = [each for item in identifiers for each in ([item] if isinstance(item, one) else item)]
        ids = [each.identifier if isinstance(each, StreamEntry) else each for each in listed]
        return int(await super().xack(name, groupname, *ids)) if ids else 0  # type: ignore[misc]

    @overload
    async def xpending(self, name: Any, groupname: Any) -> StreamPending: ...
    @overload
    async def xpending(
        self, name: Any, groupname: Any, start: Any, end: Any, count: int, idle: int | None = None, consumer: Any = None
    ) -> tuple[PendingEntry, ...]: ...
    async def xpending(
        self,
        name: Any,
        groupname: Any,
        start: Any = None,
        end: Any = None,
        count: int | None = None,
        idle: int | None = None,
        consumer: Any = None,
    ) -> StreamPending | tuple[PendingEntry, ...]:
        """Return the pending entries of a group: a summary, or with a range and a count those of the range."""
        if start is not None or end is not None or count is not None or idle is not None or consumer is not None:
            entries = await super().xpending_range(name, groupname, start, end, count, consumer, idle)  # type: ignore[misc]
            return tuple(PendingEntry(*each.values()) for each in entries)
        reply = await super().xpending(name, groupname)  # type: ignore[misc]
        consumers = {each["name"]: each["pending"] for each in reply["consumers"]}
        return StreamPending(reply["pending"], reply["min"], reply["max"], consumers)

    async def xsetid(
        self, name: Any, last_id: Any, entries_added: int | None = None, max_deleted_id: Any = None
    ) -> bool:
        """Set the last identifier of a stream, by which Redis makes the next."""
        more = [] if entries_added is None else ["ENTRIESADDED", entries_added]
        more += [] if max_deleted_id is None else ["MAXDELETEDID", max_deleted_id]
        reply = await self.execute_command("XSETID", name, last_id, *more)  # type: ignore[attr-defined]
        return reply in (True, b"OK", "OK")

    def _name_entries(self) -> None:
        client: Any = self
        for command in _ENTRY_COMMANDS:
            client.set_response_callback(command, _naming(client.response_callbacks[command]))


class Redis(_Streams, aio.Redis):  # type: ignore[misc]
    """redis-py's client for asyncio: `weft.Redis("localhost", 6379)`, `weft.Redis.from_url("redis://localhost")`.

    All of its options are taken. Entries of streams have an `identifier` and `field_values`."""

    def __init__(self, host: str = "localhost", port: int = 6379, db: int = 0, **options: Any) -> None:
        super().__init__(host=host, port=port, db=db, **options)
        self._name_entries()


class RedisCluster(_Streams, aio.RedisCluster):  # type: ignore[misc]
    """A client of a cluster: `weft.RedisCluster("localhost", 7000)` names any of its nodes."""

    def __init__(self, host: str | None = None, port: int = 6379, **options: Any) -> None:
        super().__init__(host=host, port=port, **options)
        self._name_entries()

    async def execute_command(self, *arguments: Any, **options: Any) -> Any:
        """Send a command and wait for its answer."""
        for _ in range(_TRIES):
            try:
                return await super().execute_command(*arguments, **options)
            except AttributeError as error:
                # redis-py writes to a connection that another task closed meanwhile, as failovers make it do. Nothing
                # was sent.
                if error.name != "writelines":
                    raise
        raise ConnectionError(f"{arguments[0]} was not sent: the connection was closed {_TRIES} times.")


def _naming(parse: Any) -> Any:
    return lambda reply, **options: _named(parse(_with_distinct_names(reply), **options))


def _with_distinct_names(reply: Any) -> Any:
    """Return a reply in which no entry has two fields of a name, of which redis-py would keep one."""
    if isinstance(reply, dict):
        return {key: _with_distinct_names(each) for key, each in reply.items()}
    if not isinstance(reply, list):
        return reply
    if len(reply) == 2 and isinstance(reply[0], str | bytes) and isinstance(reply[1], list):
        first = reply[1][0] if reply[1] else None
        if isinstance(first, str | bytes):  # an entry, not a stream and its entries
            return [reply[0], list(chain.from_iterable(fields_of(reply[1]).items()))]
    return [_with_distinct_names(each) for each in reply]


def _named(reply: Any) -> Any:
    """Return a reply in which the pairs of an identifier and a dict have names."""
    if isinstance(reply, tuple) and len(reply) == 2 and isinstance(reply[1], dict):
        return StreamEntry(*reply)
    if isinstance(reply, list):
        return [_named(each) for each in reply]
    if isinstance(reply, dict):
        return {key: _named(value) for key, value in reply.items()}
    return reply
