"""Streams of Redis, read as batches of Arrow."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa

from weft.dataframes.layout import Layout, Rejected
from weft.errors import NotFoundError, SettingsError
from weft.systems.redis.connection import RedisConnection
from weft.systems.redis.resp import Bytes, Page, count_of, encode, guess_last_id, page_of, page_of_entries, parse
from weft.systems.redis.wire import ReplyError, Wire, Word

QUARANTINE = "__quarantine"
ERROR_FIELD = "_weft_error"
SOURCE_FIELD = "_weft_entry"

_ID = re.compile(r"\d{1,20}(-\d{1,20})?")
_FIRST_ID = "0-0"
# A page is as many entries as make about so many bytes; the first shows how large they are. On two cores, reads in
# pages of 1 or 2 MB took twice as long in two of five rounds, as if Redis and we took turns; of 4 MB in one.
_FIRST_PAGE, _LARGEST_PAGE, _PAGE_BYTES = 512, 32_768, 4_000_000
_ACKS_A_COMMAND = 5_000
# To look more often than this for entries that idle members left costs more than it gives.
_LEAST_CLAIM_SECONDS = 0.1


LARGEST = 2**64 - 1


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
        if not isinstance(value, str) or not (value in words or _ID.fullmatch(value.removeprefix("("))):
            listed = ", ".join(repr(word) for word in words)
            raise SettingsError(
                f"{name} is {value!r}, which is no id of an entry.", hint=f"Such as '1704067200000-0', or {listed}."
            )


class _RedisFeed:
    def __init__(self, wire: Wire, stream: str, layout: Layout) -> None:
        self.wire, self.stream, self.layout = wire, stream, layout
        self._quarantine: Wire | None = None
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
        self.wire.close()
        self.close_quarantine()

    def close_quarantine(self) -> None:
        """Let go of the connection to the quarantine, if there is one."""
        if self._quarantine is not None:
            self._quarantine.close()

    def confirm(self) -> None:
        """Nothing: without a group there is nothing to acknowledge."""

    def settle(self) -> None:
        """Nothing."""

    def _ask(self, *words: Word, wait_seconds: float | None = 0) -> Bytes:
        try:
            return self.wire.ask(*words, wait_seconds=wait_seconds)
        except ReplyError as error:
            raise self.wire.explained(error) from None

    def _entries(self, reply: Bytes) -> Bytes | None:
        """The array of entries in a reply to XREAD or XREADGROUP; `None` where there is none."""
        begin = len(self._heading)
        return reply[begin:] if reply[:begin].tobytes() == self._heading else None

    def _last_id(self) -> str:
        try:
            about = self.wire.run("XINFO", "STREAM", self.stream)
        except ReplyError as error:
            if "no such key" not in str(error):
                raise self.wire.explained(error) from None
            return _FIRST_ID
        found: bytes = about[about.index(b"last-generated-id") + 1]
        return found.decode()

    def _page(self, entries: Bytes) -> Page:
        page = page_of(entries, self.layout.taken, self.layout.fields)
        if len(page) > 0:
            self._bytes_a_row = len(entries) / len(page)
        return page

    def _put_aside(self, rejected: Sequence[Rejected]) -> None:
        """Store entries in the quarantine, under their own ids: what was stored before is not stored again."""
        if self._quarantine is None:
            self._quarantine = Wire(self.wire.connection, self.stream + QUARANTINE, self.wire.stopped)
        aside = self._quarantine
        for each in rejected:
            found = parse(self._ask("XRANGE", self.stream, each.id, each.id))
            if not found:  # deleted meanwhile
                continue
            fields: list[Word] = [*found[0][1], ERROR_FIELD, each.why, SOURCE_FIELD, each.id]
            try:
                aside.run("XADD", aside.key, each.id, *fields)
            except ReplyError as error:
                if "equal or smaller" not in str(error):
                    raise aside.explained(error) from None
                # There already, or older than the newest one there.
                if not aside.run("XRANGE", aside.key, each.id, each.id):
                    aside.run("XADD", aside.key, "*", *fields)


class RangeFeed(_RedisFeed):
    """The entries between two ids; those that come later too, where the end is open."""

    def __init__(
        self,
        wire: Wire,
        stream: str,
        layout: Layout,
        start: str = "-",
        end: str = "+",
    ) -> None:
        check_range(start, end)
        super().__init__(wire, stream, layout)
        self._start, self._end = start, end
        self._expected: tuple[str, int] | None = None
        """The page that was asked for already: where it begins, and how many entries it may have."""

    def begin(self) -> None:
        """Fix where `$` is: after what is there now."""
        if self._start == "$":
            self._start = f"({self._last_id()}"

    def fetch(self, limit: int, wait_seconds: float | None, more: bool = True) -> pa.RecordBatch | None:
        """The next rows. `more` says that the page after this one will be wanted too."""
        self.begin()
        page = self._range(limit, more)
        if len(page) == 0 and self._end != "+":
            self.finished = True
        elif len(page) == 0 and wait_seconds != 0:
            page = self._wait(limit, wait_seconds)
        if len(page) == 0:
            return None
        batch, rejected = self.layout.convert(page, self.stream)
        if rejected:
            self._expected = None  # the connection is needed for something else, so its reply is let go
            self._put_aside(rejected)
        self._start = f"({page.ids[-1]}"
        return batch

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
        return _FIRST_ID
    ms, _, sequence = start.partition("-")
    if int(sequence or 0) > 0:
        return f"{ms}-{int(sequence) - 1}"
    return f"{int(ms) - 1}-{LARGEST}" if int(ms) > 0 else _FIRST_ID


class GroupFeed(_RedisFeed):
    """The entries that a consumer of a group is given."""

    def __init__(
        self,
        wire: Wire,
        stream: str,
        layout: Layout,
        group: str,
        consumer: str,
        *,
        start: str = "-",
        create_group: bool = True,
        claim_idle: int | None = None,
        claim_again: bool = False,
        confirms: bool = False,
    ) -> None:
        check_range(start, "+")
        super().__init__(wire, stream, layout)
        self.group, self.consumer = group, consumer
        self._group_start = "$" if start in ("$", "+") else _before(start)
        self._create_group = create_group
        self._claim_idle = claim_idle
        self._claim_again = claim_again
        """Not within one read: it would be given what it has itself, until it is fast enough."""
        self._confirms = confirms
        self._claim_cursor = _FIRST_ID
        self._claim_at = 0.0
        self._last_new = _FIRST_ID
        self._own_after: str | None = None
        """Where a lost reply may have left entries pending that nobody has seen: after this id."""
        self._unconfirmed: list[str] = []

    def begin(self) -> None:
        """Create the group, if it may be."""
        if self._create_group:
            if self._group_start == "$":  # now, whenever it must be created again
                self._group_start = self._last_id()
            self._create()

    def fetch(self, limit: int, wait_seconds: float | None, more: bool = True) -> pa.RecordBatch | None:
        """The next rows: those that idle members left, then new ones."""
        claimed = self._claim(limit)
        found = self._read(limit, wait_seconds) if claimed is None else (claimed, True)
        if found is None:
            return None
        page, pending = found
        batch, rejected = self.layout.convert(page, self.stream, (lambda: self._deliveries(page)) if pending else None)
        ids = page.ids.to_pylist()
        if rejected:
            self._put_aside(rejected)
            aside = {each.id for each in rejected}
            # Nobody else can: they are in no frame.
            self._acknowledge(list(aside))
            ids = [each for each in ids if each not in aside]
        if self._confirms:
            self._unconfirmed.extend(ids)
        return batch

    def confirm(self) -> None:
        """Acknowledge what was fetched."""
        ids, self._unconfirmed = self._unconfirmed, []
        self._acknowledge(ids)

    def settle(self) -> None:
        """Wait until Redis has every acknowledgement."""
        self._ask("PING")

    def _acknowledge(self, ids: Sequence[str]) -> None:
        for begin in range(0, len(ids), _ACKS_A_COMMAND):
            self.wire.post("XACK", self.stream, self.group, *ids[begin : begin + _ACKS_A_COMMAND])

    def _claim(self, limit: int) -> Page | None:
        """Entries that members, this one too, left unacknowledged for so long."""
        if self._claim_idle is None or time.monotonic() < self._claim_at:
            return None
        while True:
            words = (self.stream, self.group, self.consumer, self._claim_idle, self._claim_cursor, "COUNT", limit)
            cursor, entries = parse(self._command("XAUTOCLAIM", *words))[:2]
            self._claim_cursor = cursor.decode()
            at_end = self._claim_cursor == _FIRST_ID
            if at_end:
                pause = max(self._claim_idle / 1000, _LEAST_CLAIM_SECONDS) if self._claim_again else math.inf
                self._claim_at = time.monotonic() + pause
            page = page_of_entries(entries, self.layout.taken, self.layout.fields)
            if len(page) > 0 or at_end:
                return page if len(page) > 0 else None

    def _read(self, limit: int, wait_seconds: float | None) -> tuple[Page, bool] | None:
        """New entries, and whether they were pending already."""
        block: tuple[Word, ...] = ()
        if wait_seconds != 0:
            block = ("BLOCK", 0 if wait_seconds is None else max(1, int(wait_seconds * 1000)))
        while True:
            own, before = self._own_after, self.wire.connected
            words = (
                "GROUP",
                self.group,
                self.consumer,
                "COUNT",
                limit,
                *(() if own else block),
                "STREAMS",
                self.stream,
            )
            reply = self._command("XREADGROUP", *words, own or ">", wait_seconds=0 if own else wait_seconds)
            if 0 < before < self.wire.connected and own is None:
                # The reply to the first try may be lost, and with it entries that are this consumer's now.
                self._own_after = self._last_new
                continue
            entries = self._entries(reply)
            page = None if entries is None else self._page(entries)
            if own is not None and (page is None or len(page) == 0):
                self._own_after = None
                continue
            self.drained = entries is None or count_of(entries) < limit
            if page is None or len(page) == 0:
                return None
            self._last_new = page.ids[-1].as_py()
            if own is not None:
                self._own_after = self._last_new
            return page, own is not None

    def _command(self, *words: Word, wait_seconds: float | None = 0) -> Bytes:
        """The reply to a command of the group, which is made anew where it has vanished: with its stream, by a flush,
        by a restart."""
        while True:
            try:
                return self.wire.ask(*words, wait_seconds=wait_seconds)
            except ReplyError as error:
                said = str(error)
                if not said.startswith(("NOGROUP", "UNBLOCKED")):
                    raise self.wire.explained(error) from None
            if not self._create_group:
                raise NotFoundError(
                    f"The stream {self.stream!r} has no group {self.group!r}.",
                    hint="create_group=True creates it, and starts it at start_id.",
                )
            self.begin()

    def _create(self) -> None:
        try:
            self.wire.run("XGROUP", "CREATE", self.stream, self.group, self._group_start, "MKSTREAM")
        except ReplyError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise self.wire.explained(error) from None
        else:
            self._last_new, self._own_after = _FIRST_ID, None

    def _deliveries(self, page: Page) -> list[int]:
        ids = page.ids.to_pylist()
        found = parse(self._command("XPENDING", self.stream, self.group, ids[0], ids[-1], 2**31 - 1, self.consumer))
        times = {entry[0].decode(): entry[3] for entry in found}
        return [times.get(each, 1) for each in ids]


class ManyFeed:
    """One stream after the other, over one connection: where a cluster has them on several nodes, it moves."""

    drained = finished = False

    def __init__(self, wire: Wire, streams: Sequence[str], layout: Layout, start: str, end: str) -> None:
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

    def close(self) -> None:
        self.wire.close()
        for feed in self._feeds:
            feed.close_quarantine()


def ranges(wire: Wire, stream: str, start: str, end: str, wanted: int, window: Window) -> list[tuple[str, str]]:
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


def find_streams(connection: RedisConnection, pattern: str) -> list[str]:
    """The keys that match the pattern and are streams, in order; not the quarantine of one of them."""
    from weft.systems.redis.client import ERRORS, explain, open_client

    try:
        client = open_client(connection)
        try:
            found = {key.decode() for key in client.scan_iter(match=pattern, count=1000, _type="stream")}
        finally:
            client.close()
    except ERRORS as error:
        raise explain(connection, error) from None
    return sorted(key for key in found if not key.endswith(QUARANTINE) or key.removesuffix(QUARANTINE) not in found)


def acknowledge(connection: RedisConnection, stream: str, group: str, ids: Sequence[str]) -> int:
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
