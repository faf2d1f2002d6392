"""Streams of Redis, read by a member of a group.

What a member was given is in the group's list of pending entries until it is acknowledged. An entry that is given back
is put there under a name that no member has, where every member looks for more."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from redis import exceptions

from weft.consumers.entries import StreamEntry
from weft.consumers.reader import Membership, Part
from weft.consumers.redis_reader import (
    BEGINNING,
    Key,
    RedisReader,
    by_stream,
    check_identifier,
    entry_of,
    order_of,
    text_of,
)
from weft.errors import NotFoundError, SettingsError
from weft.streams.declare import DEAD_LETTER_SUFFIX

_log = logging.getLogger("weft.consumers")
GIVEN_BACK = "weft:given-back"
# So idle that every client that claims idle entries may have them.
_IDLE_MILLISECONDS = 86_400_000
# More would not fit the stack of a script.
_MAX_CLAIMED = 1000

# Each is one step for the server: a member never gives back, takes or buries what another has claimed meanwhile.
_GIVE_BACK = f"""
local given = 0
for i = 4, #ARGV do
  local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])[1]
  if held then
    redis.call('XCLAIM', KEYS[1], ARGV[1], '{GIVEN_BACK}', 0, ARGV[i],
      'IDLE', {_IDLE_MILLISECONDS}, 'RETRYCOUNT', math.max(0, held[4] - ARGV[3]), 'JUSTID')
    given = given + 1
  end
end
return given
"""
# Also what is this member's already: it has asked for the same before, and the reply was lost.
_TAKE = f"""
local ids = {{}}
for i = 3, #ARGV do
  local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)[1]
  if held and (held[2] == '{GIVEN_BACK}' or held[2] == ARGV[2]) then ids[#ids + 1] = ARGV[i] end
end
if #ids == 0 then return {{0, {{}}}} end
return {{#ids, redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, unpack(ids))}}
"""
_DELIVERIES = """
local counts = {}
for i = 3, #ARGV do
  local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])[1]
  counts[i - 2] = held and held[4] or 0
end
return counts
"""
# The stack of a script has room for so many names and values; the entry itself stays where it is, whole.
_BURY = """
if not redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])[1] then return end
local entry = redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3])[1]
if entry then
  redis.call('XADD', KEYS[2], '*', '_stream', KEYS[1], '_group', ARGV[1], '_id', ARGV[3], '_deliveries', ARGV[4],
    unpack(entry[2], 1, math.min(#entry[2], 7000)))
end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
"""


class RedisGroupReader(RedisReader):
    """Reads with XREADGROUP: first this member's backlog if it is asked for, then what was given back or is idle, then
    new entries."""

    def __init__(self, client: Any, membership: Membership) -> None:
        super().__init__(client)
        if membership.group_start != "$":
            check_identifier(membership.group_start)
        self._member = membership
        self.held_for: float | None = membership.claim_idle
        self.skipped = 0
        self.recovered = 0
        self._starts: dict[Key, str] = {}
        self._backlogs: dict[Key, str] = {}
        """The pending entries of this member after these are to be read before anything else."""
        self._taking: dict[Key, list[Any]] = {}
        self._claim_from: dict[Key, Any] = {}
        # What was delivered again stays here until it is handed on: a request that fails after it must not hide it.
        self._given: defaultdict[Part, deque[tuple[Any, list[Any]]]] = defaultdict(deque)
        self._counted: defaultdict[Part, list[StreamEntry]] = defaultdict(list)

    async def begin(self, stream: Key, identifier: Any) -> None:
        """Join the group, or create it."""
        self._same_slot(stream)
        await self.patiently(lambda: self._start_of(stream))
        await self.patiently(lambda: self._join(stream))
        if identifier is not None and text_of(identifier) != ">":
            self._backlogs[stream] = check_identifier(identifier)
        elif self._member.start_from_backlog:
            self._backlogs[stream] = BEGINNING

    async def _join(self, stream: Key) -> bool:
        """Whether the group had to be created."""
        member, created = self._member, False
        while (delivered := await self._last_delivered(stream)) is None:
            if not member.auto_create:
                raise NotFoundError(
                    f"The stream {text_of(stream)!r} has no group {text_of(member.group)!r}.",
                    hint="auto_create=True creates it, at group_start.",
                )
            start = await self._start_of(stream)
            try:
                await self.client.xgroup_create(stream, member.group, start, mkstream=True)
                created = True
            except exceptions.ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):  # another member was faster
                    raise
        # What is given to this member from now on comes after this entry.
        self._positions[stream] = delivered
        return created

    async def _last_delivered(self, stream: Key) -> str | None:
        try:
            groups = await self.client.xinfo_groups(stream)
        except exceptions.ResponseError as error:
            if "no such key" in str(error):
                return None
            raise
        for group in groups:
            if text_of(group["name"]) == text_of(self._member.group):
                return text_of(group["last-delivered-id"])
        return None

    async def _start_of(self, stream: Key) -> str:
        """Where the group begins, now and whenever it is created again: entries that are added after this consumer
        began are never missed."""
        last = await self.last_identifier(stream) or BEGINNING
        if stream not in self._starts:
            self._starts[stream] = last if self._member.group_start == "$" else self._member.group_start
        elif order_of(last) < order_of(self._starts[stream]):
            self._starts[stream] = BEGINNING  # the stream itself began anew
        return self._starts[stream]

    # ------------------------------------------------------------------------------------------------------------ read

    async def read(self, part: Part, count: int, wait: float) -> list[StreamEntry]:
        """What there is, in the order that the class names. Nothing means that there is nothing of either kind."""
        while True:
            try:
                return await self.patiently(lambda: self._read(part, count, wait))
            except exceptions.ResponseError as error:
                # The second is what a request hears that waits while the stream is removed.
                if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                    raise
            await self.patiently(lambda: self._recover(part))

    async def _recover(self, part: Part) -> None:
        """Create the groups again that are gone: by hand, by a flush, or by a restart that kept nothing."""
        for stream in part:
            if await self._join(stream):
                self.recovered += 1
                self._backlogs.pop(stream, None)
                _log.warning(
                    "the group %s of stream %s was gone; it begins again after %s",
                    text_of(self._member.group),
                    text_of(stream),
                    self._starts[stream],
                )

    async def _read(self, part: Part, count: int, wait: float) -> list[StreamEntry]:
        found = await self._delivered_again(part) or await self._backlog(part, count)
        looked = not found and self.looks(part)
        if looked:
            found = await self._claim(part, count)
        found = found or await self._new(part, count, wait)
        if not found and not looked:
            found = await self._claim(part, count)
        return found

    async def _new(self, part: Part, count: int, wait: float) -> list[StreamEntry]:
        try:
            reply = await self._request(part, count, [">"] * len(part), self.block(wait))
        except BaseException:
            # The server may have given entries in a reply that was lost: they are pending, and come first.
            for stream in part:
                self._backlogs.setdefault(stream, self._positions[stream])
            raise
        found = []
        for stream, entries in by_stream(reply):
            self._positions[self.name(stream)] = text_of(entries[-1][0])
            found += [entry_of(stream, each[0], each[1], 1) for each in entries]
        return found

    async def _backlog(self, part: Part, count: int) -> list[StreamEntry]:
        """The next pending entries of this member."""
        found: list[StreamEntry] = []
        while not found and (streams := [stream for stream in part if stream in self._backlogs]):
            reply = await self._request(streams, count, [self._backlogs[stream] for stream in streams], ())
            for stream, entries in by_stream(reply):
                key = self.name(stream)
                if not entries:
                    del self._backlogs[key]
                    continue
                self._given[part].append((stream, entries))
                self._backlogs[key] = text_of(entries[-1][0])
                # A reply that was lost had these: the next one that is lost has others.
                self._positions[key] = max(self._positions[key], self._backlogs[key], key=order_of)
            found = await self._delivered_again(part)
        return found

    async def _request(self, streams: Sequence[Key], count: int, after: list[str], block: tuple[Any, ...]) -> Any:
        who = ("GROUP", self._member.group, self._member.consumer)
        return await self.once(streams[0], "XREADGROUP", *who, "COUNT", count, *block, "STREAMS", *streams, *after)

    async def _claim(self, part: Part, count: int) -> list[StreamEntry]:
        """What was given back, and what any member has held for too long."""
        for stream in part:
            given = self._given[part].append
            given((self._as_given(stream), await self._take_given_back(stream, min(count, _MAX_CLAIMED))))
            if self._member.claim_idle is not None:
                given((self._as_given(stream), await self._claim_idle(stream, min(count, _MAX_CLAIMED))))
        found = await self._delivered_again(part)
        if found:
            self.look_soon()  # there may be more
        return found

    async def _take_given_back(self, stream: Key, count: int) -> list[Any]:
        member = self._member
        if stream not in self._taking:
            pending = await self.client.xpending_range(stream, member.group, "-", "+", count, GIVEN_BACK)
            if not pending:
                return []
            self._taking[stream] = [each["message_id"] for each in pending]
        ids = self._taking[stream]
        taken, entries = await self._script(_TAKE, stream, member.group, member.consumer, *ids)
        del self._taking[stream]
        self.skipped += taken - len(entries)
        return list(entries)

    async def _claim_idle(self, stream: Key, count: int) -> list[Any]:
        member = self._member
        idle, begin = member.claim_idle or 0, self._claim_from.get(stream, BEGINNING)
        entries: list[Any] = []
        while not entries:  # a request looks at a part of the pending entries only
            begin, entries, *gone = await self.client.xautoclaim(
                stream, member.group, member.consumer, idle, begin, count=count
            )
            self.skipped += sum(map(len, gone))
            self._claim_from[stream] = begin
            if text_of(begin) == BEGINNING:
                break
        return entries

    async def _delivered_again(self, part: Part) -> list[StreamEntry]:
        """What was given, with how often it was delivered."""
        given = self._given[part]
        while given:
            self._counted[part] += await self._count(*given[0])
            given.popleft()
        return self._counted.pop(part, [])

    async def _count(self, stream: Any, entries: Sequence[Any]) -> list[StreamEntry]:
        """Entries with their deliveries, without those that are deleted, which have no fields, and those to be
        buried."""
        member, left = self._member, [each for each in entries if each[1]]
        gone = [each[0] for each in entries if not each[1]]
        if gone:
            self.skipped += await self.client.xack(stream, member.group, *gone)
        if not left:
            return []
        counts = await self._script(_DELIVERIES, stream, member.group, member.consumer, *(each[0] for each in left))
        found = []
        for (identifier, fields), deliveries in zip(left, counts, strict=True):
            if member.max_deliveries is not None and deliveries > member.max_deliveries:
                await self._bury(stream, identifier, deliveries - 1)
            elif deliveries:  # else it is not this member's any more
                found.append(entry_of(stream, identifier, fields, deliveries))
        return found

    async def _script(self, text: str, stream: Any, *arguments: Any) -> Any:
        return await self.client.eval(text, 1, stream, *arguments)

    def _as_given(self, stream: Key) -> Any:
        """The name as replies of this client have it."""
        return self.client.get_encoder().decode(stream)

    # ----------------------------------------------------------------------------------------------------- dead letters

    async def _bury(self, stream: Any, identifier: Any, deliveries: int) -> None:
        member, place = self._member, self._dead_letter_of(self.name(stream))
        await self.client.eval(_BURY, 2, stream, place, member.group, member.consumer, identifier, deliveries)

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
            done += await self.patiently(partial(self.client.xack, stream, self._member.group, *ids))
        return done

    async def give_back(self, entries: Sequence[StreamEntry], *, undelivered: bool) -> int:
        """Put entries that are still this member's where all members look."""
        member, given = self._member, 0
        for stream, ids in _by_stream(entries).items():
            arguments = (stream, member.group, member.consumer, int(undelivered), *ids)
            try:
                given += await self.patiently(partial(self._script, _GIVE_BACK, *arguments))
            except exceptions.ResponseError as error:
                if not str(error).startswith("NOGROUP"):  # then nothing is pending, nor to be given back
                    raise
        self.look_soon()
        return given


def _by_stream(entries: Sequence[StreamEntry]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = defaultdict(list)
    for entry in entries:
        found[entry.stream].append(entry.identifier)
    return found
