"""Dead letters: rows that could not be read, transformed or stored, each with the reason and its origin."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from weft.engine import connectors, session, spark_io
from weft.engine.readers import opened_tables
from weft.engine.streaming import row_origin
from weft.engine.streaming.batch_id import BatchId
from weft.engine.streaming.row_origin import ORIGIN
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
from weft.systems.dead_letter_store import (
    FIELD_TYPES,
    DeadLetter,
    DeadLetterStore,
    Stage,
    StoredLetter,
    as_json,
    digest,
)
from weft.systems.load import Load
from weft.systems.log import EXTRA, RESERVED_PREFIX
from weft.systems.sql import quarantine

NO_STORE = "Name a place where such rows go alone: dead_letter_stream, dead_letter_table, dead_letter_path …"


class DeadLetterBox:
    """The dead letters of a pipeline. `replays`: how often those that are put have been replayed; 0 for a batch."""

    def __init__(self, pipeline: StreamingPipeline, *, replays: int = 0) -> None:
        self.pipeline, self._replays = pipeline, replays
        self.put_ids: set[str] = set()
        """The letters that were put into this box."""
        self.origins: set[tuple[str, str | None]] = set()
        """Source and offset of the rows of a batch that were read, and then failed."""
        self.note: Callable[[Collection[str]], None] | None = None
        """Remembers the ids of letters before they are put."""
        self.withdrawn = 0
        """How often letters of the current batch were removed. Stores that only append take no letter again under the
        name of a removed one."""
        self.has_more = False
        """Whether `letters` ended before the last record."""
        self._store = open_store(pipeline)

    @property
    def store(self) -> DeadLetterStore:
        """The store; an error with the options that declare one, where there is none."""
        if self._store is None:
            raise DeclarationError(
                f"{self.pipeline.name} has no place for dead letters.",
                hint="Name one: dead_letter_stream, dead_letter_table, dead_letter_topic or dead_letter_path.",
            )
        return self._store

    @property
    def why_unwatched(self) -> str | None:
        """Why a service does not look at its store again and again, as a page does; `None` where it may."""
        if getattr(self.store, "needs_spark", False):
            return "Spark reads them, which the service does not start"
        if getattr(self.store, "takes_messages", False):
            return "who reads them takes them from a replay or purge meanwhile"
        return None

    def put(self, letters: Sequence[DeadLetter], batch: BatchId, part: str) -> None:
        """Store the letters of a batch. The same ones of the same batch again change nothing."""
        self.origins.update((each.source, each.offset) for each in letters if each.stage != "read")
        if not letters or self._store is None:
            return
        now = datetime.now(UTC)
        seen: Counter[DeadLetter] = Counter()
        stored = []
        for each in letters:
            seen[each] += 1
            # The id of a letter is a hash of its contents, not its number: a batch that is retried under other SQL may
            # have other letters, in another order.
            again = (self.withdrawn,) if self.withdrawn else ()
            letter_id = digest(repr((*batch[:2], part, tuple(vars(each).values()), seen[each], *again)))
            stored.append(
                StoredLetter(
                    **vars(each),
                    failed_at=now,
                    letter_id=letter_id,
                    pipeline=self.pipeline.name,
                    batch=None if self._replays else batch.number,
                    replays=self._replays,
                )
            )
        if self.note is not None:
            self.note([each.letter_id for each in stored])
        self.put_stored(stored)

    def put_stored(self, letters: Sequence[StoredLetter]) -> None:
        """Store letters that have an id."""
        if letters:
            self.put_ids.update(each.letter_id for each in letters)
            self.store.put(letters)

    def letters(self, most: int | None = None) -> Iterator[StoredLetter]:
        """Yield all letters of this pipeline, each once, in no order; also the notes of replays that were begun. At
        most so many records are looked at."""
        seen: set[str] = set()
        for number, record in enumerate(self.store.records()):
            if number == most:
                self.has_more = True
                return
            letter = StoredLetter.of(record)
            if letter is None or letter.pipeline != self.pipeline.name or letter.letter_id in seen:
                continue
            seen.add(letter.letter_id)
            if letter.stage != "gone":
                yield letter

    def remove(self, ids: Collection[str]) -> None:
        if ids:
            self.store.remove(ids)


# ----------------------------------------------------------------------------------------------- letters of rows


def letter_of(row: dict[str, Any], why: str, documents: Collection[str] = ()) -> DeadLetter:
    """Return the letter of a row that `transform_sql` failed for; the row has the column of its origin. The columns
    `documents` (in small letters) are JSON: no batch may have noted that, if others of its rows have none there."""
    row = dict(row)
    extra = row.pop(EXTRA, None)
    # Without `_event_ts` the same SQL over it could not be run again.
    shown = {name: value for name, value in row.items() if not name.startswith(RESERVED_PREFIX)}
    if extra is not None:
        shown |= json.loads(extra)
    texts = (
        f"{as_json(name)}: {each if name.lower() in documents and each is not None else as_json(each)}"
        for name, each in shown.items()
    )
    return DeadLetter("transform", why, payload=f"{{{', '.join(texts)}}}", **json.loads(row[ORIGIN]))


# ---------------------------------------------------------------------------------------------- rows that were rejected


def name_origins(letters: Sequence[DeadLetter], with_origins: Callable[[], pa.Table]) -> Sequence[DeadLetter]:
    """Return the letters of rejected rows with their origins, as far as these are known: SQL that groups rows, for
    example, leaves none."""
    # Whatever fails here, the letters are worth more than their origins, and so is the batch.
    with suppress(Exception):
        rows = with_origins()
        if ORIGIN in rows.column_names:
            return row_origin.with_origins(letters, rows)
    return letters


@contextmanager
def rejected(connection: Connection, load: Load, source: str, target: str) -> Iterator[list[DeadLetter]]:
    """Yield what a target's quarantine has of this batch; it is removed from there at the end."""
    with opened_tables(connection) as tables:
        quarantine.prepare(tables, load)
        place = tables.table(load.schema, quarantine.table_name(load))
        of_batch = f"{tables.quote('_weft_checkpoint_id')} = ? AND {tables.quote('_weft_batch_id')} = ?"
        key = (load.checkpoint_id, load.batch_id)
        with tables.driver.session("read") as opened:
            rows = opened.rows(f"SELECT {tables.quote('_weft_error')}, payload FROM {place} WHERE {of_batch}", key)
        yield [DeadLetter("store", error, source, payload, target=target) for error, payload in rows]
        if rows:
            with tables.driver.session("publish") as opened:
                opened.run(f"DELETE FROM {place} WHERE {of_batch}", key)


# ------------------------------------------------------------------------------------------------------------ the store


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
        spark_io.refuse_one_host(connection, "target")
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
        publish_once(self._stream, self._connection, [each.record() for each in letters], "letter_id")

    def records(self) -> Iterator[Mapping[str, Any]]:
        """Yield the events, but those of letters that were removed."""
        removed: set[str] = set()
        for event in self._events():
            if event.get("stage") == "gone":
                removed.update(json.loads(event["payload"]))
        yield from (event for event in self._events() if event.get("letter_id") not in removed)

    def _events(self) -> Iterator[dict[str, Any]]:
        log = open_stream(self._stream, self._connection, to_read=True).log
        head = log.head()
        return in_rounds(log, log.floor(), head, head)

    def remove(self, ids: Collection[str]) -> None:
        """Publish an event that names the letters."""
        removed = sorted(ids)
        self.put([note_of("gone", removed, digest(f"gone {json.dumps(removed)}"), self._pipeline)])


def note_of(stage: Stage, ids: Sequence[str], letter_id: str, pipeline: str) -> StoredLetter:
    """Return a record that names letters: those of a replay, or those that are gone."""
    now = datetime.now(UTC)
    return StoredLetter(stage, "", "", json.dumps(ids), failed_at=now, letter_id=letter_id, pipeline=pipeline)


def stream_of(name: str, connection: str | Connection | None) -> Stream:
    """Return the stream of dead letters with this name: the declared one, or one made for them."""
    declared = current().streams.get(name)
    if declared is not None:
        return declared
    return Stream(name=name, connection=connection, fields=FIELD_TYPES, description="Rejected rows")
