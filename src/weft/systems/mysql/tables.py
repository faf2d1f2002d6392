"""Tables of MySQL and MariaDB, as loads read and write them. A schema is a database of the server.

CREATE TABLE commits whatever is open, except of temporary tables: a load creates its target before its transaction.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pymysql
from pymysql.constants import ER

from weft.columns import hint_of, length_of
from weft.errors import BusyError, DeclarationError, SchemaError, WeftError
from weft.systems.load import Load
from weft.systems.log import ROWID
from weft.systems.mysql import constraints, copy, results, types
from weft.systems.mysql.driver import Driver
from weft.systems.mysql.sessions import MySQLSessions
from weft.systems.sql.constraints import breaking
from weft.systems.sql.driver import Role, Session, SqlDriver, closed_on_error
from weft.systems.sql.literals import literal
from weft.systems.sql.prefetch import prefetch
from weft.systems.sql.spellings import pattern_between
from weft.systems.sql.tables import ROW, Column, Slice, SqlTables, Suspect, bare_rows, causes, subquery

LOAD_LOCK_SECONDS = 3600
"""How long a load waits for another one of the same table; for anybody else's lock as long as the driver says."""
# Keys in the index of a staging table. An index takes 3,072 bytes, four a letter.
_INDEXED = 4


# All columns of a row share 65,535 bytes; a character takes up to four.
_LONGEST_VARCHAR = 4_000
_NAME_LETTERS = 64
# InnoDB keeps 40 bytes of each long text in the row, which has at most half a page of 16 KB.
_COLUMNS, _TEXT_BYTES, _ROW_BYTES = 1000, 42, 7800


class MySQLLoadSessions(MySQLSessions):
    """Sessions that leave neither locks nor temporary tables behind."""

    def connect(self, role: Role) -> Driver:
        """A connection that may be slow to read, and joins without an index by hashes."""
        driver = super().connect(role)
        with closed_on_error(driver):
            driver.query("SET SESSION net_write_timeout = 3600, net_read_timeout = 3600")
            if driver.is_mariadb():
                driver.query("SET SESSION join_cache_level = 8, join_buffer_size = 67108864")
        return driver

    def commit(self, driver: Driver, role: Role) -> None:
        """Commit; what cannot be cleaned up then goes with the connection."""
        super().commit(driver, role)
        try:
            driver.clean_up()
        except pymysql.Error:
            driver.cut()

    def rollback(self, driver: Driver) -> None:
        """Undo, and clean up."""
        super().rollback(driver)
        driver.clean_up()

    def explain(self, error: BaseException) -> WeftError:
        """A row that the server refused is one that does not fit."""
        explained = super().explain(error)
        if not _is_rejection(error):
            return explained
        unread = re.search(r"concat\('((.*?): \w+\(.*\) cannot read) '", explained.what)
        if unread is not None:
            # Use the normalizer's own words: the server's error does not have the value.
            field = unread[2].replace("''", "'")
            return SchemaError(f"MySQL ({self.connection.target}): {unread[1]} the value.", field=field)
        checked = re.search(rf"'{types.TOO_LARGE} \+ \((\w+)\(.*`([^`]+)`\) \+ 1\)'", explained.what)
        if checked is None:
            return SchemaError(explained.what)
        if checked[1].lower() == "char_length":
            return SchemaError(
                f"MySQL ({self.connection.target}): a value of {checked[2]!r} is not of the column's type.",
                field=checked[2],
            )
        return SchemaError(
            f"MySQL ({self.connection.target}): a value of {checked[2]!r} would be rounded, cut off or padded.",
            field=checked[2],
            hint="Round it in the source, or give the column a type that holds it.",
        )


class MySQLTables(SqlTables):
    """Tables of a server, by default those of the connection's database."""

    commits_ddl: ClassVar[bool] = True
    dialect: ClassVar[str] = "mysql"
    sessions: ClassVar[type[SqlDriver]] = MySQLLoadSessions
    clock: ClassVar[str | None] = "UTC_TIMESTAMP(6)"
    row_lock: ClassVar[str] = " FOR UPDATE"
    current_schema: ClassVar[str] = "DATABASE()"
    random: ClassVar[str] = "rand()"

    def identity(self) -> str:
        """The server's own name for itself, and the database that names without a schema are in."""
        with self.driver.session("read") as session:
            # MariaDB's is of the host, which may have several servers.
            unique = "@@datadir" if self._is_mariadb else "@@server_uuid"
            row = session.row(f"SELECT @@hostname, @@port, {unique}, database()")
        return "mysql:" + ":".join(map(str, row or ()))

    @cached_property
    def _is_mariadb(self) -> bool:
        with self.driver.session("read") as session:
            return bool(session.driver.is_mariadb())

    def assume(self, product: str) -> None:
        """MariaDB where it is called so, else MySQL."""
        self.__dict__["_is_mariadb"] = product == "mariadb"

    @cached_property
    def _packet(self) -> int:
        with self.driver.session("read") as session:
            return int(session.value("SELECT @@max_allowed_packet"))

    # ---------------------------------------------------------------------------------------------------------- reading

    def describe(self, sql: str) -> pa.Schema:
        """Prepare the query, which runs nothing, and read the comments of the columns that it shows."""
        with self.driver.session("read") as session:
            return pa.schema([types.field_of(field, stored) for field, stored in self._fields(session, sql)])

    def _fields(self, session: Session, sql: str) -> list[tuple[results.ResultField, types.StoredType]]:
        fields = results.fields(session.driver, sql.strip().rstrip(";"))
        if not fields:
            raise DeclarationError("A source is one query: SELECT …", hint=f"This is not a query: {sql.strip()[:80]}")
        places = {(field.schema, field.table) for field in fields if field.table and field.schema}
        stored = {(*place, name): column for place in places for name, column in _stored(session, *place).items()}
        origins = [(field.schema, field.table, field.column) for field in fields]
        if any(origin not in stored for origin in origins) and (inner := types.inner_query(sql)) is not None:
            # A subquery hides the columns of tables that its own are, and so what their values mean.
            hidden = self._fields(session, inner)
            if [field.name for field, _ in hidden] == [field.name for field in fields]:
                return hidden
        expression = types.StoredType()
        return [(field, stored.get(origin, expression)) for field, origin in zip(fields, origins, strict=True)]

    def read(self, part: Slice, schema: pa.Schema, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The packets of one statement, which is one snapshot, as they come; the next while the last is used."""
        wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
        opened: list[Driver] = []

        def read() -> Iterator[pa.RecordBatch]:
            with self.driver.session("read") as session:
                opened.append(session.driver)
                if not wanted.names:
                    yield bare_rows(session.value(f"SELECT count(*) FROM {subquery(part.sql)} AS q"))
                    return
                sql = self._selection(session, part.sql, wanted, pruned=columns is not None)
                with closing(results.rows(session.driver, sql, wanted)) as received:
                    for batch in received:
                        yield _in_schema(batch, wanted)

        return prefetch(read, cancel=lambda: opened[0].cut() if opened else None)

    def _selection(self, session: Session, sql: str, wanted: pa.Schema, *, pruned: bool) -> str:
        fields = (field for field, _ in self._fields(session, sql))
        expressions = {field.name: types.selected(self.quote(field.name), field) for field in fields}
        if not pruned and not any(expressions.values()):
            return sql.strip().rstrip(";")
        columns = ((expressions.get(name), self.quote(name)) for name in wanted.names)
        selected = ", ".join(f"{expression} AS {column}" if expression else column for expression, column in columns)
        return f"SELECT {selected} FROM {subquery(sql)} AS q"

    # ---------------------------------------------------------------------------------------------------------- writing

    def columns(self, session: Session, schema: str | None, name: str) -> list[Column] | None:
        table = self.table(schema, name)
        try:
            rows = session.rows(f"SHOW FULL COLUMNS FROM {table}")
        except pymysql.Error as error:
            if error.args[0] in (ER.NO_SUCH_TABLE, ER.BAD_DB_ERROR):
                return None
            raise
        fields = []
        for field, stored in self._fields(session, f"SELECT {self.listed(row[0] for row in rows)} FROM {table}"):
            try:
                fields.append(types.field_of(field, stored))
            except SchemaError:
                fields.append(pa.field(field.name, pa.string()))
        columns, defaults = [], dict[str, str]()
        if any(nullable == "NO" and default is not None for _, _, _, nullable, _, default, *_ in rows):
            defaults = self._defaults(session, schema, name)
        for field, (column, kind, collation, nullable, _, default, extra, *_) in zip(fields, rows, strict=True):
            generated = "GENERATED" in extra.replace("DEFAULT_GENERATED", "")
            columns.append(
                Column(
                    name=column,
                    field=field.with_nullable(nullable == "YES"),
                    sql=kind if collation is None else f"{kind} collate {collation}",
                    required=nullable == "NO" and default is None and not generated and "auto_increment" not in extra,
                    generated=generated,
                    default=None if generated else defaults.get(column),
                )
            )
        return columns

    def running_transactions(self, session: Session) -> set[str]:
        rows = session.rows("SELECT trx_id FROM information_schema.innodb_trx WHERE trx_rows_modified > 0")
        return {str(number) for (number,) in rows}

    def _defaults(self, session: Session, schema: str | None, name: str) -> dict[str, str]:
        """Return the SQL of the defaults of columns that may not be null. MySQL shows those that are constants without
        their quotes, MariaDB with them."""
        rows = session.rows(
            "SELECT column_name, column_default, extra FROM information_schema.columns WHERE table_schema = "
            "coalesce(?, database()) AND table_name = ? AND is_nullable = 'NO' AND column_default IS NOT NULL",
            (schema, name),
        )
        return {
            column: f"({default})"
            if self._is_mariadb or "DEFAULT_GENERATED" in extra
            else literal(str(default), self.dialect)
            for column, default, extra in rows
            # MySQL shows texts in expressions with backslashes that are not theirs: such a column has none here.
            if self._is_mariadb or "\\" not in str(default)
        }

    def sql_type(self, field: pa.Field, *, key: bool = False) -> str:
        """Types that hold every value of the field; of a key as much as an index takes."""
        return types.sql_type(field, key=key, collation=self._collation)

    @property
    def _collation(self) -> str:
        """Without padding: under other collations "a" and "a " are the same."""
        return "utf8mb4_nopad_bin" if self._is_mariadb else "utf8mb4_0900_bin"

    def column_type(self, field: pa.Field, *, key: bool = False) -> str:
        """Texts of a length, where a row has room for them."""
        length = length_of(field)
        if length is None or length > _LONGEST_VARCHAR:
            return self.sql_type(field, key=key)
        return self.sql_type(field, key=True).replace("VARCHAR(255)", f"VARCHAR({length})")

    def fits(self, column: Column, field: pa.Field) -> bool:
        """Whether nothing would be rounded."""
        return types.takes(column.sql, column.field, field)

    def copy_in(self, session: Session, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        into = f"INSERT INTO {table} ({self.listed(schema.names)}) VALUES "
        return copy.insert(session.driver, into, schema, batches, self._packet)

    # ----------------------------------------------------------------------------------------------- words of a dialect

    def table(self, schema: str | None, name: str) -> str:
        return self.quote(name) if schema is None else f"{self.quote(schema)}.{self.quote(name)}"

    @property
    def text_collation(self) -> str | None:
        return self._collation

    def stream_column(self, field: pa.Field) -> str:
        """Streams ignore spaces at the end of a text when they compare it, loads do not."""
        name = self.quote(field.name)
        if not pa.types.is_string(field.type) or hint_of(field) is not None:
            return name
        return f"CONVERT({name} USING utf8mb4) COLLATE {self._collation} AS {name}"

    def by_letters(self, column: Column) -> str:
        is_so = f"collate {self._collation}" in column.sql
        return self.quote(column.name) if is_so else self.stream_column(column.field)

    def replace_table(self, session: Session, schema: str | None, name: str, new: str, drop: str | None) -> None:
        """One RENAME exchanges two tables at once; each statement is a transaction of its own."""
        table, old = self.table(schema, name), self.table(schema, f"{name}__weft_old")
        if drop != "TABLE":
            super().replace_table(session, schema, name, new, drop)
            return
        session.run(f"DROP TABLE IF EXISTS {old}")
        session.run(f"RENAME TABLE {table} TO {old}, {self.table(schema, new)} TO {table}")
        session.run(f"DROP TABLE {old}")

    def create_schema(self, session: Session, schema: str) -> None:
        """Create a database where it is missing: a user without the right to create may use an existing one."""
        if not session.row("SELECT 1 FROM information_schema.schemata WHERE schema_name = ?", (schema,)):
            session.run(f"CREATE DATABASE IF NOT EXISTS {self.quote(schema)}")

    def change_type(self, schema: str | None, name: str, column: Column, kind: str) -> str:
        """The whole definition: what it does not say is lost, such as a default, AUTO_INCREMENT or a collation."""
        with self.driver.session("read") as session:
            definitions = session.rows(f"SHOW CREATE TABLE {self.table(schema, name)}")[0][1]
        quoted, (old, *_) = self.quote(column.name), column.sql.split(" collate ")
        (rest,) = re.findall(rf"^ *{re.escape(f'{quoted} {old}')}(.*?),?$", definitions, re.MULTILINE)
        # A text keeps its letters; a comment of ours says what the old type could not.
        kind = kind.partition(" CHARACTER SET ")[0]
        return f"MODIFY COLUMN {quoted} {kind}{rest.replace(types.FLOAT32, '')}"

    def index_clause(self, columns: Sequence[str]) -> str | None:
        """MySQL has no CREATE INDEX IF NOT EXISTS."""
        return f"INDEX ({self.listed(columns)})"

    def create_index(self, name: str, table: str, columns: Sequence[str]) -> str | None:
        """None: `index_clause` creates it with the table."""
        return None

    def drop_index(self, name: str) -> str | None:
        """None: it stays as long as the table."""
        return None

    def create_temporary(self, session: Session, name: str, columns: str) -> None:
        """A temporary table, which is dropped when the transaction ends."""
        super().create_temporary(session, name, columns)
        session.driver.at_end.append(f"DROP TEMPORARY TABLE IF EXISTS {self.temporary(name)}")

    def create_temporary_as(self, session: Session, name: str, select: str, keys: dict[str, str] | None = None) -> int:
        definitions = [f"{self.quote(key)} {kind}" for key, kind in (keys or {}).items()] + self.stage_index(keys or {})
        defined = f" ({', '.join(definitions)})" if definitions else ""
        self.drop_temporary(session, name)
        cursor = session.run(f"CREATE TEMPORARY TABLE {self.temporary(name)}{defined} AS {select}")
        session.driver.at_end.append(f"DROP TEMPORARY TABLE IF EXISTS {self.temporary(name)}")
        return int(cursor.rowcount)

    def stage_keys(self, keys: Sequence[pa.Field], columns: dict[str, Column]) -> dict[str, str]:
        """As the target has them: both mean the same by equal, and MariaDB joins texts only by an index in any time."""
        return {
            field.name: types.key_type(columns[field.name].sql, field) or self.sql_type(field, key=False)
            for field in keys
            if field.name in columns
        }

    def stage_index(self, keys: dict[str, str]) -> list[str]:
        """An index of as many keys as it takes; one of its own for the numbers of rows."""
        parts = [f"{self.quote(key)}{types.prefix(kind)}" for key, kind in keys.items() if key != ROW]
        numbers = [f"INDEX ({self.quote(ROW)})"] if ROW in keys else []
        return [f"INDEX ({', '.join(parts[:_INDEXED])})", *numbers] if parts else numbers

    def drop_temporary(self, session: Session, name: str) -> None:
        """Without the word TEMPORARY it would commit."""
        session.run(f"DROP TEMPORARY TABLE IF EXISTS {self.temporary(name)}")

    def create_key_index(self, session: Session, schema: str | None, name: str, keys: Sequence[str]) -> None:
        """`stage_index` creates it with the table: a crash between two statements would leave the table without."""

    def lock(self, session: Session, schema: str | None, name: str) -> None:
        """A named lock of the server, which outlives the transaction by one statement."""
        database = session.value("SELECT coalesce(?, database())", (schema,))
        whole = f"{database}\0{name}".encode()
        key = f"weft:{hashlib.sha256(whole).hexdigest()[:40]}"
        # Before the wait: were the answer lost, the lock might be held all the same.
        session.driver.at_end.append(f"DO RELEASE_LOCK('{key}')")
        if session.value(f"SELECT GET_LOCK('{key}', {LOAD_LOCK_SECONDS})") != 1:
            raise BusyError(
                f"Another load has been changing {name!r} for {LOAD_LOCK_SECONDS} s.",
                hint="Nothing was stored. Try again when it is done.",
            )

    def distinct(self, left: str, right: str, column: Column) -> str:
        """Texts by their bytes: a collation may take letters, cases and spaces for the same."""
        if "collate" in column.sql:
            if "collate utf8mb4" not in column.sql:
                left, right = f"CONVERT({left} USING utf8mb4)", f"CONVERT({right} USING utf8mb4)"
            left, right = f"CAST({left} AS BINARY)", f"CAST({right} AS BINARY)"
        elif column.sql.startswith("float"):
            right = f"CAST({right} AS FLOAT)"
        elif column.sql == "json":
            right = f"CAST({right} AS JSON)"
        return f"NOT ({left} <=> {right})"

    def cast(self, expression: str, field: pa.Field, column: Column) -> str:
        """The value itself, checked where strict mode would round it."""
        text, pattern = expression, pattern_between(field, column.field)
        if pattern is not None:
            expression = types.readable(expression, column.field)
        there = types.of_hint(expression, types.cast(expression, field, column.sql), field, column.field)
        return there if pattern is None else types.spelled(text, there, pattern)

    def update_from(self, table: str, source: str, on: str, assignments: dict[str, str]) -> str:
        """UPDATE … JOIN. A value may not use a column that is assigned before it: that one is new already."""
        changes = ", ".join(f"t.{self.quote(name)} = {value}" for name, value in assignments.items())
        return f"UPDATE {table} AS t JOIN {source} AS s ON {on} SET {changes}"

    def by_bytes(self, expression: str, field: pa.Field) -> str:
        return f"BINARY CAST({expression} AS CHAR)"

    def delete_from(self, table: str, source: str, on: str, keys: dict[str, str]) -> str:
        return f"DELETE t FROM {table} AS t JOIN {source} AS s ON {on}"

    def delete_where(self, table: str, condition: str) -> str:
        return f"DELETE s FROM {table} AS s WHERE {condition}"

    def delete_missing(self, table: str, source: str, on: str) -> str:
        """The form for several tables, the only one in which every version takes an alias."""
        return f"DELETE t FROM {table} AS t WHERE NOT EXISTS (SELECT 1 FROM {source} AS s WHERE {on})"

    def as_hashed(self, expression: str, column: Column) -> str:
        """Staged values are of their own types, whose texts differ: 1.5 is 1.50 in the column."""
        return types.as_stored(expression, column.sql)

    def row_hash(self, expressions: Sequence[str]) -> str:
        """Each value with its length before it; null has none. A table may have keys alone."""
        parts = ["''", *(f"IFNULL(CONCAT(LENGTH({each}), ':', {each}), 'N')" for each in expressions)]
        return f"MD5(CONCAT({', '.join(parts)}))"

    def checksum(self, row_hash: str) -> str | None:
        return f"SUM(CAST(CONV(LEFT({row_hash}, 15), 16, 10) AS UNSIGNED))"

    def add_seconds(self, expression: str, seconds: float) -> str:
        return f"({expression} + INTERVAL {round(seconds * 1_000_000)} MICROSECOND)"

    def instant(self, expression: str, column: pa.Field) -> str:
        """Dates and times without a zone are UTC."""
        return f"CAST({expression} AS DATETIME(6))"

    def refuses_name(self, name: str) -> str | None:
        if len(name) > _NAME_LETTERS:
            return f"a name of MySQL has at most {_NAME_LETTERS} characters"
        if name.endswith(" "):
            return "a name of MySQL cannot end with a space"
        if any(ord(letter) > 0xFFFF for letter in name):
            return "a name of MySQL cannot hold characters beyond U+FFFF"
        return super().refuses_name(name)

    def can_hold(self, columns: Sequence[pa.Field]) -> bool:
        """A row must fit half a page, with a part of each text."""
        size = sum(
            1 + each.type.bit_width // 8 if pa.types.is_primitive(each.type) else _TEXT_BYTES for each in columns
        )
        return len(columns) <= _COLUMNS and size <= _ROW_BYTES

    def is_rejection(self, error: BaseException) -> bool:
        """Whether the server refused it, or Weft in its place."""
        return isinstance(error, SchemaError) or _is_rejection(error)

    def is_duplicate(self, error: BaseException) -> bool:
        return any(isinstance(cause, pymysql.Error) and cause.args[:1] in _DUPLICATES for cause in causes(error))

    def mark_rows(self, session: Session, name: str) -> str | None:
        """In a variable of the session, which no rollback changes."""
        return f"(@weft_row := {self.quote(ROW)}) IS NOT NULL"

    def marked_row(self, session: Session) -> int | None:
        row = session.value("SELECT @weft_row")
        return None if row is None else int(row)

    def suspects(self, session: Session, load: Load, source: str, values: dict[str, str]) -> list[Suspect]:
        """UPDATE … JOIN reads all rows before it changes the first one."""
        return breaking(self, session, source, values, constraints.of_table(session, load.schema, load.table))


# Duplicate, null, no default, wrong value, out of range, cut off, wrong date, too long, no such parent, still a child,
# a check, not JSON, a number beyond the largest, a float that no whole number or decimal holds, what a trigger raises.
_REJECTIONS = {
    *(
        1048,
        1062,
        1169,
        1216,
        1217,
        1263,
        1264,
        1265,
        1292,
        1364,
        1365,
        1366,
        1367,
        1406,
        1411,
        1416,
        1451,
        1452,
        1586,
        1644,
    ),
    *(1690, 1761, 1762, 1859, 1916, 1918, 3140, 3141, 3156, 3157, 3819, 4025, 4038),
}

_DUPLICATES = ((1062,), (1169,), (1586,))


def _is_rejection(error: BaseException) -> bool:
    return isinstance(error, pymysql.Error) and bool(error.args) and error.args[0] in _REJECTIONS


def _stored(session: Session, schema: str, table: str) -> dict[str, types.StoredType]:
    """Return what the catalogue has on a table's columns."""
    rows = session.rows(
        "SELECT column_name, column_type, column_comment FROM information_schema.columns "
        "WHERE table_schema = ? AND table_name = ?",
        (schema, table),
    )
    in_stream = any(name == ROWID for name, _, _ in rows)
    checked: set[str] = set()
    if session.driver.is_mariadb() and any(kind == "longtext" for _, kind, _ in rows):
        clauses = session.rows(
            "SELECT check_clause FROM information_schema.check_constraints "
            "WHERE constraint_schema = ? AND table_name = ?",
            (schema, table),
        )
        checked = {clause.lower() for (clause,) in clauses}
    return {
        name: types.StoredType(kind, comment, f"json_valid({session.store.quote(name.lower())})" in checked, in_stream)
        for name, kind, comment in rows
    }


def _in_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = batch.columns
    for index, field in enumerate(schema):
        if hint_of(field) == "time":
            # Without trailing zeros in the fraction of a second, as other systems write it.
            short = pc.replace_substring_regex(arrays[index], r"(\.\d*?)0+$", r"\1")
            arrays[index] = pc.replace_substring_regex(short, r"\.$", "")
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
