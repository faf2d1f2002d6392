"""Streams of Redis, read by a consumer without a group; and requests that the client must not repeat by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from time import monotonic
from typing import Any, TypeVar

from redis import exceptions
from redis.asyncio import RedisCluster

from weft.errors import ConnectionFailedError, SettingsError, WeftError
from weft.systems.base import Connection
from weft.systems.entries import Part, StreamEntry
from weft.systems.redis import group_member
from weft.systems.redis.client import TRANSIENT, AsyncClient, open_async_client, refuses
from weft.systems.redis.group_member import (
    BEGINNING,
    GROUP_GONE,
    LOOK_SECONDS,
    is_id,
    order_of,
    server_message,
    text_of,
)

T = TypeVar("T")
Key = bytes

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_OF_CLUSTERS = "Use a client of clusters, weft.RedisCluster(host, port), or a connection with cluster=True."


class RedisReader:
    """Reads with XREAD, from the streams' ends on."""

    def __init__(self, client: Any) -> None:
        self._owned = isinstance(client, Connection)
        self.client: AsyncClient = open_async_client(client) if self._owned else client
        self.is_cluster = isinstance(self.client, RedisCluster)
        self._longest_wait = _longest_wait(self.client)
        self._answered = False
        self._positions: dict[Key, str] = {}
        self._look_at: dict[Part, float] = {}

    def name(self, stream: Any) -> Key:
        name = getattr(stream, "name", stream)
        return name if isinstance(name, bytes) else str(name).encode()

    def parts(self, streams: Sequence[Any]) -> list[Part]:
        """Return all at once, or on a cluster those of each slot: a request has the keys of one slot."""
        if not isinstance(self.client, RedisCluster):
            return [tuple(streams)]
        by_slot: dict[int, list[Any]] = {}
        for stream in streams:
            by_slot.setdefault(self.client.keyslot(stream), []).append(stream)
        return [tuple(part) for part in by_slot.values()]

    async def begin(self, stream: Key, identifier: Any) -> None:
        """After `identifier`, or at the end."""
        if identifier is None or text_of(identifier) == "$":
            last = await self.with_retries(lambda: self.last_identifier(stream), stream)
            self._positions[stream] = last or BEGINNING
        else:
            self._positions[stream] = check_identifier(identifier)

    async def read(self, part: Part, count: int, wait: float) -> list[StreamEntry]:
        """Make one request, and another if a stream was created again."""
        entries = await self.with_retries(lambda: self._read(part, count, wait), *part)
        if not entries and self.looks(part) and await self.with_retries(lambda: self._begun_anew(part), *part):
            entries = await self.with_retries(lambda: self._read(part, count, 0), *part)
        return entries

    async def close(self) -> None:
        """Close the client, if it is the reader's own."""
        if not self._owned:
            return
        # The clients of the Sentinels would stay open.
        watchers = getattr(getattr(self.client, "connection_pool", None), "sentinel_manager", None)
        for each in (self.client, *(watchers.sentinels if watchers else ())):
            await each.aclose()

    async def _read(self, part: Part, count: int, wait: float) -> list[StreamEntry]:
        positions = [self._positions[stream] for stream in part]
        reply = await self.once(part[0], "XREAD", *self.block(wait), "COUNT", count, "STREAMS", *part, *positions)
        new = []
        for stream, entries in by_stream(reply):
            read = [entry_of(stream, each[0], each[1]) for each in entries]
            if read:
                self._positions[self.name(stream)] = text_of(read[-1].identifier)
                new += read
        return new

    async def _begun_anew(self, part: Part) -> bool:
        """Return whether a stream was removed and created again, with identifiers below those that were read."""
        anew = False
        for stream in part:
            last = await self.last_identifier(stream)
            if last is not None and order_of(last) < order_of(self._positions[stream]):
                self._positions[stream] = BEGINNING
                anew = True
        return anew

    def looks(self, part: Part) -> bool:
        """Return whether it is time to look for entries that are not announced."""
        if monotonic() < self._look_at.get(part, 0):
            return False
        self._look_at[part] = monotonic() + LOOK_SECONDS
        return True

    def look_soon(self) -> None:
        """Look with the next request."""
        self._look_at.clear()

    def block(self, wait: float) -> tuple[Any, ...]:
        """Return the words for how long the server may wait. To it, 0 is indefinitely."""
        milliseconds = int(min(wait, self._longest_wait))
        return ("BLOCK", milliseconds) if milliseconds > 0 else ()

    async def last_identifier(self, stream: Key) -> str | None:
        """Return the last identifier of a stream, also if its entry is deleted; `None` if there is no stream."""
        try:
            about = await self.client.xinfo_stream(stream)
        except exceptions.ResponseError as error:
            if "no such key" in str(error):
                return None
            raise
        return text_of(about["last-generated-id"])

    async def once(self, key: Key, *command: Any) -> Any:
        """Send a command that the client must not repeat by itself: the server may have run it, and the reply be
        lost."""
        if isinstance(self.client, RedisCluster):
            await self.client.initialize()
            node: Any = self.client.get_node_from_key(key)  # type: ignore[arg-type]
            return await self.client.execute_command(*command, target_nodes=node)
        pool = self.client.connection_pool
        link = await pool.get_connection()
        try:
            await link.send_command(*command)
            return await link.read_response()
        finally:
            await pool.release(link)

    async def with_retries(self, request: Callable[[], Awaitable[T]], *streams: Any) -> T:
        """Make a request about these streams until the server answers it, for as long as a restart may take. One that
        never answered is not waited for. What is said of a group that is gone is raised as it is."""
        ends, pause = monotonic() + group_member.PATIENCE_SECONDS, _FIRST_PAUSE
        while True:
            try:
                reply = await request()
                self._answered = True
                return reply
            except TRANSIENT as error:
                message = str(error) or type(error).__name__
                if refuses(error):
                    raise ConnectionFailedError(
                        f"Redis refuses the consumer: {message}", hint="Check username and password."
                    ) from error
                if not self._answered or monotonic() > ends:
                    hint = "Nothing is lost. Ask for the next entry again to go on where this stopped."
                    raise ConnectionFailedError(
                        f"Redis does not answer: {message}",
                        hint=hint if self._answered else "Check host and port, and that the server runs.",
                    ) from error
            except exceptions.ResponseError as error:
                if str(error).startswith(GROUP_GONE):
                    raise
                names = ", ".join(repr(text_of(stream)) for stream in streams)
                what = f"Redis refuses what is asked about {names}: {server_message(error)}"
                if isinstance(error, exceptions.NoPermissionError) or "user executing the script" in what:
                    raise ConnectionFailedError(what, hint="Check what the user may do (ACL).") from error
                if isinstance(error, exceptions.MovedError):
                    what = f"Redis is a cluster, of which another node has {names}."
                    raise SettingsError(what, hint=_OF_CLUSTERS) from error
                raise WeftError(what) from error
            except UnicodeDecodeError as error:
                names = ", ".join(repr(text_of(stream)) for stream in streams)
                raise WeftError(
                    f"An entry of {names} is not text: {error}.", hint="Use a client without decode_responses=True."
                ) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _longest_wait(client: AsyncClient) -> float:
    """For how many milliseconds the server may be asked to wait: not for as long as the socket does."""
    options = client.connection_kwargs if isinstance(client, RedisCluster) else client.connection_pool.connection_kwargs
    timeout = options.get("socket_timeout")
    return min(LOOK_SECONDS, LOOK_SECONDS if timeout is None else timeout / 2) * 1000


def by_stream(reply: Any) -> Iterable[tuple[Any, Any]]:
    """Return the streams of a reply and the entries of each, for any version of the protocol."""
    return (reply.items() if isinstance(reply, dict) else reply) if reply else ()


def entry_of(stream: Any, identifier: Any, fields: Any, deliveries: int | None = None) -> StreamEntry:
    """Return an entry of a reply. On a cluster the client has made a dict of its fields already."""
    if not isinstance(fields, dict):
        flat = iter(fields)
        fields = dict(zip(flat, flat, strict=True))
    entry = StreamEntry(identifier, fields)
    entry.stream = stream
    entry.deliveries = deliveries
    return entry


def check_identifier(identifier: Any) -> str:
    """Return an identifier of an entry, checked before a server is asked."""
    text = str(identifier) if type(identifier) is int else text_of(identifier)
    if not is_id(text):
        raise SettingsError(f"An entry of Redis has an identifier such as '1700000000000-0', not {identifier!r}.")
    return text
