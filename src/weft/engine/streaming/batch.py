"""One micro-batch: take the rows of all sources, split off the bad ones, transform the rest, commit to each target."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Protocol

import pyarrow as pa

from weft.engine import files, fitting, session
from weft.engine import given as kinds
from weft.engine.given import Given
from weft.engine.load import Job
from weft.engine.readers import open_tables
from weft.engine.streaming import dead_letters
from weft.engine.streaming.columns import Columns
from weft.engine.streaming.fit import DeclaredFit, Fit
from weft.engine.streaming.publish import published
from weft.engine.streaming.transform import Transform, TypedRows, WithOrigins, together
from weft.errors import ConnectionFailedError, DeclarationError, LoadRefusedError, WeftError
from weft.pipelines.streaming.spec import StreamingPipeline, Target
from weft.pipelines.streaming.spots import check_places
from weft.project import current
from weft.systems.base import Connection, system_for
from weft.systems.file import FileConnection
from weft.systems.load import KEY_LENGTH, Counts, Load
from weft.systems.sql import ledger
from weft.systems.sql.tables import SqlTables
from weft.systems.stream_source import BatchRows, UntypedRows

# Tests stop a process at each of these steps, by a handler on this logger.
_steps = logging.getLogger("weft.streaming")

_NOT_READING = (ConnectionFailedError, DeclarationError, LoadRefusedError)
_NO_PLACE = "Name a place where such rows go alone: dead_letter_stream, dead_letter_table, dead_letter_path …"


class Taking(Protocol):
    """An opened source, as far as a batch needs it."""

    name: str

    def take(self, frame: Any) -> BatchRows:
        """Return the rows of a micro-batch."""


@dataclass(frozen=True)
class Written:
    """What a micro-batch did."""

    batch_id: int
    rows: dict[str, int]
    """How many rows targets were given, by their names."""
    counts: dict[str, Counts]
    """What became of them."""
    dead_letters: int = 0
    """Rows that went nowhere: put aside, or dropped where the pipeline says so."""


class Batches:
    """Carries out micro-batches, each exactly once under the name of its checkpoint."""

    def __init__(
        self,
        pipeline: StreamingPipeline,
        sources: Sequence[Taking],
        columns: Columns,
        box: dead_letters.DeadLetterBox | None = None,
    ) -> None:
        check_places(pipeline, f"Streaming pipeline {pipeline.name!r}")
        self.pipeline, self.sources, self._columns = pipeline, sources, columns
        self.transform = Transform(pipeline, columns)
        self._tables: dict[Connection, SqlTables] = {}
        """What stays open: to sign in anew for each batch takes longer than to write a few rows."""
        self._box = box or dead_letters.DeadLetterBox(pipeline)
        self._from = ", ".join(each.name for each in pipeline.sources)

    def close(self) -> None:
        """Let go of what batches share."""
        self.transform.close()
        for tables in self._tables.values():
            tables.close()

    def run(self, frame: Any, checkpoint: str, batch_id: int) -> Written:
        """Carry out the batch that Spark made of all sources."""
        _steps.debug("begun")
        try:
            written = self._attempted(frame, checkpoint, batch_id)
        except WeftError as error:
            if isinstance(error, ConnectionFailedError):
                raise
            # After a crash its sources may no longer have its rows, which the targets have.
            if not self.finish(self.pipeline.targets, checkpoint, batch_id):
                self._tell_of_half(error, checkpoint, batch_id)
                raise
            written = Written(batch_id, {}, {})
        _steps.debug("done")
        return written

    def _tell_of_half(self, error: WeftError, checkpoint: str, batch_id: int) -> None:
        """Say which targets have a batch that cannot go on: whoever begins anew gives them its rows a second time."""
        having = [
            f"{each.name} of {current().connection(each.connection).label}"
            for each in self.pipeline.targets
            if self.has(each, checkpoint, batch_id)
        ]
        if having:
            error.add_note(f"stored already in {', '.join(having)}: after a reset its rows would be there twice")

    def _attempted(self, frame: Any, checkpoint: str, batch_id: int) -> Written:
        parts: list[BatchRows] = []
        split_parts: list[BatchRows] = []
        try:
            for source, part in zip(self.sources, split(frame, self.sources), strict=True):
                parts.append(source.take(part))
            try:
                return self._run(parts, frame.sparkSession, checkpoint, batch_id)
            except WeftError as error:
                # A row of a file that cannot be parsed: Spark does not report which.
                if isinstance(error, _NOT_READING):
                    raise
                split_parts = self._split(parts, checkpoint)
                if split_parts == parts:
                    raise
                return self._run(split_parts, frame.sparkSession, checkpoint, batch_id)
        finally:
            for each in {id(each): each for each in (*parts, *split_parts)}.values():
                each.close()

    def _run(self, parts: Sequence[BatchRows], spark: Any, checkpoint: str, batch_id: int) -> Written:
        """Carry out the steps of a batch: split off what cannot be parsed, transform the rest, commit it."""
        counts: dict[str, Counts] = {}
        rejected = sum(self._put_unparsed(each, checkpoint, batch_id) for each in parts)
        filled = [each for each in self._typed(parts, checkpoint) if each.size != 0]
        if filled:
            rows, letters, with_origins = self.transform.run(filled, spark, checkpoint)
            if letters and self._is_done(self.pipeline.targets, checkpoint, batch_id):
                letters = []  # what failed then is stored; what fails by other SQL now is in the targets
            self._box.put(letters, checkpoint, batch_id, "transform")
            rejected += len(letters)
            try:
                for target in self.pipeline.targets:
                    loaded = self.load(target, rows, checkpoint, batch_id, with_origins)
                    # Two may have one name, in two databases.
                    counts[target.name] = counts[target.name] + loaded if target.name in counts else loaded
                    _steps.debug("loaded")
            finally:
                if isinstance(rows, kinds.Frame):
                    rows.frame.unpersist()
        rejected += sum(each.quarantined for each in counts.values())
        return Written(batch_id, {name: each.rows_read for name, each in counts.items()}, counts, rejected)

    def _put_unparsed(self, rows: BatchRows, checkpoint: str, batch_id: int) -> int:
        """Store what could not be parsed as dead letters, and return how many there are."""
        if rows.bad and self.pipeline.transform_on_error == "fail" and self.pipeline.dead_letters is None:
            first = rows.bad[0]
            raise WeftError(
                f"{len(rows.bad):,} messages or lines of {rows.source} are no rows, the first at {first.offset}: "
                f"{first.error}",
                hint=_NO_PLACE,
            )
        self._box.put(rows.bad, checkpoint, batch_id, f"read {rows.source}")
        return len(rows.bad)

    def _typed(self, parts: Sequence[BatchRows], checkpoint: str) -> Iterator[TypedRows]:
        """Yield the rows of each source, those of files under the types that their columns had."""
        for each in parts:
            rows = each.read(self._columns.types(each.source, checkpoint)) if isinstance(each, UntypedRows) else each
            if rows is not None:
                yield rows

    def _split(self, parts: Sequence[BatchRows], checkpoint: str) -> list[BatchRows]:
        """Return the rows again, with those of files apart that cannot be parsed."""
        again = list(parts)
        for number, each in enumerate(parts):
            if isinstance(each, UntypedRows):
                with suppress(WeftError):  # the error that the batch failed with says more
                    rows = each.split(self._columns.types(each.source, checkpoint))
                    if rows is not None and rows.bad:
                        again[number] = rows
        return again

    # ---------------------------------------------------------------------------------------------------------- targets

    def load(self, target: Target, given: Given, checkpoint: str, batch_id: int, with_origins: WithOrigins) -> Counts:
        """Load rows into a target, once under this checkpoint and number. Of those that it rejects `with_origins` names
        the origins."""
        if target.stream is not None:
            return published(target, current().connection(target.connection), given, f"{checkpoint} {batch_id}")
        connection, planned = self._planned(target, checkpoint, batch_id)
        tables = None
        try:
            tables = self._opened(connection)
            fit: Fit | DeclaredFit = Fit(_columns(connection, tables, planned), self.pipeline.on_drift)
            if target.declared is not None and target.declared.columns:
                fit = DeclaredFit(target.declared, self.pipeline.on_drift)
            part = self._part(target, connection)
            aside = functools.partial(self._put_keyless, planned, checkpoint, part, with_origins)
            has_place = self.pipeline.dead_letters is not None
            job = Job(planned, connection, None, None, None, fit, aside if has_place else None)
            counts, _ = job.run(_selected(given, fit, planned), tables)
        except WeftError as error:
            if isinstance(error, LoadRefusedError) and "on_bad_rows" in (error.hint or ""):
                error = LoadRefusedError(error.what, hint=_NO_PLACE)
            error.add_note(f"target {target.name} of {self.pipeline.name}, batch {batch_id}")
            raise error from error.__cause__
        finally:
            if tables is not None and tables.one_host:
                tables.close()  # a file is not kept from others
        if counts.quarantined or counts.replayed:
            self._put_aside(target, checkpoint, batch_id, with_origins)
        return counts

    def has(self, target: Target, checkpoint: str, batch_id: int) -> bool:
        """Whether a target's ledger has a batch; streams and topics keep none."""
        if target.stream is not None:
            return False
        connection, planned = self._planned(target, checkpoint, batch_id)
        tables = None
        try:
            tables = self._opened(connection)
            if tables is None:
                return files.has(connection, planned)
            return ledger.is_committed(tables, planned)
        except WeftError:  # there is no ledger, or it cannot be read
            return False
        finally:
            if tables is not None and tables.one_host:
                tables.close()

    def finish(self, targets: Sequence[Target], checkpoint: str, batch_id: int) -> bool:
        """Do what is left of a batch that all of these targets have, which takes none of its rows; `False` where one
        has not."""
        if not self._is_done(targets, checkpoint, batch_id):
            return False
        for each in targets:
            self._put_aside(each, checkpoint, batch_id, lambda: pa.table({}))
        return True

    def _is_done(self, targets: Sequence[Target], checkpoint: str, batch_id: int) -> bool:
        return all(self.has(each, checkpoint, batch_id) for each in targets)

    def _planned(self, target: Target, checkpoint: str, batch_id: int) -> tuple[Connection, Load]:
        connection: Any = current().connection(target.connection)
        options = dict(target.options)
        if connection.kind.startswith("object_store"):
            # How the files are written is said of the target, and kept by a connection.
            connection = dataclasses.replace(connection, **vars(target.files(connection)))
            options = {}
        if self.pipeline.dead_letters is not None and system_for(connection.kind).tables is not None:
            options["on_bad_rows"] = "quarantine"
        planned = Load.declare(
            target=target.table or (None, target.name),
            mode=target.mode,
            keys=target.primary_key if target.mode == "merge" else (),
            pipeline=self.pipeline.name,
            commit_key=commit_key(checkpoint, target.name),
            batch_id=batch_id,
            moment=datetime.now(UTC),
            **options,
        )
        is_recorded = self.pipeline.delivery_to(target) == "exactly_once"
        return connection, dataclasses.replace(planned, is_recorded=is_recorded)

    def _put_aside(self, target: Target, checkpoint: str, batch_id: int, with_origins: WithOrigins) -> None:
        """Have what a target rejected of a batch among the letters."""
        connection, planned = self._planned(target, checkpoint, batch_id)
        if self.pipeline.dead_letters is None or planned.on_bad_rows != "quarantine":
            return
        # First into the box, then out of the target's own: a crash between repeats what the box knows already.
        with dead_letters.rejected(connection, planned, self._from) as letters:
            named = dead_letters.named(letters, with_origins) if letters else []
            self._box.put(named, checkpoint, batch_id, self._part(target, connection))

    def _part(self, target: Target, connection: Connection) -> str:
        """Where in a batch a target rejects rows: letters are named by it. Two may have one name, in two databases."""
        part = f"store {target.name}"
        is_shared = [each.name for each in self.pipeline.targets].count(target.name) > 1
        return f"{part} {connection!r}" if is_shared else part

    def _put_keyless(self, load: Load, checkpoint: str, part: str, with_origins: WithOrigins, rows: pa.Table) -> None:
        """Before Delta commits the others: nothing of it would tell which they were."""
        letters = dead_letters.named(dead_letters.keyless(rows, load, self._from), with_origins)
        self._box.put(letters, checkpoint, load.batch_id, part)

    def _opened(self, connection: Connection) -> SqlTables | None:
        """The tables of a target; `None` for files and Delta."""
        if system_for(connection.kind).tables is None:
            return None
        if connection not in self._tables:
            self._tables[connection] = open_tables(connection)
        return self._tables[connection]


def commit_key(checkpoint: str, target: str) -> str:
    """Under which name a target's ledger knows the batches of a checkpoint: no longer than a ledger takes."""
    key = f"{checkpoint} {target}"
    return key if len(key) <= KEY_LENGTH else f"{checkpoint} {sha256(target.encode()).hexdigest()}"


def split(frame: Any, sources: Sequence[Taking]) -> list[Any]:
    """The parts of a batch, one a source, as `joined` put them together."""
    if len(sources) == 1:
        return [frame]
    return [frame.where(f"source = {number}").select(f"s{number}.*") for number in range(len(sources))]


def joined(streams: Sequence[Any]) -> Any:
    """One streaming DataFrame of several, each of which may have columns of its own."""
    if len(streams) == 1:
        return streams[0]
    from pyspark.sql import functions as F

    packed = [
        each.select(F.lit(number).alias("source"), F.struct("*").alias(f"s{number}"))
        for number, each in enumerate(streams)
    ]
    return together(packed)


def _selected(given: Given, fit: Fit | DeclaredFit, load: Load) -> Given:
    """The rows with the columns that a target is given."""
    if isinstance(given, kinds.Memory):
        names = given.schema.names
        wanted = fit.wanted(load, names)
        if len(wanted) == len(names):
            return given
        schema = pa.schema([given.schema.field(name) for name in wanted])
        return kinds.Memory(schema, [batch.select(wanted) for batch in given.batches])
    if isinstance(given, kinds.Rows):
        return kinds.Rows(given.reader.selecting(fit.wanted(load, given.reader.schema.names)))
    assert isinstance(given, kinds.Frame)
    names, packed = given.frame.columns, given.packed
    wanted = fit.wanted(load, names)
    if len(wanted) == len(names):
        return given
    if packed is not None:
        packed = dataclasses.replace(packed, schema=pa.schema([packed.schema.field(name) for name in wanted]))
    return kinds.Frame(given.frame.select(*map(fitting.quote, wanted)), packed)


def _columns(connection: Connection, tables: SqlTables | None, load: Load) -> frozenset[str] | None:
    """The columns that a target has now, in small letters; `None` where it is not there."""
    if tables is None:
        names = files.columns(session.spark(), connection, load)
    elif isinstance(connection, FileConnection) and connection.is_missing():
        names = None
    else:
        with tables.driver.session("read") as opened:
            columns = tables.columns(opened, load.schema, load.table)
        names = None if columns is None else [each.name for each in columns]
    return None if names is None else frozenset(name.lower() for name in names)
