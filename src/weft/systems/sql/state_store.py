"""State in a database: a table for each checkpoint, which SQL can look into, and a row of `weft.state` for what the
last batch decided."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from weft.errors import WeftError
from weft.systems.sql.driver import Session
from weft.systems.sql.pairs import pairs_sql
from weft.systems.sql.system_tables import create_system_table, system_table
from weft.systems.sql.tables import Slice, SqlTables
from weft.systems.state_in_memory import retyped
from weft.systems.state_store import (
    BATCH,
    CHECK,
    CLOSED,
    CODED,
    END,
    KEY,
    TIME,
    Pairs,
    Selection,
    StateBatch,
    StateStore,
    overtaken,
)

_KEY = ("query_id",)
_ANNOUNCED = -1
"""Stands for the batch of a state whose table may be there, and whose first batch is not."""
_ESCAPE = "\x1a"
_OF_PAIRS = ((KEY, TIME), (BATCH,))
"""Indexes by which a database finds the rows of a batch of a join, and then their partners. A process that remembers
the rows does without them, which makes adding rows much faster: they are made when the database is asked."""
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


def stored_states(tables: SqlTables, pipeline: str | None = None) -> list[StoredState]:
    """Return the states of a pipeline, or of all, of all their checkpoints. Creates nothing."""
    table = system_table(tables, "state")
    names = tables.listed(("pipeline", "query_id", "table_name", "batch_id", "decided", "checkpoint"))
    if tables.connection.is_missing():
        return []
    chosen, values = (" AND pipeline = ?", (pipeline,)) if pipeline is not None else ("", ())
    try:
        with tables.driver.session("read") as session:
            # States that are only announced have no batch.
            where = f"batch_id > {_ANNOUNCED}{chosen} ORDER BY pipeline, batch_id"
            rows = session.rows(f"SELECT {names} FROM {table} WHERE {where}", values)
            return [
                StoredState(
                    owner,
                    query_id,
                    name,
                    StateBatch(int(batch), **json.loads(text)),
                    checkpoint,
                    _counts(tables, session, name),
                )
                for owner, query_id, name, batch, text, checkpoint in rows
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
        self._announced: str | None = None
        """A table that was announced, and got no rows."""
        self._schema: pa.Schema | None = None
        self._decided = ""
        """What the last batch decided, as it is stored."""
        self._is_indexed = False
        """Whether this process has made the indexes that find pairs."""

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
        if row is None or int(row[0]) == _ANNOUNCED:
            self._announced = None if row is None else str(row[3])
            return None
        self._schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(row[1])))
        self._name, self._decided = str(row[3]), str(row[2])
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
            self._decided = _decided(batch)
            return
        name = self._new_name()
        try:
            self._announce(name, rows.schema, batch)
            self._create(name, rows.schema)
            with self._tables.driver.session("publish") as session:
                self._note(session, batch, name)
                self._copy(session, system_table(self._tables, name), rows)
        except BaseException as error:
            with suppress(WeftError):
                _drop(self._tables, name)
            if isinstance(error, WeftError) and self._is_overtaken(name):
                raise overtaken(batch) from None
            raise
        self._name, self._schema, self._decided = name, rows.schema, _decided(batch)

    def retype(self, schema: pa.Schema) -> None:
        """By a table of its own: some databases commit at each change of a column."""
        assert self._name is not None
        before, name, tables = self._name, self._new_name(), self._tables
        rows = retyped(self.read(Selection()), schema)
        try:
            self._create(name, schema)
            with tables.driver.session("publish") as session:
                columns = tables.quote("columns")
                changed = session.run(
                    f"UPDATE {system_table(tables, 'state')} SET {columns} = ?, table_name = ? "
                    "WHERE query_id = ? AND table_name = ?",
                    (_text(schema), name, self._query_id, before),
                )
                if int(changed.rowcount) != 1:
                    what = f"The state of {self._pipeline} has another table now: another process has gone on."
                    raise WeftError(what)
                self._copy(session, system_table(tables, name), rows)
        except BaseException:
            with suppress(WeftError):
                _drop(tables, name)
            raise
        self._name, self._schema, self._is_indexed = name, schema, False
        _drop(tables, before)

    def read(self, wanted: Selection) -> pa.Table:
        assert self._schema is not None
        names, stored = self._tables.listed(self._schema.names), _as_stored(self._schema)
        sql = f"SELECT {names} FROM {self._table} WHERE {self._condition(wanted)}"
        return _decoded(pa.Table.from_batches(self._tables.read(Slice(sql), stored), stored), self._schema)

    def pairs(self, wanted: Pairs) -> pa.Table:
        assert self._schema is not None and self._name is not None
        if not self._is_indexed:
            with self._tables.driver.session("publish") as session:
                self._index(session, self._name, _OF_PAIRS)
            self._is_indexed = True
        schema = pa.schema([self._schema.field(name).with_nullable(True) for name in (*wanted.left, *wanted.right)])
        sql, stored = pairs_sql(wanted, self._table, self._tables.quote), _as_stored(schema)
        return _decoded(pa.Table.from_batches(self._tables.read(Slice(sql), stored), stored), schema)

    def counts(self) -> dict[int, int]:
        if self._name is None:
            return {}
        with self._tables.driver.session("read") as session:
            return _counts(self._tables, session, self._name)

    def groups(self, columns: Sequence[str], wanted: Selection) -> dict[int, int]:
        if self._name is None:
            return {}
        names, end = self._tables.listed(columns), self._tables.quote(END)
        rows = f"SELECT DISTINCT {names} FROM {self._table} WHERE {self._condition(wanted)}"
        with self._tables.driver.session("read") as session:
            counts = session.rows(f"SELECT {end}, count(*) FROM ({rows}) AS g GROUP BY {end}")
            return {int(at): int(count) for at, count in counts}

    def refuses_name(self, name: str) -> str | None:
        return self._tables.refuses_name(name)

    def can_hold(self, columns: Sequence[pa.Field]) -> bool:
        return self._tables.can_hold(list(_as_stored(pa.schema(columns))))

    def remove(self, upto: int) -> None:
        with self._tables.driver.session("publish") as session:
            session.run(f"DELETE FROM {self._table} WHERE {self._tables.quote(END)} <= {int(upto)}")

    def is_remembered(self) -> None:
        if self._name is None or self._schema is None or CHECK not in self._schema.names:
            return
        with self._tables.driver.session("publish") as session:
            for each in _OF_PAIRS:
                if (drop := self._tables.drop_index(_index_name(self._name, each))) is not None:
                    session.run(drop)
        self._is_indexed = False

    def release(self) -> None:
        if self._tables.one_host:
            self._tables.close()

    def close(self) -> None:
        self._tables.close()

    # ------------------------------------------------------------------------------------------------------ statements

    def _new_name(self) -> str:
        """Return a name that no other process has: one that is too late removes nothing but its own table."""
        word = re.sub(r"[^a-z0-9]+", "_", self._pipeline.lower()).strip("_")[:32]
        return f"state_{word}_{uuid4().hex[:12]}"

    def _announce(self, name: str, schema: pa.Schema, batch: StateBatch) -> None:
        """Note which table the first batch makes, so that it is found after a crash; remove the one before it."""
        tables, table, before = self._tables, system_table(self._tables, "state"), self._announced
        with tables.driver.session("publish") as session:
            if before is None:
                values = (self._query_id, self._pipeline, _ANNOUNCED, name, _text(schema), _decided(batch))
                names = tables.listed(_FIELDS.names)
                session.run(f"INSERT INTO {table} ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, self._checkpoint))
            else:
                columns = tables.quote("columns")
                changed = session.run(
                    f"UPDATE {table} SET table_name = ?, {columns} = ? "
                    "WHERE query_id = ? AND table_name = ? AND batch_id = ?",
                    (name, _text(schema), self._query_id, before, _ANNOUNCED),
                )
                if int(changed.rowcount) != 1:
                    raise overtaken(batch)
        self._announced = name
        if before is not None:
            _drop(tables, before)

    def _create(self, name: str, schema: pa.Schema) -> None:
        """Create the table, before the transaction of a batch: some databases commit at each CREATE TABLE."""
        tables, table, stored = self._tables, system_table(self._tables, name), _as_stored(schema)
        definitions = [f"{tables.quote(each.name)} {tables.sql_type(each, key=each.name == KEY)}" for each in stored]
        is_join = CHECK in schema.names
        indexed = [[END]] if is_join or KEY not in schema.names else [[END], [KEY]]
        definitions += filter(None, map(tables.index_clause, [*indexed, *(_OF_PAIRS if is_join else ())]))
        with tables.driver.session("publish") as session:
            session.run(f"CREATE TABLE {table} ({', '.join(definitions)})")
            self._index(session, name, indexed)

    def _index(self, session: Session, name: str, indexed: Sequence[Sequence[str]]) -> None:
        for each in indexed:
            table = system_table(self._tables, name)
            if (index := self._tables.create_index(_index_name(name, each), table, each)) is not None:
                session.run(index)

    def _copy(self, session: Session, table: str, rows: pa.Table) -> None:
        if rows.num_rows:
            is_join = CHECK in rows.schema.names
            if is_join or KEY in rows.schema.names:
                # An index takes neighbours faster, and finds them faster.
                rows = rows.sort_by(END if is_join and not self._is_indexed else KEY)
            coded = _coded(rows)
            self._tables.copy_in(session, table, coded.schema, coded.to_batches())

    def _is_overtaken(self, name: str) -> bool:
        """Return whether another process has a state, or announced one."""
        table = system_table(self._tables, "state")
        with self._tables.driver.session("read") as session:
            row = session.row(f"SELECT table_name, batch_id FROM {table} WHERE query_id = ?", (self._query_id,))
        return row is not None and (str(row[0]) != name or int(row[1]) != _ANNOUNCED)

    def _note(self, session: Session, batch: StateBatch, name: str | None = None) -> None:
        """Note what a batch decided, which is the first one of a table `name`."""
        values: list[object] = [batch.number, _decided(batch), self._pipeline, self._checkpoint, self._query_id]
        if name is not None:
            condition, values = "table_name = ? AND batch_id = ?", [*values, name, _ANNOUNCED]
        else:
            # If two processes have seen the same decision, only one goes on.
            before = batch.number if batch.is_tick else batch.number - 1
            condition = "table_name = ? AND batch_id = ? AND decided = ?"
            values += [self._name, before, self._decided]
        changed = session.run(
            f"UPDATE {system_table(self._tables, 'state')} SET batch_id = ?, decided = ?, pipeline = ?, checkpoint = ? "
            f"WHERE query_id = ? AND {condition}",
            values,
        )
        if int(changed.rowcount) != 1:
            raise overtaken(batch)

    def _condition(self, wanted: Selection) -> str:
        end, batch = self._tables.quote(END), self._tables.quote(BATCH)
        if wanted.ends:
            return f"{end} IN ({', '.join(map(str, wanted.ends))})"
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


def _index_name(name: str, columns: Sequence[str]) -> str:
    return f"{name}{columns[0][5:]}"


# ------------------------------------------------------------------------------------------- values of every database


def _is_coded(field: pa.Field) -> bool:
    return CODED.items() <= (field.metadata or {}).items()


def _as_stored(schema: pa.Schema) -> pa.Schema:
    """Return the columns of the table: those that are coded are texts."""
    return pa.schema([pa.field(each.name, pa.string()) if _is_coded(each) else each for each in schema])


def _coded(rows: pa.Table) -> pa.Table:
    """Return rows as the table has them: numbers as their digits, and texts without a null character."""
    columns = []
    for each in rows.schema:
        column = rows[each.name]
        if _is_coded(each) and pa.types.is_floating(each.type):
            column = column.cast(pa.string())
        elif _is_coded(each) and pc.any(pc.match_substring_regex(column, f"[\0{_ESCAPE}]")).as_py():
            column = pc.replace_substring(column, _ESCAPE, f"{_ESCAPE}1")
            column = pc.replace_substring(column, "\0", f"{_ESCAPE}0")
        columns.append(column)
    return pa.table(columns, schema=_as_stored(rows.schema))


def _decoded(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = []
    for each in schema:
        column = rows[each.name]
        if _is_coded(each) and pa.types.is_floating(each.type):
            column = column.cast(each.type)
        elif _is_coded(each) and pc.any(pc.match_substring(column, _ESCAPE)).as_py():
            column = pc.replace_substring(column, f"{_ESCAPE}0", "\0")
            column = pc.replace_substring(column, f"{_ESCAPE}1", _ESCAPE)
        columns.append(column)
    return pa.table(columns, schema=schema)


def _text(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _decided(batch: StateBatch) -> str:
    return json.dumps({name: value for name, value in asdict(batch).items() if name != "number"})
