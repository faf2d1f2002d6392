"""Where a shard is read from next, as a text: in positions, and in the `start` of a source.

| text | the next record of the shard |
| --- | --- |
| `earliest` | the first that it still has |
| `123` | the one of this sequence number |
| `>123` | the one after it |
| `@2026-01-31T12:00:00+00:00` | the first since a moment |
| `closed` | none: the shard was split or merged, and read to its end |
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from weft.errors import DeclarationError

EARLIEST, CLOSED = "earliest", "closed"
SHARD_PLACES = r"shardId-\d+:[^,\s]+(,shardId-\d+:[^,\s]+)*"
TIME = r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?(Z|[+-]\d{2}:?\d{2})?)?"
_PLACE = re.compile(rf"{EARLIEST}|{CLOSED}|>?\d+|@{TIME}")


def after(sequence_number: str) -> str:
    """Return the place behind a record."""
    return f">{sequence_number}"


def since(moment: datetime) -> str:
    """Return the place of the first record since a moment."""
    return f"@{moment.astimezone(UTC).isoformat()}"


def parse_time(text: str) -> datetime:
    """Return a moment; without a time zone it is one of UTC."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def sequence(place: str) -> int | None:
    """Return the sequence number in a place; `None` where there is none."""
    return int(place.removeprefix(">")) if place.removeprefix(">").isdecimal() else None


def iterator_arguments(place: str) -> dict[str, Any]:
    """Return a place as Kinesis' GetShardIterator has it."""
    if place == EARLIEST:
        return {"ShardIteratorType": "TRIM_HORIZON"}
    if place.startswith("@"):
        return {"ShardIteratorType": "AT_TIMESTAMP", "Timestamp": parse_time(place[1:])}
    kind = "AFTER" if place.startswith(">") else "AT"
    return {"ShardIteratorType": f"{kind}_SEQUENCE_NUMBER", "StartingSequenceNumber": place.removeprefix(">")}


def parse(stream: str, text: str, shards: Collection[str]) -> dict[str, str]:
    """By shard the place that a text names: one sequence number for a stream of one shard, else `shardId-…:123,…`."""
    if re.fullmatch(TIME, text):
        return dict.fromkeys(shards, f"@{text}")
    if text.isdecimal():
        if len(shards) != 1:
            example = ",".join(f"{shard}:{text}" for shard in sorted(shards))
            raise DeclarationError(
                f"The stream {stream} has {len(shards)} shards, each with sequence numbers of its own.",
                hint=f"Say which: {example}",
            )
        return dict.fromkeys(shards, text)
    if not re.fullmatch(SHARD_PLACES, text):
        raise DeclarationError(
            f"{text!r} is not a place in the stream {stream}.",
            hint="One sequence number, or shard:number, as in shardId-000000000000:123,shardId-000000000001:95.",
        )
    named = [each.partition(":") for each in text.split(",")]
    places = {shard: place for shard, _, place in named}
    if len(places) < len(named):
        raise DeclarationError(f"{text!r} names a shard of the stream {stream} twice.")
    for shard, place in places.items():
        if shard not in shards:
            known = ", ".join(sorted(shards))
            raise DeclarationError(f"The stream {stream} has no shard {shard}.", hint=f"It has {known}.")
        if not _PLACE.fullmatch(place):
            raise DeclarationError(f"{place!r} is not a place in the shard {shard} of the stream {stream}.")
    return places


def show(places: Mapping[str, str]) -> str:
    """Return the places of shards in the form that `parse` takes."""
    return ",".join(f"{shard}:{places[shard]}" for shard in sorted(places))
