"""Streams of Redis, read by a member of a group.

What a member was given is in the group's list of pending entries until it is acknowledged. An entry that is given back
is put there under a name that no member has, where every member looks for more."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeVar

from redis import exceptions
from redis.asyncio import Redis, RedisCluster

from weft.errors import SettingsError
from weft.systems.entries import Membership, Part, StreamEntry
from weft.systems.log import DEAD_LETTER_SUFFIX
from weft.systems.redis import scripts
from weft.systems.redis.entry_reader import Key, RedisReader, by_stream, check_identifier, entry_of
from weft.systems.redis.group_member import Member, Redelivered, Script, Steps, text_of

T = TypeVar("T")
_log = logging.getLogger("weft.consumers")


class RedisGroupReader(RedisReader):
    """Reads with XREADGROUP: this member's backlog if it is asked for, entries that were given back or are idle, new
    ones."""

    def __init__(self, client: Any, membership: Membership) -> None:
        super().__init__(client)
        if membership.group_start != "$":
            check_identifier(membership.group_start)
        self._member = membership
        self._members: dict[Key, Member] = {}
        self.held_for: float | None = membership.claim_idle
        self.recovered = 0
        # What was delivered again stays here until it is handed on: a request that fails after it must not hide it.
        self._redelivered: defaultdict[Key, list[Redelivered]] = defaultdict(list)

    @property
    def skipped(self) -> int:
        return sum(member.skipped for member in self._members.values())

    async def begin(self, stream: Key, identifier: Any) -> None:
        """Join the group, or create it."""
        self._same_slot(stream)
        member = Member(stream, self._member)
        if identifier is not None and text_of(identifier) != ">":
            member.begin_with_own(check_identifier(identifier))
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
                self.recovered += 1
                _log.warning(
                    "the group %s of stream %s was gone; it begins again after %s",
                    text_of(member.group),
                    text_of(stream),
                    member.start,
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
        for stream, entries in by_stream(reply):
            self._members[self.name(stream)].received(entries[-1][0])
            new += [entry_of(stream, each[0], each[1], 1) for each in entries]
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
                    entry_of(name, each.id, each.fields, each.deliveries) for each in self._redelivered.pop(stream)
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
        for stream, ids in _by_stream(entries).items():
            acknowledge = partial(self.client.xack, stream, self._member.group, *ids)
            done += await self.with_retries(acknowledge, stream)
        return done

    async def give_back(self, entries: Sequence[StreamEntry], *, undelivered: bool) -> int:
        """Put entries that are still this member's where all members look."""
        returned = 0
        for stream, ids in _by_stream(entries).items():
            member = self._members[self.name(stream)]

            async def return_them(member: Member = member, ids: list[Any] = ids) -> int:
                return await self._run(member.give_back(ids, undelivered=undelivered))

            with suppress(exceptions.ResponseError):  # the group is gone: nothing is pending, nor to be given back
                returned += await self.with_retries(return_them, stream)
        self.look_soon()
        return returned


def _by_stream(entries: Sequence[StreamEntry]) -> dict[Any, list[Any]]:
    ids: dict[Any, list[Any]] = defaultdict(list)
    for entry in entries:
        ids[entry.stream].append(entry.identifier)
    return ids


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
