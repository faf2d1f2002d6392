"""Tables of SQLite, as loads read and write them."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from typing import ClassVar

import pyarrow as pa

from weft.columns import hint_of, is_nested
from weft.errors import ConnectionFailedError, SchemaError, WeftError
from weft.systems.base import Connection
from weft.systems.sql.driver import Role, Session, SqlDriver
from weft.systems.sql.tables import ROW, Column, Slice, SqlTables, bare_rows, causes, check_event_time, subquery
from weft.systems.sqlite import casts, functions, rows, types
from weft.systems.sqlite.reading import TrackedConnection
from weft.systems.sqlite.sessions import SqliteSessions

# UPDATE … FROM.
_OLDEST = (3, 33, 0)
# How many rows are read to find the type of an expression.
_LOOK_ROWS = 10_000
# The size of a batch, and how many rows are fetched before their size is known, and at most.
_BATCH_BYTES, _FIRST_ROWS, _MOST_ROWS = 4 * 1024 * 1024, 256, 65_536
# Rows of one INSERT: twice as fast as one each. Every SQLite takes 999 values.
_INSERT_ROWS, _INSERT_VALUES = 32, 999
_QUERY = "_weft_query"


class SqliteLoadSessions(SqliteSessions):
    """Sessions whose connections know the functions that loads call."""

    _refused: str | None = None
    marked: int | None = None
    """The row that was marked last."""

    def __init__(self, connection: Connection) -> None:
        if sqlite3.sqlite_version_info < _OLDEST:
            raise ConnectionFailedError(
                f"Loads need SQLite {'.'.join(map(str, _OLDEST))}, and this Python has {sqlite3.sqlite_version}.",
                hint="Use a newer Python, or one that was built with a newer SQLite.",
            )
        super().__init__(connection)

    def connect(self, role: Role) -> TrackedConnection:
        driver = super().connect(role)
        driver.create_function("weft_hash", -1, casts.row_hash, deterministic=True)
        driver.create_function("weft_hash_part", -1, casts.hash_part, deterministic=True)
        driver.create_function("weft_hash_parts", -1, casts.hash_of_parts, deterministic=True)
        driver.create_function("weft_add_seconds", 2, casts.add_seconds, deterministic=True)
        driver.create_collation("weft_decimal", casts.compare_decimals)
        driver.create_function("weft_mark", 1, self._mark)
        functions.register(driver, self._remember)
        return driver

    def _mark(self, row: int) -> bool:
        self.marked = row
        return True

    def _remember(self, why: str) -> None:
        # SQLite will only say that a function failed.
        self._refused = why

    def explain(self, error: BaseException) -> WeftError:
        """A value that one of the functions refused, by what the function said."""
        if _refused_by_function(error) and self._refused:
            return SchemaError(f"SQLite database {self.path} refused a value: {self._refused}.")
        return super().explain(error)


class SqliteTables(SqlTables):
    dialect: ClassVar[str] = "sqlite"
    sessions: ClassVar[type[SqlDriver]] = SqliteLoadSessions
    one_host: ClassVar[bool] = True
    one_writer: ClassVar[bool] = True
    clock: ClassVar[str | None] = "strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now')"
    # SQLite stores any value whatever a column's type is called, and cannot change a type.
    widens_columns: ClassVar[bool] = False
    explain: ClassVar[str] = "EXPLAIN QUERY PLAN"
    true: ClassVar[str] = "1"
    false: ClassVar[str] = "0"
    random: ClassVar[str] = "(abs(random()) / 9223372036854775808.0)"
    default_schema: ClassVar[str | None] = "main"
    native_decimals: ClassVar[bool] = False
    described_watermark: ClassVar[str] = "-9e999"
    enforces_lengths: ClassVar[bool] = False
    folds_tables: ClassVar[bool] = True

    driver: SqliteLoadSessions

    def identity(self) -> str:
        """The file. A database in memory is only ever itself."""
        return f"sqlite:{id(self.driver) if self.driver.in_memory else os.path.realpath(self.driver.path)}"

    # ---------------------------------------------------------------------------------------------------------- reading

    def describe(self, sql: str) -> pa.Schema:
        """Create a temporary view, whose columns have the declared types of their origins."""
        view = self.quote(_QUERY)
        with self.driver.session("read") as session:
            try:
                session.run(f"CREATE TEMP VIEW {view} AS {subquery(sql)[1:-1]}")
                declared = session.rows("SELECT name, type FROM pragma_table_info(?)", (_QUERY,))
            finally:
                session.run(f"DROP VIEW IF EXISTS temp.{view}")
            fields = [types.declared_field(name, kind) for name, kind in declared]
            unclear = [number for number, (_, kind) in enumerate(declared) if types.needs_look(kind)]
            if unclear:
                seen = self._look(session, sql, [declared[number][0] for number in unclear])
                has_unseen = any(kinds <= {"null"} for kinds in seen)
                parsed = self._parsed(session, sql) if has_unseen else {}
                for number, kinds in zip(unclear, seen, strict=True):
                    name, kind = declared[number]
                    fields[number] = types.seen_field(name, kind, kinds, parsed.get(name))
        for (name, _), field in zip(declared, fields, strict=True):
            if field is None:
                raise SchemaError(
                    f"Column {name!r} holds both bytes and other values.",
                    field=name,
                    hint=f'Give it one type: CAST("{name}" AS TEXT).',
                )
        return pa.schema([field.with_name(_given_name(field.name, declared)) for field in fields if field is not None])

    def _parsed(self, session: Session, sql: str) -> dict[str, pa.DataType]:
        from weft.systems.sqlite.parsing import computed_types

        def types_of(table: str) -> dict[str, pa.DataType]:
            columns = session.rows("SELECT name, type FROM pragma_table_info(?)", (table,))
            fields = (types.declared_field(name, kind) for name, kind in columns)
            return {field.name: field.type for field in fields if field is not None}

        return computed_types(subquery(sql)[1:-1], types_of)

    def _look(self, session: Session, sql: str, names: list[str]) -> list[set[str]]:
        kinds_of = ", ".join(f"typeof({self.quote(name)})" for name in names)
        kinds = session.rows(f"SELECT DISTINCT * FROM (SELECT {kinds_of} FROM {subquery(sql)} LIMIT {_LOOK_ROWS})")
        return [set(column) for column in zip(*kinds, strict=True)] or [set() for _ in names]

    def read(self, part: Slice, schema: pa.Schema, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """In one statement, which is one snapshot."""
        names = schema.names if columns is None else columns
        wanted = pa.schema([schema.field(name) for name in names])
        chosen = ", ".join(self.quote(name) for name in names) or "count(*)"
        count = _FIRST_ROWS
        with (
            self.driver.session("read") as session,
            closing(session.run(f"SELECT {chosen} FROM {subquery(part.sql)}")) as cursor,
        ):
            while page := cursor.fetchmany(count):
                if not names:
                    yield bare_rows(page[0][0])
                    continue
                arrays = [
                    rows.arrow(column, field) for column, field in zip(zip(*page, strict=True), wanted, strict=True)
                ]
                batch = pa.RecordBatch.from_arrays(arrays, schema=wanted)
                # Read as many rows as fill a batch, but cautiously: the next ones may be longer.
                fitting = len(page) * _BATCH_BYTES // max(batch.nbytes, 1)
                count = max(1, min(fitting, 4 * count, _MOST_ROWS))
                del page, arrays
                yield batch

    # ---------------------------------------------------------------------------------------------------------- writing

    def primary_key(self, session: Session, schema: str | None, name: str) -> list[str]:
        rows = session.rows(
            "SELECT name FROM pragma_table_info(?) WHERE pk > 0 ORDER BY pk", (self._name(schema, name),)
        )
        return [column for (column,) in rows]

    def columns(self, session: Session, schema: str | None, name: str) -> list[Column] | None:
        described = session.rows(
            'SELECT name, type, "notnull", dflt_value, pk, hidden FROM pragma_table_xinfo(?) ORDER BY cid',
            (self._name(schema, name),),
        )
        keys = [column for column, _, _, _, key, _ in described if key]
        collations = self._collations(session, self.table(schema, name), [row[0] for row in described if row[-1] != 1])
        columns = []
        for column, declared, required, default, key, hidden in described:
            if hidden == 1:  # of a virtual table: not one of its columns
                continue
            # The one integer key is the row's own number, which SQLite gives.
            numbered = bool(key) and len(keys) == 1 and declared.upper() == "INTEGER"
            field = types.declared_field(column, declared, nullable=not required)
            columns.append(
                Column(
                    name=column,
                    field=pa.field(column, pa.string(), nullable=not required) if field is None else field,
                    sql=declared,
                    required=bool(required) and default is None and not numbered and hidden not in (2, 3),
                    generated=hidden in (2, 3),
                    default=f"({default})" if required and default is not None and not hidden else None,
                    collation=collations[column],
                )
            )
        return columns or None

    def _collations(self, session: Session, table: str, columns: list[str]) -> dict[str, str | None]:
        """Find them by comparing texts, because no pragma shows them: in a compound query, the first part decides how
        columns compare."""
        if not columns:
            return {}
        tried = [f"max({self.quote(column)} = '{like}')" for column in columns for like in ("A", "a ")]
        equal = session.row(
            f"SELECT {', '.join(tried)} FROM "
            f"(SELECT {self.listed(columns)} FROM {table} WHERE 0 UNION ALL SELECT {', '.join(['?'] * len(columns))})",
            ["a"] * len(columns),
        )
        assert equal is not None
        return {
            column: "NOCASE" if equal[2 * number] else "RTRIM" if equal[2 * number + 1] else None
            for number, column in enumerate(columns)
        }

    def stores_as_weft(self, field: pa.Field) -> bool:
        """Others write times and decimals as they like."""
        kind = field.type
        has_forms = pa.types.is_temporal(kind) or pa.types.is_decimal(kind) or pa.types.is_boolean(kind)
        return not (types.is_loose(field) and has_forms)

    def by_letters(self, column: Column) -> str:
        name = self.quote(column.name)
        return name if column.collation is None else f"{name} COLLATE BINARY AS {name}"

    def sql_type(self, field: pa.Field, *, key: bool = False) -> str:
        """A declared type that says what the values mean."""
        return types.sql_type(field)

    def column_type(self, field: pa.Field, *, key: bool = False) -> str:
        """Not INTEGER for a key: alone in a primary key it would be SQLite's row number, made up for a null."""
        kind = self.sql_type(field, key=key)
        return "BIGINT" if key and kind == "INTEGER" else kind

    def fits(self, column: Column, field: pa.Field) -> bool:
        """Whether both store values alike, or the column takes anything."""
        if pa.types.is_decimal(field.type) and types.makes_floats(column.sql):
            return False
        if types.declared_field(column.name, column.sql) is None:
            return True
        if is_nested(field.type):
            return hint_of(column.field) == "json"
        return _widens(field, column.field) and hint_of(column.field) in (None, hint_of(field))

    def copy_in(self, session: Session, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        """Run INSERTs of some rows each; the values are converted a column at a time."""
        names = self.listed(schema.names)
        marks = f"({', '.join('?' * len(schema))})"
        several = max(1, min(_INSERT_ROWS, _INSERT_VALUES // max(len(schema), 1)))
        one = f"INSERT INTO {table} ({names}) VALUES {marks}"
        many = f"{one}{f', {marks}' * (several - 1)}"
        driver: sqlite3.Connection = session.driver
        sent = 0
        for batch in batches:
            columns = [rows.stored(array, field) for array, field in zip(batch.columns, schema, strict=True)]
            whole = batch.num_rows // several * several
            if whole and several > 1:
                # One iterator, as often as a statement has values: each turn of zip is a statement's values.
                values = chain.from_iterable(zip(*(column[:whole] for column in columns), strict=True))
                driver.executemany(many, zip(*[values] * (several * len(schema)), strict=True))
                columns = [column[whole:] for column in columns]
            driver.executemany(one, zip(*columns, strict=True))
            sent += batch.nbytes
        return sent

    # ----------------------------------------------------------------------------------------------- words of a dialect

    def table(self, schema: str | None, name: str) -> str:
        """SQLite has no schemas: outside of `main`, the table is called "schema.name"."""
        return self.quote(self._name(schema, name))

    def _name(self, schema: str | None, name: str) -> str:
        return name if schema in (None, "main") else f"{schema}.{name}"

    def is_view(self, session: Session, schema: str | None, name: str) -> bool:
        query = "SELECT type FROM sqlite_master WHERE name = ?"
        return bool(session.value(query, (self._name(schema, name),)) == "view")

    def names(self, session: Session, schema: str | None) -> list[str]:
        before = self._name(schema, "")
        named = session.rows(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%'"
        )
        return [name.removeprefix(before) for (name,) in named if name.startswith(before)]

    def replace_table(self, session: Session, schema: str | None, name: str, new: str, drop: str | None) -> None:
        """Without a look at the views of the database: those over the table have none between the two statements."""
        (before,) = session.row("PRAGMA legacy_alter_table") or (0,)
        session.run("PRAGMA legacy_alter_table = 1")
        try:
            super().replace_table(session, schema, name, new, drop)
        finally:
            session.run(f"PRAGMA legacy_alter_table = {before}")

    def all_names(self, session: Session) -> list[tuple[str | None, str]]:
        parts = (name.rpartition(".") for name in self.names(session, None))
        return [(schema or None, name) for schema, _, name in parts if schema != "weft"]

    def create_schema(self, session: Session, schema: str) -> None:
        """Do nothing: SQLite has no schemas."""

    def create_index(self, name: str, table: str, columns: Sequence[str]) -> str | None:
        """Named like Weft's own tables: indexes of all tables share their names."""
        return super().create_index(f"weft.{name}", table, columns)

    def temporary(self, name: str) -> str:
        return f"temp.{self.quote(name)}"

    def index_rows(self, session: Session, name: str) -> None:
        """Beside the table, in the same database."""
        session.run(f"CREATE INDEX {self.temporary(f'{name}_rows')} ON {self.quote(name)} ({self.quote(ROW)})")

    def create_key_index(self, session: Session, schema: str | None, name: str, keys: Sequence[str]) -> None:
        """Named like the table, and like Weft's own tables: indexes and tables share their names, and there may be a
        table `orders_keys` next to `orders`."""
        index, table = self.quote(f"weft.{self._name(schema, name)}_keys"), self.table(schema, name)
        session.run(f"CREATE INDEX IF NOT EXISTS {index} ON {table} ({self.listed(keys)})")

    def as_key(self, expression: str, column: Column) -> str:
        return expression if column.collation is None else f"{expression} COLLATE {column.collation}"

    def delete_from(self, table: str, source: str, on: str, keys: dict[str, str]) -> str:
        """There is no USING; rows of keys are found by an index."""
        return (
            f"DELETE FROM {table} WHERE ({self.listed(keys)}) IN (SELECT {', '.join(keys.values())} FROM {source} AS s)"
        )

    def distinct(self, left: str, right: str, column: Column) -> str:
        """IS NOT compares any two values; texts by their letters, whatever the column's collation says."""
        return f"{left} IS NOT {right}" if column.collation is None else f"{left} COLLATE BINARY IS NOT {right}"

    def cast(self, expression: str, field: pa.Field, column: Column) -> str:
        """Call a function of Weft, unless both are stored alike."""
        if self.fits(column, field) and not types.is_loose(field):
            return expression
        target = column.field if types.declared_field(column.name, column.sql) is not None else field
        code = casts.code(target)
        if pa.types.is_decimal(target.type) and types.makes_floats(column.sql):
            code = code.replace("decimal", "numeric")
        return f"weft_cast({expression}, '{casts.code(field)}', '{code}')"

    def row_hash(self, expressions: Sequence[str]) -> str:
        if len(expressions) <= _MOST_ARGUMENTS:
            return f"weft_hash({', '.join(expressions)})"
        some = (expressions[at : at + _MOST_ARGUMENTS] for at in range(0, len(expressions), _MOST_ARGUMENTS))
        parts = (f"weft_hash_part({', '.join(each)})" for each in some)
        return f"weft_hash_parts({', '.join(parts)})"

    def ordered(self, expression: str, field: pa.Field) -> str:
        """Decimals are stored as texts, of which '9' comes after '10'."""
        return f"{expression} COLLATE weft_decimal" if pa.types.is_decimal(field.type) else expression

    def add_seconds(self, expression: str, seconds: float) -> str:
        return f"weft_add_seconds({expression}, {seconds!r})"

    def instant(self, expression: str, column: pa.Field) -> str:
        """Values without a zone are in UTC."""
        check_event_time(column)
        if pa.types.is_date(column.type):
            return f"({expression} || 'T00:00:00.000000+00:00')"
        return expression if column.type.tz else f"({expression} || '+00:00')"

    def is_rejection(self, error: BaseException) -> bool:
        """A constraint, a wrong type, a value that is too long, or one that our cast refused."""
        return any(
            isinstance(cause, SchemaError | sqlite3.IntegrityError | sqlite3.DataError) or _refused_by_function(cause)
            for cause in causes(error)
        )

    def is_duplicate(self, error: BaseException) -> bool:
        return any(getattr(cause, "sqlite_errorname", "") in _DUPLICATES for cause in causes(error))

    def mark_rows(self, session: Session, name: str) -> str | None:
        """By a function of Weft."""
        return f"weft_mark({self.quote(ROW)})"

    def marked_row(self, session: Session) -> int | None:
        return self.driver.marked


_MOST_ARGUMENTS = 100
"""Of a function: SQLite's own limit, before version 3.48, is 127."""
_DUPLICATES = ("SQLITE_CONSTRAINT_PRIMARYKEY", "SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_ROWID")


def _widens(source: pa.Field, target: pa.Field) -> bool:
    if pa.types.is_integer(source.type) and pa.types.is_integer(target.type):
        return bool(source.type.bit_width <= target.type.bit_width)
    if pa.types.is_floating(source.type) and pa.types.is_floating(target.type):
        return bool(source.type.bit_width <= target.type.bit_width)
    return bool(source.type.equals(target.type))


def _given_name(name: str, declared: Sequence[tuple[str, str]]) -> str:
    """The name that a query gave to a column: a view calls a second `a` `a:1`."""
    first = re.sub(r":\d+$", "", name)
    return first if first != name and first in (each for each, _ in declared) else name


def _refused_by_function(error: BaseException) -> bool:
    return isinstance(error, sqlite3.Error) and "user-defined function raised exception" in str(error)
