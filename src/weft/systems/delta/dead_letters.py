"""Dead letters in a Delta table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from weft.errors import NotFoundError
from weft.spark_support import outcome
from weft.systems.base import Connection
from weft.systems.dead_letter_store import SCHEMA, StoredLetter
from weft.systems.delta.table import DeltaTable, read
from weft.systems.delta.target import DeltaTarget
from weft.systems.sql.dead_letters import letter_load
from weft.systems.sql.literals import literal


class DeltaLetters:
    """The dead letters in one table."""

    needs_spark = True

    def __init__(
        self, connection: Connection, place: tuple[str | None, str], pipeline: str, spark: Callable[[], Any]
    ) -> None:
        self._connection, self._table, self._pipeline, self._spark = connection, place, pipeline, spark
        self.name = f"table {'.'.join(filter(None, place))} of {connection.label}"

    def put(self, letters: Sequence[StoredLetter]) -> None:
        """Merge letters into the table, which the first ones create."""
        rows = pa.Table.from_pylist([each.record() for each in letters], SCHEMA)
        spark = self._spark()
        with outcome.explained(f"write to {self.name}"):
            try:
                load = letter_load(self._table, self._pipeline)
                DeltaTarget(self._connection).write(spark.createDataFrame(rows), load, spark)
            except ConnectionError:  # Py4J's, whose JVM ended
                raise
            except OSError as error:  # a folder that cannot be made, a full disk, a bucket that does not answer
                raise self._connection.failed(error) from None

    def records(self) -> Iterator[Mapping[str, Any]]:
        schema, table = self._table
        try:
            with outcome.explained(f"read {self.name}"):
                rows = read(self._spark(), self._connection, table, schema).toArrow()
        except NotFoundError:
            return
        yield from rows.to_pylist()

    def remove(self, ids: Collection[str]) -> None:
        spark = self._spark()
        self._connection.configure(spark)
        name = DeltaTable(spark, self._connection, *self._table).name
        wanted = ", ".join(literal(each, "spark") for each in ids)
        with outcome.explained(f"remove letters from {self.name}"):
            spark.sql(f"DELETE FROM {name} WHERE letter_id IN ({wanted})")
