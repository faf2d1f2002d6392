"""Which statements a mode has."""

from __future__ import annotations

import pyarrow as pa

from weft.systems.load import Load
from weft.systems.sql.driver import Session
from weft.systems.sql.merge import Merge
from weft.systems.sql.move import Move, Truncate
from weft.systems.sql.scd2 import Scd2, Scd2ByEvent
from weft.systems.sql.tables import Column, SqlTables


def move_for(
    tables: SqlTables,
    session: Session,
    load: Load,
    schema: pa.Schema,
    columns: dict[str, Column],
    stage: str,
    staged_as: dict[str, str],
) -> Move:
    """The move of a load: rows with this schema, staged in the table `stage` with the types `staged_as`."""
    scd2 = Scd2 if load.event_timestamp_column is None else Scd2ByEvent
    modes: dict[str, type[Move]] = {"append": Move, "truncate": Truncate, "merge": Merge, "scd2": scd2}
    return modes[load.mode](tables, session, load, schema, columns, stage, staged_as)
