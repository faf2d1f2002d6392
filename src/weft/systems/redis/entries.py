"""Streams of Redis, read entry by entry by consumers. See `weft.systems.entries`.

What a member of a group was given is in the group's list of pending entries until it is acknowledged. An entry that is
given back is put there under a name that no member has, where every member looks for more."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, ClassVar, TypeVar

from redis import exceptions
from redis.asyncio import Redis, RedisCluster

from weft.errors import ConnectionFailedError, SettingsError, WeftError
from weft.systems.base import Connection
from weft.systems.entries import Membership, Part, StreamEntry, by_stream
from weft.systems.log import DEAD_LETTER_SUFFIX
from weft.systems.redis import group_member, scripts
from weft.systems.redis.client import TRANSIENT, AsyncClient, open_async_client, refuses
from weft.systems.redis.group_member import (
    BEGINNING,
    GROUP_GONE,
    LOOK_SECONDS,
    Redelivered,
    RedisMember,
    Script,
    Steps,
    fields_of,
    is_id,
    order_of,
    server_message,
    text_of,
)

T = TypeVar("T")
Key = bytes

_log = logging.getLogger("weft.consumers")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_OF_CLUSTERS = "Use a client of clusters, weft.RedisCluster(host, port), or a connection with cluster=True."


class RedisReader:
    """Reads with XREAD, from the streams' ends on."""

    def __init__(self, client: Any) -> None:
        self._owned = isinstance(client, Connection)
        self.client: AsyncClient = open_async_client(client) if self._owned else client
        self.is_cluster = isinstance(self.client, RedisCluster)
        if self._owned and self.is_cluster:
            for command in ("XREAD", "XREADGROUP"):
                self.client.set_response_callback(command, _as_it_is)  # type: ignore[arg-type]
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
            self._positions[stream] = _check_identifier(identifier)

    async def read(self, part: Part, count: int, wait: float) -> list[StreamEntry]:
        """Make one request, and another if a stream was created again."""
        entries = await self.with_retries(lambda: self._read(part, count, wait), *part)
        if not entries and self.looks(part) and await self.with_retries(lambda: self._was_recreated(part), *part):
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
        for stream, entries in _streams_of(reply):
            read = [_entry_of(stream, each[0], each[1]) for each in entries]
            if read:
                self._positions[self.name(stream)] = text_of(read[-1].identifier)
                new += read
        return new

    async def _was_recreated(self, part: Part) -> bool:
        """Return whether a stream was removed and created again, with identifiers below those that were read."""
        is_new = False
        for stream in part:
            last = await self.last_identifier(stream)
            if last is not None and order_of(last) < order_of(self._positions[stream]):
                self._positions[stream] = BEGINNING
                is_new = True
        return is_new

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
        """Send a command that the client must not repeat by itself: the server may have run it, its reply be lost."""
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


def _as_it_is(reply: Any, **_: Any) -> Any:
    """Return a reply. The client would make dicts of fields, which lose those that come twice."""
    return reply


def _longest_wait(client: AsyncClient) -> float:
    """For how many milliseconds the server may be asked to wait: not for as long as the socket does."""
    options = client.connection_kwargs if isinstance(client, RedisCluster) else client.connection_pool.connection_kwargs
    timeout = options.get("socket_timeout")
    return min(LOOK_SECONDS, LOOK_SECONDS if timeout is None else timeout / 2) * 1000


def _streams_of(reply: Any) -> Iterable[tuple[Any, Any]]:
    """Return the streams of a reply and the entries of each, for any version of the protocol."""
    return (reply.items() if isinstance(reply, dict) else reply) if reply else ()


def _entry_of(stream: Any, identifier: Any, fields: Any, deliveries: int | None = None) -> StreamEntry:
    """Return an entry of a reply. On a cluster a client of others has made a dict of its fields already."""
    entry = StreamEntry(identifier, fields if isinstance(fields, dict) else fields_of(fields))
    entry.stream = stream
    entry.deliveries = deliveries
    return entry


def _check_identifier(identifier: Any) -> str:
    """Return an identifier of an entry, checked before a server is asked."""
    text = str(identifier) if type(identifier) is int else text_of(identifier)
    if not is_id(text):
        raise SettingsError(f"An entry of Redis has an identifier such as '1700000000000-0', not {identifier!r}.")
    return text


class RedisGroupReader(RedisReader):
    """Reads with XREADGROUP: this member's backlog if asked for, entries that were given back or are idle, new ones."""

    def __init__(self, client: Any, membership: Membership) -> None:
        super().__init__(client)
        if text_of(membership.group_start) != "$":
            _check_identifier(membership.group_start)
        self._member = membership
        self._members: dict[Key, RedisMember] = {}
        self.held_for: float | None = membership.claim_idle
        self.recovered = 0
        # Redelivered entries stay here until they are handed on: a later request that fails must not lose them.
        self._redelivered: defaultdict[Key, list[Redelivered]] = defaultdict(list)

    @property
    def skipped(self) -> int:
        return sum(member.skipped for member in self._members.values())

    async def begin(self, stream: Key, identifier: Any) -> None:
        """Join the group, or create it."""
        self._same_slot(stream)
        member = RedisMember(stream, self._member)
        if identifier is not None and text_of(identifier) != ">":
            member.begin_with_own(_check_identifier(identifier))
        elif self._member.start_from_backlog:
            member.begin_with_own()
        await self.with_retries(lambda: self._run(member.join()), stream)
        self._members[stream] = member

    # ------------------------------------------------------------------------------------------------------------ read

    async def read(self, part: Part, count: int, wait: float) -> list[StreamEntry]:
        """Return entries in the order that the class names; none if there are none of any kind."""
        while True:
            try:
                return await self.with_retries(lambda: self._read(part, count, wait), *part)
            except exceptions.ResponseError:  # the group is gone
                await self.with_retries(lambda: self._recover(part), *part)

    async def _recover(self, part: Part) -> None:
        """Create the groups again that are gone: by hand, by a flush, or by a restart that kept nothing."""
        for stream in part:
            member = self._members[stream]
            if await self._run(member.join()):
                self._began_again(member, f"after {member.start}")

    def _began_again(self, member: RedisMember, place: str) -> None:
        self.recovered += 1
        _log.warning(
            "the group %s of stream %s was gone, or was set back; it begins again %s",
            text_of(member.group),
            text_of(member.stream),
            place,
        )

    async def _read(self, part: Part, count: int, wait: float) -> list[StreamEntry]:
        looked = self.looks(part)
        entries = await self._delivered_again(part, count, look=looked) or await self._new(part, count, wait)
        if not entries and not looked:
            entries = await self._delivered_again(part, count, look=True)
        return entries

    async def _new(self, part: Part, count: int, wait: float) -> list[StreamEntry]:
        who = ("GROUP", self._member.group, self._member.consumer)
        places = ("STREAMS", *part, *[">"] * len(part))
        try:
            reply = await self.once(part[0], "XREADGROUP", *who, "COUNT", count, *self.block(wait), *places)
        except BaseException:
            for stream in part:
                self._members[stream].lost_a_reply()
            raise
        new = []
        for stream, entries in _streams_of(reply):
            member = self._members[self.name(stream)]
            if member.received(entries[0][0], entries[-1][0]):
                self._began_again(member, f"at {text_of(entries[0][0])}")
            new += [_entry_of(stream, each[0], each[1], 1) for each in entries]
        return new

    async def _delivered_again(self, part: Part, count: int, *, look: bool) -> list[StreamEntry]:
        entries: list[StreamEntry] = []
        while not entries:
            for stream in part:
                self._redelivered[stream] += await self._run(self._members[stream].delivered_again(count, look=look))
            if not any(self._redelivered[stream] for stream in part):
                break
            for stream in part:
                await self._move_dead_letters(stream)
            for stream in part:
                name = self.client.get_encoder().decode(stream)  # as in the replies to this client
                entries += [
                    _entry_of(name, each.id, each.fields, each.deliveries) for each in self._redelivered.pop(stream)
                ]
        if entries and look:
            self.look_soon()  # there may be more
        return entries

    async def _run(self, steps: Steps[T]) -> T:
        try:
            script = next(steps)
            while True:
                script = steps.send(await self._script(script))
        except StopIteration as done:
            result: T = done.value
            return result

    async def _script(self, script: Script) -> Any:
        text, digest = scripts.source(script.name)
        words = (len(script.keys), *script.keys, *script.arguments)
        try:
            return await self.client.evalsha(digest, *words)
        except exceptions.NoScriptError:
            return await self.client.eval(text, *words)

    # ----------------------------------------------------------------------------------------------------- dead letters

    async def _move_dead_letters(self, stream: Key) -> None:
        most, redelivered = self._member.max_deliveries, self._redelivered[stream]
        for entry in [each for each in redelivered if most is not None and each.deliveries > most]:
            await self._run(self._members[stream].move_to_dead_letters(entry, self._dead_letter_of(stream)))
            redelivered.remove(entry)

    def _dead_letter_of(self, stream: Key) -> Key:
        if self._member.dead_letter is not None:
            return self.name(self._member.dead_letter)
        # On a cluster both must be in one slot: what is between braces decides.
        suffix = DEAD_LETTER_SUFFIX.encode()
        tagged = b"{" in stream and len(self.parts([stream, stream + suffix])) == 1
        return (stream if tagged or not self.is_cluster else b"{" + stream + b"}") + suffix

    def _same_slot(self, stream: Key) -> None:
        if self._member.max_deliveries is None or not self.is_cluster:
            return
        place = self._dead_letter_of(stream)
        if len(self.parts([stream, place])) > 1:
            raise SettingsError(
                f"The dead letters {text_of(place)!r} and the stream {text_of(stream)!r} are in different slots of the "
                "cluster, so that an entry cannot be moved in one step.",
                hint=f"Name the same slot in braces: dead_letter='{{{text_of(stream)}}}{DEAD_LETTER_SUFFIX}'.",
            )

    # --------------------------------------------------------------------------------------------------- ack, give back

    async def ack(self, entries: Sequence[StreamEntry]) -> int:
        """XACK, one a stream."""
        done = 0
        for stream, ids in by_stream(entries, "identifier").items():
            acknowledge = partial(self.client.xack, stream, self._member.group, *ids)
            done += await self.with_retries(acknowledge, stream)
        return done

    async def give_back(self, entries: Sequence[StreamEntry], *, undelivered: bool) -> int:
        """Put entries that are still this member's where all members look."""
        returned = 0
        for stream, ids in by_stream(entries, "identifier").items():
            member = self._members[self.name(stream)]

            async def return_them(member: RedisMember = member, ids: list[Any] = ids) -> int:
                return await self._run(member.give_back(ids, undelivered=undelivered))

            with suppress(exceptions.ResponseError):  # the group is gone: nothing is pending, nor to be given back
                returned += await self.with_retries(return_them, stream)
        self.look_soon()
        return returned


class RedisEntries:
    """Streams of Redis by their keys, of any writer."""

    noun: ClassVar[str] = "a key of Redis"
    clients: ClassVar[str] = 'weft.Redis("localhost"), weft.RedisCluster("localhost", 7000)'

    @staticmethod
    def takes(client: object) -> bool:
        return isinstance(client, Redis | RedisCluster)

    @staticmethod
    def open(client: Any, membership: Membership | None) -> RedisReader:
        return RedisReader(client) if membership is None else RedisGroupReader(client, membership)
