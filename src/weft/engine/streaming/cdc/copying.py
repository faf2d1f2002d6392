"""The first copy of a source table into its mirror, before the changes are applied.

The source of messages begins at its end, which is noted first. Whatever is before that was committed by then, and the
copy sees it; whatever comes after is applied to what was copied. So the copy need not be of one moment: a row that
changes meanwhile gets its changes again, the last of which decides. It is read in ranges of the key, each in a short
transaction, and goes on after a crash with the range that was not noted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from weft.engine import inputs, session, spark_io
from weft.engine.load import Job
from weft.engine.readers import open_tables, opened_tables, stored_columns
from weft.engine.streaming.cdc.routes import source_table
from weft.engine.streaming.checkpoint_files import Copies
from weft.engine.streaming.targets import place_of
from weft.errors import DeclarationError, LoadRefusedError, NotFoundError, did_you_mean
from weft.pipelines.streaming.cdc import CDC
from weft.pipelines.streaming.spec import StreamingPipeline, Target
from weft.project import current
from weft.spark_support.folder import Location
from weft.systems.base import Connection, system_for
from weft.systems.load import Declared, Load, full_name
from weft.systems.sql.literals import literal
from weft.systems.sql.tables import SqlTables

_log = logging.getLogger("weft.engine")
# Tests stop a process at each of these steps, by a handler on this logger.
_steps = logging.getLogger("weft.streaming")
ROWS_A_RANGE = 500_000
_POLL_SECONDS, _TOLD_SECONDS = 0.1, 30.0


def copied(
    pipeline: StreamingPipeline, home: Location, stopping: threading.Event, check: Callable[[], None] = lambda: None
) -> bool:
    """Copy what the mirrors of a pipeline do not have yet; `False` where it was stopped before the end. `check` raises
    where another process has taken the pipeline over."""
    cdc = pipeline.cdc
    if cdc is None or cdc.snapshot != "copy":
        return True
    state = Copies(home)
    for target in pipeline.targets:
        with closing(open_tables(current().connection(cdc.snapshot_connection))) as tables:
            if not _Copy(pipeline, cdc, target, tables).run(state, stopping, check):
                return False
    return True


def tables_to_copy(pipeline: StreamingPipeline) -> list[str]:
    """Return the tables that a pipeline copies first; raise for what cannot be copied."""
    cdc = pipeline.cdc
    if cdc is None or cdc.snapshot != "copy":
        return []
    with closing(open_tables(current().connection(cdc.snapshot_connection))) as tables:
        for target in pipeline.targets:
            _Copy(pipeline, cdc, target, tables).columns()
    return [full_name(*source_table(pipeline, target)) for target in pipeline.targets]


@dataclass(frozen=True)
class _Copy:
    """The copy of one table."""

    pipeline: StreamingPipeline
    cdc: CDC
    target: Target
    tables: SqlTables
    """The tables of the source's database."""

    def run(self, state: Copies, stopping: threading.Event, check: Callable[[], None]) -> bool:
        """Copy range after range; `False` where it was stopped before the end."""
        place = place_of(self.target, self.target.connection_with_options(self._mirror))
        reached, what = state.of(place), self._what
        if reached is not None:
            self._refuse_other(reached)
            if reached.get("done"):
                return True
        columns = self.columns()
        if reached is None:
            self._refuse_rows()
            state.note(place, **what, after=None)
        after = None if reached is None else reached["after"]
        if after is None and not self._settled(stopping):
            return False
        while not stopping.is_set():
            check()
            upto = self._end(after)
            self._load(columns, after, upto)
            _steps.debug("copied")
            if upto is None:
                state.note(place, **what, done=True)
                return True
            state.note(place, **what, after=upto)
            _log.info("%s has copied %s up to %s", self.pipeline.name, self.target.name, upto)
            after = upto
        return False

    @property
    def _what(self) -> dict[str, Any]:
        """What is copied, without secrets."""
        source = self.tables.connection
        return {
            "table": full_name(*self._name),
            "from": f"{source.kind} {source.target}",
            "keys": list(self.target.primary_key),
        }

    def _refuse_other(self, reached: dict[str, Any]) -> None:
        """Refuse to go on with the copy of another table: the mirror would have rows of both. The server of a copy that
        is done may have moved."""
        names = ("table", "keys") if reached.get("done") else ("table", "from", "keys")
        if any(reached[name] != self._what[name] for name in names):
            before, now = (
                f"{each['table']} ({each['from']}) by {', '.join(each['keys'])}" for each in (reached, self._what)
            )
            raise DeclarationError(
                f"{self.label} has rows of a copy of {before}, and now the pipeline copies {now}.",
                hint=f"Empty the table and start again: weft checkpoints reset {self.pipeline.name}",
            )

    # ------------------------------------------------------------------------------------------------------- the source

    @property
    def _name(self) -> tuple[str | None, str]:
        return source_table(self.pipeline, self.target)

    @property
    def _key(self) -> str:
        # Ranges of the first column: databases use an index for it, but not for pairs.
        return self.tables.quote(self.target.primary_key[0])

    def columns(self) -> list[str]:
        """Return the columns that are copied: those that the mirror has, or will have."""
        stored = stored_columns(self.tables, *self._name)
        if stored is None:
            raise NotFoundError(
                f"There is no table {full_name(*self._name)} of {self.tables.connection.label} to copy.",
                hint='Name it: CDC(…, snapshot_table="schema.table").',
            )
        names = [each.name for each in stored]
        for key in self.target.primary_key:
            if key not in names:
                raise DeclarationError(
                    f"{full_name(*self._name)} of {self.tables.connection.label} has no column {key!r}, which is a key "
                    "of the mirror.",
                    hint=did_you_mean(key, names, f"Its columns: {', '.join(names)}."),
                )
        present = self._present()
        if present is None or self.cdc.schema_evolution != "skip":
            return names
        return [name for name in names if name in present]

    def _settled(self, stopping: threading.Event) -> bool:
        """Wait until the transactions that run now have ended: a database may send the changes of one to its log before
        others see them. Those changes may be before the end that was noted, so that the copy must have them."""
        running, waited = self._running(), 0.0
        while running:
            if waited >= _TOLD_SECONDS:
                _log.info("The copy of %s waits for %d transactions of the source", self.target.name, len(running))
                waited = 0.0
            if stopping.wait(_POLL_SECONDS):
                return False
            waited += _POLL_SECONDS
            running &= self._running()
        return True

    def _running(self) -> set[str]:
        with self.tables.driver.session("read") as reading:
            return self.tables.running_transactions(reading)

    def _end(self, after: str | None) -> str | None:
        """Return the key with which the next range ends; `None` for the last range."""
        where = "" if after is None else f" WHERE {self._key} > {after}"
        sql = f"SELECT {self._key} FROM {self.tables.table(*self._name)}{where}"
        with self.tables.driver.session("read") as reading:
            last = reading.value(f"{sql} ORDER BY {self._key} LIMIT 1 OFFSET {ROWS_A_RANGE - 1}")
        if last is None:
            return None
        try:
            return literal(str(last) if isinstance(last, UUID) else last, self.tables.dialect)
        except DeclarationError:
            return None  # bytes, for example: the rest is one range

    # ------------------------------------------------------------------------------------------------------- the mirror

    @property
    def _mirror(self) -> Connection:
        return current().connection(self.target.connection)

    @property
    def label(self) -> str:
        """How errors call the mirror."""
        return f"{self.target.name} of {self._mirror.label}"

    def _present(self) -> list[str] | None:
        """Return the columns of the mirror; `None` where it is not there."""
        connection = self._mirror
        assert self.target.table is not None
        if connection.is_missing():
            return None
        if system_for(connection.kind).tables is None:
            return spark_io.columns(session.spark(), connection, Load.declare(target=self.target.table))
        with opened_tables(connection) as tables:
            stored = stored_columns(tables, *self.target.table)
        return None if stored is None else [each.name for each in stored if not each.generated]

    def _refuse_rows(self) -> None:
        """Refuse a mirror with rows: those that the source no longer has would stay."""
        connection = self._mirror
        assert self.target.table is not None
        if self._present() is None:
            if self.cdc.soft_delete_column is not None:
                raise DeclarationError(
                    f"There is no table {self.label}, and a copy does not know the type of soft_delete_column.",
                    hint=f"Create it, with a timestamp or boolean {self.cdc.soft_delete_column!r}.",
                )
            return
        if system_for(connection.kind).tables is None:
            frame = spark_io.stored(session.spark(), connection, Load.declare(target=self.target.table))
            has_rows = frame is not None and not frame.isEmpty()
        else:
            with opened_tables(connection) as tables, tables.driver.session("read") as reading:
                has_rows = reading.row(f"SELECT 1 FROM {tables.table(*self.target.table)} LIMIT 1") is not None
        if has_rows:
            hint, source = "Empty the table.", self.tables.connection.name
            if source and system_for(connection.kind).tables is not None:  # others are compared, but not mended
                hint += " Or leave snapshot='copy' out, and compare the mirror: "
                hint += f"weft cdc verify {self.pipeline.name} --source {source} --mend"
            raise LoadRefusedError(
                f"{self.label} has rows, and a copy would leave those that the source no longer has.", hint=hint
            )

    def _load(self, columns: list[str], after: str | None, upto: str | None) -> None:
        """Merge a range of rows; again after a crash, which changes nothing."""
        bounds = [] if after is None else [f"{self._key} > {after}"]
        bounds += [] if upto is None else [f"{self._key} <= {upto}"]
        where = f" WHERE {' AND '.join(bounds)}" if bounds else ""
        sql = f"SELECT {self.tables.listed(columns)} FROM {self.tables.table(*self._name)}{where}"
        load = Load.declare(
            target=self.target.table or "", mode="merge", keys=self.target.primary_key, pipeline=self.pipeline.name
        )
        if self.cdc.schema_evolution == "evolve":
            load = replace(load, declared=Declared(schema=None, on_drift="evolve"))
        connection = self.target.connection_with_options(self._mirror)
        source = current().connection(self.cdc.snapshot_connection)
        Job(load, connection, source).run(inputs.SourceSql(sql))
