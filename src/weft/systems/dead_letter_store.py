"""Dead letters, and the capability of a system to keep them.

A dead letter is one row that could not be read, transformed or stored, with the reason and its origin. A store is
named by `System.dead_letter_store`; `weft.engine.streaming.dead_letters` opens the one that a pipeline declares.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Literal, Protocol, Self

import pyarrow as pa

from weft.systems import payloads
from weft.types import FieldType, to_json_or_text

Stage = Literal["read", "transform", "store", "replay", "gone"]
STAGES = ("read", "transform", "store")
"""Where a row can fail. The other two stages mark records that are not letters: a replay that began, and letters that
were removed from a store that only appends."""


@dataclass(frozen=True)
class DeadLetter:
    """One row that was rejected."""

    stage: Stage
    """Where it failed: when it was read from its source, by `transform_sql`, or when a target stored it."""
    error: str
    source: str
    payload: str
    """The row as JSON, or the text of what could not be parsed."""
    offset: str | None = None
    target: str | None = None


@dataclass(frozen=True, kw_only=True)
class StoredLetter(DeadLetter):
    """A dead letter as a store keeps it."""

    failed_at: datetime
    letter_id: str
    pipeline: str
    batch: int | None = None
    """The batch in which it failed; `None` where a replay failed because of another row."""
    replays: int = 0
    """How often it was replayed, and failed again."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self | None:
        """Return the letter of a record; `None` for a record that is not a letter.

        Unknown columns are ignored, and missing ones have the values of letters that were written without them."""
        known = {name: record[name] for name in FIELDS if record.get(name) is not None}
        if not {"letter_id", "stage", "pipeline"} <= known.keys():
            return None
        moment = known.get("failed_at", datetime.fromtimestamp(0, UTC))
        moment = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
        known["failed_at"] = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        return cls(**{"error": "", "source": "", "payload": "", **known})

    def record(self) -> dict[str, Any]:
        """Return the letter as a store keeps it."""
        return {name: getattr(self, name) for name in FIELDS}


FIELDS = (
    "failed_at",
    "letter_id",
    "pipeline",
    "batch",
    "stage",
    "error",
    "source",
    "offset",
    "target",
    "payload",
    "replays",
)
_TYPES = {"failed_at": "timestamp", "batch": "int64", "replays": "int64"}
FIELD_TYPES = {name: FieldType.parse(_TYPES.get(name, "string")) for name in FIELDS}
SCHEMA = pa.schema([pa.field(name, kind.arrow) for name, kind in FIELD_TYPES.items()])


def as_json(value: object) -> str:
    """Return a row of any values as JSON from which a reader of the payload can restore them."""
    return payloads.dumps(value, to_json_or_text)


def digest(text: str) -> str:
    """Return a name for a text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def decoded(data: bytes | None) -> dict[str, Any]:
    """Return a record of JSON bytes; an empty one for what others wrote."""
    try:
        record = json.loads(data or b"{}")
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


class DeadLetterStore(Protocol):
    """Dead letters in one table, stream, topic or folder, which several pipelines may share.

    Made of a connection, the place that a pipeline declares (a table, topic or path), the pipeline's name, and a
    function that returns a Spark session with the connection's jars: `(connection, place, pipeline, spark)`.

    `needs_spark = True` says that Spark reads it, and `takes_messages = True` that nobody else can remove letters while
    somebody reads them: the service reads neither. One that makes no place itself has `check()`, which raises where the
    place is missing, so that a pipeline does not start and fail with its first bad row.
    """

    name: str
    """How messages call it."""

    def put(self, letters: Sequence[StoredLetter]) -> None:
        """Store letters. Storing one again changes nothing that a reader sees."""

    def records(self) -> Iterator[Mapping[str, Any]]:
        """Yield every record as it is stored: letters of any pipeline, and what others put there."""

    def remove(self, ids: Collection[str]) -> None:
        """Remove letters. When this returns, they are gone for good."""
