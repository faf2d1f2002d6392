"""Where dead letters are kept: a table, a stream, a topic, or files in a folder or bucket."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import pyarrow as pa

from weft.engine import connectors, outcome, session
from weft.engine import given as kinds
from weft.engine.load import Job
from weft.engine.readers import open_tables
from weft.engine.streaming.letter import FIELD_TYPES, SCHEMA, Stored, as_json, digest
from weft.errors import DeclarationError, NotFoundError, StorageError, WeftError
from weft.pipelines.streaming.spec import Source, StreamingPipeline, Target
from weft.project import current
from weft.settings import interpolate
from weft.streams.declare import Stream
from weft.streams.events import in_rounds
from weft.streams.publishing import publish_once
from weft.streams.runtime import open_stream
from weft.systems.base import Connection
from weft.systems.load import Declared, Load
from weft.systems.objects.folder import LocalFolder
from weft.systems.objects.s3 import S3Connection
from weft.systems.sql.literals import literal
from weft.systems.sql.tables import Slice

# So many are named in one statement.
_IDS = 500


class Place(Protocol):
    """A place for letters, which several pipelines may share."""

    name: str
    """What people call it."""

    def put(self, letters: Sequence[Stored]) -> None:
        """Store letters. One that is there already changes nothing, but on a topic, where its reader finds one."""

    def records(self) -> Iterator[Mapping[str, Any]]:
        """All that it holds, as it holds it: letters of any pipeline, and what others put there."""

    def remove(self, ids: Collection[str]) -> None:
        """Have it hold these letters no longer. When this returns, they are gone for good."""


def place_of(pipeline: StreamingPipeline) -> Place | None:
    """The place that a pipeline names."""
    letters, name = pipeline.dead_letters, pipeline.name
    if letters is None:
        return None
    if letters.stream is not None:
        return _Events(letters.stream, letters.connection, name)
    if letters.path is not None:
        return _files(pipeline, letters.path, letters.connection)
    connection: Any = current().connection(letters.connection)
    if letters.topic is not None:
        return _Topic(connection, letters.topic)
    assert letters.table is not None
    return (_DeltaRows if connection.kind.startswith("delta") else _Rows)(connection, letters.table, name)


def _files(pipeline: StreamingPipeline, path: str, connection: str | Connection | None) -> _Files:
    holder: Any = None if connection is None else current().connection(connection)
    path = interpolate(path, f"the dead_letter_path of {pipeline.name}")
    where = str(Path(path).expanduser().absolute()) if holder is None else f"{holder.root}/{path.strip('/')}"
    parts: tuple[Source | Target, ...] = (*pipeline.sources, *pipeline.targets)
    for part in parts:
        own: Any = current().connection(part.connection)
        if own.kind.startswith("object_store") and f"{where}/".startswith(f"{own.root}/{part.name.strip('/')}/"):
            raise DeclarationError(
                f"{pipeline.name}: the dead letters in {where} would be among the files of {part.name}.",
                hint="Put them beside it: dead_letter_path.",
            )
    return _BucketFiles(where, holder) if isinstance(holder, S3Connection) else _Files(where, holder)


# --------------------------------------------------------------------------------------------------------------- tables


class _Rows:
    """A table of a SQL database."""

    def __init__(self, connection: Any, table: tuple[str | None, str], pipeline: str) -> None:
        self._connection, self._table, self._pipeline = connection, table, pipeline
        self.name = f"table {'.'.join(filter(None, table))} of {connection.label}"

    def put(self, letters: Sequence[Stored]) -> None:
        table = pa.Table.from_pylist([each.record() for each in letters], SCHEMA)
        load = Load.declare(target=self._table, mode="merge", keys=["letter_id"], pipeline=self._pipeline)
        # One that was made before letters had all of these columns gets the others.
        load = replace(load, declared=Declared(on_drift="evolve"))
        Job(load, self._connection, None, None, None).run(kinds.Memory(SCHEMA, table.to_batches()))

    def records(self) -> Iterator[Mapping[str, Any]]:
        if self._connection.is_missing():
            return  # the first letter makes the file
        tables = open_tables(self._connection)
        try:
            with tables.driver.session("read") as opened:
                columns = tables.columns(opened, *self._table)
            if columns is None:
                return
            names = ", ".join(tables.quote(each.name) for each in columns if each.name in SCHEMA.names)
            sql = f"SELECT {names} FROM {tables.table(*self._table)}"
            for batch in tables.read(Slice(sql), tables.describe(sql)):
                yield from batch.to_pylist()
        finally:
            tables.close()

    def remove(self, ids: Collection[str]) -> None:
        wanted = list(ids)
        tables = open_tables(self._connection)
        try:
            with tables.driver.session("publish") as opened:
                for first in range(0, len(wanted), _IDS):
                    some = wanted[first : first + _IDS]
                    opened.run(
                        f"DELETE FROM {tables.table(*self._table)} "
                        f"WHERE {tables.quote('letter_id')} IN ({', '.join('?' * len(some))})",
                        some,
                    )
        finally:
            tables.close()


class _DeltaRows(_Rows):
    """A table of Delta."""

    def records(self) -> Iterator[Mapping[str, Any]]:
        from weft.systems.delta import source as delta

        schema, table = self._table
        spark = connectors.ready(session.spark(), self._connection)
        try:
            with outcome.explained(f"read {self.name}"):
                found = delta.read(spark, self._connection, table, schema).toArrow()
        except NotFoundError:
            return
        yield from found.to_pylist()

    def remove(self, ids: Collection[str]) -> None:
        from weft.systems.delta.table import DeltaTable
        from weft.systems.objects.spark import configure

        spark = connectors.ready(session.spark(), self._connection)
        configure(spark, self._connection)
        name = DeltaTable(spark, self._connection, *self._table).name
        wanted = ", ".join(literal(each, "spark") for each in ids)
        with outcome.explained(f"remove letters from {self.name}"):
            spark.sql(f"DELETE FROM {name} WHERE letter_id IN ({wanted})")


# --------------------------------------------------------------------------------------------------- streams and topics


class _Events:
    """A stream. Events stay there until retention removes them: letters that are gone are named by another event."""

    def __init__(self, stream: str | Stream, connection: str | Connection | None, pipeline: str) -> None:
        self._stream = stream if isinstance(stream, Stream) else stream_of(stream, connection)
        self._connection = None if connection is None else current().connection(connection)
        self._pipeline = pipeline
        self.name = f"stream {self._stream.name}"

    def put(self, letters: Sequence[Stored]) -> None:
        publish_once(self._stream, self._connection, [each.record() for each in letters], "letter_id")

    def records(self) -> Iterator[Mapping[str, Any]]:
        gone: set[str] = set()
        for event in self._events():
            if event.get("stage") == "gone":
                gone.update(json.loads(event["payload"]))
        yield from (event for event in self._events() if event.get("letter_id") not in gone)

    def _events(self) -> Iterator[dict[str, Any]]:
        log = open_stream(self._stream, self._connection).log
        head = log.head()
        return in_rounds(log, log.floor(), head, head)

    def remove(self, ids: Collection[str]) -> None:
        payload = json.dumps(sorted(ids))
        note = Stored(
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
    """The stream of dead letters with this name: the declared one, or one made for them."""
    found = current().streams.get(name)
    if found is not None:
        return found
    return Stream(name=name, connection=connection, fields=FIELD_TYPES, description="Rows that went nowhere")


class _Topic:
    """A topic of Kafka. A letter's key is its id, so that a message of that key without a value says that it is gone:
    it goes to the same partition, and where topics are compacted both are removed."""

    def __init__(self, connection: Any, topic: str) -> None:
        self._connection, self._topic = connection, topic
        self.name = f"topic {topic} of {connection.label}"

    def put(self, letters: Sequence[Stored]) -> None:
        self._send((each.letter_id, as_json(each.record()).encode()) for each in letters)

    def records(self) -> Iterator[Mapping[str, Any]]:
        from weft.systems.kafka import reading

        gone: set[bytes] = set()
        for each in reading.messages(self._connection, self._topic):
            if each.value is None and each.key is not None:
                gone.add(each.key)
        for each in reading.messages(self._connection, self._topic):
            found = _decoded(each.value)
            if str(found.get("letter_id")).encode() not in gone:
                yield found

    def remove(self, ids: Collection[str]) -> None:
        self._send((each, None) for each in ids)

    def _send(self, messages: Iterable[tuple[str, bytes | None]]) -> None:
        from weft.systems.kafka import sink

        sink.produce(self._connection, self._topic, [(key.encode(), value, {}) for key, value in messages])


# ---------------------------------------------------------------------------------------------------------------- files


class _Files:
    """Files of JSON lines in a folder. Pipelines add files; who removes letters writes the rest of a file again."""

    def __init__(self, path: str, connection: Any = None) -> None:
        self._path, self._connection = path, connection
        self._ids: dict[str, set[str]] = {}
        """By file, the letters that were in it when it was last read: others only take some out."""
        self.name = f"path {path}"

    def put(self, letters: Sequence[Stored]) -> None:
        # By what is in it: the same letters again are the same file.
        name = f"letters-{digest(' '.join(each.letter_id for each in letters))}.json"
        with self._explained():
            self._create(name, b"".join(as_json(each.record()).encode() + b"\n" for each in letters))

    def records(self) -> Iterator[Mapping[str, Any]]:
        with self._explained():
            for name in self._names():
                yield from (record for _, record in self._lines(name))

    def remove(self, ids: Collection[str]) -> None:
        wanted = set(ids)
        with self._explained():
            for name in self._names():
                if name in self._ids and wanted.isdisjoint(self._ids[name]):
                    continue
                lines = self._lines(name)
                kept = [line for line, record in lines if record.get("letter_id") not in wanted]
                if len(kept) < len(lines):
                    self._replace(name, b"".join(kept))

    def _lines(self, name: str) -> list[tuple[bytes, dict[str, Any]]]:
        """The lines of a file, and what they say."""
        lines = [(line, _decoded(line)) for line in (self._read(name) or b"").splitlines(keepends=True)]
        self._ids[name] = {str(record.get("letter_id")) for _, record in lines}
        return lines

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except WeftError:
            raise
        except OSError as error:
            if self._connection is not None:
                raise self._connection.failed(error) from None
            raise StorageError(f"The dead letters in {self._path} cannot be read or written: {error}.") from None

    def _names(self) -> list[str]:
        return sorted(name for name in LocalFolder().files_in(self._path) if name.endswith(".json") and name[0] != ".")

    def _read(self, name: str) -> bytes | None:
        return LocalFolder().read(f"{self._path}/{name}")

    def _create(self, name: str, data: bytes) -> None:
        """Make a file, unless it is there."""
        LocalFolder().create(f"{self._path}/{name}", data)

    def _replace(self, name: str, data: bytes) -> None:
        """Put other contents into a file; without any it goes. Nothing brings the old ones back, not even a power
        cut: a move waits for the disk."""
        folder, path, hidden = LocalFolder(), f"{self._path}/{name}", f"{self._path}/.{uuid4().hex}.tmp"
        if data:
            folder.create(hidden, data)
            folder.move({hidden: path})
        else:
            folder.move({path: hidden})
            folder.remove([hidden])


class _BucketFiles(_Files):
    """The same in a bucket, by Arrow's client: nobody should wait for Spark to see a letter."""

    def __init__(self, path: str, connection: Any) -> None:
        super().__init__(path.partition("://")[2], connection)
        self.name = f"path {path.replace('s3a://', 's3://')}"

    @cached_property
    def _store(self) -> Any:
        return self._connection.filesystem()

    def _names(self) -> list[str]:
        from pyarrow.fs import FileSelector

        found = self._store.get_file_info(FileSelector(self._path, allow_not_found=True))
        return sorted(each.base_name for each in found if each.is_file and each.base_name.endswith(".json"))

    def _read(self, name: str) -> bytes | None:
        try:
            with self._store.open_input_stream(f"{self._path}/{name}") as file:
                data: bytes = file.read()
                return data
        except FileNotFoundError:
            return None

    def _create(self, name: str, data: bytes) -> None:
        if not self._store.get_file_info(f"{self._path}/{name}").is_file:
            self._replace(name, data)

    def _replace(self, name: str, data: bytes) -> None:
        if not data:
            self._store.delete_file(f"{self._path}/{name}")
            return
        # An object appears when its last part is there, whole.
        with self._store.open_output_stream(f"{self._path}/{name}") as file:
            file.write(data)


def _decoded(data: bytes | None) -> dict[str, Any]:
    """A record; nothing for what somebody else wrote."""
    try:
        found = json.loads(data or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
