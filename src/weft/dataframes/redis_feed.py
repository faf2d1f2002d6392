"""Streams of Redis, read as batches of Arrow."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import pyarrow as pa

from weft.dataframes.layout import Layout, Rejected
from weft.dataframes.quarantine import Quarantine, quarantine_of
from weft.errors import SettingsError, WeftError
from weft.systems.entries import Membership
from weft.systems.redis import scripts
from weft.systems.redis.connection import RedisConnection
from weft.systems.redis.members import (
    BEGINNING,
    LARGEST,
    LOOK_SECONDS,
    VANISHED,
    Given,
    Member,
    Script,
    Steps,
    is_id,
    order_of,
    text_of,
)
from weft.systems.redis.resp import Bytes, Page, count_of, encode, guess_last_id, page_of, page_of_entries
from weft.systems.redis.wire import Key, ReplyError, Wire, Word

T = TypeVar("T")
_log = logging.getLogger("weft.dataframes")
# A page is as many entries as make about so many bytes; the first shows how large they are. On two cores, reads in
# pages of 1 or 2 MB took twice as long in two of five rounds, as if Redis and we took turns; of 4 MB in one.
_FIRST_PAGE, _LARGEST_PAGE, _PAGE_BYTES = 512, 32_768, 4_000_000
_ACKS_A_COMMAND = 5_000
_NOTHING = (b"*-1\r\n", b"$-1\r\n", b"_\r\n")


@dataclass(frozen=True)
class Window:
    """The milliseconds between which ids are wanted. The second pair holds for ids of 13 digits alone."""

    least_ms: int = 0
    most_ms: int = LARGEST
    least_of_13_digits: int = 0
    most_of_13_digits: int = LARGEST


def check_range(start: str, end: str) -> None:
    """Refuse what is no id, before Redis is asked."""
    for name, value, words in (("start_id", start, ("-", "+", "$")), ("end_id", end, ("-", "+"))):
        if not isinstance(value, str) or not (value in words or is_id(value.removeprefix("("))):
            listed = ", ".join(repr(word) for word in words)
            raise SettingsError(
                f"{name} is {value!r}, which is no id of an entry.", hint=f"Such as '1704067200000-0', or {listed}."
            )


class _RedisFeed:
    def __init__(self, wire: Wire, stream: Key, layout: Layout) -> None:
        self.wire, self.stream, self.layout = wire, stream, layout
        self.name = text_of(stream)
        self._quarantine: Quarantine | None = None
        self._heading = b"*1\r\n*2\r\n" + encode(stream).partition(b"\r\n")[2]
        self.finished = False
        self.drained = False
        self._bytes_a_row = _PAGE_BYTES / _FIRST_PAGE

    @property
    def page_size(self) -> int:
        """How many entries make a page of a reasonable size."""
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

    def confirm(self) -> None:
        """Nothing: without a group there is nothing to acknowledge."""

    def settle(self) -> None:
        """Nothing."""

    def give_back(self) -> None:
        """Nothing: without a group nobody is kept from it."""

    def _ask(self, *words: Word, wait_seconds: float | None = 0) -> Bytes:
        try:
            return self.wire.ask(*words, wait_seconds=wait_seconds)
        except ReplyError as error:
            raise self.wire.explained(error) from None

    def _entries(self, reply: Bytes) -> Bytes | None:
        """The array of entries in a reply to XREAD or XREADGROUP; `None` where there is none."""
        begin = len(self._heading)
        if reply[:begin].tobytes() == self._heading:
            return reply[begin:]
        if reply[:8].tobytes() in _NOTHING:
            return None
        # To take it for nothing would be to hide entries that are this consumer's.
        raise WeftError(f"Redis answered {reply[:60].tobytes()!r} where entries of {self.name!r} were asked for.")

    def _page(self, entries: Bytes) -> Page:
        page = page_of(entries, self.layout.taken, self.layout.fields)
        if len(page) > 0:
            self._bytes_a_row = len(entries) / len(page)
        return page

    def _put_aside(self, rejected: Sequence[Rejected]) -> None:
        if self._quarantine is None:
            self._quarantine = Quarantine(self.wire, self.stream)
        self._quarantine.put(rejected)


class RangeFeed(_RedisFeed):
    """The entries between two ids; those that come later too, where the end is open."""

    def __init__(
        self,
        wire: Wire,
        stream: Key,
        layout: Layout,
        start: str = "-",
        end: str = "+",
    ) -> None:
        check_range(start, end)
        super().__init__(wire, stream, layout)
        self._start, self._end = start, end
        self._expected: tuple[str, int] | None = None
        """The page that was asked for already: where it begins, and how many entries it may have."""
        self._reached: str | None = None
        """The last id that the stream is known to have had."""
        self._look_at = 0.0

    def begin(self) -> None:
        """Fix where `$` is: after what is there now."""
        if self._start == "$":
            self._reached = self.wire.last_id(self.stream)
            self._start = f"({self._reached}"

    def fetch(self, limit: int, wait_seconds: float | None, more: bool = True) -> pa.RecordBatch | None:
        """The next rows. `more` says that the page after this one will be wanted too."""
        self.begin()
        if self._reached == f"{LARGEST}-{LARGEST}":
            self.finished = True
            return None
        page = self._range(limit, more)
        if len(page) == 0 and self._end != "+":
            self.finished = True
        elif len(page) == 0 and wait_seconds != 0:
            page = self._wait(limit, wait_seconds)
        if len(page) == 0:
            if wait_seconds != 0:
                self._look_for_a_new_beginning()
            return None
        batch, rejected = self.layout.convert(page, self.name)
        if rejected:
            self._expected = None  # the connection is needed for something else, so its reply is let go
            self._put_aside(rejected)
        self._reached = page.ids[-1].as_py()
        self._start = f"({self._reached}"
        return batch

    def _look_for_a_new_beginning(self) -> None:
        """Whether the stream was removed and made again, with ids below those that were read: nobody announces it."""
        if self._reached is None or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_SECONDS
        if order_of(self.wire.last_id(self.stream)) < order_of(self._reached):
            _log.warning(
                "the stream %r began anew: it ends before %s, and is read from its start", self.name, self._reached
            )
            self._start, self._reached = "-", None

    def _range(self, limit: int, more: bool) -> Page:
        if self._expected is None or self._expected[0] != self._start or self._expected[1] > limit:
            self._send(self._start, limit)
        try:
            reply = self.wire.receive()
        except ReplyError as error:
            raise self.wire.explained(error) from None
        assert self._expected is not None
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

    def _wait(self, limit: int, seconds: float | None) -> Page:
        after = _before(self._start)
        block = 0 if seconds is None else max(1, int(seconds * 1000))
        reply = self._ask("XREAD", "COUNT", limit, "BLOCK", block, "STREAMS", self.stream, after, wait_seconds=seconds)
        entries = self._entries(reply)
        return Page(pa.array([], pa.string())) if entries is None else self._page(entries)


def _before(start: str) -> str:
    """The last id before a range's start."""
    if start.startswith("("):
        return start[1:]
    if start == "-":
        return BEGINNING
    ms, _, sequence = start.partition("-")
    if int(sequence or 0) > 0:
        return f"{ms}-{int(sequence) - 1}"
    return f"{int(ms) - 1}-{LARGEST}" if int(ms) > 0 else BEGINNING


class GroupFeed(_RedisFeed):
    """The entries that a consumer of a group is given."""

    def __init__(
        self,
        wire: Wire,
        stream: Key,
        layout: Layout,
        group: str,
        consumer: str,
        *,
        start: str = "-",
        create_group: bool = True,
        claim_idle: int | None = None,
        iterates: bool = False,
        confirms: bool = False,
    ) -> None:
        check_range(start, "+")
        super().__init__(wire, stream, layout)
        self._member = Member(
            stream,
            Membership(
                group=group,
                consumer=consumer,
                group_start="$" if start in ("$", "+") else _before(start),
                auto_create=create_group,
                claim_idle=claim_idle,
                create_hint="create_group=True creates it, and starts it at start_id.",
            ),
        )
        self._iterates = iterates
        self._confirms = confirms
        self._look_at = 0.0
        self._fetched = pa.array([], pa.string())
        self._unconfirmed: list[str] = []

    def begin(self) -> None:
        """Find the group, or create it, if it may be."""
        try:
            self._run(self._member.join())
        except ReplyError as error:
            raise self.wire.explained(error) from None

    def fetch(self, limit: int, wait_seconds: float | None, more: bool = True) -> pa.RecordBatch | None:
        """The next rows: those that were given back or that idle members left, then new ones."""
        while True:
            given = self._with_group(lambda: self._delivered_again(limit))
            if given:
                self.drained = False
                entries = [(each.id, each.fields) for each in given]
                page = page_of_entries(entries, self.layout.taken, self.layout.fields)
                return self._batch(page, [each.deliveries for each in given])
            connected = self.wire.connected
            reply = self._with_group(lambda: self._new(limit, wait_seconds))
            if connected == self.wire.connected:
                break
            # The reply to the first try may be lost, and with it entries that are this consumer's now.
            self._member.lost_a_reply()
        entries_of = self._entries(reply)
        self.drained = entries_of is None or count_of(entries_of) < limit
        if entries_of is None:
            return None
        page = self._page(entries_of)
        self._member.received(page.ids[-1].as_py())
        return self._batch(page)

    def _delivered_again(self, limit: int) -> list[Given]:
        look = time.monotonic() >= self._look_at
        given = self._run(self._member.delivered_again(limit, look=look))
        if look and not given:
            # A read looks once: after that it would be given what it has itself.
            self._look_at = time.monotonic() + LOOK_SECONDS if self._iterates else math.inf
        return given

    def _new(self, limit: int, wait_seconds: float | None) -> Bytes:
        block: tuple[Word, ...] = ()
        if wait_seconds != 0:
            block = ("BLOCK", 0 if wait_seconds is None else max(1, int(wait_seconds * 1000)))
        member = ("GROUP", self._member.group, self._member.consumer)
        words = (*member, "COUNT", limit, *block, "STREAMS", self.stream, ">")
        return self.wire.ask("XREADGROUP", *words, wait_seconds=wait_seconds)

    def _batch(self, page: Page, deliveries: list[int] | None = None) -> pa.RecordBatch:
        batch, rejected = self.layout.convert(page, self.name, deliveries)
        self._fetched = page.ids
        if rejected:
            self._put_aside(rejected)
            # Nobody else can: they are in no frame.
            self._acknowledge([each.id for each in rejected])
        if self._confirms:
            self._unconfirmed += page.ids.to_pylist()  # those too, which harms nobody
        return batch

    def confirm(self) -> None:
        """Acknowledge what was fetched."""
        ids, self._unconfirmed = self._unconfirmed, []
        self._acknowledge(ids)

    def settle(self) -> None:
        """Wait until Redis has every acknowledgement."""
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
        """What is asked of the group, which is made anew where it has vanished: with its stream, by a flush, by a
        restart."""
        while True:
            try:
                return request()
            except ReplyError as error:
                if not str(error).startswith(VANISHED):
                    raise self.wire.explained(error) from None
            self.begin()

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


class ManyFeed:
    """One stream after the other, over one connection: where a cluster has them on several nodes, it moves."""

    drained = finished = False

    def __init__(self, wire: Wire, streams: Sequence[Key], layout: Layout, start: str, end: str) -> None:
        check_range(start, end)
        self.wire = wire
        self._feeds = [RangeFeed(wire, stream, layout, start, end) for stream in streams]

    @property
    def page_size(self) -> int:
        return self._feeds[0].page_size if self._feeds else _FIRST_PAGE

    def begin(self) -> None:
        """Nothing: each stream begins when it is its turn."""

    def fetch(self, limit: int, wait_seconds: float | None, more: bool = True) -> pa.RecordBatch | None:
        while self._feeds:
            feed = self._feeds[0]
            batch = feed.fetch(limit, 0, more)
            if batch is None or feed.drained:
                del self._feeds[0]
                feed.close_quarantine()
            if batch is not None:
                return batch
        self.drained = self.finished = True
        return None

    def confirm(self) -> None:
        """Nothing to acknowledge."""

    def settle(self) -> None:
        """Nothing."""

    def give_back(self) -> None:
        """Nothing."""

    def close(self) -> None:
        self.wire.close()
        for feed in self._feeds:
            feed.close_quarantine()


def ranges(wire: Wire, stream: Key, start: str, end: str, wanted: int, window: Window) -> list[tuple[str, str]]:
    """Up to so many ranges of ids, of about the same time, that hold what is there now and in the window."""
    try:
        first = wire.run("XRANGE", stream, start, end, "COUNT", 1)
        last = wire.run("XREVRANGE", stream, end, start, "COUNT", 1)
    except ReplyError as error:
        raise wire.explained(error) from None
    if not first or not last:
        return []
    (first_id, _), (last_id, _) = first[0], last[0]
    first_ms, last_ms = (int(each.partition(b"-")[0]) for each in (first_id, last_id))
    least, most = max(first_ms, window.least_ms), min(last_ms, window.most_ms)
    if len(str(first_ms)) == len(str(last_ms)) == 13:
        least, most = max(least, window.least_of_13_digits), min(most, window.most_of_13_digits)
    parts = min(wanted, most - least + 1)
    edges = [least + number * (most - least + 1) // max(parts, 1) for number in range(parts + 1)]
    return [
        (
            first_id.decode() if begin == first_ms else f"{begin}-0",
            last_id.decode() if following == last_ms + 1 else f"{following - 1}-{LARGEST}",
        )
        for begin, following in pairwise(edges)
    ]


def find_streams(connection: RedisConnection, pattern: str) -> list[Key]:
    """The keys that match the pattern and are streams, in order; not the quarantine of one of them."""
    from weft.systems.redis.client import persistently

    found = persistently(connection, lambda client: set(client.scan_iter(match=pattern, count=1000, _type="stream")))
    aside = {quarantine_of(key) for key in found}
    return [_key(key) for key in sorted(found) if key not in aside]


def _key(key: bytes) -> Key:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key


def acknowledge(connection: RedisConnection, stream: Key, group: str, ids: Sequence[str]) -> int:
    """Acknowledge entries; how many were pending."""
    wire, done = Wire(connection, stream), 0
    try:
        for begin in range(0, len(ids), _ACKS_A_COMMAND):
            done += wire.run("XACK", stream, group, *ids[begin : begin + _ACKS_A_COMMAND])
    except ReplyError as error:
        raise wire.explained(error) from None
    finally:
        wire.close()
    return done
