"""Targets that are streams: each row of a batch is an event."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from weft.engine import connectors, frames, inputs
from weft.engine.inputs import Input
from weft.engine.readers import read_all
from weft.pipelines.streaming.spec import StreamingPipeline, Target
from weft.project import current
from weft.spark_support import outcome
from weft.streams.declare import Stream
from weft.systems.base import Connection, system_for
from weft.systems.load import Counts, Load
from weft.systems.log import RESERVED_PREFIX
from weft.systems.stream_source import EVENT_TIME
from weft.systems.target import SparkTarget

# So many events are one publish: all of them or none, and few enough to be held as Python objects.
_EVENTS = 100_000


def published(pipeline: StreamingPipeline, target: Target, rows: Input, checkpoint: str, batch_id: int) -> Counts:
    """Publish the rows of a batch to a topic or stream."""
    connection, topic = current().connection(target.connection), topic_target(target)
    if topic is None:
        return _published_events(target, connection, rows, f"{checkpoint} {batch_id}")
    load = Load(
        table=target.name,
        keys=target.primary_key,
        pipeline=pipeline.name,
        checkpoint_id=checkpoint,
        batch_id=batch_id,
        moment=datetime.now(UTC),
    )
    frame = _frame(rows)
    with outcome.explained(f"write to {target.name}"):
        return topic.write(frame, load, connectors.ready(frame.sparkSession, connection))


def topic_target(target: Target) -> SparkTarget | None:
    """Return the topics of a target's connection; `None` where the target is a stream of ours."""
    connection = current().connection(target.connection)
    target_class = system_for(connection.kind).load("target")
    if target_class is None or isinstance(target.stream, Stream):
        return None
    opened: SparkTarget = target_class(connection)
    return opened


def _published_events(target: Target, connection: Connection, rows: Input, key: str) -> Counts:
    """Publish rows to a stream of ours. A batch that is tried again is found by its key where it is one publish, and
    stored again where it is several: which rows come first may differ between two tries, so that a key could lose
    some."""
    from weft.streams.publishing import publish_sync
    from weft.streams.runtime import open_stream

    assert target.stream is not None
    ready = open_stream(target.stream, connection)
    keeps_time = EVENT_TIME in ready.stream.fields
    read = stored = 0
    waiting: list[dict[str, Any]] | None = None
    for events in _events(rows, keeps_time=keeps_time):
        if waiting is not None:
            stored += _stored(publish_sync(ready.stream, waiting, connection=connection))
        read, waiting = read + len(events), events
    if waiting is not None:
        is_one = read == len(waiting)
        reply = publish_sync(
            ready.stream, waiting, connection=connection, idempotency_key=f"{key} {target.name}" if is_one else None
        )
        stored += _stored(reply)
    return Counts(rows_read=read, inserted=stored)


def _stored(reply: dict[str, Any]) -> int:
    return int(reply["rows_received"] - reply["rows_deduplicated"])


def _events(rows: Input, *, keeps_time: bool) -> Iterator[list[dict[str, Any]]]:
    gathered: list[dict[str, Any]] = []
    for batch in _batches(rows):
        names = [
            name
            for name in batch.schema.names
            if not name.startswith(RESERVED_PREFIX) and (keeps_time or name != EVENT_TIME)
        ]
        gathered += batch.select(names).to_pylist()
        while len(gathered) > _EVENTS:
            yield gathered[:_EVENTS]
            gathered = gathered[_EVENTS:]
    if gathered:
        yield gathered


def _batches(rows: Input) -> Iterator[Any]:
    if isinstance(rows, inputs.Memory):
        yield from rows.batches
    elif isinstance(rows, inputs.Readable):
        yield from read_all(rows.reader)
    elif isinstance(rows, inputs.Frame):
        with outcome.explained("run the batch"):
            yield from rows.frame.toArrow().to_batches()


def _frame(rows: Input) -> Any:
    reader = rows.reader if isinstance(rows, inputs.Readable) else None
    return frames.of(rows, reader, None)
