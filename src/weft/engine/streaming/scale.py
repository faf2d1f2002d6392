"""What sources are measured by: offsets of events and messages, files, versions. How far behind a place is, and which
place comes before it.

A place is what Spark's log has of a source. It may be moved back, never forward: a pipeline skips nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol
from urllib.parse import unquote

from weft.errors import DeclarationError, StorageError
from weft.pipelines.streaming.spec import Source
from weft.project import current
from weft.spark_support.folder import GLOB
from weft.spark_support.location import Location
from weft.streams import runtime
from weft.streams.declare import Stream
from weft.systems.base import system_for
from weft.systems.kafka.options import partition_offsets
from weft.systems.objects.paths import table_path

MOST_COUNTED = 100_000
"""On Redis, where entries are counted one by one."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SCHEME = re.compile(r"^\w+:/+")
_VERSION = re.compile(r"(\d{20})\.json")


@dataclass(frozen=True)
class Back:
    """A place before another one."""

    place: Any
    first: Any
    """What is read again: the first event or version, the first of each partition, or how many files."""
    told: str = ""
    """The same in words; empty where a source goes on where it is."""
    note: str | None = None
    files: str = ""
    """Of files, Spark's log of those that stay read."""


class Scale(Protocol):
    """How one source is measured."""

    unit: str

    def behind(self, place: Any) -> int | None:
        """How many come after a place, at most; before the first batch the place is `None`, and so is the answer where
        the beginning is not known."""

    def end(self) -> str:
        """The `start` by which a source begins with what comes next."""

    def kept(self, place: Any) -> Back:
        """The place itself, for a source that goes on where it is."""

    def to_offset(self, place: Any, offset: str) -> Back:
        """The place from which the event of an offset is read again."""

    def to_time(self, place: Any, moment: datetime) -> Back:
        """The place from which everything since a moment is read again."""


def scale_of(source: Source, log: Location | None) -> Scale:
    """That of a source, whose own part of Spark's log is in the folder `log`, if that is known."""
    if isinstance(source.query, Stream):
        return Events(source)
    connection: Any = current().connection(source.connection)
    if connection.kind == "kafka":
        return Messages(source, connection)
    if connection.kind.startswith("object_store"):
        return Files(source, connection, log)
    if connection.kind.startswith("delta"):
        return Versions(source, connection)
    assert system_for(connection.kind).log is not None
    return Events(source)


def told(place: Any, log: Location | None = None) -> str:
    """A place in words, whatever it is of."""
    if isinstance(place, Mapping):
        if set(place) == {"logOffset"}:
            return "" if log is None else counted(sum(1 for _ in entries(log, place["logOffset"])), "files")
        if "reservoirVersion" in place:
            return f"version {_before(place):,}"
        if len(place) == 1 and isinstance(offsets := next(iter(place.values())), Mapping):
            return _partitions(offsets)
    return f"{place:,}" if type(place) is int else "nothing yet" if place is None else str(place)


def counted(count: int, unit: str) -> str:
    """So many of them, in words."""
    return f"{count:,} {unit.removesuffix('s') if count == 1 else unit}"


def _further(source: Source, now: str, wanted: str) -> DeclarationError:
    return DeclarationError(
        f"{source.name} is at {now}, and {wanted} comes after that.", hint="A rewind goes back, and skips nothing."
    )


def _unread(source: Source) -> DeclarationError:
    return DeclarationError(f"{source.name} was not read yet, so there is nothing to go back to.")


# --------------------------------------------------------------------------------------------------------- our own logs


class Events:
    """A stream of ours: a place is the offset of the last event that was read."""

    unit = "events"

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def _log(self) -> Any:
        return runtime.open_stream(self._source.query, self._source.connection).log

    @property
    def _stored(self) -> Any:
        """`None` where there is none yet: whoever only looks makes nothing."""
        return runtime.stored_log(runtime.find(self._source.query), self._source.connection)

    def behind(self, place: int | None) -> int | None:
        """The events after it, at most; on Redis they are counted so far and no further."""
        start, log = self._source.start, self._log if place is not None else self._stored
        if place is None and start != "earliest" and not start.isdecimal():
            return None
        if log is None:
            return 0
        if place is None:
            place = log.floor() if start == "earliest" else int(start) - 1
        found: int = log.extent(place, log.head(), MOST_COUNTED)
        return found

    def end(self) -> str:
        """The next event."""
        return str(self._log.head() + 1)

    def kept(self, place: int | None) -> Back:
        """Where it is."""
        return Back(place, None if place is None else place + 1)

    def to_offset(self, place: int | None, offset: str) -> Back:
        """From the event of this offset."""
        if not offset.isdecimal() or not int(offset):
            raise DeclarationError(f"{offset!r} is no offset of the stream {self._source.name}: one number is.")
        return self._from(place, int(offset))

    def to_time(self, place: int | None, moment: datetime) -> Back:
        """From the first event that was published since."""
        return self._from(place, self._log.first_since(moment))

    def _from(self, place: int | None, first: int) -> Back:
        if place is None:
            raise _unread(self._source)
        if first > place:
            raise _further(self._source, f"{place:,}", f"{first:,}")
        floor, note = self._log.floor(), None
        if first <= floor:
            note = f"retention removed the events of {self._source.name} up to {floor:,}."
            first = floor + 1
        return Back(first - 1, first, f"event {first:,} of {self._source.name}; it was at {place:,}", note)


# --------------------------------------------------------------------------------------------------------------- topics


class Messages:
    """A topic of Kafka: a place is the next offset of each partition."""

    unit = "messages"

    def __init__(self, source: Source, connection: Any) -> None:
        self._source, self._connection = source, connection

    def behind(self, place: Mapping[str, Mapping[str, int]] | None) -> int | None:
        """The offsets between it and the end; transactions and compaction leave some of them empty."""
        from weft.systems.kafka import source as kafka

        if place is None and self._source.start == "latest":
            return None
        ends = kafka.latest(self._connection, self._source.name)
        at = self._at(place) if place is not None else self._first()
        return sum(max(end - at.get(number, 0), 0) for number, end in ends.items())

    def _first(self) -> dict[int, int]:
        """Where a new checkpoint begins."""
        from weft.systems.kafka import source as kafka

        start, floors = self._source.start, kafka.earliest(self._connection, self._source.name)
        return floors if start == "earliest" else {**floors, **partition_offsets(self._source.name, start, floors)}

    def refuse_start(self) -> None:
        """Raise where a new checkpoint would begin after the end."""
        from weft.systems.kafka import source as kafka

        name, start = self._source.name, self._source.start
        if start in ("earliest", "latest"):
            return
        ends = kafka.latest(self._connection, name)
        for number, offset in partition_offsets(name, start, ends).items():
            if offset > ends[number]:
                raise DeclarationError(
                    f"The topic {name!r} cannot start at {number}:{offset}: its next message is "
                    f"{number}:{ends[number]}.",
                    hint="latest begins with what comes next.",
                )

    def end(self) -> str:
        """The next message of each partition."""
        from weft.systems.kafka import source as kafka

        return ",".join(f"{number}:{end}" for number, end in kafka.latest(self._connection, self._source.name).items())

    def kept(self, place: Any) -> Back:
        """Where it is."""
        return Back(place, None if place is None else place[self._source.name])

    def to_offset(self, place: Any, offset: str) -> Back:
        """From the message of this offset, in the only partition or in those that are named."""
        at = self._at(place)
        wanted = partition_offsets(self._source.name, offset, at)
        for number, found in wanted.items():
            if found > at[number]:
                raise _further(self._source, _partitions(at), f"{number}:{found}")
        return self._from(at, wanted)

    def to_time(self, place: Any, moment: datetime) -> Back:
        """From the first message of each partition since then."""
        from weft.systems.kafka import source as kafka

        at = self._at(place)
        found = kafka.offsets_at(self._connection, self._source.name, moment)
        wanted = {number: offset for number, offset in found.items() if offset < at.get(number, 0)}
        if not wanted:
            raise DeclarationError(
                f"No message of {self._source.name} that was read is of {moment:%Y-%m-%d %H:%M:%S} or later."
            )
        return self._from(at, wanted)

    def _from(self, at: dict[int, int], wanted: dict[int, int]) -> Back:
        from weft.systems.kafka import source as kafka

        floors = kafka.earliest(self._connection, self._source.name)
        gone = {number: floors[number] for number, found in wanted.items() if found < floors.get(number, 0)}
        note = f"the brokers removed the messages of {self._source.name} before {_partitions(gone)}." if gone else None
        moved = {**at, **wanted, **{number: min(floor, at[number]) for number, floor in gone.items()}}
        place = {self._source.name: {str(number): offset for number, offset in moved.items()}}
        told = f"{_partitions(moved)} of {self._source.name}; it was at {_partitions(at)}"
        return Back(place, place[self._source.name], told, note)

    def _at(self, place: Any) -> dict[int, int]:
        if place is None:
            raise _unread(self._source)
        return {int(number): offset for number, offset in place[self._source.name].items()}


def _partitions(offsets: Mapping[Any, int]) -> str:
    return ", ".join(f"{number}:{offsets[number]}" for number in sorted(offsets, key=int))


# ---------------------------------------------------------------------------------------------------------------- files


class Files:
    """Files under a prefix: a place is a number of Spark's own log, which has the names of those that were read."""

    unit = "files"

    def __init__(self, source: Source, connection: Any, log: Location | None) -> None:
        self._source, self._connection, self._log = source, connection, log
        self._seen: set[str] = set()
        self._upto = -1

    def behind(self, place: Mapping[str, int] | None) -> int | None:
        """The files that are there and were not read. Files that a pattern names are not counted."""
        if self._log is None or GLOB.search(self._source.name):
            return None
        upto = -1 if place is None else place["logOffset"]
        if upto < self._upto:
            self._seen, self._upto = set(), -1
        self._seen.update(_plain(each["path"]) for each in entries(self._log, upto, self._upto))
        self._upto = upto
        return sum(path not in self._seen for path in _listed(self._connection, self._source.name))

    def end(self) -> str:
        """Files are read from the first on."""
        raise AssertionError("refused where it is declared")

    def kept(self, place: Any) -> Back:
        """Where it is: all that was read stays read."""
        return self._without(place, float("inf"))

    def to_offset(self, place: Any, offset: str) -> Back:
        """Not with files."""
        raise DeclarationError(
            f"{self._source.name} is files, which have no offsets.",
            hint="Read those again that changed since: --to-time.",
        )

    def to_time(self, place: Any, moment: datetime) -> Back:
        """Those that were last changed at that time or later are read again."""
        # The millisecond that it is in: Spark's log has whole ones.
        found = self._without(place, (moment - _EPOCH) // timedelta(milliseconds=1))
        if not found.first:
            since = f"{moment:%Y-%m-%d %H:%M:%S}"
            raise DeclarationError(f"No file of {self._source.name} that was read has changed since {since}.")
        return found

    def _without(self, place: Any, milliseconds: float) -> Back:
        if place is None or self._log is None:
            raise _unread(self._source)
        read = list(entries(self._log, place["logOffset"]))
        stay = [each for each in read if each["timestamp"] < milliseconds]
        again = len(read) - len(stay)
        lines = (json.dumps({**each, "batchId": 0}, separators=(",", ":")) for each in stay)
        told = f"{again:,} of {counted(len(read), self.unit)} of {self._source.name} that were read" if again else ""
        return Back({"logOffset": 0}, again, told, files="\n".join(("v1", *lines)))


def entries(log: Location, upto: int, after: int = -1) -> Iterator[dict[str, Any]]:
    """The files that a source was given, by Spark's log: path, time of change. Each tenth file of the log has what all
    before it had."""
    names = {int(stem): each for each in log.names() if (stem := each.partition(".")[0]).isdecimal()}
    whole = max((number for number, each in names.items() if "." in each and number <= upto), default=-1)
    wanted = [number for number in sorted(names) if max(whole, after + 1) <= number <= upto]
    for number in wanted:
        file = log.at(names[number])
        try:
            _, *lines = (file.read() or "").splitlines()
            for line in lines:
                if (found := json.loads(line))["batchId"] > after:
                    yield found
        except (OSError, ValueError, LookupError) as error:
            raise StorageError(f"Spark's log cannot be read at {file.path}: {error}.") from None


def removed(connection: Any, planned: Iterable[Mapping[str, Any]], read: Iterable[str]) -> list[str]:
    """The files of Spark's log that are gone; not those that were read. Spark reads no empty ones."""
    known = {_SCHEME.sub("/", path) for path in read}
    paths = sorted({_plain(each["path"]) for each in planned})
    missing = [path for path in paths if f"/{path.lstrip('/')}" not in known]
    return [each.path for each in _store(connection).get_file_info(missing) if not each.is_file] if missing else []


def _listed(connection: Any, prefix: str) -> Iterator[str]:
    """The files under a prefix that Spark sees too."""
    root = _plain(connection.root)
    for path in _paths(connection, f"{root}/{prefix.strip('/')}", recursive=True):
        if not any(_is_hidden(part) for part in path.removeprefix(root).split("/")):
            yield path


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.endswith("._COPYING_") or (name.startswith("_") and "=" not in name)


def _paths(connection: Any, folder: str, *, recursive: bool = False) -> list[str]:
    from pyarrow import fs

    store = _store(connection)
    selector = fs.FileSelector(folder.rstrip("/") or "/", recursive=recursive, allow_not_found=True)
    try:
        return [each.path for each in store.get_file_info(selector) if each.is_file]
    except OSError as error:
        raise connection.failed(error) from None


def _store(connection: Any) -> Any:
    """Arrow's own client of a folder or bucket."""
    from pyarrow import fs

    return connection.filesystem() if hasattr(connection, "filesystem") else fs.LocalFileSystem()


def _plain(path: str) -> str:
    """A path as Arrow has it, of what Spark's log calls it."""
    scheme, separator, rest = path.partition("://")
    return unquote(rest) if separator else scheme


# ---------------------------------------------------------------------------------------------------------------- Delta


class Versions:
    """A Delta table: a place is the version that is read next, or is being read."""

    unit = "versions"

    def __init__(self, source: Source, connection: Any) -> None:
        self._source, self._connection = source, connection
        self._folder = f"{_plain(table_path(connection.root, None, source.name))}/_delta_log"

    def behind(self, place: Mapping[str, Any] | None) -> int | None:
        """The versions that were not read to their end."""
        known, start = self.known(), self._source.start
        if not known or (place is None and start == "latest"):
            return None
        first = place["reservoirVersion"] if place is not None else 0 if start == "earliest" else int(start)
        return max(known[-1] + 1 - int(first), 0)

    def end(self) -> str:
        """The next version."""
        return str(max(self.known(), default=-1) + 1)

    def kept(self, place: Any) -> Back:
        """Where it is."""
        return Back(place, None if place is None else place["reservoirVersion"])

    def to_offset(self, place: Any, offset: str) -> Back:
        """From a version."""
        if not offset.isdecimal():
            raise DeclarationError(f"{offset!r} is no version of {self._source.name}: one number is.")
        return self._from(place, int(offset))

    def to_time(self, place: Any, moment: datetime) -> Back:
        """From the first version that was committed since."""
        first = None
        for version in reversed(self.known()):
            if self._committed(version) < moment:
                break
            first = version
        if first is None:
            raise DeclarationError(f"{self._source.name} has no version of {moment:%Y-%m-%d %H:%M:%S} or later.")
        return self._from(place, first)

    def _from(self, place: Any, version: int) -> Back:
        if place is None:
            raise _unread(self._source)
        if place["isStartingVersion"]:
            raise DeclarationError(
                f"{self._source.name} is still being read for the first time, as the whole that it was then.",
                hint="To begin anew: weft checkpoints reset.",
            )
        if version > _before(place):
            raise _further(self._source, f"version {_before(place):,}", f"{version:,}")
        known, note = self.known(), None
        if known and version < known[0]:
            note = f"the log of {self._source.name} begins with version {known[0]:,}."
            version = known[0]
        moved = {**place, "reservoirVersion": version, "index": -1}
        told = f"version {version:,} of {self._source.name}; it was at {_before(place):,}"
        return Back(moved, version, told, note)

    def known(self) -> list[int]:
        """The versions that its log has."""
        names = (each.rpartition("/")[2] for each in _paths(self._connection, self._folder))
        return sorted(int(found[1]) for name in names if (found := _VERSION.fullmatch(name)))

    def _committed(self, version: int) -> datetime:
        """When a version was made."""
        store, path = _store(self._connection), f"{self._folder}/{version:020}.json"
        try:
            with store.open_input_stream(path) as file:
                actions = [json.loads(line) for line in file.read().splitlines()]
            found: dict[str, Any] = next((each["commitInfo"] for each in actions if "commitInfo" in each), {})
            milliseconds = found.get("inCommitTimestamp") or found.get("timestamp")
            if milliseconds is not None:
                return datetime.fromtimestamp(milliseconds / 1000, UTC)
            changed: datetime = store.get_file_info(path).mtime
            return changed
        except OSError as error:
            raise self._connection.failed(error) from None


def _before(place: Mapping[str, Any]) -> int:
    """The last version of which something was read."""
    version: int = place["reservoirVersion"]
    return version if place["index"] >= 0 else version - 1
