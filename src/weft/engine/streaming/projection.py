"""Which columns of a micro-batch go into a target: what its table has, and what it is to get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from weft.engine import projection
from weft.errors import LoadRefusedError
from weft.pipelines import declare
from weft.pipelines.streaming.spec import Drift
from weft.pipelines.table import Table
from weft.systems.load import Declared, Load
from weft.systems.log import RESERVED_PREFIX
from weft.systems.stream_source import EVENT_TIME


@dataclass(frozen=True)
class Fit:
    """Fits a batch to its target. What Weft adds to rows is written where the target has a column for it; a table that
    is made anew has one for the time of the event."""

    present: frozenset[str] | None
    """The columns of the target; `None` where there is no table yet."""
    on_drift: Drift

    def __call__(self, load: Load, source: pa.Schema, dialect: str, quote: Callable[[str], str]) -> Load:
        """The load with the columns that it writes."""
        return replace(
            load, declared=Declared(schema=None, on_drift="evolve" if self.on_drift == "evolve" else "ignore")
        )

    def wanted(self, load: Load, names: Sequence[str]) -> list[str]:
        """Those of the columns that are written. The others are left out before rows go anywhere: a database would
        have to take them into a table of ours first."""
        return [name for name in names if self._is_wanted(name, load)]

    def runs_in(self, dialect: str) -> bool:
        """Columns are chosen everywhere."""
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
        self._fit = projection.Fit(declare.Target(table=table, on_drift=_DRIFTS[on_drift]))

    def __call__(self, load: Load, source: pa.Schema, dialect: str, quote: Callable[[str], str]) -> Load:
        """The load with the columns that it writes."""
        return self._fit(load, source, dialect, quote)

    def wanted(self, load: Load, names: Sequence[str]) -> list[str]:
        """Those of the columns that it is about."""
        return [name for name in names if not _is_own(name) or name in self._names]

    def runs_in(self, dialect: str) -> bool:
        """Whether a database can apply all normalizers itself; else Spark does."""
        return self._fit.runs_in(dialect)


def _is_own(name: str) -> bool:
    return name.startswith(RESERVED_PREFIX) or name == EVENT_TIME
