"""The rows of a micro-batch on their way from the sources to the targets: as they are, or through `transform_sql`."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import pyarrow as pa

from weft.columns import python_rows
from weft.engine import frames, inputs, reader_frames
from weft.engine.frame_projection import arrow_of, gathered
from weft.engine.inputs import Input
from weft.engine.streaming import dead_letters, fan_in, functions
from weft.engine.streaming.checkpoint_files import Columns
from weft.engine.streaming.failing_rows import FailingRows, without_rows
from weft.engine.streaming.log_source import SMALL
from weft.engine.streaming.lookups import LookupTable
from weft.engine.streaming.row_origin import ORIGIN
from weft.engine.streaming.sources import takes_columns
from weft.errors import ConnectionFailedError, DeclarationError, WeftError, listed
from weft.pipelines.streaming.spec import Source, StreamingPipeline
from weft.spark_support import outcome
from weft.spark_support.sessions import FILE_METADATA, moved_to, quoted, references
from weft.systems.dead_letter_store import DeadLetter
from weft.systems.log import RESERVED_PREFIX, ROWID
from weft.systems.stream_source import OFFSET, FrameRows, Packed, ReaderRows

# Spark reports what was observed after the job, from another thread.
_OBSERVED_SECONDS = 1.0
_NO_ROWS_FAULT = (ConnectionFailedError, DeclarationError)
TypedRows = ReaderRows | FrameRows
WithOrigins = Callable[[], pa.Table]
"""Makes the rows for the targets again, with the column `ORIGIN` where that is possible."""


T = TypeVar("T")
Reduce = Callable[[Sequence[tuple[str, Any]]], T]
"""Takes the name of each source with its rows, as a DataFrame."""
Probe = Callable[[str, Any], Any]
"""Takes a source and rows of it, and returns a DataFrame that cannot be computed where a row cannot be reduced."""


class Transformed(NamedTuple):
    """What the targets of a batch get."""

    rows: Input
    rejected: list[DeadLetter]
    """The rows that `transform_sql` failed for."""
    with_origins: WithOrigins


class Reduction(NamedTuple, Generic[T]):
    """What a batch whose rows are reduced makes of them."""

    result: T
    rejected: list[DeadLetter]
    """The rows that `transform_sql` failed for."""
    named: Sequence[tuple[str, Callable[[], Any]]]
    """By source, makes the rows again as a DataFrame, with the column `ORIGIN` where that is possible."""
    unreduced: Sequence[DeadLetter] = ()
    """The rows that could not be reduced."""


class Transform:
    """Makes the rows for the targets of a pipeline."""

    def __init__(self, pipeline: StreamingPipeline, columns: Columns) -> None:
        self._pipeline, self._columns = pipeline, columns
        self._lookups: list[LookupTable] | None = None
        self._seen: tuple[list[tuple[str, str]], int] | None = None
        self._needs_time = True
        """Whether the SQL asks when files were changed, over the columns and lookups that were last seen."""
        self._count: Callable[[], int] | None = None
        """Returns how many rows the SQL was given; where the sources do not know that."""

    def close(self) -> None:
        for each in self._lookups or ():
            each.close()

    def rows_read(self) -> int | None:
        """Return how many rows the SQL was given, after a target has them; `None` where the sources know."""
        return None if self._count is None else self._count()

    def run(self, parts: Sequence[TypedRows], spark: Any, query_id: str) -> Transformed:
        """Return the rows for the targets, with those apart that the SQL fails for."""
        sql = self._pipeline.transform_sql
        self._count = None
        is_small = _is_small(parts)

        def with_origins() -> pa.Table:
            rows = self._with_origins(parts, spark, is_small, query_id)
            result = rows if sql is None else self._transformed(rows, functions.selecting_also(sql, ORIGIN))
            with outcome.explained(f"read the batch of {self._pipeline.name}"):
                return gathered(result)

        if len(parts) == 1 and sql is None and (as_is := self._as_is(parts[0], is_small, query_id)) is not None:
            return Transformed(as_is, [], with_origins)
        result = self._result(parts, spark, is_small, query_id)
        if sql is None or self._pipeline.transform_on_error == "fail":
            return Transformed(self._materialized(result, is_small), [], with_origins)
        try:
            return Transformed(self._materialized(result, is_small, now=True), [], with_origins)
        except WeftError:
            with outcome.explained(f"read the batch of {self._pipeline.name}"):
                source = gathered(self._with_origins(parts, spark, is_small, query_id))
            self._count = source.__len__
            documents = {name for each in parts if isinstance(each, FrameRows) for name in each.documents}
            return self._split(source, sql, spark, documents)

    def reduced(
        self,
        parts: Sequence[TypedRows],
        spark: Any,
        query_id: str,
        reduce: Reduce[T],
        probe: Probe | None = None,
    ) -> Reduction[T]:
        """Return what `reduce` makes of the result of the SQL over each source; with a `probe` the rows apart that it
        fails for."""
        sql, is_small = self._pipeline.transform_sql, _is_small(parts)
        counts: list[Callable[[], int]] = []
        results: list[tuple[str, Any]] = []
        named = [(each.source, functools.partial(self._named, each, spark, query_id)) for each in parts]
        splits = sql is not None and self._pipeline.transform_on_error != "fail"
        try:
            for each in parts:
                self._count = None
                results.append((each.source, self._result([each], spark, is_small, query_id)))
                counts.append(self._count or functools.partial(int, each.size or 0))
            reduced = reduce(results)
        except _NO_ROWS_FAULT:
            raise
        except WeftError:
            if not splits and probe is None:
                raise
        else:
            self._count = lambda: sum(count() for count in counts)
            return Reduction(reduced, [], named)
        rejected: list[DeadLetter] = []
        # A job that failed may have observed some of the rows.
        self._count = lambda: sum(self._counted(each, spark, is_small, query_id) for each in parts)
        if splits:
            assert sql is not None
            good: list[tuple[str, Any]] = []
            named, rows = [], 0
            for each in parts:
                with outcome.explained(f"read the batch of {self._pipeline.name}"):
                    source = gathered(self._with_origins([each], spark, is_small, query_id))
                split = self._split(source, sql, spark)
                assert isinstance(split.rows, inputs.Memory)
                good.append((each.source, frames.from_memory(spark, split.rows)))
                named.append((each.source, functools.partial(self._named_split, split, spark)))
                rejected += split.rejected
                rows += len(source)
            self._count = lambda: rows
            try:
                return Reduction(reduce(good), rejected, named)
            except WeftError:
                if probe is None:
                    raise
        assert probe is not None
        return self._probed(named, rejected, spark, reduce, probe)

    def _counted(self, rows: TypedRows, spark: Any, is_small: bool, query_id: str) -> int:
        return int(self._frame(rows, spark, is_small, query_id).count() if rows.size is None else rows.size)

    def _probed(
        self,
        named: Sequence[tuple[str, Callable[[], Any]]],
        rejected: list[DeadLetter],
        spark: Any,
        reduce: Reduce[T],
        probe: Probe,
    ) -> Reduction[T]:
        """Return what `reduce` makes of the rows that it does not fail for."""
        what = f"run the batch of {self._pipeline.name}"
        good, left, letters = [], [], []
        for source, frame in named:
            with outcome.explained(what):
                rows = frame().toArrow()
            # SQL that selects everything has the origin twice.
            rows = rows.select([rows.column_names.index(name) for name in dict.fromkeys(rows.column_names)])
            plain = rows.drop_columns([ORIGIN]) if ORIGIN in rows.column_names else rows
            finder = FailingRows(what, functools.partial(_frame_of, spark), functools.partial(probe, source))
            _, bad = finder.split(plain)
            unknown = json.dumps({"source": source, "offset": None})
            failed = python_rows(rows.take(pa.array(bad, pa.int64())))
            for row, why in zip(failed, bad.values(), strict=True):
                letters.append(dead_letters.letter_of({ORIGIN: unknown, **row}, why))
            good.append((source, _frame_of(spark, without_rows(plain, bad))))
            left.append((source, functools.partial(_frame_of, spark, without_rows(rows, bad))))
        return Reduction(reduce(good), rejected, left, letters)

    def _named(self, rows: TypedRows, spark: Any, query_id: str) -> Any:
        """Return the result of the SQL over the rows of a source, with the column `ORIGIN` where that is possible."""
        source = self._with_origins([rows], spark, _is_small([rows]), query_id)
        sql = self._pipeline.transform_sql
        if sql is None:
            return source
        try:
            return self._transformed(source, functions.selecting_also(sql, ORIGIN))
        except WeftError:  # of a subquery, for example
            return self._transformed(source, sql)

    def _named_split(self, split: Transformed, spark: Any) -> Any:
        rows = split.rows
        with suppress(WeftError):
            rows = memory_of(split.with_origins())
        assert isinstance(rows, inputs.Memory)
        return frames.from_memory(spark, rows)

    def over(self, sql: str, spark: Any) -> FailingRows:
        """Run SQL over rows that this process has, and find those that it fails for."""
        return FailingRows(
            f"run the batch of {self._pipeline.name}",
            functools.partial(_frame_of, spark),
            lambda frame: self._transformed(frame, sql),
        )

    def _split(self, source: pa.Table, sql: str, spark: Any, documents: Collection[str] = ()) -> Transformed:
        """Return what the SQL makes of the rows that it does not fail for. `documents`: see `letter_of`."""
        result, bad = self.over(sql, spark).split(source.drop_columns([ORIGIN]), is_known=True)
        rows = python_rows(source.take(pa.array(bad, pa.int64())))
        rejected = [dead_letters.letter_of(row, why, documents) for row, why in zip(rows, bad.values(), strict=True)]
        named = self.over(functions.selecting_also(sql, ORIGIN), spark)
        return Transformed(memory_of(result), rejected, lambda: named.attempt(without_rows(source, bad)))

    def _as_is(self, rows: TypedRows, is_small: bool, query_id: str) -> Input | None:
        """Return the rows of the only source without a DataFrame between; `None` where there must be one."""
        if isinstance(rows, ReaderRows):
            gathered = rows.gather() if is_small else None
            return inputs.Readable(rows.reader) if gathered is None else _memory(gathered)
        here = rows.gather()
        if rows.packed is None and here is None:
            return None
        self._columns.note(rows.found or rows.frame().schema, rows.source, query_id)
        if here is not None:
            return memory_of(here.select([each.name for each in here.schema if not pa.types.is_null(each.type)]))
        assert rows.packed is not None
        return self._packed(rows.packed, rows.frame(), is_small)

    def _packed(self, packed: Packed, frame: Any, is_small: bool) -> Input:
        """Return rows that are written as they are. A column of nulls alone is left out, as in `_materialized`."""
        schema = pa.schema([field for field in packed.schema if not pa.types.is_null(field.type)])
        packed = dataclasses.replace(packed, schema=schema)
        with outcome.explained(f"read the batch of {self._pipeline.name}"):
            if is_small:
                rows = packed.unpack(schema, packed.frame.toArrow().to_batches())
                return memory_of(pa.Table.from_batches(rows, schema))
        return inputs.Frame(frame.select(*map(quoted, schema.names)), packed)

    def _result(self, parts: Sequence[TypedRows], spark: Any, is_small: bool, query_id: str) -> Any:
        """Return what the SQL makes of the rows, or the rows as they are.

        The time of rows is left out where it is costly and the SQL was seen not to ask for it.
        """
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        sql = self._pipeline.transform_sql

        def whole(timed: bool) -> Any:
            rows = [(each.source, self._frame(each, spark, is_small, query_id, timed=timed)) for each in parts]
            # The session of the query, in which the lookups are.
            frame = moved_to(fan_in.rows_of_all(rows, fan_in.read_by(sql)), spark)
            if sql is None or all(each.size is not None for each in parts):
                return frame
            if all(each.stream is not None for each in self._pipeline.targets):
                self._count = frame.count  # of rows that are collected to be published, nothing is observed
                return frame
            observation = Observation()
            self._count = functools.partial(_observed_rows, observation, frame)
            return frame.observe(observation, F.count(F.lit(1)).alias("rows"))

        def seen(rows: Any) -> tuple[list[tuple[str, str]], int]:
            return rows.dtypes, sum(each.swaps for each in self._lookups or ())

        is_costly = any(isinstance(each, FrameRows) and each.time_is_costly for each in parts)
        if is_costly and sql is not None and not self._needs_time:
            rows = whole(timed=False)
            result = self._transformed(rows, sql, parts)
            if seen(rows) == self._seen:
                return result
        rows = whole(timed=True)
        if sql is None:
            return rows
        result = self._transformed(rows, sql, parts)
        if is_costly and (now := seen(rows)) != self._seen:
            self._seen, self._needs_time = now, True
            with suppress(Exception):  # what cannot be planned fails again where that is reported
                self._needs_time = references(result, FILE_METADATA)
        return result

    def _with_origins(self, parts: Sequence[TypedRows], spark: Any, is_small: bool, query_id: str) -> Any:
        """Return the rows again, each with its origin."""
        from pyspark.sql import functions as F

        named = []
        for each in parts:
            rows = self._frame(each, spark, is_small, query_id, with_offsets=True)
            column = next((name for name in (OFFSET, ROWID) if name in rows.columns), None)
            offset = F.lit(None) if column is None else F.col(column)
            origin = F.struct(F.lit(each.source).alias("source"), offset.cast("string").alias("offset"))
            named.append((each.source, rows.withColumn(ORIGIN, F.to_json(origin)).drop(OFFSET)))
        return moved_to(fan_in.rows_of_all(named, fan_in.read_by(self._pipeline.transform_sql)), spark)

    def _frame(
        self,
        rows: TypedRows,
        spark: Any,
        is_small: bool,
        query_id: str,
        *,
        timed: bool = True,
        with_offsets: bool = False,
    ) -> Any:
        if isinstance(rows, FrameRows):
            frame = rows.with_offsets() if with_offsets else rows.frame(timed=timed)
            return self._columns.complete(frame, rows.source, query_id, rows.found, rows.documents)
        gathered = rows.gather() if is_small else None
        if gathered is not None:
            return frames.from_memory(spark, _memory(gathered))
        return reader_frames.from_reader(spark, rows.reader, spark.sparkContext.defaultParallelism)

    def _transformed(self, rows: Any, sql: str, parts: Sequence[TypedRows] = ()) -> Any:
        """Return the result of SQL over rows, which are those of `parts`."""
        if self._lookups is None:
            functions.register(rows.sparkSession, self._pipeline.udfs, self._pipeline.aggregate_udfs)
            lookups = self._pipeline.lookups.items()
            self._lookups = [LookupTable(name, each, rows.sparkSession) for name, each in lookups]
        for table in self._lookups:
            table.ready()
        try:
            return functions.transformed(rows, sql, self._pipeline.aggregate_udfs)
        except WeftError as error:
            named = {each.source for each in parts}
            sources = [each for each in self._pipeline.sources if each.name in named and takes_columns(each)]
            undeclared = _undeclared(error, sql, rows.columns, sources)
            if undeclared is not None:
                raise undeclared from error
            error.add_note(f"columns of source: {', '.join(f'{name} {kind}' for name, kind in rows.dtypes)}"[:500])
            raise

    def _materialized(self, result: Any, is_small: bool, *, now: bool = False) -> Input:
        """Return rows for the targets: here, or held by Spark where they are needed more than once or must be sure.

        A column of nulls alone is left out: its type is known when it has a value."""
        from pyspark.sql.types import NullType

        result = result.drop(*(field.name for field in result.schema if isinstance(field.dataType, NullType)))
        arrow_of(result.schema)  # refuses by its name a column that no table can hold
        with outcome.explained(f"run the batch of {self._pipeline.name}"):
            if is_small:
                return memory_of(gathered(result))
            if now or len(self._pipeline.targets) > 1:
                result = result.persist()
            if now:
                try:
                    result.count()
                except BaseException:
                    result.unpersist()
                    raise
        return inputs.Frame(result)


def _undeclared(error: WeftError, sql: str, known: Sequence[str], sources: Sequence[Source]) -> DeclarationError | None:
    """Return what is wrong with SQL that names a column which no row has had yet, and which one of `sources` could
    declare; `None` where something else is wrong."""
    from sqlglot import exp, parse_one
    from sqlglot.errors import SqlglotError

    spark_error: Any = error.__context__  # of which the `WeftError` tells
    condition = str(getattr(spark_error, "getCondition", lambda: None)())
    if not sources or not condition.startswith("UNRESOLVED_COLUMN"):
        return None
    *qualifiers, name = re.findall("`([^`]*)`", spark_error.getMessageParameters()["objectName"])
    if qualifiers:
        try:
            tables = parse_one(sql, read="spark").find_all(exp.Table)
        except SqlglotError:
            return None
        table = next((each.name for each in tables if each.alias_or_name.lower() == qualifiers[0].lower()), None)
        if table is None:  # a key of an object
            name = qualifiers[0]
        elif table.lower() != "source":
            return None
    if name.lower() in map(str.lower, known) or name.startswith(RESERVED_PREFIX):
        return None
    near = listed(name, known, f"There are: {', '.join(known)}.")
    about = error.hint if isinstance(error, DeclarationError) else near
    named = " and ".join(each.name for each in sources)
    return DeclarationError(
        f"transform_sql names the column {name!r}, which no row of {named} has had so far.",
        hint=f'{about} If rows are to have it later, declare its type: weft.Source(…, columns={{"{name}": …}}). '
        "It is null where they have none.",
    )


def _is_small(parts: Sequence[TypedRows]) -> bool:
    return all(each.size is not None for each in parts) and sum(each.size or 0 for each in parts) <= SMALL


def _observed_rows(observation: Any, rows: Any) -> int:
    """Return how many rows were read; they are counted where no job has reported it."""
    future = observation._jo.future()
    deadline = time.monotonic() + _OBSERVED_SECONDS
    while not future.isCompleted() and time.monotonic() < deadline:
        time.sleep(0.01)
    return int(observation.get["rows"] if future.isCompleted() else rows.count())


def memory_of(table: pa.Table) -> inputs.Memory:
    """Return rows that this process has, for several targets."""
    rows = inputs.understand(table, has_source=False)
    assert isinstance(rows, inputs.Memory)
    return inputs.Memory(rows.schema, list(rows.batches))


def _frame_of(spark: Any, rows: pa.Table) -> Any:
    return frames.from_memory(spark, memory_of(rows))


def _memory(table: pa.Table) -> inputs.Memory:
    return inputs.Memory(table.schema, table.to_batches())
