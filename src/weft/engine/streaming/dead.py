"""Dead letters: rows that could not be read, transformed or stored, alone, with the reason and where they are from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa

from weft.engine import given as kinds
from weft.engine.load import Job
from weft.engine.readers import open_tables
from weft.engine.streaming.letter import Letter
from weft.engine.streaming.sources import EVENT_TS
from weft.errors import WeftError
from weft.pipelines.streaming.spec import DeadLetters, StreamingPipeline
from weft.project import current
from weft.streams.declare import Stream
from weft.streams.publishing import publish_once
from weft.systems.base import Connection
from weft.systems.load import Load
from weft.systems.log import EXTRA, RESERVED_PREFIX, ROWID
from weft.systems.sql import quarantine
from weft.types import FieldType

FIELDS = ("failed_at", "letter_id", "pipeline", "batch", "stage", "error", "source", "offset", "target", "payload")
_SCHEMA = pa.schema(
    [
        pa.field("failed_at", pa.timestamp("us", "UTC")),
        *(pa.field(name, pa.int64() if name == "batch" else pa.string()) for name in FIELDS[1:]),
    ]
)


class DeadLetterBox:
    """Where a pipeline puts its dead letters, each batch's once."""

    def __init__(self, pipeline: StreamingPipeline) -> None:
        self.pipeline, self.place = pipeline, pipeline.dead_letters

    def put(self, letters: Sequence[Letter], checkpoint: str, batch_id: int, part: str) -> None:
        """Store letters. The same ones of the same batch again change nothing, but on a topic."""
        if not letters or self.place is None:
            return
        now = datetime.now(UTC)
        seen: Counter[Letter] = Counter()
        records: list[dict[str, Any]] = []
        for each in letters:
            seen[each] += 1
            # By what it says: a batch that is tried again under other SQL may have other letters, in another order.
            about = (checkpoint, batch_id, part, astuple(each), seen[each])
            letter_id = blake2b(repr(about).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
            told = {"failed_at": now, "letter_id": letter_id, "pipeline": self.pipeline.name, "batch": batch_id}
            records.append({**told, **asdict(each)})
        _put(self.place, records, self.pipeline.name, f"{checkpoint} {part}", batch_id)


def _put(place: DeadLetters, records: list[dict[str, Any]], pipeline: str, key: str, batch_id: int) -> None:
    if place.stream is not None:
        stream = place.stream if isinstance(place.stream, Stream) else stream_of(place.stream, place.connection)
        where = None if place.connection is None else current().connection(place.connection)
        publish_once(stream, where, records, "letter_id")
        return
    if place.topic is not None:
        from weft.systems.kafka import sink

        texts = [json.dumps(record, ensure_ascii=False, default=str).encode() for record in records]
        broker: Any = current().connection(place.connection)
        sink.produce(broker, place.topic, [(None, text, {}) for text in texts])
        return
    rows = kinds.Memory(_SCHEMA, pa.Table.from_pylist(records, _SCHEMA).to_batches())
    if place.table is not None:
        load = Load.declare(target=place.table, mode="merge", keys=["letter_id"], pipeline=pipeline)
        Job(load, current().connection(place.connection), None, None, None).run(rows)
        return
    from weft.systems.objects.connection import ObjectStoreLocalConnection

    assert place.path is not None
    path = Path(place.path).expanduser().absolute()
    folder = ObjectStoreLocalConnection(str(path.parent), name="dead letters", format="json_lines")
    # Files are never changed, so that these are told by their place in the batch alone.
    load = Load.declare(target=(None, path.name), pipeline=pipeline, commit_key=key, batch_id=batch_id)
    Job(load, folder, None, None, None).run(rows)


def stream_of(name: str, connection: str | Connection | None) -> Stream:
    """The stream of dead letters with this name: the declared one, or one made for them."""
    found = current().streams.get(name)
    if found is not None:
        return found
    fields = {each: FieldType.parse("int64" if each == "batch" else "string") for each in FIELDS[1:]}
    fields = {"failed_at": FieldType.parse("timestamp"), **fields}
    return Stream(name=name, connection=connection, fields=fields, description="Rows that went nowhere")


# ----------------------------------------------------------------------------------------------- rows that are to blame


def blamed(
    rows: pa.Table, attempt: Callable[[pa.Table], pa.Table]
) -> tuple[pa.Table, list[tuple[dict[str, Any], str]]]:
    """The rows that can be transformed, and those that cannot, each with the reason: found by halving."""
    bad: list[tuple[int, str]] = []

    def look(first: int, end: int) -> None:
        try:
            attempt(rows.slice(first, end - first))
        except WeftError as error:
            if end - first == 1:
                bad.append((first, error.what))
                return
            middle = (first + end) // 2
            look(first, middle)
            look(middle, end)

    look(0, len(rows))
    numbers = {number for number, _ in bad}
    kept = rows.take(pa.array([number for number in range(len(rows)) if number not in numbers], pa.int64()))
    return kept, [(rows.slice(number, 1).to_pylist()[0], why) for number, why in bad]


def letter_of(row: dict[str, Any], why: str, source: str) -> Letter:
    """The letter of a row that `transform_sql` did not take."""
    row = dict(row)
    offset = row.get(ROWID)
    extra = row.pop(EXTRA, None)
    shown = {name: value for name, value in row.items() if not name.startswith(RESERVED_PREFIX) and name != EVENT_TS}
    if extra is not None:
        shown |= json.loads(extra)
    return Letter(
        "transform",
        why,
        str(row.get("_weft_source", source)),
        json.dumps(shown, ensure_ascii=False, default=str),
        None if offset is None else str(offset),
    )


# ---------------------------------------------------------------------------------------------- rows that were rejected


@contextmanager
def rejected(connection: Connection, load: Load, source: str) -> Iterator[list[Letter]]:
    """What a target's quarantine has of this batch; it is taken out of there in the end."""
    tables = open_tables(connection)
    place = tables.table(load.schema, quarantine.table_name(load))
    of_batch = f"{tables.quote('_weft_checkpoint_id')} = ? AND {tables.quote('_weft_batch_id')} = ?"
    key = (load.checkpoint_id, load.batch_id)
    try:
        with tables.driver.session("read") as session:
            found = session.rows(f"SELECT {tables.quote('_weft_error')}, payload FROM {place} WHERE {of_batch}", key)
        yield [Letter("store", error, source, payload, target=load.name) for error, payload in found]
        if found:
            with tables.driver.session("publish") as session:
                session.run(f"DELETE FROM {place} WHERE {of_batch}", key)
    finally:
        tables.close()
