"""Tables of a SQL database, as loads read and write them: what a dialect must say, and what follows from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, ClassVar

import pyarrow as pa

from weft.systems.base import Connection
from weft.systems.sql.driver import Role, Session, SqlDriver

ROW = "_weft_row"
"""The number of a staged row, where rows are moved piece by piece."""


@dataclass(frozen=True)
class Column:
    """A column of a table that is there."""

    name: str
    field: pa.Field
    """Its canonical type (`weft.columns`)."""
    sql: str
    """Its type as the database calls it, for CAST."""
    required: bool = False
    """Whether an INSERT must name it: not nullable, no default, not generated."""
    generated: bool = False
    """Whether the database alone may write it."""
    collation: str | None = None
    """What compares its texts, where that is not their letters and the staging table does not do the same."""


@dataclass(frozen=True)
class Slice:
    """A part of a query's result that one task reads."""

    sql: str
    snapshot: str | None = None
    """The exported snapshot that all parts are read in, where the database has such a thing."""


class SqlTables(ABC):
    """Reads queries as Arrow, and carries out the statements of a load.

    Picklable: it travels to Spark's tasks and opens its connections there. Batches are in the canonical types of
    `weft.columns`; what a reader yields has the schema that `describe` gave.
    """

    dialect: ClassVar[str]
    one_host: ClassVar[bool] = False
    """Whether only this machine can open it (a file), so that a cluster cannot."""
    one_writer: ClassVar[bool] = False
    """Whether one connection at a time may write, so that parallel tasks would only wait for each other."""

    savepoints: ClassVar[bool] = True
    """Whether a part of a transaction can be undone."""
    has_temporary_views: ClassVar[bool] = False
    """Whether a view can be made of a temporary table: then rows need not be stored twice."""
    clock: ClassVar[str | None] = None
    """The server's clock at the statement, not at the beginning of its transaction; `None` where SQL has none."""
    row_lock: ClassVar[str] = ""
    """What a SELECT ends with that locks its rows; nothing where one connection at a time may write."""
    has_schemas: ClassVar[bool] = True
    """Whether Weft's own tables are in a schema `weft`; else their names begin with `weft.`."""
    widens_columns: ClassVar[bool] = True
    """Whether the type of a column can be changed to a wider one."""
    explain: ClassVar[str] = "EXPLAIN"
    """What stands before a query to ask for its plan."""
    true: ClassVar[str] = "TRUE"
    false: ClassVar[str] = "FALSE"
    random: ClassVar[str] = "random()"
    """A random number from 0 to below 1, in each row another one."""
    earliest: ClassVar[datetime] = datetime(1, 1, 2)
    """A time that is before those of rows."""
    native_decimals: ClassVar[bool] = True
    """Whether decimals and dates are stored as such; else as texts."""
    enforces_lengths: ClassVar[bool] = True
    """Whether the database refuses a text that is longer than its column."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection.resolved()

    @cached_property
    def driver(self) -> SqlDriver:
        """The pooled connections of this process."""
        return self.open_driver()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "driver"}

    def close(self) -> None:
        """Close what this process has open."""
        if "driver" in self.__dict__:
            self.driver.close()
            del self.__dict__["driver"]

    # -------------------------------------------------------------------------------------------------- what to connect

    @abstractmethod
    def open_driver(self) -> SqlDriver:
        """A new pool of connections."""

    @abstractmethod
    def identity(self) -> str:
        """What tells this database from others: two connections with one identity reach the same tables."""

    def assume(self, product: str) -> None:  # noqa: B027 - optional, not forgotten
        """Take the server for one of this product, and do not ask it: for statements that somebody else will run."""

    def waiting_turn(self, role: Role) -> AbstractContextManager[None]:
        """Wait for this process's turn at the database, where many short transactions of several would starve one."""
        return nullcontext()

    # ---------------------------------------------------------------------------------------------------------- reading

    @abstractmethod
    def describe(self, sql: str) -> pa.Schema:
        """The canonical schema of a query's result, without running it for real."""

    @abstractmethod
    def read(self, part: Slice, schema: pa.Schema, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of a query in canonical batches of bounded size, in one snapshot and in bounded memory.

        `columns`: only these, in this order.
        """

    def slices(self, sql: str, parts: int, by: str | None = None) -> tuple[list[Slice], Any]:
        """The query in parts that may be read in parallel but show one moment, and what must stay open meanwhile.

        One part where the database cannot show several connections one moment. The second value has `close()`.
        """
        return [Slice(sql)], None

    # ---------------------------------------------------------------------------------------------------------- writing

    @abstractmethod
    def columns(self, session: Session, schema: str | None, name: str) -> list[Column] | None:
        """The columns of a table in order, or `None` where there is no such table."""

    @abstractmethod
    def sql_type(self, field: pa.Field, *, key: bool = False) -> str:
        """The type of a new column for a canonical field (nested ones: the JSON type). `key`: it must be indexable."""

    def column_type(self, field: pa.Field, *, key: bool = False) -> str:
        """The type of a column that is declared, where more is known of it than rows can say: a length, jsonb."""
        return self.sql_type(field, key=key)

    @abstractmethod
    def copy_in(self, session: Session, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        """Append canonical batches to a (quoted) table inside the session's transaction, as fast as the system can.

        The table's columns are named as the schema's and have the types that `sql_type` gives, or for
        `fits(column, field)` those of the column. Gives the bytes sent.
        """

    def fits(self, column: Column, field: pa.Field) -> bool:
        """Whether `copy_in` may write this field straight into that column, so that no staging table is needed."""
        return bool(column.field.type.equals(field.type)) and column.sql == self.sql_type(field)

    # ----------------------------------------------------------------------------------------------- words of a dialect

    def quote(self, name: str) -> str:
        """A quoted identifier."""
        return self.driver.quote(name)

    def table(self, schema: str | None, name: str) -> str:
        """The quoted name of a table; without a schema, one of the connection's default schema."""
        return self.quote(name) if schema is None else self.driver.table(schema, name)

    def create_schema(self, session: Session, schema: str) -> None:
        """Create a schema where it is missing."""
        session.run(f"CREATE SCHEMA IF NOT EXISTS {self.quote(schema)}")

    def change_type(self, name: str, kind: str, *, nullable: bool) -> str:
        """What an ALTER TABLE says to give a column another type."""
        return f"ALTER COLUMN {self.quote(name)} TYPE {kind}"

    def index_clause(self, columns: Sequence[str]) -> str | None:
        """What a CREATE TABLE says to make an index; `None` where an index is made by a statement, or by nothing."""
        return None

    def create_index(self, name: str, table: str, columns: Sequence[str]) -> str | None:
        """The statement that makes an index of one of Weft's own (quoted) tables where it is missing; `None` where
        `index_clause` made it, or where the database needs none."""
        listed = ", ".join(map(self.quote, columns))
        return f"CREATE INDEX IF NOT EXISTS {self.quote(name)} ON {table} ({listed})"

    def temporary(self, name: str) -> str:
        """The quoted name of a temporary table of this session."""
        return self.quote(name)

    def create_temporary(self, session: Session, name: str, columns: str) -> None:
        """A temporary table with these column definitions; it ends with the transaction or is dropped by the load."""
        session.run(f"CREATE TEMPORARY TABLE {self.temporary(name)} ({columns})")

    def create_temporary_as(
        self,
        session: Session,
        name: str,
        select: str,
        parameters: Sequence[Any] = (),
        keys: dict[str, str] | None = None,
    ) -> int:
        """A temporary table of a query's rows; gives how many. `keys`: what `stage_keys` gave."""
        session.run(f"CREATE TEMPORARY TABLE {self.temporary(name)} AS {select}", parameters)
        row = session.row(f"SELECT count(*) FROM {self.temporary(name)}")
        assert row is not None
        return int(row[0])

    def stage_keys(self, keys: Sequence[pa.Field], columns: dict[str, Column]) -> dict[str, str]:
        """The types that keys have in a staging table with an index on them, where joins need one."""
        return {}

    def stage_index(self, keys: dict[str, str]) -> list[str]:
        """The definition of that index; a new scd2 table has it too, unless `create_key_index` makes it one."""
        return []

    def index_rows(self, session: Session, name: str) -> None:  # noqa: B027 - optional, not forgotten
        """An index on the numbers of staged rows, where the database finds a range of them by one."""

    def drop_temporary(self, session: Session, name: str) -> None:
        """Drop a temporary table where it is there."""
        session.run(f"DROP TABLE IF EXISTS {self.temporary(name)}")

    def create_temporary_view(self, session: Session, name: str, select: str) -> None:
        """A name for a query, for this session alone."""
        session.run(f"CREATE TEMPORARY VIEW {self.quote(name)} AS {select}")

    def drop_temporary_view(self, session: Session, name: str) -> None:
        """Drop it where it is there."""
        session.run(f"DROP VIEW IF EXISTS {self.temporary(name)}")

    def filled(self, session: Session, table: str) -> None:  # noqa: B027 - optional, not forgotten
        """A temporary table was filled: collect statistics where the planner needs them."""

    def create_key_index(self, session: Session, schema: str | None, name: str, keys: Sequence[str]) -> None:
        """An index by which the versions of a key are found in a new scd2 table."""
        columns = ", ".join(self.quote(key) for key in keys)
        session.run(f"CREATE INDEX {self.quote(f'{name[:40]}_keys')} ON {self.table(schema, name)} ({columns})")

    def ordered(self, expression: str, field: pa.Field) -> str:
        """A value of this type in a comparison, so that it is compared as what it is."""
        return expression

    def sorts_fast(self, field: pa.Field) -> bool:
        """Whether to sort a column is the fastest way to count its distinct values."""
        return False

    def is_sortable(self, field: pa.Field) -> bool:
        """Whether ORDER BY takes a staged column of this type (PostgreSQL's json has no order)."""
        return True

    def lock(self, session: Session, schema: str | None, name: str) -> None:  # noqa: B027 - optional, not forgotten
        """Let one load at a time change this table until the transaction ends. Readers are not held up."""

    def as_key(self, expression: str, column: Column) -> str:
        """A staged key as the target compares it: which rows have the same one, is for the target to say."""
        return expression

    def distinct(self, left: str, right: str, column: Column) -> str:
        """Whether two values of a column differ, where null equals null."""
        return f"{left} IS DISTINCT FROM {right}"

    def cast(self, expression: str, field: pa.Field, column: Column) -> str:
        """A staged value as a column's type; an error of the statement where it does not fit, never another value."""
        return f"CAST({expression} AS {column.sql})"

    def update(self, table: str, assignments: dict[str, str], condition: str) -> str:
        """An UPDATE of the rows of `table` as `t` that meet a condition."""
        changes = ", ".join(f"{self.quote(name)} = {value}" for name, value in assignments.items())
        return f"UPDATE {table} AS t SET {changes} WHERE {condition}"

    def update_from(self, table: str, source: str, on: str, assignments: dict[str, str]) -> str:
        """An UPDATE of `table` as `t` from the matching rows of `source` as `s`."""
        changes = ", ".join(f"{self.quote(name)} = {value}" for name, value in assignments.items())
        return f"UPDATE {table} AS t SET {changes} FROM {source} AS s WHERE {on}"

    def delete_missing(self, table: str, source: str, on: str) -> str:
        """A DELETE of the rows of `table` as `t` that match no row of `source` as `s`, by an anti-join."""
        return f"DELETE FROM {table} AS t WHERE NOT EXISTS (SELECT 1 FROM {source} AS s WHERE {on})"

    def delete_where(self, table: str, condition: str) -> str:
        """A DELETE of the rows of `table` as `s` that meet a condition."""
        return f"DELETE FROM {table} AS s WHERE {condition}"

    def as_hashed(self, expression: str, column: Column) -> str:
        """A value of a column as `row_hash` takes it, alike whether it is stored or about to be."""
        return expression

    @abstractmethod
    def row_hash(self, expressions: Sequence[str]) -> str:
        """A hexadecimal hash of values, in which null, empty and shifted values differ."""

    @abstractmethod
    def moment(self, value: datetime) -> str:
        """A literal of an instant, of the type that `valid_from` has."""

    @abstractmethod
    def add_seconds(self, expression: str, seconds: float) -> str:
        """A timestamp expression some seconds later (or earlier)."""

    def instant(self, expression: str, column: pa.Field) -> str:
        """A staged date or timestamp as the type of `valid_from`."""
        return expression

    @abstractmethod
    def is_rejection(self, error: BaseException) -> bool:
        """Whether the database refused a value or a row (constraint, range, type), not the whole attempt."""
