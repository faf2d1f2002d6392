"""Tables of a SQL database, as loads read and write them: what a dialect implements, and what all share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from weft.errors import DeclarationError, WeftError
from weft.systems.base import Connection
from weft.systems.load import Load
from weft.systems.sql.driver import Role, Session, SqlDriver
from weft.systems.sql.literals import literal

ROW = "_weft_row"
"""The number of a staged row, where rows are moved piece by piece."""
_MOST_COLUMNS = 1500
"""Each database takes so many, and what else the table of a load has: PostgreSQL 1,600, also counting dropped ones."""


@dataclass(frozen=True)
class Column:
    """A column of an existing table."""

    name: str
    field: pa.Field
    """The column with its canonical type (`weft.columns`)."""
    sql: str
    """The type as the database spells it, for CAST."""
    required: bool = False
    """Whether an INSERT must name it: not nullable, no default, not generated."""
    generated: bool = False
    """Whether the database alone may write it."""
    default: str | None = None
    """The SQL of its default, where it may not be null and the database does not generate it."""
    collation: str | None = None
    """The collation of its texts, where it takes different letters for the same and the staging table does not."""


@dataclass(frozen=True)
class Slice:
    """A part of a query's result that one task reads."""

    sql: str
    snapshot: str | None = None
    """The exported snapshot that all parts are read in, where the database has such a thing."""


class Suspect(NamedTuple):
    """A staged row that its target probably rejects."""

    row: int
    """The number of the row."""
    contradicts: int | None = None
    """The number of an earlier row which it cannot be next to."""
    is_unfit: bool = False
    """Whether a value does not fit its column."""
    broken: str | None = None
    """What it breaks, where all rows that break this are rejected for the same reason."""
    shown: str | None = None
    """The value of the row that the reason shows."""


class SqlTables(ABC):
    """Reads queries as Arrow, and carries out the statements of a load.

    Picklable: it travels to Spark's tasks and opens its connections there. Batches are in the canonical types of
    `weft.columns`; what a reader yields has the schema that `describe` returned.
    """

    dialect: ClassVar[str]
    sessions: ClassVar[type[SqlDriver]]
    """The connections of loads."""
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
    """The clause of SELECT that locks its rows; empty where one connection at a time may write."""
    widens_columns: ClassVar[bool] = True
    """Whether the type of a column can be changed to a wider one."""
    explain: ClassVar[str] = "EXPLAIN"
    """The keyword that returns the plan of a query."""
    current_schema: ClassVar[str] = "current_schema()"
    """The schema of a table that is named without one."""
    true: ClassVar[str] = "TRUE"
    false: ClassVar[str] = "FALSE"
    random: ClassVar[str] = "random()"
    """A random number from 0 to below 1, in each row another one."""
    described_watermark: ClassVar[str] = "NULL"
    """What `$watermark` is while a query is described: below all values, where types are known by values alone."""
    commits_ddl: ClassVar[bool] = False
    """Whether a statement that creates or drops something commits what came before it."""
    default_schema: ClassVar[str | None] = None
    """The schema of tables without one, where a common table expression would otherwise find itself."""
    native_decimals: ClassVar[bool] = True
    """Whether decimals, dates and times are stored as such; else as texts."""
    folds_columns: ClassVar[bool] = True
    """Whether names of columns that differ in upper and lower case alone are one name, also quoted ones."""
    folds_tables: ClassVar[bool] = False
    """The same for names of tables and schemas."""
    enforces_lengths: ClassVar[bool] = True
    """Whether the database refuses a text that is longer than its column."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection.resolved()

    @cached_property
    def driver(self) -> SqlDriver:
        """The pooled connections of this process."""
        return self.sessions(self.connection)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "driver"}

    def close(self) -> None:
        """Close the connections of this process."""
        if "driver" in self.__dict__:
            self.driver.close()
            del self.__dict__["driver"]

    # -------------------------------------------------------------------------------------------------- what to connect

    @abstractmethod
    def identity(self) -> str:
        """Return an id of this database: two connections with one id reach the same tables."""

    def assume(self, product: str) -> None:  # noqa: B027 - optional, not forgotten
        """Assume that the server is this product and do not ask it: for statements that somebody else will run."""

    def waiting_turn(self, role: Role) -> AbstractContextManager[None]:
        """Wait for this process's turn at the database, where many short transactions of several would starve one."""
        return nullcontext()

    # ---------------------------------------------------------------------------------------------------------- reading

    @abstractmethod
    def describe(self, sql: str) -> pa.Schema:
        """Return the canonical schema of a query's result without running the query."""

    @abstractmethod
    def read(self, part: Slice, schema: pa.Schema, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Read the rows of a query in canonical batches of bounded size, in one snapshot and in bounded memory.

        `columns`: only these, in this order.
        """

    def slices(self, sql: str, parts: int, by: str | None = None) -> tuple[list[Slice], Any]:
        """Split a query into parts for parallel readers of one snapshot; return them and what must stay open meanwhile.

        One part where several connections cannot share a snapshot. The second value has `close()`.
        """
        return [Slice(sql)], None

    # ---------------------------------------------------------------------------------------------------------- writing

    @abstractmethod
    def columns(self, session: Session, schema: str | None, name: str) -> list[Column] | None:
        """Return the columns of a table in order, or `None` where there is no such table."""

    def primary_key(self, session: Session, schema: str | None, name: str) -> list[str]:
        """Return the columns of a table's primary key; none where it has none."""
        place, schemas = (self.current_schema, ()) if schema is None else ("?", (schema,))
        rows = session.rows(
            "SELECT k.column_name FROM information_schema.table_constraints AS c "
            "JOIN information_schema.key_column_usage AS k ON k.constraint_name = c.constraint_name "
            "AND k.table_schema = c.table_schema AND k.table_name = c.table_name "
            f"WHERE c.constraint_type = 'PRIMARY KEY' AND c.table_schema = {place} AND c.table_name = ? "
            "ORDER BY k.ordinal_position",
            (*schemas, name),
        )
        return [column for (column,) in rows]

    def running_transactions(self, session: Session) -> set[str]:
        """Return names of the transactions of others that write now; none where one waits for the other anyway."""
        return set()

    def names(self, session: Session, schema: str | None) -> list[str]:
        """Return the names of the tables and views in a schema, by default the connection's."""
        place, schemas = (self.current_schema, ()) if schema is None else ("?", (schema,))
        listing = f"SELECT table_name FROM information_schema.tables WHERE table_schema = {place}"
        return [name for (name,) in session.rows(listing, schemas)]

    def is_view(self, session: Session, schema: str | None, name: str) -> bool:
        place, schemas = (self.current_schema, ()) if schema is None else ("?", (schema,))
        query = f"SELECT table_type FROM information_schema.tables WHERE table_schema = {place} AND table_name = ?"
        return "VIEW" in str(session.value(query, (*schemas, name)))

    def views_over(self, session: Session, names: Sequence[tuple[str | None, str]]) -> list[str]:
        """Return the other views that keep tables and views, each of a schema and a name, from being dropped."""
        return []

    def all_names(self, session: Session) -> list[tuple[str | None, str]]:
        """Return the schemas and names of the users' tables and views; without a schema those of the connection's."""
        others = "'information_schema', 'pg_catalog', 'mysql', 'performance_schema', 'sys'"
        rows = session.rows(
            f"SELECT nullif(table_schema, {self.current_schema}), table_name FROM information_schema.tables "
            f"WHERE table_schema NOT IN ({others})"
        )
        return [(schema, name) for schema, name in rows]

    @abstractmethod
    def sql_type(self, field: pa.Field, *, key: bool = False) -> str:
        """Return the type of a new column for a canonical field (JSON for nested ones). `key`: it must be indexable."""

    def column_type(self, field: pa.Field, *, key: bool = False) -> str:
        """Return the type of a declared column, of which more is known than of a field of rows: a length, jsonb."""
        return self.sql_type(field, key=key)

    @abstractmethod
    def copy_in(self, session: Session, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        """Append canonical batches to a (quoted) table inside the session's transaction, as fast as the system can.

        The table's columns are named as the schema's and have the types that `sql_type` returns, or for
        `fits(column, field)` those of the column. Return the bytes sent.
        """

    def refuses_name(self, name: str) -> str | None:
        """Return why no column can have this name; `None` where one can."""
        return "a name cannot hold the character \\u0000" if "\0" in name else None

    def can_hold(self, columns: Sequence[pa.Field]) -> bool:
        """Return whether a table can have these columns."""
        return len(columns) <= _MOST_COLUMNS

    def fits(self, column: Column, field: pa.Field) -> bool:
        """Whether `copy_in` may write this field directly into that column, so that no staging table is needed."""
        return bool(column.field.type.equals(field.type)) and column.sql == self.sql_type(field)

    # ---------------------------------------------------------------------------------------------------------- dialect

    def quote(self, name: str) -> str:
        """Return a quoted identifier."""
        return self.driver.quote(name)

    def listed(self, names: Iterable[str], alias: str = "") -> str:
        """Return quoted columns, separated by commas."""
        return ", ".join(f"{alias}{self.quote(name)}" for name in names)

    def table(self, schema: str | None, name: str) -> str:
        """Return the quoted name of a table; without a schema, one of the connection's default schema."""
        return self.quote(name) if schema is None else self.driver.table(schema, name)

    @property
    def text_collation(self) -> str | None:
        """How a query has to compare its own texts, where the database would not compare them letter by letter."""
        return None

    def stores_as_weft(self, field: pa.Field) -> bool:
        """Return whether the values of a column are in the one form in which Weft writes its type."""
        return True

    def stream_column(self, field: pa.Field) -> str:
        """Return a column of a stream's table as columns of loads are, so that a query may compare the two."""
        return self.quote(field.name)

    def by_letters(self, column: Column) -> str:
        """Return a column for a list of SELECT, with texts that are the same only where all letters are."""
        return self.quote(column.name)

    def selecting_by_letters(self, sql: str, schema: str | None, name: str, columns: Sequence[str]) -> str:
        """Return a query of columns of a table so that its texts are compared letter by letter."""
        with self.driver.session("read") as session:
            known = {each.name: each for each in self.columns(session, schema, name) or ()}
        plain = [self.quote(each) for each in columns]
        listed = [self.by_letters(known[each]) if each in known else self.quote(each) for each in columns]
        return sql if listed == plain else f"SELECT {', '.join(listed)} FROM ({sql}) AS by_letters"

    def qualified(self, schema: str | None, name: str) -> str:
        """Return the name of a table that is not taken for a common table expression of the same name."""
        if schema is None and self.default_schema is not None:
            return f"{self.quote(self.default_schema)}.{self.quote(name)}"
        return self.table(schema, name)

    def replace_table(self, session: Session, schema: str | None, name: str, new: str, drop: str | None) -> None:
        """Put the table `new` in the place of `name`, which is a VIEW or a TABLE (`drop`), or is not there."""
        if drop is not None:
            session.run(f"DROP {drop} {self.table(schema, name)}")
        # With schemas a table keeps its own; without, the schema is a part of the name.
        renamed = self.quote(name) if self.driver.has_schemas else self.table(schema, name)
        session.run(f"ALTER TABLE {self.table(schema, new)} RENAME TO {renamed}")

    def create_schema(self, session: Session, schema: str) -> None:
        """Create a schema where it is missing."""
        session.run(f"CREATE SCHEMA IF NOT EXISTS {self.quote(schema)}")

    def change_type(self, schema: str | None, name: str, column: Column, kind: str) -> str:
        """Return the clause of ALTER TABLE that gives a column of a table another type, and changes nothing else."""
        return f"ALTER COLUMN {self.quote(column.name)} TYPE {kind}"

    def index_clause(self, columns: Sequence[str]) -> str | None:
        """Return the clause of CREATE TABLE for an index; `None` where a statement creates it, or nothing does."""
        return None

    def create_index(self, name: str, table: str, columns: Sequence[str]) -> str | None:
        """Return the statement that creates an index of one of Weft's own (quoted) tables where it is missing; `None`
        where `index_clause` created it, or where the database needs none."""
        return f"CREATE INDEX IF NOT EXISTS {self.quote(name)} ON {table} ({self.listed(columns)})"

    def drop_index(self, name: str) -> str | None:
        """Return the statement that drops an index of `create_index`; `None` where that made none."""
        return f"DROP INDEX IF EXISTS {self.driver.table('weft', name)}"

    def temporary(self, name: str) -> str:
        """Return the quoted name of a temporary table of this session."""
        return self.quote(name)

    def create_temporary(self, session: Session, name: str, columns: str) -> None:
        """Create or replace a temporary table with these column definitions; the transaction ends it, or the load
        drops it."""
        self.drop_temporary(session, name)
        session.run(f"CREATE TEMPORARY TABLE {self.temporary(name)} ({columns})")

    def create_temporary_as(self, session: Session, name: str, select: str, keys: dict[str, str] | None = None) -> int:
        """Create or replace a temporary table of a query's rows; return how many. `keys`: those of `stage_keys`."""
        self.drop_temporary(session, name)
        session.run(f"CREATE TEMPORARY TABLE {self.temporary(name)} AS {select}")
        return int(session.value(f"SELECT count(*) FROM {self.temporary(name)}"))

    def stage_keys(self, keys: Sequence[pa.Field], columns: dict[str, Column]) -> dict[str, str]:
        """Return the types that keys have in a staging table with an index on them, where joins need one."""
        return {}

    def stage_index(self, keys: dict[str, str]) -> list[str]:
        """Return the definition of that index; a new scd2 table has it too, unless `create_key_index` creates one."""
        return []

    def index_rows(self, session: Session, name: str) -> None:  # noqa: B027 - optional, not forgotten
        """Create an index on the numbers of staged rows, where the database finds a range of them by one."""

    def drop_temporary(self, session: Session, name: str) -> None:
        """Drop a temporary table if it exists."""
        session.run(f"DROP TABLE IF EXISTS {self.temporary(name)}")

    def create_temporary_view(self, session: Session, name: str, select: str) -> None:
        """Create a view of a query for this session alone."""
        session.run(f"CREATE TEMPORARY VIEW {self.quote(name)} AS {select}")

    def drop_temporary_view(self, session: Session, name: str) -> None:
        """Drop such a view if it exists."""
        session.run(f"DROP VIEW IF EXISTS {self.temporary(name)}")

    def filled(self, session: Session, table: str) -> None:  # noqa: B027 - optional, not forgotten
        """Collect statistics of a temporary table that was filled, where the planner needs them."""

    @abstractmethod
    def create_key_index(self, session: Session, schema: str | None, name: str, keys: Sequence[str]) -> None:
        """Create the index that finds the versions of a key in a new scd2 table."""

    def ordered(self, expression: str, field: pa.Field) -> str:
        """Return the expression that compares a value by its type, not by how it is stored."""
        return expression

    def before_all(self, field: pa.Field) -> str:
        """Return a literal that is before every date or time of a column: a year before the first of them."""
        zone = UTC if pa.types.is_timestamp(field.type) and field.type.tz else None
        first: date = date.min if pa.types.is_date(field.type) else datetime.min.replace(tzinfo=zone)
        return literal(first, self.dialect).replace("0001-", "0000-")

    def by_bytes(self, expression: str, field: pa.Field) -> str:
        """Return the expression that compares a text by its bytes, not as a language orders letters."""
        return expression

    def sorts_fast(self, field: pa.Field) -> bool:
        """Whether sorting a column is the fastest way to count its distinct values."""
        return False

    def is_sortable(self, field: pa.Field) -> bool:
        """Whether ORDER BY takes a staged column of this type (PostgreSQL's json has no order)."""
        return True

    def lock(self, session: Session, schema: str | None, name: str) -> None:  # noqa: B027 - optional, not forgotten
        """Let one load at a time change this table until the transaction ends. Readers do not wait."""

    def as_key(self, expression: str, column: Column) -> str:
        """Return a staged key as the target compares it: the target decides which rows have the same key."""
        return expression

    def distinct(self, left: str, right: str, column: Column) -> str:
        """Return the condition that two values of a column differ, where null equals null."""
        return f"{left} IS DISTINCT FROM {right}"

    def cast(self, expression: str, field: pa.Field, column: Column) -> str:
        """Return a staged value as a column's type; the statement fails where it does not fit, and never alters it."""
        return f"CAST({expression} AS {column.sql})"

    def try_cast(self, expression: str, field: pa.Field, column: Column) -> str:
        """Return a cast that is null for a value that does not fit; `cast`, if the database has no such cast."""
        return self.cast(expression, field, column)

    def update(self, table: str, assignments: dict[str, str], condition: str) -> str:
        """Return an UPDATE of the rows of `table` as `t` that meet a condition."""
        changes = ", ".join(f"{self.quote(name)} = {value}" for name, value in assignments.items())
        return f"UPDATE {table} AS t SET {changes} WHERE {condition}"

    def update_from(self, table: str, source: str, on: str, assignments: dict[str, str]) -> str:
        """Return an UPDATE of `table` as `t` from the matching rows of `source` as `s`."""
        changes = ", ".join(f"{self.quote(name)} = {value}" for name, value in assignments.items())
        return f"UPDATE {table} AS t SET {changes} FROM {source} AS s WHERE {on}"

    def delete_missing(self, table: str, source: str, on: str) -> str:
        """Return a DELETE of the rows of `table` as `t` that match no row of `source` as `s`, by an anti-join."""
        return f"DELETE FROM {table} AS t WHERE NOT EXISTS (SELECT 1 FROM {source} AS s WHERE {on})"

    def delete_from(self, table: str, source: str, on: str, keys: dict[str, str]) -> str:
        """Return a DELETE of the rows of `table` as `t` that match a row of `source` as `s`: by a condition, which says
        that columns of the table have these values of `s`."""
        return f"DELETE FROM {table} AS t USING {source} AS s WHERE {on}"

    def delete_where(self, table: str, condition: str) -> str:
        """Return a DELETE of the rows of `table` as `s` that meet a condition."""
        return f"DELETE FROM {table} AS s WHERE {condition}"

    def as_hashed(self, expression: str, column: Column) -> str:
        """Return a value of a column as `row_hash` takes it: the same whether it is stored or staged."""
        return expression

    @abstractmethod
    def row_hash(self, expressions: Sequence[str]) -> str:
        """Return the hexadecimal hash of values, in which null, empty and shifted values differ."""

    def checksum(self, row_hash: str) -> str | None:
        """Return the checksum of rows by their hashes, in whatever order they are; `None` where there is none."""
        return None

    def moment(self, value: datetime) -> str:
        """Return the literal of an instant, of the type of `valid_from`."""
        return literal(value.astimezone(UTC), self.dialect)

    @abstractmethod
    def add_seconds(self, expression: str, seconds: float) -> str:
        """Return a timestamp expression some seconds later (or earlier)."""

    @abstractmethod
    def instant(self, expression: str, column: pa.Field) -> str:
        """Return a staged date or timestamp as the type of `valid_from`."""

    @abstractmethod
    def is_rejection(self, error: BaseException) -> bool:
        """Whether the database refused a value or a row (constraint, range, type), not the whole attempt."""

    def is_duplicate(self, error: BaseException) -> bool:
        """Whether the database refused a row because a row with its key is there."""
        return False

    # ---------------------------------------------------------------------------------------------------- rejected rows
    def check_deferred(self, session: Session) -> None:  # noqa: B027 - optional, not forgotten
        """Check the constraints that the database would check at the commit, when it is too late to find the rows."""

    # These results only save attempts: a row that they name is tried alone, or one that breaks the same rule.

    def mark_rows(self, session: Session, name: str) -> str | None:
        """Return a condition that is true for every row of a staging table and notes the row's number, for
        `marked_row`; `None` where statements do not read row by row."""
        return None

    def marked_row(self, session: Session) -> int | None:
        """Return the number of the row that was noted last, also by a statement that was undone."""
        return None

    def suspects(self, session: Session, load: Load, source: str, values: dict[str, str]) -> list[Suspect]:
        """Return the rows of `source` as `s` that a constraint of the target rejects, in order, where statements may
        read all rows before one is refused. `values`: what is inserted, by `try_cast`."""
        return []

    def unreadable(self, session: Session, source: str, expressions: Sequence[str]) -> list[int]:
        """Return the numbers of the rows of `source` as `q` for which an expression fails, where none are marked."""
        return []

    def copied_rows(self, error: BaseException) -> int | None:
        """Return how many rows `copy_in` had copied when it was refused, where the error says so."""
        return None


def check_event_time(column: pa.Field) -> None:
    """Raise where a column is neither a date nor a timestamp."""
    if not pa.types.is_date(column.type) and not pa.types.is_timestamp(column.type):
        raise DeclarationError(f"The column {column.name!r} is {column.type}: an event time is a date or timestamp.")


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and, outside of its session, the driver's error that it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__context__ if isinstance(cause, WeftError) else None


def subquery(sql: str) -> str:
    """Return the query in parentheses, whatever it ends with: a comment must not swallow the parenthesis."""
    return f"({sql.strip().rstrip(';').rstrip()}\n)"


def bare_rows(count: int) -> pa.RecordBatch:
    """Return so many rows without a column, for a query of which only the number of rows matters."""
    return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), count, [None], children=[]))
