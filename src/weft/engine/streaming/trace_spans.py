"""The spans of a micro-batch, under the names that OpenTelemetry has for messaging: `process orders`, and below it a
commit to each target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from weft import tracing
from weft.engine.streaming.batch_id import BatchId
from weft.engine.streaming.progress import OpenedSource
from weft.pipelines.streaming.endpoints import label_of
from weft.pipelines.streaming.spec import StreamingPipeline, Target
from weft.systems.load import Counts

Named = tuple[str, tracing.Kind, dict[str, str | int | float | bool]]


def process_span(pipeline: StreamingPipeline, sources: Sequence[OpenedSource], batch: BatchId) -> Named:
    """Return the span of a whole batch."""
    about = {
        **_of_batch(pipeline, batch),
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.consumer.group.name": pipeline.name,
    }
    systems = {each.source.messaging_system for each in sources} - {None}
    if len(systems) == 1:
        about["messaging.system"] = str(*systems)
    if len(sources) == 1:
        about["messaging.destination.name"] = sources[0].name
    return f"process {', '.join(each.name for each in sources) or pipeline.name}", "consumer", about


def note_read(sources: Sequence[OpenedSource]) -> None:
    """Add to the span of a batch what its sources gave it: how many messages, and of which publishes."""
    read = [(each.source, each.rows) for each in sources if each.rows is not None]
    with suppress(Exception):  # the batch itself reports what is wrong with a source
        tracing.note({"messaging.batch.message_count": sum(source.count(rows) for source, rows in read)})
        for source, rows in read:
            tracing.link(source.publish_ids(rows), source.traceparents(rows))


def commit_span(pipeline: StreamingPipeline, targets: Sequence[Target], batch: BatchId) -> Named:
    """Return the span of a commit to one target, or to several in one transaction."""
    labels = ", ".join(label_of(pipeline, each) for each in targets)
    return f"commit {labels}", "client", {**_of_batch(pipeline, batch), "weft.target": labels}


def note_counts(counts: Iterable[Counts]) -> None:
    """Add to the span of a commit what it did."""
    done = list(counts)
    tracing.note(
        {
            "weft.rows_read": sum(each.rows_read for each in done),
            "weft.replayed": bool(done) and all(each.replayed for each in done),
        }
    )


def _of_batch(pipeline: StreamingPipeline, batch: BatchId) -> dict[str, str | int | float | bool]:
    return {"weft.pipeline": pipeline.name, "weft.query_id": batch.query_id, "weft.batch_id": batch.number}
