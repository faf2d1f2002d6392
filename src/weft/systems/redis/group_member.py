"""A member of a group of one stream, as consumers and frames are: what it asks of Redis, and what the answers mean.

Nothing here speaks to a server. A step is a script to run, and is sent its reply: readers of entries run steps with
asyncio, feeds of pages on a wire. Scripts, so that each is one step for the server, whose reply has one shape for
every client, and that can be run again where the reply was lost. New entries are not asked for here: consumers make
objects of them, frames columns, and each has its own way to XREADGROUP.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeVar

from weft.errors import NotFoundError, SettingsError
from weft.systems import reader_retries
from weft.systems.entries import Membership

T = TypeVar("T")

GIVEN_BACK = "weft:given-back"
"""The name under which entries are pending that were given back. No member has it, and every member looks there."""
BEGINNING = "0-0"
LARGEST = 2**64 - 1
GROUP_GONE = ("NOGROUP", "UNBLOCKED")
"""How errors about a group that is gone begin. A request that waits while its stream is removed gets the second."""
LOOK_SECONDS = 1.0
"""How often readers look for entries that were given back or became idle, and for streams that were created again."""
PATIENCE_SECONDS = reader_retries.PATIENCE_SECONDS
# A script that works on more would keep the server from its other clients.
_MOST_AT_ONCE = 500
_ID = re.compile(r"(\d{1,20})(?:-(\d{1,20}))?")
_OF_SCRIPT = re.compile(r" script: \w+, on @user_script:\d+\.?$")


class Script(NamedTuple):
    """A script of `lua/` to run."""

    name: str
    keys: tuple[str | bytes, ...]
    arguments: tuple[Any, ...]


Steps = Generator[Script, Any, T]


class Redelivered(NamedTuple):
    """An entry that was delivered before: its id, names and values in turns, and how often it was delivered."""

    id: Any
    fields: list[Any]
    deliveries: int


class _Pending(NamedTuple):
    """Pending entries that are to be taken: what `member_take` needs."""

    idle: int
    counts: bool
    entries: list[Any]


class RedisMember:
    """The state of a member in its stream and group."""

    def __init__(self, stream: str | bytes, membership: Membership) -> None:
        if text_of(membership.consumer) == GIVEN_BACK:
            raise SettingsError(f"No member can have the name {GIVEN_BACK!r}: it holds what members gave back.")
        self._membership = membership
        self.stream, self.group, self.consumer = stream, membership.group, membership.consumer
        self.start = membership.group_start
        """Where the group begins, also when it is created again. `$` becomes the last id of the stream."""
        self.skipped = 0
        """How many pending entries were passed over because they are deleted."""
        self._last = BEGINNING
        self.position = BEGINNING
        """New entries are those after this id, and after any claimed entry, which was delivered before."""
        self._own_after: str | None = None
        self._own_counts = False
        self._claimed_up_to = BEGINNING
        self._listed_before: set[str] = set()
        """Own entries and those given back. Until all were looked through for idle ones, they do not come as such."""
        self._listed: _Pending | None = None

    def join(self) -> Steps[bool]:
        """Find the group, or create it if that is allowed; whether it was created."""
        reply = yield self._script("member_join", self.start, self._last, int(self._membership.auto_create))
        start, last, delivered, created = reply
        self.start, self._last = text_of(start), text_of(last)
        if delivered is None:
            raise NotFoundError(
                f"The stream {text_of(self.stream)!r} has no group {text_of(self.group)!r}.",
                hint=self._membership.create_hint,
            )
        self.position = text_of(delivered)
        if created:
            self._own_after = self._listed = None
            self._claimed_up_to = BEGINNING
        return bool(created)

    def received(self, first: Any, last: Any) -> bool:
        """New entries came, from one to another; whether the group was set back, as these were delivered before."""
        set_back = order_of(text_of(first)) <= order_of(self.position)
        self.position = text_of(last)
        return set_back

    def lost_a_reply(self) -> None:
        """The reply to a request for new entries was lost: what it gave is pending, and comes first."""
        if self._own_after is None:
            self._own_after, self._own_counts = self.position, False

    def begin_with_own(self, after: str = BEGINNING) -> None:
        """Begin with the unacknowledged entries of this member."""
        self._own_after, self._own_counts = after, True

    def delivered_again(self, count: int, *, look: bool) -> Steps[list[Redelivered]]:
        """Return the next entries that were delivered before: this member's own, if it begins with them or a reply was
        lost; then, if it is to `look`, those that were given back, and those that any member has held for too long.
        None are returned after each kind was read to its end once."""
        while True:
            if self._listed is None:
                self._listed = yield from self._list(min(count, _MOST_AT_ONCE), look)
            if self._listed is None:
                return []
            idle, counts, entries = self._listed
            listed = [word for entry in entries for word in (entry[0], entry[1], entry[3])]
            delivered, deleted = yield self._script("member_take", self.consumer, idle, int(counts), *listed)
            # Not before there is a reply: it is asked for again, and what others took meanwhile is left out.
            self._listed = None
            self.skipped += deleted
            if delivered:
                self.position = max(self.position, text_of(delivered[-1][0]), key=order_of)
                return [Redelivered(*each) for each in delivered]

    def _list(self, count: int, look: bool) -> Steps[_Pending | None]:
        if self._own_after is not None:
            pending = yield self._script("member_pending", f"({self._own_after}", "+", count, self.consumer)
            self._own_after = text_of(pending[-1][0]) if pending else None
            if pending:
                return self._before_idle_ones(_Pending(0, self._own_counts, pending))
        if not look:
            return None
        pending = yield self._script("member_pending", "-", "+", count, GIVEN_BACK)
        if pending:
            return self._before_idle_ones(_Pending(0, True, pending))
        idle = self._membership.claim_idle
        if idle is None:
            return None
        while pending := (yield self._script("member_pending", "IDLE", idle, f"({self._claimed_up_to}", "+", count)):
            self._claimed_up_to = text_of(pending[-1][0])
            left = [entry for entry in pending if text_of(entry[0]) not in self._listed_before]
            if left:
                return _Pending(idle, True, left)
        self._claimed_up_to = BEGINNING
        self._listed_before.clear()
        return None

    def _before_idle_ones(self, listed: _Pending) -> _Pending:
        if self._membership.claim_idle is not None:
            self._listed_before.update(text_of(entry[0]) for entry in listed.entries)
        return listed

    def give_back(self, ids: Sequence[Any], *, undelivered: bool) -> Steps[int]:
        """Release entries that are still this member's to any member; how many. `undelivered`: nobody saw them."""
        returned = 0
        for begin in range(0, len(ids), _MOST_AT_ONCE):
            some = ids[begin : begin + _MOST_AT_ONCE]
            returned += yield self._script("member_give_back", self.consumer, int(undelivered), *some)
        return returned

    def move_to_dead_letters(self, entry: Redelivered, place: str | bytes) -> Steps[None]:
        words = (self.group, self.consumer, entry.id, entry.deliveries - 1)
        yield Script("member_bury", (self.stream, place), words)

    def _script(self, name: str, *arguments: Any) -> Script:
        return Script(name, (self.stream,), (self.group, *arguments))


def fields_of(flat: Sequence[Any]) -> dict[Any, Any]:
    """Return names and values in turns as a dict. A second field of a name is `name#2`, so that none hides another."""
    fields: dict[Any, Any] = {}
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        free, number = name, 1
        while free in fields:
            number += 1
            free = f"{name}#{number}" if isinstance(name, str) else b"%b#%d" % (name, number)
        fields[free] = value
    return fields


def is_id(text: str) -> bool:
    """Return whether Redis takes this for the id of an entry."""
    match = _ID.fullmatch(text)
    return match is not None and all(int(part or 0) <= LARGEST for part in match.groups())


def order_of(identifier: str) -> tuple[int, int]:
    """Return the key by which ids are compared."""
    milliseconds, _, sequence = identifier.partition("-")
    return int(milliseconds), int(sequence or 0)


def text_of(word: Any) -> str:
    """Return a word of a reply as a text, whether the client decodes it or not."""
    return word.decode(errors="backslashreplace") if isinstance(word, bytes) else str(word)


def server_message(error: BaseException) -> str:
    """Return the message of a server's error, without its place in a script."""
    return _OF_SCRIPT.sub("", str(error))
