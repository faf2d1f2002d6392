"""State in a database: a table for each checkpoint, which SQL can look into, and a row of `weft.state` for what the
last batch decided."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from uuid import uuid4

import pyarrow as pa

from weft.errors import WeftError
from weft.systems.sql.driver import Session
from weft.systems.sql.pairs import pairs_sql
from weft.systems.sql.system_tables import create_system_table, system_table
from weft.systems.sql.tables import Slice, SqlTables
from weft.systems.state_store import BATCH, CHECK, CLOSED, END, KEY, Pairs, Selection, StateBatch, StateStore, overtaken

_KEY = ("query_id",)
_FIELDS = pa.schema(
    [
        pa.field("query_id", pa.string(), nullable=False),
        pa.field("pipeline", pa.string(), nullable=False),
        pa.field("batch_id", pa.int64(), nullable=False),
        pa.field("table_name", pa.string(), nullable=False),
        pa.field("columns", pa.string(), nullable=False),
        pa.field("decided", pa.string(), nullable=False),
        pa.field("checkpoint", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True)
class StoredState:
    """A state as a database has it."""

    pipeline: str
    query_id: str
    table: str
    batch: StateBatch
    checkpoint: str
    """The machine and path of the checkpoint that it is of."""
    counts: Mapping[int, int]
    """How many rows there are, by the end of their window."""

    @property
    def rows(self) -> int:
        return sum(self.counts.values())


def stored_states(tables: SqlTables, pipeline: str) -> list[StoredState]:
    """Return the states of a pipeline, of all its checkpoints. Creates nothing."""
    table = system_table(tables, "state")
    names = tables.listed(("query_id", "table_name", "batch_id", "decided", "checkpoint"))
    if tables.connection.is_missing():
        return []
    try:
        with tables.driver.session("read") as session:
            rows = session.rows(f"SELECT {names} FROM {table} WHERE pipeline = ? ORDER BY batch_id", (pipeline,))
            return [
                StoredState(
                    pipeline,
                    query_id,
                    name,
                    StateBatch(int(batch), **json.loads(text)),
                    checkpoint,
                    _counts(tables, session, name),
                )
                for query_id, name, batch, text, checkpoint in rows
            ]
    except WeftError as error:
        if tables.connection.reports_missing(str(error)) == "table":
            return []
        raise


def drop_state(tables: SqlTables, state: StoredState) -> None:
    """Remove a state. The row goes last: a crash in between leaves a state that can be removed again."""
    _drop(tables, state.table)
    with tables.driver.session("publish") as session:
        session.run(f"DELETE FROM {system_table(tables, 'state')} WHERE query_id = ?", (state.query_id,))


def _drop(tables: SqlTables, name: str) -> None:
    with tables.driver.session("publish") as session:
        session.run(f"DROP TABLE IF EXISTS {system_table(tables, name)}")


def _counts(tables: SqlTables, session: Session, name: str) -> dict[int, int]:
    end = tables.quote(END)
    waiting = f"{system_table(tables, name)} WHERE {end} > {CLOSED // 2}"
    rows = session.rows(f"SELECT {end}, count(*) FROM {waiting} GROUP BY {end}")
    return {int(at): int(count) for at, count in rows}


class SqlState(StateStore):
    """The state of one checkpoint of a pipeline."""

    def __init__(self, tables: SqlTables, pipeline: str, query_id: str, checkpoint: str = "") -> None:
        self._tables, self._pipeline, self._query_id, self._checkpoint = tables, pipeline, query_id, checkpoint
        self._name: str | None = None
        self._schema: pa.Schema | None = None

    @property
    def _table(self) -> str:
        assert self._name is not None
        return system_table(self._tables, self._name)

    def last(self) -> StateBatch | None:
        create_system_table(self._tables, "state", _FIELDS, _KEY)
        names = self._tables.listed(("batch_id", "columns", "decided", "table_name"))
        table = system_table(self._tables, "state")
        with self._tables.driver.session("read") as session:
            row = session.row(f"SELECT {names} FROM {table} WHERE query_id = ?", (self._query_id,))
        if row is None:
            return None
        self._schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(row[1])))
        self._name = str(row[3])
        return StateBatch(number=int(row[0]), **json.loads(row[2]))

    def schema(self) -> pa.Schema | None:
        return self._schema

    def append(self, rows: pa.Table, batch: StateBatch, replaced: Selection | None = None) -> None:
        if self._schema is not None:
            with self._tables.driver.session("publish") as session:
                self._note(session, batch)
                if replaced is not None:
                    session.run(f"DELETE FROM {self._table} WHERE {self._condition(replaced)}")
                self._copy(session, self._table, rows)
            return
        # A name of its own: a process that is too late removes nothing but this.
        word = re.sub(r"[^a-z0-9]+", "_", self._pipeline.lower()).strip("_")[:32]
        name = f"state_{word}_{uuid4().hex[:12]}"
        self._create(name, rows.schema)
        try:
            with self._tables.driver.session("publish") as session:
                self._note_first(session, name, rows.schema, batch)
                self._copy(session, system_table(self._tables, name), rows)
        except BaseException as error:
            with suppress(WeftError):
                _drop(self._tables, name)
            if isinstance(error, WeftError) and self._has_row():
                raise overtaken(batch) from None
            raise
        self._name, self._schema = name, rows.schema

    def retype(self, schema: pa.Schema) -> None:
        assert self._schema is not None
        tables, known = self._tables, set(self._schema.names)
        changed = [each for each in schema if each.name not in known or each != self._schema.field(each.name)]
        with tables.driver.session("publish") as session:
            for field in changed:
                name = tables.quote(field.name)
                if field.name in known:
                    session.run(f"ALTER TABLE {self._table} DROP COLUMN {name}")
                session.run(f"ALTER TABLE {self._table} ADD COLUMN {name} {tables.sql_type(field)}")
            table = system_table(tables, "state")
            columns = tables.quote("columns")
            session.run(f"UPDATE {table} SET {columns} = ? WHERE query_id = ?", (_text(schema), self._query_id))
        self._schema = schema

    def read(self, wanted: Selection) -> pa.Table:
        assert self._schema is not None
        names = self._tables.listed(self._schema.names)
        sql = f"SELECT {names} FROM {self._table} WHERE {self._condition(wanted)}"
        return pa.Table.from_batches(self._tables.read(Slice(sql), self._schema), self._schema)

    def pairs(self, wanted: Pairs) -> pa.Table:
        assert self._schema is not None
        schema = pa.schema([self._schema.field(name) for name in (*wanted.left, *wanted.right)])
        sql = pairs_sql(wanted, self._table, self._tables.quote)
        return pa.Table.from_batches(self._tables.read(Slice(sql), schema), schema)

    def counts(self) -> dict[int, int]:
        if self._name is None:
            return {}
        with self._tables.driver.session("read") as session:
            return _counts(self._tables, session, self._name)

    def remove(self, upto: int) -> None:
        with self._tables.driver.session("publish") as session:
            session.run(f"DELETE FROM {self._table} WHERE {self._tables.quote(END)} <= {int(upto)}")

    def release(self) -> None:
        if self._tables.one_host:
            self._tables.close()

    def close(self) -> None:
        self._tables.close()

    # ------------------------------------------------------------------------------------------------------ statements

    def _create(self, name: str, schema: pa.Schema) -> None:
        """Create the table, before the transaction of a batch: some databases commit at each CREATE TABLE."""
        tables, table = self._tables, system_table(self._tables, name)
        definitions = [f"{tables.quote(each.name)} {tables.sql_type(each, key=each.name == KEY)}" for each in schema]
        # A join finds the rows of a batch, and then their partners.
        indexed = [each for each in (END, KEY, *([BATCH] if CHECK in schema.names else [])) if each in schema.names]
        definitions += filter(None, (tables.index_clause([each]) for each in indexed))
        with tables.driver.session("publish") as session:
            session.run(f"CREATE TABLE {table} ({', '.join(definitions)})")
            for each in indexed:
                if (index := tables.create_index(f"{name}{each[5:]}", table, [each])) is not None:
                    session.run(index)

    def _copy(self, session: Session, table: str, rows: pa.Table) -> None:
        if rows.num_rows:
            schema = rows.schema if self._schema is None else self._schema
            self._tables.copy_in(session, table, schema, rows.cast(schema).to_batches())

    def _has_row(self) -> bool:
        table = system_table(self._tables, "state")
        with self._tables.driver.session("read") as session:
            return session.row(f"SELECT 1 FROM {table} WHERE query_id = ?", (self._query_id,)) is not None

    def _note_first(self, session: Session, name: str, schema: pa.Schema, batch: StateBatch) -> None:
        values = (self._query_id, self._pipeline, batch.number, name, _text(schema), _decided(batch), self._checkpoint)
        names = self._tables.listed(_FIELDS.names)
        session.run(f"INSERT INTO {system_table(self._tables, 'state')} ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def _note(self, session: Session, batch: StateBatch) -> None:
        changed = session.run(
            f"UPDATE {system_table(self._tables, 'state')} SET batch_id = ?, decided = ?, pipeline = ?, checkpoint = ? "
            "WHERE query_id = ? AND batch_id = ?",
            (batch.number, _decided(batch), self._pipeline, self._checkpoint, self._query_id, batch.number - 1),
        )
        if int(changed.rowcount) != 1:
            raise overtaken(batch)

    def _condition(self, wanted: Selection) -> str:
        end, batch = self._tables.quote(END), self._tables.quote(BATCH)
        conditions = [] if wanted.upto is None else [f"{end} <= {int(wanted.upto)}"]
        if wanted.after is not None:
            either = f"{end} > {int(wanted.after)}"
            if wanted.batch is not None:
                touched = f"SELECT {end} FROM {self._table} WHERE {batch} = {int(wanted.batch)}"
                either = f"({either} OR {end} IN ({touched}))"
            conditions.append(either)
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


def _text(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _decided(batch: StateBatch) -> str:
    return json.dumps({name: value for name, value in asdict(batch).items() if name != "number"})
