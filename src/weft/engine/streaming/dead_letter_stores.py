"""The dead-letter store that a pipeline declares: that of a system, a table, a stream of ours or a folder."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from weft.engine import connectors, files, session
from weft.errors import DeclarationError
from weft.pipelines.streaming.spec import Source, StreamingPipeline, Target
from weft.project import current
from weft.settings import interpolate
from weft.streams.declare import Stream
from weft.streams.events import in_rounds
from weft.streams.publishing import publish_once
from weft.streams.runtime import open_stream
from weft.systems.base import Connection, system_for
from weft.systems.dead_letter_files import LetterFiles
from weft.systems.dead_letter_store import FIELD_TYPES, DeadLetterStore, StoredLetter, digest


def open_store(pipeline: StreamingPipeline) -> DeadLetterStore | None:
    """Return the store that a pipeline declares."""
    letters, name = pipeline.dead_letters, pipeline.name
    if letters is None:
        return None
    if letters.stream is not None:
        return StreamLetters(letters.stream, letters.connection, name)
    path = None
    if letters.path is not None:
        path = interpolate(letters.path, f"the dead_letter_path of {name}")
        if letters.connection is None:
            folder = LetterFiles(str(Path(path).expanduser().absolute()))
            _refuse_among_files(pipeline, folder.path)
            return folder
    connection = current().connection(letters.connection)
    place = path or letters.topic or letters.table
    store_class = system_for(connection.kind).load_dead_letter_store()

    def spark() -> Any:
        files.refuse_one_host(connection, "target")
        return connectors.ready(session.spark(), connection)

    store: DeadLetterStore = store_class(current().for_tables(connection), place, name, spark)
    if isinstance(store, LetterFiles):
        _refuse_among_files(pipeline, store.path)
    return store


def _refuse_among_files(pipeline: StreamingPipeline, path: str) -> None:
    """Refuse letters among the files of a source or a target."""
    parts: tuple[Source | Target, ...] = (*pipeline.sources, *pipeline.targets)
    for part in parts:
        if current().connection(part.connection).has_path(part.name, path):
            raise DeclarationError(
                f"{pipeline.name}: the dead letters in {path} would be among the files of {part.name}.",
                hint="Put them next to it: dead_letter_path.",
            )


class StreamLetters:
    """The dead letters in one stream, on any system that has a log. Events stay until retention removes them: another
    event names the letters that were removed."""

    def __init__(self, stream: str | Stream, connection: str | Connection | None, pipeline: str) -> None:
        self._stream = stream if isinstance(stream, Stream) else stream_of(stream, connection)
        self._connection = None if connection is None else current().connection(connection)
        self._pipeline = pipeline
        self.name = f"stream {self._stream.name}"

    def put(self, letters: Sequence[StoredLetter]) -> None:
        """Publish letters."""
        publish_once(self._stream, self._connection, [each.record() for each in letters], "letter_id")

    def records(self) -> Iterator[Mapping[str, Any]]:
        """Yield the events, but those of letters that were removed."""
        removed: set[str] = set()
        for event in self._events():
            if event.get("stage") == "gone":
                removed.update(json.loads(event["payload"]))
        yield from (event for event in self._events() if event.get("letter_id") not in removed)

    def _events(self) -> Iterator[dict[str, Any]]:
        log = open_stream(self._stream, self._connection).log
        head = log.head()
        return in_rounds(log, log.floor(), head, head)

    def remove(self, ids: Collection[str]) -> None:
        """Publish an event that names the letters."""
        payload = json.dumps(sorted(ids))
        note = StoredLetter(
            stage="gone",
            error="",
            source="",
            payload=payload,
            failed_at=datetime.now(UTC),
            letter_id=digest(f"gone {payload}"),
            pipeline=self._pipeline,
        )
        self.put([note])


def stream_of(name: str, connection: str | Connection | None) -> Stream:
    """Return the stream of dead letters with this name: the declared one, or one made for them."""
    declared = current().streams.get(name)
    if declared is not None:
        return declared
    return Stream(name=name, connection=connection, fields=FIELD_TYPES, description="Rejected rows")
