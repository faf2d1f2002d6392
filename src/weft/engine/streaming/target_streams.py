"""Streams and topics as targets: each row of a batch is an event or a message, and one that is refused becomes a
letter."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from hashlib import sha256
from typing import Any

import pyarrow as pa

from weft.columns import hint_of, is_nested, not_utf8, python_rows, python_values, why_no_text
from weft.engine import connectors, frames, inputs
from weft.engine.inputs import Input
from weft.engine.readers import read_all
from weft.engine.streaming.batch_id import BatchId
from weft.engine.streaming.dead_letters import NO_STORE
from weft.engine.streaming.failing_rows import without_rows
from weft.errors import SchemaError
from weft.pipelines.streaming.spec import StreamingPipeline, Target
from weft.project import current
from weft.spark_support import outcome
from weft.streams.declare import Stream
from weft.streams.encode import unfit
from weft.streams.publishing import publish_batch
from weft.streams.runtime import OpenedStream, open_stream
from weft.systems.base import Connection, system_for
from weft.systems.frame_checks import written_texts
from weft.systems.load import Counts, Load
from weft.systems.log import RESERVED_PREFIX
from weft.systems.stream_source import EVENT_TIME
from weft.systems.target import Reject, SparkTarget
from weft.types import to_json

# The most events in one publish, which stores all or none: few enough to hold them as Python objects.
_EVENTS = 100_000
PutRefused = Callable[[Sequence[tuple[dict[str, Any], str]]], None]
"""Takes the rows that a stream refuses, each with the reason, before the others are stored."""


def published(
    pipeline: StreamingPipeline, target: Target, rows: Input, batch: BatchId, put: PutRefused | None
) -> Counts:
    """Publish the rows of a batch to a topic or stream."""
    connection, topic = current().connection(target.connection), topic_target(target)
    if topic is None:
        return _published_events(target, connection, rows, _publish_key(batch), put)
    load = Load(
        table=target.name,
        keys=target.primary_key,
        pipeline=pipeline.name,
        checkpoint_id=batch.query_id,
        batch_id=batch.number,
        moment=datetime.now(UTC),
    )
    frame = frames.of(rows, rows.reader if isinstance(rows, inputs.Readable) else None, None)
    with outcome.explained(f"write to {target.name}"):
        reject = None if put is None else rejecting(put)
        spark = connectors.ready(frame.sparkSession, connection)
        return written_texts(frame, load, reject, lambda texts: topic.write(texts, load, spark, reject))


def _publish_key(batch: BatchId) -> str:
    """Return the key under which a batch is published once. With other rows it has another one: else they would be
    taken for duplicates where an older checkpoint was brought back."""
    key = f"{batch.query_id} {batch.number}"
    return key if batch.positions is None else f"{key} {sha256(batch.positions.encode()).hexdigest()[:16]}"


def rejecting(put: PutRefused) -> Reject:
    """Return what a target of Spark's hands refused rows to."""
    return lambda rows, why: put([(row, why) for row in python_rows(rows)])


def topic_target(target: Target) -> SparkTarget | None:
    """Return the topics of a target's connection; `None` where the target is a Weft stream."""
    connection = current().connection(target.connection)
    target_class = system_for(connection.kind).load("target")
    if target_class is None or isinstance(target.stream, Stream):
        return None
    opened: SparkTarget = target_class(connection)
    return opened


def _published_events(target: Target, connection: Connection, rows: Input, key: str, put: PutRefused | None) -> Counts:
    """Publish rows to a Weft stream. A batch that is tried again is found by its key where it is one publish, and
    stored again where it is several: which rows come first may differ between two tries, so that a key could lose
    some."""
    assert target.stream is not None
    ready = open_stream(target.stream, connection)
    fields = ready.log.fields()
    documents = {name for name, kind in fields.items() if kind.base == "json"}
    known = ready.stream.fields if ready.stream.validate_schema else fields
    aside: list[int] = []

    def unread(some: pa.Table, bad: Mapping[int, str]) -> None:
        reasons = list(map(why_no_text, bad.values()))
        if put is None:
            raise SchemaError(reasons[0], field=next(iter(bad.values())), hint=NO_STORE)
        put(list(zip(python_rows(some.take(pa.array(bad, pa.int64()))), reasons, strict=True)))
        aside.append(len(bad))

    parts = _events(rows, documents, known, unread, keeps_time=EVENT_TIME in ready.stream.fields)
    first = list(itertools.islice(parts, 2))
    once = f"{key} {target.name}" if len(first) == 1 else None
    read = stored = refused = 0
    publishes = itertools.chain(first, parts)
    del first  # else two publishes would be held to the end
    for events in publishes:
        counts = _stored(ready, events, once, put)
        read += len(events)
        stored += counts.inserted
        refused += counts.quarantined
    return Counts(rows_read=read + sum(aside), inserted=stored, quarantined=refused + sum(aside))


def _stored(ready: OpenedStream, events: list[dict[str, Any]], key: str | None, put: PutRefused | None) -> Counts:
    """Publish events, but those that the stream refuses, if there is a place for them."""
    try:
        reply = publish_batch(ready, events, key)
        return Counts(inserted=reply["rows_received"] - reply["rows_deduplicated"])
    except SchemaError as error:
        if put is None:
            raise SchemaError(error.what, field=error.field, value=error.value, hint=NO_STORE) from None
        bad = unfit(ready.stream, ready.log, events)
        if not bad and len(events) == 1:
            bad = {0: error}
    if bad:
        # Without the number, which may differ where the batch is tried again: it has the same letters.
        put([(events[at], re.sub(r"^Event \d+ of the", "The", error.what)) for at, error in bad.items()])
        parts = [([each for at, each in enumerate(events) if at not in bad], key)]
    else:
        # An event that the database itself refuses is found by bisection.
        middle = len(events) // 2
        parts = [(events[:middle], None), (events[middle:], None)]
    done = [_stored(ready, part, key, put) for part, key in parts if part]
    refused = len(bad) + sum(each.quarantined for each in done)
    return Counts(inserted=sum(each.inserted for each in done), quarantined=refused)


def _events(
    rows: Input,
    documents: Collection[str],
    known: Collection[str],
    unread: Callable[[pa.Table, Mapping[int, str]], None],
    *,
    keeps_time: bool,
) -> Iterator[list[dict[str, Any]]]:
    """Yield rows as events. A text for one of the fields in `documents` is JSON. A null in a column that is no `known`
    field is no value: another row brought the column. `unread` takes rows with the numbers of those that are no events,
    since a text is not UTF-8."""
    gathered: list[dict[str, Any]] = []
    for batch in _batches(rows):
        names = [
            name
            for name in batch.schema.names
            if not name.startswith(RESERVED_PREFIX) and (keeps_time or name != EVENT_TIME)
        ]
        batch = batch.select(names)
        if bad := not_utf8(batch):
            some = pa.Table.from_batches([batch])
            unread(some, bad)
            batch = without_rows(some, bad)
        events = python_rows(batch)
        for name in names:
            if (as_published := _published(batch.schema.field(name), is_document=name in documents)) is not None:
                for event, value in zip(events, as_published(batch.column(name)), strict=True):
                    event[name] = value
            if name not in known:
                for event in events:
                    if event[name] is None:
                        del event[name]
        gathered += events
        while len(gathered) > _EVENTS:
            yield gathered[:_EVENTS]
            gathered = gathered[_EVENTS:]
    if gathered:
        yield gathered


def _published(field: pa.Field, *, is_document: bool) -> Callable[[pa.Array], list[Any]] | None:
    """Return what makes values for a stream of a column; `None` where they are as they are."""
    if is_nested(field.type):
        return lambda column: [_as_json(each) for each in python_values(column)]
    if hint_of(field) == "json" or is_document:
        return lambda column: [_of_json(each) for each in column.to_pylist()]
    if pa.types.is_decimal(field.type) and not field.type.scale:  # integers that became wider, of which most fit int64
        return lambda column: [None if each is None else int(each) for each in column.to_pylist()]
    return None


def _as_json(value: Any) -> Any:
    """Return a value within lists and structs as JSON has it: whole decimals as integers, others and times as texts."""
    if isinstance(value, dict):
        return {name: _as_json(each) for name, each in value.items()}
    if isinstance(value, list):
        # Arrow gives a map as pairs.
        if value and all(isinstance(each, tuple) for each in value):
            return {str(name): _as_json(each) for name, each in value}
        return [_as_json(each) for each in value]
    if isinstance(value, Decimal) and value == value.to_integral_value():
        return int(value)
    return to_json(value) if isinstance(value, Decimal | date | bytes) else value


def _of_json(text: Any) -> Any:
    """Return what a text of JSON says; another value, and a text that is no JSON, as it is."""
    with suppress(ValueError, RecursionError):
        return json.loads(text) if isinstance(text, str) else text
    return text


def _batches(rows: Input) -> Iterator[Any]:
    if isinstance(rows, inputs.Memory):
        yield from rows.batches
    elif isinstance(rows, inputs.Readable):
        yield from read_all(rows.reader)
    elif isinstance(rows, inputs.Frame):
        with outcome.explained("run the batch"):
            yield from rows.frame.toArrow().to_batches()
