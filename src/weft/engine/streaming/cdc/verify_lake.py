"""A mirror that Spark reads, such as a Delta table, compared with its source."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_, or_
from typing import Any, ClassVar

import pyarrow as pa

from weft.columns import canonical_batch
from weft.engine import session, spark_io
from weft.engine.frame_projection import schema_of
from weft.engine.streaming.cdc import verify
from weft.engine.streaming.cdc.verify import AT_ONCE, Key, Side, Values
from weft.errors import NotFoundError
from weft.spark_support import outcome
from weft.spark_support.lazy import F
from weft.systems.base import Connection
from weft.systems.frame_checks import column
from weft.systems.load import Load, full_name


class LakeSide(Side):
    """The rows of such a table."""

    can_mend: ClassVar[bool] = False

    def __init__(
        self, connection: Connection, schema: str | None, name: str, keys: Sequence[str], gone: str = ""
    ) -> None:
        self._connection = connection
        self._load = Load.declare(target=(schema, name), mode="merge", keys=tuple(keys))
        stored = self._stored()
        label = f"{full_name(schema, name)} of {connection.label}"
        self._describe(label, None if stored is None else list(schema_of(stored)), keys, gone)
        self._sorted: Any = None

    def _stored(self) -> Any:
        with outcome.explained("read the mirror"):
            return spark_io.stored(session.spark(), self._connection, self._load)

    def _there(self) -> Any:
        """The rows that are not soft deleted, as they are now."""
        frame = self._stored()
        if frame is None:
            raise NotFoundError(f"There is no table {self.label} any more.")
        if self.gone:
            is_flag = pa.types.is_boolean(self.columns[self.gone].type)
            gone = column(self.gone)
            frame = frame.where(~F.coalesce(gone, F.lit(False)) if is_flag else gone.isNull())
        return frame.select(*map(column, self.selected))

    def has_checksums_of(self, other: Side) -> bool:
        return False

    def after(self, key: Key | None) -> dict[Key, Values]:
        """Return the next rows behind a key, of those that were there at the first call."""
        by = [column(each) for each in self.keys]
        if key is None:
            # Sorted once: Spark knows the bounds of each part, and reads those alone that a range is in.
            self._sorted = self._there().orderBy(*by).persist()
        frame = self._sorted
        if key is not None:
            parts = (F.lit(part).alias(name) for part, name in zip(key, self.keys, strict=True))
            frame = frame.where((by[0] >= F.lit(key[0])) & (F.struct(*by) > F.struct(*parts)))
        rows = self._found(frame.orderBy(*by).limit(verify.ROWS_A_RANGE))
        if len(rows) < verify.ROWS_A_RANGE:
            self._sorted.unpersist()
        return rows

    def rows(self, keys: Sequence[Key]) -> dict[Key, Values]:
        rows: dict[Key, Values] = {}
        for start in range(0, len(keys), AT_ONCE):
            named = (
                reduce(and_, (column(name) == F.lit(part) for name, part in zip(self.keys, key, strict=True)))
                for key in keys[start : start + AT_ONCE]
            )
            rows |= self._found(self._there().where(reduce(or_, named)))
        return rows

    def _found(self, frame: Any) -> dict[Key, Values]:
        with outcome.explained("read the mirror"):
            table = frame.toArrow()
        schema = schema_of(frame)
        return self._by_key(canonical_batch(batch, schema) for batch in table.to_batches())
