"""State in a database: a table for each checkpoint, which SQL can look into, and a row of `weft.state` for what the
last batch decided."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from weft.errors import WeftError
from weft.systems.sql.driver import Session
from weft.systems.sql.system_tables import create_system_table, system_table
from weft.systems.sql.tables import Slice, SqlTables
from weft.systems.state_store import BATCH, CLOSED, END, KEY, Selection, StateBatch, StateStore, overtaken

_KEY = ("pipeline", "query_id")
_FIELDS = pa.schema(
    [
        pa.field("pipeline", pa.string(), nullable=False),
        pa.field("query_id", pa.string(), nullable=False),
        pa.field("batch_id", pa.int64(), nullable=False),
        pa.field("table_name", pa.string(), nullable=False),
        pa.field("columns", pa.string(), nullable=False),
        pa.field("decided", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True)
class StoredState:
    """A state as a database has it."""

    pipeline: str
    query_id: str
    table: str
    batch: StateBatch
    counts: Mapping[int, int]
    """How many rows there are, by the end of their window."""

    @property
    def rows(self) -> int:
        return sum(self.counts.values())


def stored_states(tables: SqlTables, pipeline: str) -> list[StoredState]:
    """Return the states of a pipeline, of all its checkpoints. Creates nothing."""
    table = system_table(tables, "state")
    names = tables.listed(("query_id", "table_name", "batch_id", "decided"))
    if tables.connection.is_missing():
        return []
    try:
        with tables.driver.session("read") as session:
            rows = session.rows(f"SELECT {names} FROM {table} WHERE pipeline = ? ORDER BY batch_id", (pipeline,))
            return [
                StoredState(
                    pipeline, query_id, name, StateBatch(int(batch), **json.loads(text)), _counts(tables, session, name)
                )
                for query_id, name, batch, text in rows
            ]
    except WeftError as error:
        if tables.connection.reports_missing(str(error)) == "table":
            return []
        raise


def drop_state(tables: SqlTables, state: StoredState) -> None:
    """Remove a state. The row goes last: a crash in between leaves a state that can be removed again."""
    with tables.driver.session("publish") as session:
        session.run(f"DROP TABLE IF EXISTS {system_table(tables, state.table)}")
    with tables.driver.session("publish") as session:
        key = (state.pipeline, state.query_id)
        session.run(f"DELETE FROM {system_table(tables, 'state')} WHERE pipeline = ? AND query_id = ?", key)


def _counts(tables: SqlTables, session: Session, name: str) -> dict[int, int]:
    end = tables.quote(END)
    waiting = f"{system_table(tables, name)} WHERE {end} > {CLOSED // 2}"
    rows = session.rows(f"SELECT {end}, count(*) FROM {waiting} GROUP BY {end}")
    return {int(at): int(count) for at, count in rows}


class SqlState(StateStore):
    """The state of one checkpoint of a pipeline."""

    def __init__(self, tables: SqlTables, pipeline: str, query_id: str) -> None:
        self._tables, self._key = tables, (pipeline, query_id)
        # No longer than a name may be; people find it by the name of the pipeline.
        word = re.sub(r"\W+", "_", pipeline).strip("_").lower()[:32]
        self.name = f"state_{word}_{query_id.replace('-', '')[:12]}"
        self._schema: pa.Schema | None = None

    @property
    def _table(self) -> str:
        return system_table(self._tables, self.name)

    def last(self) -> StateBatch | None:
        create_system_table(self._tables, "state", _FIELDS, _KEY)
        row = self._stored()
        if row is None:
            return None
        self._schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(row[1])))
        return StateBatch(number=int(row[0]), **json.loads(row[2]))

    def schema(self) -> pa.Schema | None:
        return self._schema

    def append(self, rows: pa.Table, batch: StateBatch, replaced: Selection | None = None) -> None:
        is_first = self._schema is None
        if is_first:
            self._create(rows.schema)
        assert self._schema is not None
        with self._tables.driver.session("publish") as session:
            self._note(session, batch, is_first)
            if replaced is not None:
                session.run(f"DELETE FROM {self._table} WHERE {self._condition(replaced)}")
            if rows.num_rows:
                self._tables.copy_in(session, self._table, self._schema, rows.cast(self._schema).to_batches())

    def read(self, wanted: Selection) -> pa.Table:
        assert self._schema is not None
        sql = f"SELECT * FROM {self._table} WHERE {self._condition(wanted)}"
        return pa.Table.from_batches(self._tables.read(Slice(sql), self._schema), self._schema)

    def counts(self) -> dict[int, int]:
        if self._schema is None:
            return {}
        with self._tables.driver.session("read") as session:
            return _counts(self._tables, session, self.name)

    def remove(self, upto: int) -> None:
        with self._tables.driver.session("publish") as session:
            session.run(f"DELETE FROM {self._table} WHERE {self._tables.quote(END)} <= {int(upto)}")

    def release(self) -> None:
        if self._tables.one_host:
            self._tables.close()

    def close(self) -> None:
        self._tables.close()

    # ------------------------------------------------------------------------------------------------------- statements

    def _stored(self) -> tuple[Any, ...] | None:
        names = self._tables.listed(("batch_id", "columns", "decided"))
        table = system_table(self._tables, "state")
        with self._tables.driver.session("read") as session:
            return session.row(f"SELECT {names} FROM {table} WHERE pipeline = ? AND query_id = ?", self._key)

    def _create(self, schema: pa.Schema) -> None:
        """Create the table, before the transaction of a batch: some databases commit at each CREATE TABLE. One that a
        crash left behind is empty."""
        tables = self._tables
        definitions = [
            f"{tables.quote(field.name)} {tables.sql_type(field, key=field.name == KEY)}" for field in schema
        ]
        indexes = [name for name in (END, KEY) if name in schema.names]
        definitions += filter(None, (tables.index_clause([name]) for name in indexes))
        with tables.driver.session("publish") as session:
            session.run(f"DROP TABLE IF EXISTS {self._table}")
            session.run(f"CREATE TABLE {self._table} ({', '.join(definitions)})")
            for name in indexes:
                if (index := tables.create_index(f"{self.name}{name[5:]}", self._table, [name])) is not None:
                    session.run(index)
        self._schema = schema

    def _note(self, session: Session, batch: StateBatch, is_first: bool) -> None:
        decided = {name: value for name, value in asdict(batch).items() if name != "number"}
        table, text = system_table(self._tables, "state"), json.dumps(decided)
        if is_first:
            assert self._schema is not None
            columns = base64.b64encode(self._schema.serialize().to_pybytes()).decode()
            values = (*self._key, batch.number, self.name, columns, text)
            session.run(f"INSERT INTO {table} ({self._tables.listed(_FIELDS.names)}) VALUES (?, ?, ?, ?, ?, ?)", values)
            return
        changed = session.run(
            f"UPDATE {table} SET batch_id = ?, decided = ? WHERE pipeline = ? AND query_id = ? AND batch_id = ?",
            (batch.number, text, *self._key, batch.number - 1),
        )
        if int(changed.rowcount) != 1:
            raise overtaken(batch)

    def _condition(self, wanted: Selection) -> str:
        end, batch = self._tables.quote(END), self._tables.quote(BATCH)
        either = [] if wanted.after is None else [f"{end} > {int(wanted.after)}"]
        if wanted.batch is not None:
            touched = f"SELECT {end} FROM {self._table} WHERE {batch} = {int(wanted.batch)}"
            either.append(f"{end} IN ({touched})")
        conditions = [f"({' OR '.join(either)})"] if either else []
        conditions += [] if wanted.upto is None else [f"{end} <= {int(wanted.upto)}"]
        condition = " AND ".join(conditions) or "1 = 1"
        if not wanted.whole_keys:
            return condition
        key = self._tables.quote(KEY)
        # MySQL deletes no rows of a table that a subquery reads, unless that is a table of its own.
        of_rows = f"SELECT * FROM (SELECT {key} FROM {self._table} WHERE {condition}) AS k"
        # Made of hexadecimal digits.
        named = f" OR {key} IN ({', '.join(map(repr, wanted.keys))})" if wanted.keys else ""
        after = "" if wanted.after is None else f"{end} > {int(wanted.after)} AND "
        return f"{after}({key} IN ({of_rows}){named})"
