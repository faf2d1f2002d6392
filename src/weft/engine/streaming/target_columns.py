"""Which columns of a batch a target of a streaming pipeline gets."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from weft.engine.projection import TableProjection
from weft.errors import LoadRefusedError
from weft.pipelines import declare
from weft.pipelines.streaming.spec import Drift
from weft.pipelines.table import Table
from weft.spark_support.sessions import quoted
from weft.systems.load import Declared, Load, Projected
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
        on_drift = "evolve" if self.on_drift == "evolve" else "ignore"
        return replace(load, declared=Declared(schema=None, on_drift=on_drift))

    def wanted(self, load: Load, names: Sequence[str]) -> list[str]:
        """Return the columns that are written. The others are left out before rows go anywhere: a database
        would have to take them into a staging table first."""
        return [name for name in names if self._is_wanted(name, load)]

    def new(self, load: Load, names: Sequence[str], present: Collection[str]) -> list[str]:
        """Return the columns of these that the target would get, without those that the load needs."""
        needed = {EVENT_TIME, *named_by(load)}
        return [name for name in names if name.lower() not in present and name not in needed]

    def written_to(self, name: str) -> tuple[str, pa.Field | None]:
        return name, None

    @property
    def has_normalizers(self) -> bool:
        return False

    def runs_in(self, dialect: str) -> bool:
        return True

    def _is_wanted(self, name: str, load: Load) -> bool:
        if name.lower() in (self.present or ()):
            return True
        if load.changes is not None and name in (*load.changes.own, load.changes.soft_delete_column):
            return True
        is_named = name in load.deduplicate_by
        if self.present is None:
            return is_named or not name.startswith(RESERVED_PREFIX)
        if is_own(name) and not is_named:
            return False
        if self.on_drift == "fail":
            others = "leave it out by transform_sql, or say on_drift='evolve' or 'ignore'"
            if load.changes is not None:
                others = "or say schema_evolution='evolve' or 'skip'"
            raise LoadRefusedError(
                f"The source of {load.name} has a column {name!r} that the table does not have.",
                hint=f"Add it to the table, {others}.",
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

    def __call__(self, load: Load, source: pa.Schema, tables: SqlTables | None) -> Load:
        if load.changes is None:
            return super().__call__(load, source, tables)
        projected = super().__call__(load, load.stored(source), tables)
        if projected.projection is None:
            return projected
        quote = quoted if tables is None else tables.quote
        own = [Projected(f"q.{quote(name)}", source.field(name)) for name in load.changes.own]
        return replace(projected, projection=(*projected.projection, *own))

    def wanted(self, load: Load, names: Sequence[str]) -> list[str]:
        """Return the columns of these that the projection is about."""
        declared = (*self.target.table.names, *(() if load.changes is None else load.changes.own))
        wanted = [name for name in names if not is_own(name) or name in declared]
        # An expression may be made of any column.
        if self.target.on_drift == "ignore" and not any(each.normalizers for each in self.target.table.columns):
            return [name for name in wanted if name in declared or name in named_by(load)]
        return wanted

    def new(self, load: Load, names: Sequence[str], present: Collection[str]) -> list[str]:
        """Return the columns of these that `evolve` would add."""
        if self.target.on_drift != "evolve":
            return []
        needed = {*self.target.table.names, *named_by(load)}
        return [name for name in names if name.lower() not in present and name not in needed]


def named_by(load: Load) -> tuple[str, ...]:
    """Return the columns that a load names."""
    time = load.event_timestamp_column
    chosen = (load.keys, load.deduplicate_by, load.update_columns or (), load.compare_columns or ())
    return (*itertools.chain.from_iterable(chosen), *(() if time is None else (time,)))


def is_own(name: str) -> bool:
    """Return whether Weft adds a column to rows."""
    return name.startswith(RESERVED_PREFIX) or name == EVENT_TIME
