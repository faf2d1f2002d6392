"""Keys of Redis, read page by page. See `weft.systems.pages`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import pyarrow as pa

from weft.errors import ConnectionFailedError, SettingsError, WeftError
from weft.systems.base import require
from weft.systems.entries import Membership
from weft.systems.pages import FeedPage, FieldNames, PageFeed, Rejected
from weft.systems.redis import scripts
from weft.systems.redis.client import Client, run_with_retries
from weft.systems.redis.connection import RedisConnection
from weft.systems.redis.group_member import (
    BEGINNING,
    GROUP_GONE,
    LARGEST,
    LOOK_SECONDS,
    Redelivered,
    RedisMember,
    Script,
    Steps,
    is_id,
    order_of,
    text_of,
)
from weft.systems.redis.quarantine import Quarantine, is_quarantine, quarantine_of
from weft.systems.redis.resp import Bytes, EntryPage, count_of, encode, guess_last_id, page_of, page_of_entries
from weft.systems.redis.wire import Key, ReplyError, Wire, Word

T = TypeVar("T")
_log = logging.getLogger("weft.dataframes")
# A page is as many entries as make about so many bytes; the first shows how large they are. On two cores, reads in
# pages of 1 or 2 MB took twice as long in two of five rounds, as if Redis and we took turns; of 4 MB in one.
_FIRST_PAGE, _LARGEST_PAGE, _PAGE_BYTES = 512, 32_768, 4_000_000
_ACKS_A_COMMAND = 5_000
_NOTHING = (b"*-1\r\n", b"$-1\r\n", b"_\r\n")


def _check_range(start: str, end: str) -> None:
    """Raise for a text that is not an id, before Redis is asked."""
    for name, value, words in (("start_id", start, ("-", "$")), ("end_id", end, ("-", "+"))):
        if not isinstance(value, str) or not (value in words or is_id(value.removeprefix("("))):
            listed = ", ".join(repr(word) for word in words)
            raise SettingsError(
                f"{name} is {value!r}, which is not the id of an entry.",
                hint=f"Such as '1704067200000-0', or {listed}.",
            )


class _RedisFeed(PageFeed):
    def __init__(self, wire: Wire, stream: Key, names: FieldNames) -> None:
        self.wire, self.stream = wire, stream
        self._names = names
        self._quarantine: Quarantine | None = None
        self._heading = b"*1\r\n*2\r\n" + encode(stream).partition(b"\r\n")[2]
        self._bytes_a_row = _PAGE_BYTES / _FIRST_PAGE

    @property
    def name(self) -> str:
        return text_of(self.stream)

    @property
    def page_size(self) -> int:
        fitting = max(1, min(_LARGEST_PAGE, int(_PAGE_BYTES / self._bytes_a_row)))
        # A power of two, so that it seldom changes: the page that was asked for ahead must be as large as this one.
        return 1 << (fitting.bit_length() - 1)

    def close(self) -> None:
        try:
            self.wire.close()
        finally:
            self.close_quarantine()

    def close_quarantine(self) -> None:
        """Let go of the connection to the quarantine, if there is one."""
        if self._quarantine is not None:
            self._quarantine.close()

    def _entries(self, reply: Bytes) -> Bytes | None:
        """Return the array of entries in a reply to XREAD or XREADGROUP; `None` where there is none."""
        begin = len(self._heading)
        if reply[:begin].tobytes() == self._heading:
            return reply[begin:]
        if reply[:8].tobytes() in _NOTHING:
            return None
        # To take it for nothing would be to hide entries that are this consumer's.
        raise WeftError(f"Redis answered {reply[:60].tobytes()!r} where entries of {self.name!r} were asked for.")

    def _page(self, entries: Bytes) -> EntryPage:
        page = page_of(entries, *self._names)
        if len(page) > 0:
            self._bytes_a_row = len(entries) / len(page)
        return page

    def reject(self, rejected: Sequence[Rejected]) -> None:
        if self._quarantine is None:
            self._quarantine = Quarantine(self.wire, self.stream)
        self._quarantine.put(rejected)


class RangeFeed(_RedisFeed):
    """The entries between two ids; those that come later too, where the end is open."""

    def __init__(self, wire: Wire, stream: Key, names: FieldNames, start: str, end: str) -> None:
        _check_range(start, end)
        super().__init__(wire, stream, names)
        self._start, self._end = start, end
        self._expected: tuple[str, int] | None = None
        """The page that was asked for already: where it begins, and how many entries it may have."""
        self._reached: str | None = None
        """The last id that the stream is known to have had."""
        self._added: int | None = None
        """How many entries the stream was given up to the last one that was read, where that is known."""
        self._look_at = 0.0
        self.reply: Bytes
        """The reply of the last page. It is valid until the next fetch."""

    def begin(self) -> None:
        """Fix where `$` is: after what is there now."""
        if self._start == "$":
            about = self.wire.extent(self.stream)
            self._reached, self._added = about.last, about.added
            self._start = f"({self._reached}"

    def fetch(self, limit: int, wait_seconds: float | None, more: bool = True) -> EntryPage | None:
        self.begin()
        if self._reached == f"{LARGEST}-{LARGEST}":
            self.finished = True
            return None
        if self._added is None and self._reached is None and wait_seconds != 0 and _before(self._start) == BEGINNING:
            about = self.wire.extent(self.stream)
            self._added = about.added - about.length  # nobody expects those that are gone already
        page = self._range(limit, more)
        if len(page) == 0 and wait_seconds != 0:
            is_over = self._end != "+" and order_of(self.wire.last_id(self.stream)) >= _last_of(self._end)
            if not is_over:
                page = self._wait(limit, wait_seconds)
            if self._end != "+":  # what came may be after it; or before it, between the two questions
                page = self._range(limit, more)
            self.finished = is_over and len(page) == 0
        if len(page) == 0:
            if wait_seconds != 0:
                self._look_for_a_new_beginning()
            return None
        self._added = None if self._added is None else self._added + len(page)
        self._reached = page.ids[-1].as_py()
        self._start = f"({self._reached}"
        return page

    def reject(self, rejected: Sequence[Rejected]) -> None:
        self._expected = None  # the connection is needed for something else, so its reply is let go
        super().reject(rejected)

    def _look_for_a_new_beginning(self) -> None:
        """Begin at the start if the stream was removed and created again, with ids below those that were read. Warn of
        entries that were removed before they were read."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_SECONDS
        about, reached = self.wire.extent(self.stream), order_of(self._reached or BEGINNING)
        if order_of(about.last) < reached:
            _log.warning(
                "the stream %r began again: it ends before %s, and is read from its start", self.name, self._reached
            )
            self._start, self._reached, self._added = "-", None, 0
        elif order_of(about.newest) <= reached:  # none is left to be read
            if self._added is not None and about.added > self._added:
                lost = about.added - self._added
                _log.warning("%d entries of %r were removed before they were read.", lost, self.name)
            self._added = about.added

    def _range(self, limit: int, more: bool) -> EntryPage:
        if self._expected is None or self._expected[0] != self._start or self._expected[1] > limit:
            self._send(self._start, limit)
        try:
            reply = self.wire.receive()
        except ReplyError as error:
            raise self.wire.explained(error) from None
        assert self._expected is not None
        self.reply = reply
        self.drained = count_of(reply) < self._expected[1]
        self._expected = None
        # Redis works on the next page while this one is taken apart.
        guess = guess_last_id(reply) if more and not self.drained else None
        if guess is not None:
            self._send(f"({guess}", limit)
        return self._page(reply)

    def _send(self, start: str, limit: int) -> None:
        self._expected = (start, limit)
        self.wire.send("XRANGE", self.stream, start, self._end, "COUNT", limit)

    def _wait(self, limit: int, seconds: float | None) -> EntryPage:
        after = _before(self._start)
        block = 0 if seconds is None else max(1, int(seconds * 1000))
        words = ("XREAD", "COUNT", limit, "BLOCK", block, "STREAMS", self.stream, after)
        try:
            entries = self._entries(self.wire.ask(*words, wait_seconds=seconds))
        except ReplyError as error:
            raise self.wire.explained(error) from None
        return EntryPage(pa.array([], pa.string())) if entries is None else self._page(entries)


def _before(start: str) -> str:
    """Return the last id before a range's start."""
    if start.startswith("("):
        return start[1:]
    if start == "-":
        return BEGINNING
    ms, _, sequence = start.partition("-")
    if int(sequence or 0) > 0:
        return f"{ms}-{int(sequence) - 1}"
    return f"{int(ms) - 1}-{LARGEST}" if int(ms) > 0 else BEGINNING


def _last_of(end: str) -> tuple[int, int]:
    """Return the order of the last id that a range with an end can have."""
    if end == "-":
        return order_of(BEGINNING)
    identifier = end.removeprefix("(")
    whole = identifier if "-" in identifier else f"{identifier}-{LARGEST}"
    return order_of(_before(whole) if end.startswith("(") else whole)


# Where each group was when this process last saw it: a read is a member for a moment only.
_positions: dict[tuple[RedisConnection, Key, str], str] = {}


class GroupFeed(_RedisFeed):
    """The entries that a consumer of a group is given."""

    def __init__(
        self,
        wire: Wire,
        stream: Key,
        names: FieldNames,
        membership: Membership,
        *,
        iterates: bool,
        confirms: bool,
    ) -> None:
        start = membership.group_start
        _check_range(start, "+")
        super().__init__(wire, stream, names)
        self._member = RedisMember(stream, replace(membership, group_start="$" if start == "$" else _before(start)))
        self._place = (wire.connection, stream, text_of(membership.group))
        self._iterates = iterates
        self._confirms = confirms
        self._look_at = 0.0
        self._fetched = pa.array([], pa.string())
        self._unconfirmed: list[str] = []

    def begin(self) -> None:
        """Find the group, or create it, if it may be."""
        self._join()

    def _join(self, *, was_gone: bool = False) -> None:
        known = _positions.get(self._place)  # first: another thread may read on meanwhile
        try:
            created = self._run(self._member.join())
        except ReplyError as error:
            raise self.wire.explained(error) from None
        position = self._member.position
        if was_gone or (known is not None and (created or order_of(position) < order_of(known))):
            self._warn_of_a_new_beginning(f"after {position}")
        _positions[self._place] = position

    def _warn_of_a_new_beginning(self, place: str) -> None:
        _log.warning(
            "The group %r of %r was gone, or was set back: it begins again %s, and entries may be delivered again.",
            text_of(self._member.group),
            self.name,
            place,
        )

    def fetch(self, limit: int, wait_seconds: float | None, more: bool = True) -> FeedPage | None:
        """Return the next entries: those that were given back or that idle members left, then new ones."""
        ends = math.inf if wait_seconds is None else time.monotonic() + wait_seconds
        while True:
            again = self._with_group(lambda: self._delivered_again(limit))
            if again:
                self.drained = False
                page = page_of_entries([(each.id, each.fields) for each in again], *self._names)
                page.deliveries = [each.deliveries for each in again]
                return self._remember(page)
            connected, left = self.wire.connected, ends - time.monotonic()
            # Not longer: nobody announces what is released or becomes idle meanwhile.
            wait = max(0.0, min(left, LOOK_SECONDS))
            try:
                reply = self._with_group(partial(self._new, limit, wait))
            except ConnectionFailedError:  # an iteration that nobody waits for goes on later
                self._member.lost_a_reply()
                raise
            if connected != self.wire.connected:
                # The reply to the first try may be lost, and with it entries that are this consumer's now.
                self._member.lost_a_reply()
                continue
            entries_of = self._entries(reply)
            # A read looks once more at its end, an iteration with the next fetch.
            if entries_of is not None or left <= (LOOK_SECONDS if self._iterates else 0):
                break
        if not self._iterates:
            self._look_at = math.inf  # else a read would be given what it has itself
        self.drained = entries_of is None or count_of(entries_of) < limit
        if entries_of is None:
            return None
        page = self._page(entries_of)
        first, last = page.ids[0].as_py(), page.ids[-1].as_py()
        if self._member.received(first, last):
            self._warn_of_a_new_beginning(f"at {first}")
        _positions[self._place] = self._member.position
        return self._remember(page)

    def _delivered_again(self, limit: int) -> list[Redelivered]:
        look = time.monotonic() >= self._look_at
        skipped = self._member.skipped
        again = self._run(self._member.delivered_again(limit, look=look))
        if deleted := self._member.skipped - skipped:
            _log.warning("%d entries of %r were deleted before they were acknowledged.", deleted, self.name)
        if look and not again and self._iterates:
            self._look_at = time.monotonic() + LOOK_SECONDS
        return again

    def _new(self, limit: int, wait_seconds: float) -> Bytes:
        block: tuple[Word, ...] = ("BLOCK", max(1, int(wait_seconds * 1000))) if wait_seconds > 0 else ()
        member = ("GROUP", self._member.group, self._member.consumer)
        words = (*member, "COUNT", limit, *block, "STREAMS", self.stream, ">")
        return self.wire.ask("XREADGROUP", *words, wait_seconds=wait_seconds)

    def _remember(self, page: FeedPage) -> FeedPage:
        self._fetched = page.ids
        if self._confirms:
            self._unconfirmed += page.ids.to_pylist()  # the rejected ones too, which does no harm
        return page

    def reject(self, rejected: Sequence[Rejected]) -> None:
        """Put entries into the quarantine, and acknowledge them: nobody else can, since no frame has them."""
        super().reject(rejected)
        self._acknowledge([each.id for each in rejected])

    def confirm(self) -> None:
        ids, self._unconfirmed = self._unconfirmed, []
        self._acknowledge(ids)

    def settle(self) -> None:
        self.wire.settle()

    def give_back(self) -> None:
        """Let any member have what was fetched last. In a process that was forked it is the parent's."""
        ids, self._fetched = self._fetched.to_pylist(), self._fetched[:0]
        if not self.wire.is_own:
            return
        try:
            self._run(self._member.give_back(ids, undelivered=True))
        except (ReplyError, WeftError) as error:
            _log.warning("%d entries of %r that nobody saw are left to be claimed: %s", len(ids), self.name, error)

    def _acknowledge(self, ids: Sequence[str]) -> None:
        for begin in range(0, len(ids), _ACKS_A_COMMAND):
            self.wire.post("XACK", self.stream, self._member.group, *ids[begin : begin + _ACKS_A_COMMAND])

    def _with_group(self, request: Callable[[], T]) -> T:
        """Return the reply to a request. Create the group again if it is gone: by a removal, a flush or a restart."""
        while True:
            try:
                return request()
            except ReplyError as error:
                if not str(error).startswith(GROUP_GONE):
                    raise self.wire.explained(error) from None
            self._join(was_gone=True)

    def _run(self, steps: Steps[T]) -> T:
        try:
            script = next(steps)
            while True:
                script = steps.send(self._script(script))
        except StopIteration as done:
            result: T = done.value
            return result

    def _script(self, script: Script) -> object:
        text, digest = scripts.source(script.name)
        words = (len(script.keys), *script.keys, *script.arguments)
        try:
            return self.wire.run("EVALSHA", digest, *words)
        except ReplyError as error:
            if not str(error).startswith("NOSCRIPT"):
                raise
            return self.wire.run("EVAL", text, *words)


class ManyFeed(PageFeed):
    """One stream after the other, over one connection: where a cluster has them on several nodes, it moves."""

    def __init__(self, wire: Wire, streams: Sequence[Key], names: FieldNames, start: str, end: str) -> None:
        _check_range(start, end)
        self.wire = wire
        self._feeds = [RangeFeed(wire, stream, names, start, end) for stream in streams]

    @property
    def name(self) -> str:
        return self._feeds[0].name

    @property
    def page_size(self) -> int:
        return self._feeds[0].page_size if self._feeds else _FIRST_PAGE

    def fetch(self, limit: int, wait_seconds: float | None, more: bool = True) -> FeedPage | None:
        """Return the next page of the stream whose turn it is, or of the next one that has some."""
        while self._feeds:
            feed = self._feeds[0]
            page = None if feed.drained else feed.fetch(limit, 0, more)
            if page is not None:
                return page
            del self._feeds[0]
            feed.close_quarantine()
        self.drained = self.finished = True
        return None

    def reject(self, rejected: Sequence[Rejected]) -> None:
        self._feeds[0].reject(rejected)

    def close(self) -> None:
        self.wire.close()
        for feed in self._feeds:
            feed.close_quarantine()


class RedisPages:
    """Streams of Redis by their keys, of any writer."""

    def __init__(self, connection: RedisConnection) -> None:
        require("hiredis", connection.kind)  # which parses replies
        self.connection = connection

    def read_range(
        self, stream: object, names: FieldNames, start: str, end: str, stopped: Callable[[], bool] = lambda: False
    ) -> PageFeed:
        key = _key(stream)
        return RangeFeed(Wire(self.connection, key, stopped), key, names, start, end)

    def read_group(
        self,
        stream: object,
        names: FieldNames,
        membership: Membership,
        *,
        iterates: bool,
        confirms: bool,
        stopped: Callable[[], bool],
    ) -> PageFeed:
        key = _key(stream)
        wire = Wire(self.connection, key, stopped)
        return GroupFeed(wire, key, names, membership, iterates=iterates, confirms=confirms)

    def read_matching(self, pattern: str, names: FieldNames, start: str, end: str) -> PageFeed:
        """Open every stream whose key matches a pattern, in the order of the keys; not the quarantine of one."""

        def find(client: Client) -> tuple[set[bytes], set[bytes]]:
            keys = set(client.scan_iter(match=pattern, count=1000, _type="stream"))
            named_so = keys & {quarantine_of(key) for key in keys}
            return keys, {key for key in named_so if is_quarantine(client.xrange(key, count=1))}

        keys, aside = run_with_retries(self.connection, find)
        streams = [_text_or_bytes(key) for key in sorted(keys - aside)]
        return ManyFeed(Wire(self.connection, streams[0] if streams else pattern), streams, names, start, end)

    def partition(self, stream: object, start: str, end: str, count: int) -> list[tuple[str, str]]:
        key = _key(stream)
        with closing(Wire(self.connection, key)) as wire:
            return partition(wire, key, start, end, count)

    def acknowledge(self, stream: object, group: str, ids: Sequence[str]) -> int:
        key, acknowledged = _key(stream), 0
        for each in ids:
            if not is_id(each):
                raise SettingsError(f"{each!r} is not the id of an entry.", hint='frame["_id"] has those of its rows.')
        place = self.connection.resolved(), key
        wire = _idle.pop(place, None) or Wire(self.connection, key)
        try:
            for begin in range(0, len(ids), _ACKS_A_COMMAND):
                acknowledged += wire.query("XACK", key, group, *ids[begin : begin + _ACKS_A_COMMAND])
        except BaseException:
            wire.close()
            raise
        if len(_idle) < _MOST_IDLE and _idle.setdefault(place, wire) is wire:
            return acknowledged
        wire.close()
        return acknowledged


# For the next call: a connection takes longer than an acknowledgement.
_idle: dict[tuple[RedisConnection, Key], Wire] = {}
_MOST_IDLE = 16


def _key(stream: object) -> Key:
    if not isinstance(stream, str | bytes) or not stream:
        raise SettingsError(f"A stream of Redis is named by its key, not by {stream!r}.")
    return stream


def _text_or_bytes(key: bytes) -> Key:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key


def partition(wire: Wire, stream: Key, start: str, end: str, count: int) -> list[tuple[str, str]]:
    """Return up to so many ranges of ids, of about the same time, that hold all entries."""
    first = wire.query("XRANGE", stream, start, end, "COUNT", 1)
    last = wire.query("XREVRANGE", stream, end, start, "COUNT", 1)
    if not first or not last:
        return []
    (first_id, _), (last_id, _) = first[0], last[0]
    least, most = (int(each.partition(b"-")[0]) for each in (first_id, last_id))
    parts = min(count, most - least + 1)
    edges = [least + number * (most - least + 1) // max(parts, 1) for number in range(parts + 1)]
    return [
        (
            first_id.decode() if begin == least else f"{begin}-0",
            last_id.decode() if following == most + 1 else f"{following - 1}-{LARGEST}",
        )
        for begin, following in pairwise(edges)
    ]
