"""Which columns of a micro-batch go into a target: what its table has, and what it is to get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from weft.engine.projection import TableProjection
from weft.errors import LoadRefusedError
from weft.pipelines import declare
from weft.pipelines.streaming.spec import Drift
from weft.pipelines.table import Table
from weft.systems.load import Declared, Load
from weft.systems.log import RESERVED_PREFIX
from weft.systems.sql.tables import SqlTables
from weft.systems.stream_source import EVENT_TIME


@dataclass(frozen=True)
class TargetColumns:
    """Chooses the columns of a batch that a target gets. What Weft adds to rows is written where the target has a
    column for it; a new table has one for the time of the event."""

    present: frozenset[str] | None
    """The columns of the target; `None` where there is no table yet."""
    on_drift: Drift

    def __call__(self, load: Load, source: pa.Schema, tables: SqlTables | None) -> Load:
        """Return the load with the columns that it writes."""
        on_drift = "evolve" if self.on_drift == "evolve" else "ignore"
        return replace(load, declared=Declared(schema=None, on_drift=on_drift))

    def wanted(self, load: Load, names: Sequence[str]) -> list[str]:
        """Return those of the columns that are written. The others are left out before rows go anywhere: a database
        would have to take them into a table of ours first."""
        return [name for name in names if self._is_wanted(name, load)]

    def runs_in(self, dialect: str) -> bool:
        """Return whether a dialect can choose columns: all can."""
        return True

    def _is_wanted(self, name: str, load: Load) -> bool:
        if name.lower() in (self.present or ()):
            return True
        is_named = name in load.deduplicate_by
        if self.present is None:
            return is_named or not name.startswith(RESERVED_PREFIX)
        if _is_own(name) and not is_named:
            return False
        if self.on_drift == "fail":
            raise LoadRefusedError(
                f"The source of {load.name} has a column {name!r} that the table does not have.",
                hint="Add it to the table, leave it out by transform_sql, or say on_drift='evolve' or 'ignore'.",
            )
        return self.on_drift == "evolve"


_DRIFTS: dict[Drift, declare.Drift] = {"evolve": "evolve", "ignore": "ignore", "fail": "error"}


class DeclaredColumns(TableProjection):
    """Maps a batch to a table under `@weft.table`, as a load of a declared pipeline does. What Weft adds to rows is
    written where the table declares a column for it."""

    @classmethod
    def of(cls, table: Table, on_drift: Drift) -> DeclaredColumns:
        """Return the projection of a declared table."""
        return cls(declare.PipelineTarget(table=table, on_drift=_DRIFTS[on_drift]))

    def wanted(self, load: Load, names: Sequence[str]) -> list[str]:
        """Return the columns of these that the projection is about."""
        return [name for name in names if not _is_own(name) or name in self.target.table.names]


def _is_own(name: str) -> bool:
    return name.startswith(RESERVED_PREFIX) or name == EVENT_TIME
