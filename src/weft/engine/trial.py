"""What a load into files or a Delta table would do: Spark works it out, and nothing is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.engine import connectors, files, fitting
from weft.spark_support import outcome
from weft.systems.base import Connection
from weft.systems.load import IS_CURRENT, VALID_FROM, VALID_TO, Counts, Load
from weft.systems.sql.checks import refuse_unknown_columns


class Trial:
    """A load whose columns fit its target: what it is refused for without looking at rows is refused here."""

    def __init__(self, frame: Any, connection: Connection, load: Load) -> None:
        from weft.spark_support import sessions
        from weft.systems.objects import rows

        files.refuse(connection, load)
        refuse_unknown_columns(load.checks, frame.columns, load.name)
        load.check_source(frame.columns)
        self.load = load
        self.spark = sessions.own_session(connectors.ready(frame.sparkSession, connection), {})
        self.frame = rows.without_void(sessions.moved_to(frame, self.spark))
        self.stored = self._stored(connection)
        # Files are replaced whole, whatever columns they have; a Delta table keeps its own.
        if self.stored is not None and (load.mode != "truncate" or connection.kind.startswith("delta")):
            self.frame = rows.fitted(self.frame, self.stored.schema, load)
            self.stored = rows.completed(self.stored, rows.grown(self.stored.schema, self.frame))

    def _stored(self, connection: Connection) -> Any:
        """The target's rows, or `None` where there is no such table."""
        from weft.systems.objects import source
        from weft.systems.objects.paths import table_path

        load = self.load
        connection.configure(self.spark)
        if not connection.kind.startswith("delta"):
            root = connection.root  # type: ignore[attr-defined]
            return source.read_table(self.spark, table_path(root, load.schema, load.table))
        from weft.systems.delta.table import DeltaTable

        table = DeltaTable(self.spark, connection, load.schema, load.table)
        columns = table.schema()
        if columns is None:
            return None
        table.check(load, columns)
        return table.read()

    @property
    def creates(self) -> str | None:
        """The table that would be made, where there is none."""
        if self.stored is not None:
            return None
        columns = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in self.frame.schema)
        return f"{self.load.name} ({columns})"

    def run(self) -> Counts:
        """Try the rows; raises where they are refused."""
        what = f"try the load of {self.load.name}"
        with outcome.explained(what), fitting.expected(self.frame, self.load) as (frame, warnings):
            return replace(self._counts(frame), warnings=warnings)

    def _counts(self, frame: Any) -> Counts:
        from weft.systems.objects.rows import checked_keys, refuse_empty

        load, stored = self.load, self.stored
        if load.keys:
            frame, total, kept = checked_keys(frame, load)
        else:
            total = kept = frame.count()
        refuse_empty(load, total)
        if not load.tracks_rows:
            deleted = stored.count() if load.mode == "truncate" and stored is not None else 0
            return Counts(rows_read=total, inserted=kept, deleted=deleted)
        from pyspark.sql import functions as F

        from weft.systems.delta import changes

        is_scd2 = load.mode == "scd2"
        if stored is None:
            own = {VALID_FROM: "timestamp", VALID_TO: "timestamp", IS_CURRENT: "boolean"} if is_scd2 else {}
            stored = frame.limit(0).withColumns({name: F.lit(None).cast(kind) for name, kind in own.items()})
        found = (changes.scd2_changes if is_scd2 else changes.merge_changes)(frame, stored, load)
        expired = F.count_if(F.col(changes.EXPIRED)) if is_scd2 else F.lit(0)
        ops = (changes.INSERT, changes.VERSION, changes.UPDATE, changes.DELETE)
        (row,) = found.agg(*(F.count_if(F.col(changes.OP) == op) for op in ops), expired).collect()
        inserted, versions, updated, deleted, old = row
        changed = versions + updated
        return Counts(
            rows_read=total,
            inserted=inserted,
            updated=changed,
            unchanged=kept - inserted - changed,
            deleted=deleted + old,
        )
