"""Dead letters for tests: those that are kept, a pipeline to replay them, letters that somehow came to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import weft
from engine.streaming.conftest import declare, rows
from weft.engine.streaming.batch_id import BatchId
from weft.engine.streaming.dead_letters import DeadLetterBox, stream_of
from weft.engine.streaming.replay import Replay, ReplayResult
from weft.pipelines.streaming.declare import make
from weft.systems.dead_letter_store import DeadLetter, StoredLetter


def pipeline_of(**declared: Any) -> Any:
    """A pipeline from the stream `events` to the tables `copies` and `others`, unless it says otherwise."""
    declared = {
        "name": "copies",
        "source": declared.pop("source", None) or declare(n="int64", text="string"),
        "targets": [weft.Target(table=(None, "copies")), weft.Target(table=(None, "others"))],
        **declared,
    }
    return make(**declared)


def unread(*numbers: int) -> list[DeadLetter]:
    """Letters of rows that somehow could not be read."""
    return [DeadLetter("read", f"No {n}", "events", json.dumps({"n": n, "text": f"é{n}"}), str(n)) for n in numbers]


def put(pipeline: Any, letters: list[DeadLetter], batch: int = 0) -> None:
    DeadLetterBox(pipeline).put(letters, BatchId("query", batch), "read")


def letters_of(pipeline: Any) -> list[StoredLetter]:
    """Those of a topic come from its partitions in any order, so that two of one payload need more to sort by."""
    return sorted(DeadLetterBox(pipeline).letters(), key=lambda each: (each.payload, each.replays, each.letter_id))


def replay_all(pipeline: Any, **options: Any) -> ReplayResult:
    return Replay(pipeline, lambda _: True, **options).run()


def kept_letters(place: str, project: Path) -> list[dict[str, Any]]:
    if place == "stream":
        return letters_of_stream()
    if place == "table":
        names = ("offset", "payload", "pipeline", "stage", "source", "error")
        return [
            dict(zip(names, row, strict=True))
            for row in rows("failed", '"offset", payload, pipeline, stage, source, error')
        ]
    frame = weft.read("failed", source=weft.ObjectStoreLocalConnection(str(project), name="project"))
    return sorted(frame.toArrow().to_pylist(), key=lambda each: each["offset"])


def letters_of_stream() -> list[dict[str, Any]]:
    return list(weft.consume_sync(stream_of("failed", None), "me"))
