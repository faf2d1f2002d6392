"""Where a stream has its dead letters and the events that did not fit, in which groups, the replay that publishes them
again, and their removal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import uuid4

from weft.errors import DeclarationError, NotFoundError, SchemaError, SettingsError, WeftError
from weft.project import current
from weft.streams import retention
from weft.streams.commit import Ticket
from weft.streams.consuming import LEFT_OUT
from weft.streams.declare import Stream
from weft.streams.encode import NO_SUCH_FIELD, OF_ALL_EXTRA, Encoded, encode, to_batch
from weft.streams.events import to_dicts
from weft.streams.runtime import OpenedStream, open_stream
from weft.systems.base import Connection
from weft.systems.dead_letter_store import digest
from weft.systems.log import PUBLISH_ID, RESERVED_PREFIX, ROWID, Batch, Log, reused_key
from weft.types import FieldType, from_json

# The events that one commit publishes, before they are removed.
_PAGE = 100
# How much of a reason is looked at, and how much of it distinguishes groups: a consumer may give one of any length.
_LOOKED_AT, _REASON = 2000, 300
# The parts of a reason that differ between events: the number, and the bad value, which stands before one of these.
_OWN = re.compile(r"^Event \d+ of the publish to '[^']*', ")
_PROBLEMS = (": it ", f": {NO_SUCH_FIELD}", f": {OF_ALL_EXTRA}")


def places(stream: Stream) -> tuple[Stream | None, Stream | None]:
    """Return where a stream has its dead letters and the events that did not fit; `None` where it has no such place."""
    letters = current().streams.get(stream.dead_letter or "") or stream.dead_letters
    return (
        None if stream.max_deliveries is None else letters,
        None if stream.on_schema_drift != "quarantine" else stream.quarantine,
    )


def owners(name: str) -> list[Stream]:
    """Return the streams whose quarantine or dead letters have that name."""
    streams = current().streams.values()
    return [
        each for each in streams if name in {each.dead_letters.name, *(place.name for place in places(each) if place)}
    ]


def whose(event: Mapping[str, Any]) -> str:
    """Return the consumer that did not acknowledge a rejected event, or its field that did not fit."""
    return str(event.get("consumer") or event.get("field") or "")[:_REASON]


def common(reason: str, field: str) -> str:
    """Return what the reasons of events that were rejected alike have in common."""
    reason = _OWN.sub("", reason[:_LOOKED_AT])
    before = f"field {field!r}"
    if not reason.startswith(f"{before} = "):
        return reason
    at = max(reason.rfind(each, len(before)) for each in _PROBLEMS)
    return reason if at < 0 else before + reason[at:]


def group_id(event: Mapping[str, Any]) -> str:
    """Return the name of the group of a rejected event: of those of its stream that were rejected alike. By the reason
    as it is stored: several may look alike without their secrets."""
    who, stream = whose(event), event.get("stream") if event.get("consumer") else None
    return digest(f"{stream!r} {who!r} {common(str(event.get('reason') or ''), who)[:_REASON]}")


@dataclass(frozen=True, slots=True)
class Replayed:
    """How many events a replay published, and how many still do not fit and were put back."""

    replayed: int = 0
    refused: int = 0
    duplicates: int = 0
    """How many were there already (of a replay before), or have a key that another event has: these are dropped."""


def replay_sync(
    place: str | Stream,
    *,
    before: int | str | datetime | None = None,
    group: str | None = None,
    connection: str | Connection | None = None,
) -> Replayed:
    """Publish the events of a quarantine or of dead letters to their streams again, and remove them from there.

    Those that a stream still refuses are put back, at the end. `before`: only those before an offset or a moment;
    `group`: only those of one group.

    What becomes of an event is decided once, by a key in its stream that says which of the two it was. A replay after
    a crash, or beside this one, finds the decision: it publishes nothing twice, and puts nothing back that was
    published.
    """
    source, streams = _opened(place, connection)
    name, log = source.stream.name, source.log
    quarantined = next((each for each in streams.values() if each.quarantine.name == name), None)
    done = Replayed()
    for events in _pages(log, _upto(log, before)):
        by_stream: dict[str, list[_Rejected]] = {}
        problem: WeftError | None = None
        published: list[int] = []
        for event in events:
            if group is not None and group_id(event) != group:
                continue
            owner = quarantined or streams.get(str(event.get("stream")))
            if owner is None or not isinstance(event.get("event"), dict):
                problem = _unknown(name, event, streams)
                break
            ready = open_stream(owner, connection)
            letters = by_stream.setdefault(owner.name, [])
            letters.append(_Rejected(event, ready, is_first=not letters, of_consumer=quarantined is None))
            published.append(event[ROWID])
        for letters in by_stream.values():
            back, duplicates = _publish(letters)
            if back:
                _put_back(open_stream(source.stream, connection), back)
            done = Replayed(
                done.replayed + len(letters) - len(back) - duplicates,
                done.refused + len(back),
                done.duplicates + duplicates,
            )
        if group is not None:
            log.remove(published)
        elif published:
            log.trim(published[-1])
        if problem is not None:
            raise problem
    return done


def purge_sync(
    place: str | Stream,
    *,
    before: int | str | datetime | None = None,
    group: str | None = None,
    connection: str | Connection | None = None,
) -> int:
    """Remove the events of a quarantine or of dead letters for good, and return how many; `before` and `group` as for a
    replay."""
    source, _ = _opened(place, connection)
    log = source.log

    def remove() -> int:
        upto = _upto(log, before)
        if group is None:
            return log.trim(upto) if upto > 0 else 0
        return sum(map(log.remove, _offsets(log, upto, group)))

    return retention.with_room(source.hub.store, remove)


def count_group(log: Log, group: str, upto: int) -> int:
    """Return how many rejected events of a place are of a group, up to an offset."""
    return sum(map(len, _offsets(log, upto, group)))


def _offsets(log: Log, upto: int, group: str) -> Iterator[list[int]]:
    for events in _pages(log, upto):
        yield [event[ROWID] for event in events if group_id(event) == group]


def _opened(place: str | Stream, connection: str | Connection | None) -> tuple[OpenedStream, dict[str, Stream]]:
    """Return a place, and the streams whose rejected events it holds; refuse a stream of other events."""
    source = open_stream(place, connection, to_read=True)  # nothing is made
    name = source.stream.name
    streams = {each.name: each for each in owners(name)}
    if not streams:
        kept = [each.name for each in places(source.stream) if each]
        hint = f"Its rejected events are in {' and '.join(kept)}." if kept else "Name a quarantine or dead letters."
        raise DeclarationError(f"{name} holds no rejected events of a stream.", hint=hint)
    return source, streams


def _upto(log: Log, before: int | str | datetime | None) -> int:
    """Return the last offset before another or a moment. Also without one: what comes meanwhile waits for its turn."""
    return log.head() if before is None else min(log.head(), retention.last_before(log, before))


def _pages(log: Log, upto: int) -> Iterator[list[dict[str, Any]]]:
    after = log.floor()
    while events := to_dicts(log.read(after, upto, _PAGE)):
        yield events
        after = events[-1][ROWID]


def _unknown(place: str, event: dict[str, Any], streams: Iterable[str]) -> NotFoundError:
    rowid = event[ROWID]
    return NotFoundError(
        f"The event {rowid} of {place} is not a rejected event of {', '.join(streams)}. "
        "Those before it were replayed, it and those behind it were not.",
        hint=f"Declare its stream, or remove what is up to this event: weft streams trim {place} --before {rowid + 1}",
    )


class _Rejected:
    """One rejected event: its key, and either its columns for its stream or why that refuses it."""

    def __init__(self, record: dict[str, Any], ready: OpenedStream, *, is_first: bool, of_consumer: bool) -> None:
        self.ready = ready
        self.record = {name: value for name, value in record.items() if not name.startswith(RESERVED_PREFIX)}
        # With the publish: a place that was deleted and created again has the same offsets again.
        self.key = f"replay {record[PUBLISH_ID]} {record[ROWID]}"
        # The event of a dead letter was published under the key of its fields before: it is no duplicate of itself.
        self._key_fields: tuple[str, ...] | None = () if of_consumer else None
        self._encoded = Encoded((), [], [])
        stream, log = ready.stream, ready.log
        # Not into the quarantine by itself: that would be under another key each time.
        strict = replace(stream, on_schema_drift="reject") if stream.on_schema_drift == "quarantine" else stream
        fields = log.fields(fresh=is_first)  # another process may have added columns
        self.fits = False
        if of_consumer and LEFT_OUT in str(self.record.get("reason")):
            return  # what was left out would be lost
        try:
            self._encoded = encode(strict, log, [_event(self.record["event"], stream, fields)], fresh=False)
            self.fits = True
        except SchemaError as error:
            known = {"field": error.field} if "field" in self.record else {}
            self.record |= {"reason": error.what, **known}

    def batch(self, publish_id: str) -> Batch:
        """Return what decides over it: the event, or nothing but its key."""
        return to_batch(
            self.ready.stream,
            self.ready.log,
            [(publish_id, len(self._encoded.events))],
            self._encoded,
            self._key_fields,
            publish_key=self.key,
            published=[{"fits": self.fits}],
        )


def _event(body: dict[str, Any], stream: Stream, fields: dict[str, FieldType]) -> dict[str, Any]:
    event = {}
    for name, value in body.items():
        if value is None and name in fields and name not in stream.fields:
            continue  # read of a column that the event did not have
        try:
            event[name] = from_json(value, fields[name]) if name in fields else value
        except ValueError:  # the stream says what is wrong
            event[name] = value
    return event


def _publish(letters: Sequence[_Rejected]) -> tuple[list[_Rejected], int]:
    """Decide over rejected events of one stream; return those to put back, and how many others are duplicates."""
    ready, publish_id = letters[0].ready, str(uuid4())
    try:
        duplicates = _commit(ready, publish_id, [each.batch(publish_id) for each in letters])
    except SettingsError as error:
        if error.what != reused_key(ready.log.name).what:
            raise
        # A replay before this one decided otherwise, when the declaration was another. That stands.
        if len(letters) > 1:
            alone = [_publish([each]) for each in letters]
            return [each for back, _ in alone for each in back], sum(duplicates for _, duplicates in alone)
        back = [each for each in letters if each.fits]
        return back, len(letters) - len(back)
    return [each for each in letters if not each.fits], duplicates


def _put_back(place: OpenedStream, letters: Sequence[_Rejected]) -> None:
    """Store rejected events at the end of their place. Its own rules do not apply, as when they came there."""
    lenient, publish_id = replace(place.stream, validate_schema=False, on_schema_drift="evolve"), str(uuid4())
    batches = [
        to_batch(
            lenient,
            place.log,
            [(publish_id, 1)],
            encode(lenient, place.log, [each.record], fresh=False),
            (),
            publish_key=each.key,
        )
        for each in letters
    ]
    _commit(place, publish_id, batches)


def _commit(ready: OpenedStream, publish_id: str, batches: list[Batch]) -> int:
    """Store batches of one stream, and return how many of their events are duplicates."""
    ready.keyed = True
    ticket = Ticket(ready, publish_id, [], lambda _: batches, batches=batches)
    ready.hub.committer.publish(ticket)
    retention.enforce_soon(ready)
    return 0 if ticket.appended is None else ticket.appended.deduplicated
