"""One micro-batch: the rows of all sources, the SQL over them, and a load into each target."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import pyarrow as pa

from weft.engine import files, fitting, frames, outcome, session
from weft.engine import given as kinds
from weft.engine.given import Given
from weft.engine.load import Job
from weft.engine.readers import open_tables
from weft.engine.streaming import dead, functions
from weft.engine.streaming.columns import Columns
from weft.engine.streaming.fit import DeclaredFit, Fit
from weft.engine.streaming.letter import Letter
from weft.engine.streaming.lookups import Lookups
from weft.engine.streaming.publish import published
from weft.engine.streaming.sources import SMALL, Origin, Taken
from weft.engine.streaming.whence import PLACE, WHENCE
from weft.errors import ConnectionFailedError, DeclarationError, LoadRefusedError, WeftError
from weft.pipelines.streaming.spec import StreamingPipeline, Target
from weft.pipelines.streaming.spots import check_places
from weft.project import current
from weft.systems.base import Connection, system_for
from weft.systems.load import KEY_LENGTH, Counts, Load
from weft.systems.log import ROWID
from weft.systems.objects.following import METADATA
from weft.systems.objects.spark import asks_for, moved_to
from weft.systems.sql import ledger
from weft.systems.sql.tables import SqlTables

# Tests stop a process at each of these steps, by a handler on this logger.
_steps = logging.getLogger("weft.streaming")

_NOT_READING = (ConnectionFailedError, DeclarationError, LoadRefusedError)
_NO_PLACE = "Name a place where such rows go alone: dead_letter_stream, dead_letter_table, dead_letter_path …"

Placed = Callable[[], pa.Table]
"""Makes the rows that targets are given once more, with the column `WHENCE` where that can be."""


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
        origins: Sequence[Origin],
        columns: Columns,
        box: dead.DeadLetterBox | None = None,
    ) -> None:
        check_places(pipeline, f"Streaming pipeline {pipeline.name!r}")
        self.pipeline, self.origins, self._columns = pipeline, origins, columns
        self._lookups: Lookups | None = None
        self._seen: tuple[list[tuple[str, str]], int] | None = None
        self._is_dated = True
        """Whether the SQL asks when files were changed, over the columns and lookups that were last seen."""
        self._tables: dict[Connection, SqlTables] = {}
        """What stays open: to sign in anew for each batch takes longer than to write a few rows."""
        self._box = box or dead.DeadLetterBox(pipeline)
        self._from = ", ".join(each.name for each in pipeline.sources)

    def close(self) -> None:
        """Let go of what batches share."""
        if self._lookups is not None:
            self._lookups.close()
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
        taken: list[Taken] = []
        try:
            for origin, part in zip(self.origins, split(frame, self.origins), strict=True):
                taken.append(origin.take(part))
            try:
                return self._run(taken, frame.sparkSession, checkpoint, batch_id)
            except WeftError as error:
                # A row of a file that cannot be read: Spark does not tell which.
                bad = [] if isinstance(error, _NOT_READING) else self._sifted(taken, checkpoint)
                if not bad:
                    raise
                taken += bad
                sifted = {each.source: each for each in taken}
                return self._run(list(sifted.values()), frame.sparkSession, checkpoint, batch_id)
        finally:
            for each in taken:
                each.close()

    def _run(self, taken: list[Taken], spark: Any, checkpoint: str, batch_id: int) -> Written:
        counts: dict[str, Counts] = {}
        lost = 0
        for each in taken:
            self._refuse_bad(each)
            self._box.put(each.bad, checkpoint, batch_id, f"read {each.source}")
            lost += len(each.bad)
        filled = [each for each in (self._read(each, checkpoint) for each in taken) if each.size != 0]
        if filled:
            given, letters, placed = self._given(filled, spark, checkpoint)
            if letters and self._is_done(self.pipeline.targets, checkpoint, batch_id):
                letters = []  # what failed then is stored; what fails by other SQL now is in the targets
            self._box.put(letters, checkpoint, batch_id, "transform")
            lost += len(letters)
            try:
                for target in self.pipeline.targets:
                    loaded = self.load(target, given, checkpoint, batch_id, placed)
                    # Two may have one name, in two databases.
                    counts[target.name] = counts[target.name] + loaded if target.name in counts else loaded
                    _steps.debug("loaded")
            finally:
                if isinstance(given, kinds.Frame):
                    given.frame.unpersist()
        lost += sum(each.quarantined for each in counts.values())
        return Written(batch_id, {name: each.rows_read for name, each in counts.items()}, counts, lost)

    def _sifted(self, taken: Sequence[Taken], checkpoint: str) -> list[Taken]:
        """Those of files in which there are rows that cannot be read, with these told apart."""
        found = []
        for each in taken:
            if each.sift is not None:
                with suppress(WeftError):  # what the batch failed for says more
                    sifted = each.sift(self._columns.types(each.source, checkpoint))
                    found += [sifted] if sifted.bad else []
        return found

    def _read(self, taken: Taken, checkpoint: str) -> Taken:
        read = taken.read
        if read is None:
            return taken
        known = self._columns.types(taken.source, checkpoint)
        dated = read(known, None)
        if dated is None:
            return dataclasses.replace(taken, size=0)

        def placed() -> Any:
            again = read(known, PLACE)
            assert again is not None
            return again(True)

        return dataclasses.replace(taken, dated=dated, placed=placed)

    def _refuse_bad(self, taken: Taken) -> None:
        if taken.bad and self.pipeline.transform_on_error == "fail" and self.pipeline.dead_letters is None:
            bad, first = len(taken.bad), taken.bad[0]
            raise WeftError(
                f"{bad:,} messages or lines of {taken.source} are no rows, the first at {first.offset}: {first.error}",
                hint=_NO_PLACE,
            )

    # ------------------------------------------------------------------------------------------------------------- rows

    def _given(self, taken: list[Taken], spark: Any, checkpoint: str) -> tuple[Given, list[Letter], Placed]:
        """What targets are given, the letters of rows that the SQL does not take, and where the others are from."""
        sql = self.pipeline.transform_sql

        def placed() -> pa.Table:
            rows = self._placed(taken, spark, is_small, checkpoint)
            made = rows if sql is None else self._transformed(rows, functions.keeping(sql, WHENCE))
            with outcome.explained(f"read the batch of {self.pipeline.name}"):
                return made.toArrow()

        is_small = all(each.size is not None for each in taken) and sum(each.size or 0 for each in taken) <= SMALL
        if len(taken) == 1 and sql is None and taken[0].reader is not None:
            gather = taken[0].gather
            return gather() if is_small and gather is not None else kinds.Rows(taken[0].reader), [], placed
        if len(taken) == 1 and sql is None and taken[0].packed is not None:
            return self._packed(taken[0].packed, taken[0].frame, is_small), [], placed
        made = self._made(taken, spark, is_small, checkpoint)
        if sql is None or self.pipeline.transform_on_error == "fail":
            return self._carried(made, is_small), [], placed
        try:
            return self._carried(made, is_small, now=True), [], placed
        except WeftError as error:
            with outcome.explained(f"read the batch of {self.pipeline.name}"):
                source = self._placed(taken, spark, is_small, checkpoint).toArrow()
            kept, bad = dead.blamed(source.drop_columns([WHENCE]), lambda part: self.attempt(part, sql, spark))
            if not bad:  # it is no row alone
                raise error from None
            letters = [dead.letter_of(source.slice(row, 1).to_pylist()[0], why) for row, why in bad]
            told = dead.without(source, {row for row, _ in bad})
            # Of no rows SQL may make one, such as a sum of nothing.
            made = memory_of(self.attempt(kept, sql, spark).slice(0, None if len(kept) else 0))
            return made, letters, lambda: self.attempt(told, functions.keeping(sql, WHENCE), spark)

    def _made(self, taken: list[Taken], spark: Any, is_small: bool, checkpoint: str) -> Any:
        """What the SQL makes of the rows, or these as they are.

        Spark's readers of texts write all that there is to tell of a file beside each of its rows, a third of their
        work, as soon as a query could ask for it. So files are not dated where the SQL was seen not to ask for that.
        """
        sql = self.pipeline.transform_sql

        def whole(is_dated: bool) -> Any:
            parts = [
                each if each.dated is None else dataclasses.replace(each, frame=each.dated(is_dated)) for each in taken
            ]
            rows = [self._frame(each, spark, is_small, checkpoint) for each in parts]
            # The session of the query, in which the lookups are.
            return moved_to(_together(rows), spark)

        def seen(rows: Any) -> tuple[list[tuple[str, str]], int]:
            return rows.dtypes, 0 if self._lookups is None else self._lookups.swaps

        has_files = any(each.dated is not None for each in taken)
        if has_files and sql is not None and not self._is_dated:
            rows = whole(is_dated=False)
            made = self._transformed(rows, sql)
            if seen(rows) == self._seen:
                return made
        rows = whole(is_dated=True)
        if sql is None:
            return rows
        made = self._transformed(rows, sql)
        if has_files and (now := seen(rows)) != self._seen:
            self._seen, self._is_dated = now, True
            with suppress(Exception):  # what cannot be planned fails again where that is told
                self._is_dated = asks_for(made, METADATA)
        return made

    def _placed(self, taken: list[Taken], spark: Any, is_small: bool, checkpoint: str) -> Any:
        """The rows once more, each with where it is from."""
        from pyspark.sql import functions as F

        parts = []
        for each in taken:
            again = each if each.placed is None else dataclasses.replace(each, frame=each.placed())
            rows = self._frame(again, spark, is_small, checkpoint)
            place = (
                F.col(PLACE if PLACE in rows.columns else ROWID) if {PLACE, ROWID} & {*rows.columns} else F.lit(None)
            )
            where = F.struct(F.lit(each.source).alias("source"), place.cast("string").alias("offset"))
            parts.append(rows.withColumn(WHENCE, F.to_json(where)).drop(PLACE))
        return moved_to(_together(parts), spark)

    def _packed(self, packed: kinds.Packed, frame: Any, is_small: bool) -> Given:
        """Rows that are written as they are. A column of nulls alone is left out, as below."""
        schema = pa.schema([field for field in packed.schema if not pa.types.is_null(field.type)])
        packed = dataclasses.replace(packed, schema=schema)
        with outcome.explained(f"read the batch of {self.pipeline.name}"):
            if is_small:
                rows = packed.unpack(schema, packed.frame.toArrow().to_batches())
                return memory_of(pa.Table.from_batches(rows, schema))
        return kinds.Frame(frame.select(*map(fitting.quote, schema.names)), packed)

    def attempt(self, rows: pa.Table, sql: str, spark: Any) -> pa.Table:
        """What the SQL makes of rows that this process has."""
        made = self._transformed(frames.from_memory(spark, memory_of(rows)), sql)
        with outcome.explained(f"run the batch of {self.pipeline.name}"):
            return made.toArrow()

    def _transformed(self, rows: Any, sql: str) -> Any:
        if self._lookups is None:
            functions.register(rows.sparkSession, self.pipeline.udfs, self.pipeline.aggregate_udfs)
            self._lookups = Lookups(self.pipeline.lookups, rows.sparkSession)
        self._lookups.ready()
        return functions.transformed(rows, sql, self.pipeline.aggregate_udfs)

    def _carried(self, made: Any, is_small: bool, *, now: bool = False) -> Given:
        """Rows for the targets: here, or held by Spark where they are needed more than once or must be sure.

        A column of nulls alone is left out: what type it has will be seen when it has a value."""
        from pyspark.sql.types import NullType

        made = made.drop(*(field.name for field in made.schema if isinstance(field.dataType, NullType)))
        with outcome.explained(f"run the batch of {self.pipeline.name}"):
            if is_small:
                return memory_of(made.toArrow())
            if now or len(self.pipeline.targets) > 1:
                made = made.persist()
            if now:
                made.count()
        return kinds.Frame(made)

    def _frame(self, taken: Taken, spark: Any, is_small: bool, checkpoint: str) -> Any:
        if taken.reader is None:
            return self._columns.complete(taken.frame, taken.source, checkpoint)
        if is_small and taken.gather is not None:
            return frames.from_memory(spark, taken.gather())
        return frames.from_reader(spark, taken.reader, spark.sparkContext.defaultParallelism)

    # ---------------------------------------------------------------------------------------------------------- targets

    def load(self, target: Target, given: Given, checkpoint: str, batch_id: int, placed: Placed) -> Counts:
        """Load rows into a target, once under this checkpoint and number. Of those that it rejects `placed` tells where
        they are from."""
        if target.stream is not None:
            return published(target, current().connection(target.connection), given, f"{checkpoint} {batch_id}")
        connection, planned = self._planned(target, checkpoint, batch_id)
        tables = None
        try:
            tables = self._opened(connection)
            fit: Fit | DeclaredFit = Fit(_columns(connection, tables, planned), self.pipeline.on_drift)
            if target.declared is not None and target.declared.columns:
                fit = DeclaredFit(target.declared, self.pipeline.on_drift)
            aside = functools.partial(self._put_keyless, planned, checkpoint, self._part(target, connection), placed)
            has_place = self.pipeline.dead_letters is not None
            job = Job(planned, connection, None, None, None, fit, aside if has_place else None)
            counts, _ = job.run(_selected(given, fit, planned), tables)
        except WeftError as error:
            if isinstance(error, LoadRefusedError) and error.can_quarantine:
                error = LoadRefusedError(error.what, hint=_NO_PLACE)
            error.add_note(f"target {target.name} of {self.pipeline.name}, batch {batch_id}")
            raise error from error.__cause__
        finally:
            if tables is not None and tables.one_host:
                tables.close()  # a file is not kept from others
        if counts.quarantined or counts.replayed:
            self._put_aside(target, checkpoint, batch_id, placed)
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

    def _put_aside(self, target: Target, checkpoint: str, batch_id: int, placed: Placed) -> None:
        """Have what a target rejected of a batch among the letters."""
        connection, planned = self._planned(target, checkpoint, batch_id)
        if self.pipeline.dead_letters is None or planned.on_bad_rows != "quarantine":
            return
        # First into the box, then out of the target's own: a crash between repeats what the box knows already.
        with dead.rejected(connection, planned, self._from) as letters:
            told = dead.told(letters, placed) if letters else []
            self._box.put(told, checkpoint, batch_id, self._part(target, connection))

    def _part(self, target: Target, connection: Connection) -> str:
        """Where in a batch a target rejects rows: letters are named by it. Two may have one name, in two databases."""
        part = f"store {target.name}"
        is_shared = [each.name for each in self.pipeline.targets].count(target.name) > 1
        return f"{part} {connection!r}" if is_shared else part

    def _put_keyless(self, load: Load, checkpoint: str, part: str, placed: Placed, rows: pa.Table) -> None:
        """Before Delta commits the others: nothing of it would tell which they were."""
        letters = dead.told(dead.keyless(rows, load, self._from), placed)
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


def split(frame: Any, origins: Sequence[Origin]) -> list[Any]:
    """The parts of a batch, one a source, as `joined` put them together."""
    if len(origins) == 1:
        return [frame]
    return [frame.where(f"source = {number}").select(f"s{number}.*") for number in range(len(origins))]


def joined(streams: Sequence[Any]) -> Any:
    """One streaming DataFrame of several, each of which may have columns of its own."""
    if len(streams) == 1:
        return streams[0]
    from pyspark.sql import functions as F

    packed = [
        each.select(F.lit(number).alias("source"), F.struct("*").alias(f"s{number}"))
        for number, each in enumerate(streams)
    ]
    return _together(packed)


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


def _together(parts: Sequence[Any]) -> Any:
    return functools.reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), parts)


def memory_of(table: pa.Table) -> kinds.Memory:
    """Rows that this process has, for several targets."""
    made = kinds.understand(table, has_source=False)
    assert isinstance(made, kinds.Memory)
    return kinds.Memory(made.schema, list(made.batches))


def _columns(connection: Connection, tables: SqlTables | None, load: Load) -> frozenset[str] | None:
    """The columns that a target has now, in small letters; `None` where it is not there."""
    if tables is None:
        names = files.columns(session.spark(), connection, load)
    elif connection.is_missing():
        names = None
    else:
        with tables.driver.session("read") as opened:
            columns = tables.columns(opened, load.schema, load.table)
        names = None if columns is None else [each.name for each in columns]
    return None if names is None else frozenset(name.lower() for name in names)
