"""What a checkpoint keeps next to Spark's log: which its sources are, where those with `start="latest"` began, the
columns that they have had, and the tables that were written to.

Spark's log knows sources by their order alone: a pipeline that reads another one under the same name would go on in it
at the position of the one before, and skip what is before that.

It records where a source begins together with its first batch, which may come days later. A pipeline that was restarted
before that would begin at the end once more, and skip what came between.

Files and messages bring their own columns. With those of all batches kept, SQL which names a column goes on working
where a batch does not have it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pyarrow as pa

from weft.engine.streaming.batch_id import BatchId
from weft.errors import DeclarationError
from weft.pipelines.streaming.spec import Source, StreamingPipeline
from weft.project import current
from weft.spark_support.columns import HINT
from weft.spark_support.folder import Location
from weft.systems.codecs.columns import storable
from weft.systems.stream_source import OFFSET, StreamSource
from weft.types import FieldType

_MOST_COLUMNS = 1000
"""The most columns of a source that are remembered, unless its first batch has more."""


class CheckpointFile:
    """A file of JSON in a checkpoint: moved with it, and gone with it."""

    NAME: ClassVar[str]

    def __init__(self, checkpoint: Location) -> None:
        self._home, self._file = checkpoint, checkpoint.at(self.NAME)

    @property
    def home(self) -> Location:
        return self._home

    def _read(self) -> Any:
        return json.loads(self._file.read() or "null")

    def _write(self, kept: Any) -> None:
        self._file.write(json.dumps(kept))


class Sources(CheckpointFile):
    """The pipeline that a checkpoint is of, and its sources in their order, from its first batch on."""

    NAME = "sources.json"

    def check(self, pipeline: StreamingPipeline) -> bool:
        """Raise where it is another pipeline, or reads others; whether they are noted at all."""
        noted, now = self._read(), _named(pipeline.sources)
        owner, before = (noted["pipeline"], noted["sources"]) if isinstance(noted, dict) else (None, noted)
        if owner is not None and owner != pipeline.name:
            raise DeclarationError(
                f"The checkpoint of {pipeline.name} is that of the pipeline {owner}: what one has read, the other "
                "would pass over.",
                hint='Give each its own: checkpoint="…". If it is the same pipeline under another name, remove '
                f"{self._file.path}, and it goes on.",
            )
        if before is not None and before != now:
            raise DeclarationError(
                f"The checkpoint of {pipeline.name} is of {_listed(before)}, and now the pipeline reads {_listed(now)}."
                " It would go on in one source at the position of another.",
                hint=f"To start again: weft checkpoints reset {pipeline.name}. Or give the pipeline another name.",
            )
        return owner is not None

    def note(self, pipeline: StreamingPipeline) -> None:
        """Remember a pipeline."""
        self._write({"pipeline": pipeline.name, "sources": _named(pipeline.sources)})


class Copies(CheckpointFile):
    """By target what is copied into it, and how far that has come: the SQL of the last key, or that it is done."""

    NAME = "copies.json"

    def of(self, target: str) -> dict[str, Any] | None:
        """Return what is known of the copy into a target."""
        known: dict[str, Any] | None = (self._read() or {}).get(target)
        return known

    def note(self, target: str, **reached: Any) -> None:
        """Remember how far it has come."""
        self._write({**(self._read() or {}), target: reached})


class Verified(CheckpointFile):
    """By target what the last comparison of a mirror with its source found."""

    NAME = "verified.json"

    def all(self) -> dict[str, dict[str, Any]]:
        """Return the last comparison of each mirror."""
        return dict(self._read() or {})

    def note(self, target: str, **result: Any) -> None:
        """Remember what one found."""
        self._write({**self.all(), target: result})


def _named(sources: Sequence[Source]) -> list[list[str]]:
    return [[current().connection(each.connection).kind, each.name.strip("/")] for each in sources]


def _listed(named: list[list[str]]) -> str:
    return ", ".join(f"{name} ({kind})" for kind, name in named)


class Starts(CheckpointFile):
    """By source, what its `start="latest"` was when the checkpoint was new."""

    NAME = "starts.json"

    def settle(self, sources: Sequence[Source], opened: Sequence[StreamSource]) -> list[str]:
        """Where each source begins. An end is looked up once; when this returns, a crash does not make it forgotten."""
        if self._home.at("metadata").read() is None:  # what Spark writes first
            for each in opened:
                each.check_start()
        known = self._read() or {}
        pairs = zip(sources, opened, strict=True)
        ends = {each.name: there.end() for each, there in pairs if _is_open(each) and each.name not in known}
        if ends:
            known |= ends
            self._write(known)
        return [each.start for each in _begun(sources, known)]

    def known(self, sources: Sequence[Source]) -> list[Source]:
        """Return the sources, each with the start at which it began, if it has begun."""
        return _begun(sources, self._read() or {})


def _is_open(source: Source) -> bool:
    return source.start == "latest"


def _begun(sources: Sequence[Source], known: dict[str, str]) -> list[Source]:
    return [
        dataclasses.replace(each, start=known.get(each.name, each.start)) if _is_open(each) else each
        for each in sources
    ]


class Written(CheckpointFile):
    """The tables that batches were written to, each with the number of columns that it got from them; and by query,
    what the current batch found when it was first tried. The tables beside which a ledger has the batches, each
    with the name under which it has them. A table gets columns before its rows: a batch that is tried again would
    put other rows aside, and add columns beyond the limit. And the newest batches that had no row for them, which
    no ledger has."""

    NAME = "targets.json"

    def __init__(self, checkpoint: Location) -> None:
        super().__init__(checkpoint)
        self._known: dict[str, dict[str, Any]] | None = None

    def has(self, table: str) -> bool:
        return table in self._stored()["tables"]

    def has_ledger(self, table: str, pipeline: str) -> bool:
        """Return whether the ledger beside a table got batches under the name of a pipeline; `False` where an older
        version wrote them."""
        return self.has(table) and self._ledgers().get(table) == pipeline

    def _ledgers(self) -> dict[str, str]:
        return self._stored().setdefault("ledgers", {})

    def added(self, table: str) -> int:
        """Return how many columns a table got."""
        return int(self._stored()["tables"].get(table, 0))

    def at_first(self, table: str, batch: BatchId, now: Collection[str] | None) -> Collection[str] | None:
        """Return the columns that a table had when a batch was first tried; `None` where there was no table.
        `now`: those that it has."""
        tried: dict[str, list[str] | None] = self._tried(batch)["columns"]
        return tried.get(table, now)

    def note_try(self, table: str, batch: BatchId, columns: Collection[str] | None) -> None:
        """Remember the columns that a table has when a batch is first tried."""
        if table not in self._tried(batch)["columns"]:
            with self._changing(batch) as (_, tried):
                tried["columns"][table] = None if columns is None else sorted(columns)

    def note(self, table: str, batch: BatchId, added: int, ledger_of: str | None = None) -> None:
        """Remember a table that has a batch, and how many columns it got since that was first tried. `ledger_of`: the
        pipeline under whose name the ledger beside the table has the batch."""
        is_tried = table in self._tried(batch)["columns"]
        if is_tried or not self.has(table) or self._ledgers().get(table) != ledger_of:
            with self._changing(batch) as (tables, tried):
                tables[table] = tables.get(table, 0) + (added if is_tried else 0)
                tried["columns"].pop(table, None)
                self._ledgers().pop(table, None)
                if ledger_of is not None:
                    self._ledgers()[table] = ledger_of

    def keep(self, tables: Collection[str], batch: BatchId) -> None:
        """Forget tables that are no targets now: one that becomes a target again is a new one, which gets the rows from
        then on."""
        if gone := self._stored()["tables"].keys() - set(tables):
            with self._changing(batch) as (known, _):
                for each in gone:
                    known.pop(each, None)
                    self._ledgers().pop(each, None)

    def last_loaded(self, batch: BatchId) -> int:
        """Return the last batch before this one that the targets got; -1 where there is none, or none is known: an
        earlier version did not note which batches had no rows."""
        first, last = self._without_rows(batch)
        if self._stored().get("without_rows") is None:
            self._note_without_rows(batch, first, last)
        return batch.number - 1 if last < batch.number - 1 else first - 1

    def note_without_rows(self, batch: BatchId) -> None:
        """Remember a batch that no target gets, because it has no row for them."""
        first, last = self._without_rows(batch)
        self._note_without_rows(batch, batch.number if last < batch.number - 1 else first, batch.number)

    def _without_rows(self, batch: BatchId) -> tuple[int, int]:
        """Return the first and the last of the newest batches without rows."""
        noted = self._stored().get("without_rows") or {"first": 0, "last": batch.number - 1}
        return int(noted["first"]), int(noted["last"])

    def _note_without_rows(self, batch: BatchId, first: int, last: int) -> None:
        with self._changing(batch):
            self._stored()["without_rows"] = {"first": first, "last": last}

    def withdrawn(self, batch: BatchId) -> int:
        """Return how often letters of a batch were removed because it failed."""
        return int(self._tried(batch)["withdrawn"])

    def note_withdrawn(self, batch: BatchId) -> None:
        with self._changing(batch) as (_, tried):
            tried["withdrawn"] += 1

    def letters(self, batch: BatchId) -> set[str]:
        """Return the ids of the letters that attempts of a batch have put."""
        return set(self._tried(batch).get("letters", ()))

    def note_letters(self, batch: BatchId, ids: Collection[str]) -> None:
        """Remember letters before they are put: an attempt may end at any moment."""
        with self._changing(batch) as (_, tried):
            tried["letters"] = sorted({*tried.get("letters", ()), *ids})
            tried["superseded"] = sorted({*tried.get("superseded", ())}.difference(ids))

    def superseded(self, batch: BatchId) -> set[str]:
        """Return the letters of earlier attempts that are to go once a batch is stored."""
        return set(self._tried(batch).get("superseded", ()))

    def supersede(self, batch: BatchId, ids: Collection[str]) -> None:
        """Remember which letters are to go once a batch is stored: a process may end between the two."""
        if {*ids} != self.superseded(batch):
            with self._changing(batch) as (_, tried):
                tried["superseded"] = sorted(ids)

    @contextmanager
    def _changing(self, batch: BatchId) -> Iterator[tuple[dict[str, int], dict[str, Any]]]:
        """Yield the tables and the try of a batch, and write them at the end; a replay of letters without a checkpoint
        leaves nothing behind."""
        self._known = None  # a replay may have written meanwhile
        stored, tried = self._stored(), self._tried(batch)
        yield stored["tables"], tried
        stored["tries"].pop(batch.query_id, None)
        if tried["columns"] or tried["withdrawn"] or tried.get("letters"):
            stored["tries"][batch.query_id] = tried
        if self._home.at("metadata").read() is not None:
            self._write(stored)

    def _tried(self, batch: BatchId) -> dict[str, Any]:
        tried: dict[str, Any] = self._stored()["tries"].get(batch.query_id, {})
        return tried if tried.get("number") == batch.number else {"number": batch.number, "columns": {}, "withdrawn": 0}

    def _stored(self) -> dict[str, dict[str, Any]]:
        if self._known is None:
            stored = self._read() or {}
            if "tries" not in stored:  # that of an older version: counts by table, or a list of the tables
                stored = {"tables": stored if isinstance(stored, dict) else dict.fromkeys(stored, 0), "tries": {}}
            self._known = stored
        return self._known


class StatePlace(CheckpointFile):
    """Remembers which database keeps the windows of a checkpoint: another database would have none of them."""

    NAME = "state.json"

    def settle(self, pipeline: str, query_id: str, place: str) -> None:
        """Remember where the state is; raise where it was elsewhere."""
        noted = self._read()
        if noted is not None and noted["checkpoint"] == query_id and noted["place"] != place:
            raise DeclarationError(
                f"The windows of {pipeline} are in {noted['place']}, and now its state would be in {place}.",
                hint=f"Name the former by state_store. Or begin again: weft checkpoints reset {pipeline}.",
            )
        if noted is None or noted["checkpoint"] != query_id:
            self._write({"checkpoint": query_id, "place": place})

    def check_begun(self, pipeline: str, query_id: str, *, is_there: bool) -> None:
        """Remember that the state is there; raise where it was there and is no more: its rows would be in no window,
        and nobody would notice."""
        noted = self._read()
        if noted is None or noted["checkpoint"] != query_id or bool(noted.get("begun")) == is_there:
            return
        if not is_there:
            raise DeclarationError(
                f"The state of {pipeline} is gone from {noted['place']}, and with it the rows that waited there.",
                hint=f"Restore it. Or begin again: weft checkpoints reset {pipeline}.",
            )
        self._write({**noted, "begun": True})


class Columns(CheckpointFile):
    """By source, the columns of all batches that were carried out, with the type that each had last; those that are
    declared have their declared type."""

    NAME = "columns.json"

    def __init__(self, checkpoint: Location, sources: Sequence[Source] = ()) -> None:
        super().__init__(checkpoint)
        self._query_id = ""
        self._known: dict[str, dict[str, Any]] = {}
        self._found: dict[str, dict[str, Any]] = {}
        """The new ones of the current batch."""
        self._agreed: dict[str, dict[str, Any]] = {}
        """By source, the types of columns that another source decides for the current batch."""
        self._declared = {each.name: dict(each.columns) for each in sources}

    def complete(
        self, frame: Any, source: str, query_id: str, columns: Any = None, documents: Collection[str] = ()
    ) -> Any:
        """A batch with all columns that its source has had. One of nulls alone has the type that it had before, or is
        JSON, if it is one of `documents` (in small letters)."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import NullType

        self.note(columns or frame.schema, source, query_id)
        fields = {field.name: field for field in frame.schema}
        # SQL takes `Id` and `id` for one column.
        here = {name.lower(): name for name in fields}
        missing = {}
        agreed = self._agreed.get(source, {})
        for name, kind in self._typed(self._of(source, query_id), source).items():
            kind = agreed.get(name, kind)
            spelled = here.get(name.lower(), name)
            if spelled not in fields or isinstance(fields[spelled].dataType, NullType):
                missing[spelled] = F.lit(None).cast(_storable(kind))
                if name.lower() in documents:
                    missing[spelled] = F.lit(None).cast("string").alias(spelled, metadata={HINT: "json"})
        # Each step over a DataFrame takes as long as to write some thousand rows.
        return frame.withColumns(missing) if missing else frame

    def note(self, columns: Any, source: str, query_id: str) -> None:
        """Take note of the columns of the current batch, which `keep` writes."""
        from pyspark.sql.types import NullType

        known = self._of(source, query_id)
        self._found[source] = {
            field.name: field.jsonValue()
            for field in columns
            if not isinstance(field.dataType, NullType)
            and known.get(field.name) != field.jsonValue()
            and field.name != OFFSET
        }

    def begin(self) -> None:
        """Forget what a batch found that was not carried out."""
        self._found, self._agreed = {}, {}

    def agree(self, source: str, types: Mapping[str, Any]) -> None:
        """Read columns of a source under these types in the current batch."""
        self._agreed.setdefault(source, {}).update(types)

    def agreed(self) -> dict[str, dict[str, Any]]:
        """Return by source the types that were agreed for the current batch."""
        return {source: dict(types) for source, types in self._agreed.items()}

    def agree_only(self, agreed: Mapping[str, Mapping[str, Any]]) -> None:
        """Have these types agreed for the current batch, and no others."""
        self._agreed = {source: dict(types) for source, types in agreed.items()}

    def has_news(self, source: str) -> bool:
        """Return whether the current batch has new columns or types."""
        return bool(self._found.get(source))

    def note_again(self, columns: Any, source: str, query_id: str, sql: str | None) -> None:
        """Take note of other columns of the current batch. Those that SQL names stay, though it has them no more: the
        SQL would fail for every batch without."""
        before = self._found.get(source, {})
        self.note(columns, source, query_id)
        names = {name.lower() for name in (*self._of(source, query_id), *self._found[source])}
        wanted = (name for name in before if name.lower() not in names and _is_named(name, sql))
        self._found[source] |= {name: before[name] for name in wanted}

    def forget_changes(self, source: str) -> None:
        """Forget the types that the current batch gave to columns which had others."""
        known = {name.lower() for name in self._known.get(source, {})}
        self._found[source] = {name: kind for name, kind in self._found[source].items() if name.lower() not in known}

    def forget_new(self, names: Collection[str], sql: str | None) -> None:
        """Forget those of the columns that no target gets, unless SQL names them."""
        dropped = {name.lower() for name in names if not _is_named(name, sql)}
        for source, kinds in self._found.items():
            self._found[source] = {name: kind for name, kind in kinds.items() if name.lower() not in dropped}

    def keep(self) -> None:
        """Write the columns of a batch that was carried out."""
        for source, new in self._found.items():
            known = self._known.setdefault(source, {})
            if known:  # the columns of a first batch are what the source is about
                older = {name.lower() for name in known}
                fresh = [name for name in new if name.lower() not in older]
                for name in fresh[max(_MOST_COLUMNS - len(known), 0) :]:
                    del new[name]
            newer = {name.lower() for name in new}
            for name in [each for each in known if each.lower() in newer]:
                del known[name]
            known.update(new)
        if any(self._found.values()):
            self._write({"checkpoint": self._query_id, "columns": self._known})
        self._found = {}

    def types(self, source: str, query_id: str) -> dict[str, Any]:
        """Return the types that the columns of a source had last, or have by declaration or as was agreed."""
        return {**self._typed(self._of(source, query_id), source), **self._agreed.get(source, {})}

    def declared(self, source: str) -> dict[str, Any]:
        """Return the types that columns of a source have by declaration."""
        return self._typed({}, source)

    def kept(self, source: str) -> list[pa.Field]:
        """Return all columns that a source has had."""
        from pyspark.sql.pandas.types import to_arrow_type

        columns = self._typed((self._read() or {"columns": {}})["columns"].get(source, {}), source)
        return [pa.field(name, to_arrow_type(kind, timezone="UTC")) for name, kind in columns.items()]

    def _typed(self, columns: dict[str, Any], source: str) -> dict[str, Any]:
        from pyspark.sql.pandas.types import from_arrow_type
        from pyspark.sql.types import StructField

        declared = self._declared.get(source, {})
        fixed = {name.lower() for name in declared}
        return {
            **{
                name: StructField.fromJson(text).dataType for name, text in columns.items() if name.lower() not in fixed
            },
            **{name: from_arrow_type(FieldType.parse(kind).arrow) for name, kind in declared.items()},
        }

    def _of(self, source: str, query_id: str) -> dict[str, Any]:
        if query_id != self._query_id:
            stored = self._read()
            # That of a checkpoint that was reset says nothing.
            is_its_own = stored is not None and stored["checkpoint"] == query_id
            self._query_id, self._known = query_id, stored["columns"] if is_its_own else {}
        return self._known.setdefault(source, {})


def _is_named(column: str, sql: str | None) -> bool:
    return column.lower() in (sql or "").lower()


def _storable(kind: Any) -> Any:
    """Return a type of Spark's without what no table can hold: see `weft.systems.codecs.columns.storable`."""
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
    from pyspark.sql.types import StructField, StructType

    schema = to_arrow_schema(StructType([StructField("column", kind)]), timezone="UTC")
    return from_arrow_schema(storable(schema), prefer_timestamp_ntz=True)[0].dataType
