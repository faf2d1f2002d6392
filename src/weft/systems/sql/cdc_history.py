"""The statements that put changes into the history of a table, by the times of the source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import ClassVar

import pyarrow as pa

from weft.systems.changes import AT, DELETE, END, KEY, OP, READ, TS
from weft.systems.load import VALID_FROM, VALID_TO, Counts
from weft.systems.sql.cdc import FIELDS, SURVIVORS, Gated
from weft.systems.sql.scd2 import Scd2ByEvent


class History(Scd2ByEvent, Gated):
    """Keeps each version of a row, from the time of the change to that of the next one, whatever order they come in."""

    # One that changes nothing too: a change that comes late may be between it and the one before.
    is_kept: ClassVar[str] = "1 = 1"
    is_version: ClassVar[str] = "c._hash <> ''"

    def check_keys(self, rows: int, reject: Callable[[], None] | None = None) -> int:
        left_out = super().check_keys(rows, reject)
        self._begin()
        return left_out

    @property
    def _began(self) -> str:
        return self.tables.instant(f"s.{self._q(AT)}", self.fields[AT])

    def _staged_hash(self, compared: Sequence[str]) -> str:
        """A delete has no values: it ends the version before it."""
        return f"CASE WHEN s.{self._q(OP)} = {DELETE} THEN '' ELSE {super()._staged_hash(compared)} END"

    def clear(self) -> Counts:
        """End the versions that truncates of the source ended."""
        since, to, deleted = f"t.{self._q(VALID_FROM)}", f"t.{self._q(VALID_TO)}", 0
        for _, ts in self.changes.truncates:
            if ts is not None:
                end = self.tables.moment(_instant(ts))
                within = f"{since} <= {end} AND {to} > {end}"
                self.session.run(self.tables.update(self.target, {VALID_TO: end}, within))
                deleted += self._close(end, f"{since} <= {end}")
        return Counts(deleted=deleted)

    def _differing(self, otherwise: str = "1 = 0") -> str:
        """Each change is a version. A row that another snapshot reads is none, where it is as it was."""
        return super()._differing(f"({otherwise} OR s.{self._q(OP)} <> {READ})")

    def _add_ends(self, line: str) -> None:
        """Add the deletes and the truncate that came in earlier batches: what comes late ends with them too."""
        gate, tables, keys = self.gate, self.tables, self.load.keys
        stage = tables.temporary(self.stage)
        found = self.session.rows(
            f"SELECT {self._q('position')}, ts_ms FROM {gate.table} WHERE {gate.of_rows} "
            f"AND {self._q('position')} IN (SELECT {self._q(KEY)} FROM {stage})"
        )
        truncates = {ts for _, ts in (*self.changes.truncates, *self._known_truncates()) if ts is not None}
        if truncates:
            staged = self.session.rows(f"SELECT DISTINCT {self._q(KEY)} FROM {stage}")
            found = [*found, *((key, ts) for (key,) in staged for ts in truncates)]
        if not found:
            return
        schema = pa.schema([(KEY, pa.string()), (AT, pa.timestamp("us", "UTC"))])
        columns = [
            pa.array([key for key, _ in found]),
            pa.array([_instant(ts) for _, ts in found], schema.field(1).type),
        ]
        definitions = ", ".join(f"{self._q(each.name)} {tables.sql_type(each)}" for each in schema)
        tables.create_temporary(self.session, SURVIVORS, definitions)
        ends = tables.temporary(SURVIVORS)
        tables.copy_in(self.session, ends, schema, [pa.RecordBatch.from_arrays(columns, schema=schema)])
        values = ", ".join(f"{self._value(key)} AS {self._q(key)}" for key in keys)
        at = tables.instant(f"e.{self._q(AT)}", schema.field(AT))
        self.session.run(
            f"INSERT INTO {line} ({tables.listed([*keys, '_ts', '_src', '_hash'])}) "
            f"SELECT DISTINCT {values}, {at}, 1, '' FROM {self.source} AS s "
            f"JOIN {ends} AS e ON e.{self._q(KEY)} = s.{self._q(KEY)}"
        )

    def delete_missing(self) -> Counts:
        """Note the deletes in the gate: each one, because it ends whatever comes late and began before it."""
        gate, run, end = self.gate, self.session.run, self._q(END)
        stage = self.tables.temporary(self.stage)
        self._forget(END)
        # The place of the position is taken by the key alone.
        self._insert_staged(
            f"INSERT INTO {gate.table} ({self.tables.listed(FIELDS.names)}) SELECT DISTINCT {gate.pipeline}, "
            f"{gate.rows}, s.{end}, s.{self._q(KEY)}, s.{self._q(TS)}, {self.tables.true} FROM {stage} AS s "
            f"WHERE s.{end} IS NOT NULL AND s.{self._q(TS)} >= {self._oldest}"
        )
        run(f"DELETE FROM {gate.table} WHERE {gate.of_truncates} AND ts_ms < {self._oldest}")
        for position, ts in self.changes.truncates:
            if ts is not None:
                self._note_truncate(position, ts, str(ts))
        return Counts()


def _instant(ts_ms: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ts_ms)
