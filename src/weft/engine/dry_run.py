"""What a load into files or a Delta table would do: Spark works it out, and nothing is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.engine import connectors, files, frame_projection
from weft.spark_support import outcome, sessions
from weft.systems import load_checks
from weft.systems.base import Connection
from weft.systems.load import Counts, Load
from weft.systems.sql.checks import refuse_unknown_columns


class DryRun:
    """A load whose columns fit its target: what it is refused for without looking at rows is refused here."""

    def __init__(self, frame: Any, connection: Connection, load: Load) -> None:
        files.refuse(connection, load)
        refuse_unknown_columns(load.checks, frame.columns, load.name)
        load.check_source(frame.columns)
        self.load, self.target = load, files.target_of(connection)
        self.spark = sessions.own_session(connectors.ready(frame.sparkSession, connection))
        self.frame = load_checks.without_void(sessions.moved_to(frame, self.spark))
        connection.configure(self.spark)
        self.stored = self.target.stored(load, self.spark)
        if self.stored is not None and (load.mode != "truncate" or self.target.keeps_columns):
            self.frame = load_checks.cast_to_table(self.frame, self.stored.schema, load)
            self.stored = load_checks.with_all_columns(
                self.stored, load_checks.extended_schema(self.stored.schema, self.frame)
            )

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
        with outcome.explained(what), frame_projection.expected(self.frame, self.load) as (frame, warnings):
            return replace(self._counts(frame), warnings=warnings)

    def _counts(self, frame: Any) -> Counts:
        load, stored = self.load, self.stored
        if load.keys:
            frame, total, kept = load_checks.checked_keys(frame, load)
        else:
            total = kept = frame.count()
        load_checks.refuse_empty(load, total)
        if load.tracks_rows:
            changed = self.target.changes(frame, stored, load)
            unchanged = kept - changed.inserted - changed.updated
            return replace(changed, rows_read=total, unchanged=unchanged)
        deleted = stored.count() if load.mode == "truncate" and stored is not None else 0
        return Counts(rows_read=total, inserted=kept, deleted=deleted)
