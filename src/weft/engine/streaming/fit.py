"""Which columns of a micro-batch go into a target: what its table has, and what it is to get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa

from weft.engine import shape
from weft.engine.streaming.sources import EVENT_TS
from weft.errors import LoadRefusedError
from weft.pipelines import declare
from weft.pipelines.streaming.spec import Drift
from weft.pipelines.table import Table
from weft.systems.load import Declared, Load, Projected
from weft.systems.log import RESERVED_PREFIX


@dataclass(frozen=True)
class Fit:
    """Fits a batch to its target. What Weft adds to rows is written where the target has a column for it; a table that
    is made anew has one for the time of the event."""

    present: frozenset[str] | None
    """The columns of the target; `None` where there is no table yet."""
    on_drift: Drift

    def __call__(self, load: Load, source: pa.Schema, dialect: str, quote: Callable[[str], str]) -> Load:
        """The load with the columns that it writes."""
        wanted = [field for field in source if self._is_wanted(field.name, load)]
        declared = Declared(schema=None, on_drift="evolve" if self.on_drift == "evolve" else "ignore")
        if len(wanted) == len(source):
            return replace(load, declared=declared)
        projection = tuple(Projected(f"q.{quote(field.name)}", field) for field in wanted)
        return replace(load, declared=declared, projection=projection)

    def runs_in(self, dialect: str) -> bool:
        """Columns are chosen everywhere."""
        return True

    def _is_wanted(self, name: str, load: Load) -> bool:
        if self.present is None:
            return not name.startswith(RESERVED_PREFIX)
        if name.lower() in self.present:
            return True
        if _is_own(name):
            return False
        if self.on_drift == "fail":
            raise LoadRefusedError(
                f"The source of {load.name} has a column {name!r}, which the table has not.",
                hint="Add it to the table, leave it out by transform_sql, or say on_drift='evolve' or 'ignore'.",
            )
        return self.on_drift == "evolve"


_DRIFTS: dict[Drift, declare.Drift] = {"evolve": "evolve", "ignore": "ignore", "fail": "error"}


class DeclaredFit:
    """Fits a batch to a table under `@weft.table`, as a load of a declared pipeline does. What Weft adds to rows is
    written where the table declares a column for it."""

    def __init__(self, table: Table, on_drift: Drift) -> None:
        self._names = set(table.names)
        self._fit = shape.Fit(declare.Target(table=table, on_drift=_DRIFTS[on_drift]))

    def __call__(self, load: Load, source: pa.Schema, dialect: str, quote: Callable[[str], str]) -> Load:
        """The load with the columns that it writes."""
        wanted = pa.schema([field for field in source if not _is_own(field.name) or field.name in self._names])
        made = self._fit(load, wanted, dialect, quote)
        if made.projection is None and len(wanted) < len(source):
            made = replace(made, projection=tuple(Projected(f"q.{quote(field.name)}", field) for field in wanted))
        return made

    def runs_in(self, dialect: str) -> bool:
        """Whether a database can apply all normalizers itself; else Spark does."""
        return self._fit.runs_in(dialect)


def _is_own(name: str) -> bool:
    return name.startswith(RESERVED_PREFIX) or name == EVENT_TS
