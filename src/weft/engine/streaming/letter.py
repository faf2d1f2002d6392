"""What is told of a row that went nowhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Literal, Self

import pyarrow as pa

from weft.types import FieldType, to_json

Stage = Literal["read", "transform", "store", "replay", "gone"]
STAGES = ("read", "transform", "store")
"""Where a row can fail. The other two are notes among the letters: a replay that was begun, and letters that are gone
from a place where nothing can be removed."""


@dataclass(frozen=True)
class Letter:
    """One row that went nowhere."""

    stage: Stage
    """Where it failed: when it was read from its source, by `transform_sql`, or when a target stored it."""
    error: str
    source: str
    payload: str
    """The row as JSON, or the text of what was no row."""
    offset: str | None = None
    target: str | None = None


@dataclass(frozen=True, kw_only=True)
class Stored(Letter):
    """A letter as it is kept."""

    failed_at: datetime
    letter_id: str
    pipeline: str
    batch: int | None = None
    """In which batch it failed; of what failed in a replay by another row's fault, nobody knows."""
    replays: int = 0
    """How often it was replayed, and failed again."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self | None:
        """That of a record; `None` for what is no letter. Other columns are passed by, and ones that are missing are
        as in a letter that was written before there were such."""
        known = {name: record[name] for name in FIELDS if record.get(name) is not None}
        if not {"letter_id", "stage", "pipeline"} <= known.keys():
            return None
        moment = known.get("failed_at", datetime.fromtimestamp(0, UTC))
        moment = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
        known["failed_at"] = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        return cls(**{"error": "", "source": "", "payload": "", **known})

    def record(self) -> dict[str, Any]:
        """It as a place keeps it."""
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
    """A row as JSON, whatever is in it: what a reader of the payload can take for the same value again."""
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: object) -> object:
    try:
        return to_json(value)
    except TypeError:
        return str(value)


def digest(text: str) -> str:
    """A name for what a text says."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
