"""Tables that `transform_sql` joins: read with the first batch, and again after each interval, between batches."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from weft.engine import frame_projection, frames, inputs, reader_frames
from weft.engine.readers import SqlReader, naming_declared, open_tables, opened_tables
from weft.errors import NotFoundError, WeftError, did_you_mean
from weft.pipelines.streaming.spec import Lookup
from weft.project import current
from weft.spark_support import outcome
from weft.systems.base import Connection, system_for
from weft.systems.load import full_name
from weft.systems.sql.tables import SqlTables

_log = logging.getLogger("weft.engine")


class LookupTable:
    """One lookup of a pipeline, in the session of its query."""

    def __init__(self, name: str, lookup: Lookup, spark: Any) -> None:
        self.name, self.lookup, self.spark = name, lookup, spark
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"weft-lookup-{name}")
        self._coming: Future[Any] | None = None
        self._held: Any = None
        self._read_at = self._asked_at = 0.0
        self.swaps = 0
        """How often a table took the place of another."""

    def ready(self) -> None:
        """Make the table ready for a batch, as fresh as it could be read meanwhile."""
        # Without batches for an interval nothing starts a refresh: the next batch would join an old table.
        rested, self._asked_at = self._is_past(self._asked_at), time.monotonic()
        if self._held is None:
            self._swap(self._read())
            return
        is_due = self._coming is None and self._is_past(self._read_at)
        if is_due:
            self._coming = self._threads.submit(self._read)
        if self._coming is not None and (self._coming.done() or (is_due and rested)):
            coming, self._coming = self._coming, None
            try:
                self._swap(coming.result())
            except WeftError as error:
                _log.warning("The lookup %s stays as it was: %s", self.name, error)
                self._read_at = time.monotonic()

    def _is_past(self, moment: float) -> bool:
        """Return whether the interval has passed since then."""
        interval = self.lookup.refresh_interval_ms
        return interval is not None and time.monotonic() - moment >= interval / 1000

    def _read(self) -> Any:
        """Return all rows, held by Spark: a batch sees the old table whole or the new one whole."""
        try:
            with outcome.explained(f"read the lookup {self.name}"):
                frame = self._frame().persist()
                frame.count()
        except WeftError as error:
            error.add_note(f"lookup {self.name}")
            raise
        return frame

    def _frame(self) -> Any:
        connection = current().connection(self.lookup.connection)
        if system_for(connection.kind).tables is None:
            return _frame_of_files(self.lookup, connection)
        tables = open_tables(connection)
        sql = _sql(self.lookup, tables)
        return reader_frames.from_reader(self.spark, SqlReader(tables, sql, tables.describe(sql)))

    def _swap(self, frame: Any) -> None:
        from weft.spark_support.sessions import moved_to

        before, self._held = self._held, frame
        moved_to(frame, self.spark).createOrReplaceTempView(self.name)
        self._read_at = time.monotonic()
        self.swaps += 1
        if before is not None:
            before.unpersist()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._held is not None:
            self._held.unpersist()


def columns_of(name: str, lookup: Lookup) -> pa.Schema:
    """Return the columns of a lookup, of which no row is read; an error where it is not there."""
    connection = current().connection(lookup.connection)
    try:
        if system_for(connection.kind).tables is None:
            with outcome.explained(f"read the lookup {name}"):
                return frame_projection.schema_of(_frame_of_files(lookup, connection))
        with opened_tables(connection) as tables:
            try:
                return tables.describe(_sql(lookup, tables))
            except WeftError:
                _refuse_missing(lookup, tables)
                raise
    except WeftError as error:
        error.add_note(f"lookup {name}")
        raise


def _refuse_missing(lookup: Lookup, tables: SqlTables) -> None:
    """Raise if the table is not there, with the name of the one that may be meant."""
    if lookup.table is None or tables.connection.is_missing():
        return
    with tables.driver.session("read") as session:
        if tables.columns(session, lookup.schema, lookup.table) is None:
            names = sorted(name for name in tables.names(session, lookup.schema) if not name.startswith("weft."))
            listing = f"Its tables: {', '.join(names[:20])}." if names else None
            raise NotFoundError(
                f"There is no table {full_name(lookup.schema, lookup.table)} on {tables.connection.label}.",
                hint=did_you_mean(lookup.table, names, listing),
            )


def _sql(lookup: Lookup, tables: SqlTables) -> str:
    if lookup.query is not None:
        return naming_declared(lookup.query, tables)
    return f"SELECT * FROM {tables.table(lookup.schema, str(lookup.table))}"


def _frame_of_files(lookup: Lookup, connection: Connection) -> Any:
    path = f"{lookup.schema}/{lookup.table}" if lookup.schema else str(lookup.table)
    return frames.of(inputs.Files(path), None, connection)
