"""Dead letters in a table of a SQL database, on any system that has tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow as pa

from weft.systems.base import Connection, system_for
from weft.systems.dead_letter_store import SCHEMA, StoredLetter
from weft.systems.load import Declared, Load, refuse_own
from weft.systems.sql import commit
from weft.systems.sql.tables import Slice, SqlTables

# The most letters that one statement names.
_IDS = 500


class TableLetters:
    """The dead letters in one table."""

    def __init__(
        self, connection: Connection, place: tuple[str | None, str], pipeline: str, spark: Callable[[], Any]
    ) -> None:
        self._connection, self._table, self._pipeline = connection, place, pipeline
        self.name = f"table {'.'.join(filter(None, place))} of {connection.label}"

    def put(self, letters: Sequence[StoredLetter]) -> None:
        """Merge letters into the table, which the first ones create."""
        rows = pa.Table.from_pylist([each.record() for each in letters], SCHEMA)
        load = letter_load(self._table, self._pipeline)
        refuse_own(load.schema, load.table)
        with self._opened() as tables:
            commit.prepare(tables, load, SCHEMA)
            commit.commit(tables, load, commit.BatchedRows(SCHEMA, rows.to_batches()))

    def records(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of the table."""
        if self._connection.is_missing():
            return  # the first letter makes the file
        with self._opened() as tables:
            with tables.driver.session("read") as session:
                columns = tables.columns(session, *self._table)
            if columns is None:
                return
            names = tables.listed(each.name for each in columns if each.name in SCHEMA.names)
            sql = f"SELECT {names} FROM {tables.table(*self._table)}"
            for batch in tables.read(Slice(sql), tables.describe(sql)):
                yield from batch.to_pylist()

    def remove(self, ids: Collection[str]) -> None:
        """Delete the rows of letters."""
        wanted = list(ids)
        with self._opened() as tables, tables.driver.session("publish") as session:
            for first in range(0, len(wanted), _IDS):
                some = wanted[first : first + _IDS]
                session.run(
                    f"DELETE FROM {tables.table(*self._table)} "
                    f"WHERE {tables.quote('letter_id')} IN ({', '.join('?' * len(some))})",
                    some,
                )

    def _opened(self) -> closing[SqlTables]:
        return closing(system_for(self._connection.kind).load_tables()(self._connection))


def letter_load(table: tuple[str | None, str], pipeline: str) -> Load:
    """Return the load that merges letters into a table: one that was made before letters had all of these columns gets
    the others."""
    load = Load.declare(target=table, mode="merge", keys=["letter_id"], pipeline=pipeline)
    return replace(load, declared=Declared(on_drift="evolve"))
