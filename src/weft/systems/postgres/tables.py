"""Tables of PostgreSQL, as loads read and write them: binary COPY in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, timedelta
from itertools import pairwise
from typing import Any, ClassVar

import psycopg
import pyarrow as pa

from weft.columns import hint_of, is_binary_json, is_nested, length_of
from weft.errors import DeclarationError, SchemaError, WeftError, did_you_mean
from weft.systems.load import Load
from weft.systems.postgres import constraints, copy, types
from weft.systems.postgres.sessions import LOCK_SECONDS, PostgresSessions
from weft.systems.sql.constraints import breaking
from weft.systems.sql.driver import Role, Session, SqlDriver
from weft.systems.sql.spellings import pattern_between
from weft.systems.sql.tables import ROW, Column, Slice, SqlTables, Suspect, causes, check_event_time, subquery

# The keys of our advisory locks: "load" in ASCII, then a hash of the table's name.
_LOCK_SPACE = 0x6C6F6164
# A load waits this long for another one of the same table; for anybody else's lock as long as the driver says.
_LOAD_LOCK = "1h"
# Longer names are cut off silently.
_NAME_BYTES = 63
_SYSTEM_COLUMNS = {"ctid", "xmin", "xmax", "cmin", "cmax", "tableoid"}
_MARK = "_weft_mark"
_TEXTS = {"text", "character varying", "character", "name", '"char"'}


class PostgresLoadSessions(PostgresSessions):
    """Sessions that write values as text in one way, whatever the server's settings are: a hash of a row is one of its
    text."""

    configuration: ClassVar[dict[str, str]] = PostgresSessions.configuration | {
        "DateStyle": "ISO, YMD",
        "IntervalStyle": "postgres",
        "bytea_output": "hex",
        "extra_float_digits": "1",
    }

    def _settings(self, role: Role, is_local: str) -> str:
        """The server's default is the cost of a disk that turns: with it the planner reads 10M rows to find the 100k
        that a batch changes, which takes twice as long as to look them up in the index."""
        name = "'random_page_cost'"
        planned = f"CASE current_setting({name}, true) WHEN '4' THEN set_config({name}, '1.1', {is_local}) END"
        return super()._settings(role, is_local) + (f", {planned}" if role == "publish" else "")


class PostgresTables(SqlTables):
    """Tables of a PostgreSQL database."""

    dialect: ClassVar[str] = "postgres"
    sessions: ClassVar[type[SqlDriver]] = PostgresLoadSessions
    clock: ClassVar[str | None] = "clock_timestamp()"
    row_lock: ClassVar[str] = " FOR UPDATE"
    has_temporary_views: ClassVar[bool] = True
    folds_columns: ClassVar[bool] = False

    driver: PostgresLoadSessions

    def identity(self) -> str:
        """The server by its cluster and its start, since copies of a cluster keep its number; then the database."""
        with self.driver.session("read") as session:
            ((database, started, port, allowed),) = session.rows(
                "SELECT current_database(), pg_postmaster_start_time()::text, current_setting('port'), "
                "has_function_privilege('pg_control_system()', 'EXECUTE')"
            )
            server = session.value("SELECT system_identifier FROM pg_control_system()") if allowed else port
        return f"postgres:{server}:{started}:{database}"

    # ---------------------------------------------------------------------------------------------------------- reading

    def describe(self, sql: str) -> pa.Schema:
        """Prepare the query: the server returns the types of its columns."""
        with self.driver.session("read") as session:
            return self._describe(session, sql)

    def _describe(self, session: Session, sql: str) -> pa.Schema:
        connection: psycopg.Connection[Any] = session.driver
        query = f"SELECT * FROM {subquery(sql)} AS q"
        for result in (
            connection.pgconn.prepare(b"", query.encode()),
            connection.pgconn.describe_prepared(b""),
        ):
            if result.status != psycopg.pq.ExecStatus.COMMAND_OK:
                raise psycopg.errors.error_from_result(result)
        names = [(result.fname(number) or b"").decode() for number in range(result.nfields)]
        return pa.schema(
            [types.field_of(name, result.ftype(number), result.fmod(number)) for number, name in enumerate(names)]
        )

    def read(self, part: Slice, schema: pa.Schema, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Streamed through the ADBC driver."""
        from weft.systems.postgres import reading

        names = schema.names if columns is None else columns
        return reading.batches(self.driver, part.sql, [schema.field(name) for name in names], part.snapshot)

    def slices(self, sql: str, parts: int, by: str | None = None) -> tuple[list[Slice], Any]:
        """Ranges of a column, all in one exported snapshot. It lives as long as the transaction that made it."""
        if parts < 2 or by is None:
            return [Slice(sql)], None
        connection = self.driver.connect_as("read", autocommit=False)
        try:
            session = Session(self.driver, connection)
            session.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            # Readers may take long, and this transaction only waits for them.
            session.run("SET LOCAL idle_in_transaction_session_timeout = 0")
            schema = self._describe(session, sql)
            bounds = self._bounds(session, sql, schema, parts, by)
            try:
                snapshot = session.value("SELECT pg_export_snapshot()")
            except (psycopg.errors.ReadOnlySqlTransaction, psycopg.errors.ObjectNotInPrerequisiteState):
                # A standby cannot export one.
                connection.close()
                return [Slice(sql)], None
        except BaseException as error:
            connection.close()
            if self.driver.is_driver_error(error):
                raise self.driver.explain(error) from None
            raise
        return [Slice(each, snapshot) for each in self._ranges(sql, by, bounds)], connection

    def _bounds(self, session: Session, sql: str, schema: pa.Schema, parts: int, by: str) -> list[str]:
        """Return where all parts but the first begin, as literals."""
        if by not in schema.names:
            hint = did_you_mean(by, schema.names, f"Its columns: {', '.join(schema.names[:30])}.")
            raise DeclarationError(f"The query has no column {by!r} to be split by.", hint=hint)
        kind = schema.field(by).type
        column = self.quote(by)
        if not (pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind)):
            raise DeclarationError(
                f"A query cannot be split by the column {by!r}, which is {kind}.",
                hint="Choose an integer, a date or a timestamp, best one with an index.",
            )
        ((low, high),) = session.rows(f"SELECT min({column}), max({column}) FROM {subquery(sql)} AS q")
        if low is None or low == high:
            return []
        if pa.types.is_integer(kind):
            starts = {low + (high - low + 1) * part // parts for part in range(1, parts)}
            return [str(start) for start in sorted(starts - {low})]
        days: set[date] = {low + timedelta((high - low).days * part // parts) for part in range(1, parts)}
        if pa.types.is_timestamp(kind):
            days = {low + (high - low) * part / parts for part in range(1, parts)}
        word = "DATE" if pa.types.is_date(kind) else "TIMESTAMPTZ" if kind.tz else "TIMESTAMP"
        return [f"{word} '{start.isoformat()}'" for start in sorted(days - {low})]

    def _ranges(self, sql: str, by: str, bounds: list[str]) -> list[str]:
        column, query = self.quote(by), f"SELECT * FROM {subquery(sql)} AS q"
        if not bounds:
            return [sql]
        between = [f"{query} WHERE {column} >= {low} AND {column} < {high}" for low, high in pairwise(bounds)]
        return [
            f"{query} WHERE {column} < {bounds[0]} OR {column} IS NULL",
            *between,
            f"{query} WHERE {column} >= {bounds[-1]}",
        ]

    # ---------------------------------------------------------------------------------------------------------- writing

    def columns(self, session: Session, schema: str | None, name: str) -> list[Column] | None:
        rows = session.rows(
            # A domain's own type is the one below it, maybe over several steps.
            "WITH RECURSIVE a AS (SELECT a.attnum, a.attname, a.atttypid AS oid, a.atttypmod AS modifier, "
            "format_type(a.atttypid, a.atttypmod) AS sql, a.attnotnull AS required, a.atthasdef OR a.attidentity <> '' "
            "AS filled, a.attgenerated <> '' OR a.attidentity = 'a' AS generated, a.attcollation, "
            "pg_get_expr(d.adbin, d.adrelid) AS default_sql FROM pg_attribute a "
            "LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum "
            "WHERE a.attrelid = to_regclass(?) AND a.attnum > 0 AND NOT a.attisdropped "
            "UNION ALL SELECT a.attnum, a.attname, t.typbasetype, t.typtypmod, a.sql, a.required OR t.typnotnull, "
            "a.filled OR t.typdefault IS NOT NULL, a.generated, a.attcollation, a.default_sql FROM a JOIN pg_type t "
            "ON t.oid = a.oid AND t.typtype = 'd') "
            "SELECT a.attname, a.oid::bigint, a.modifier, a.sql, a.required, a.filled, a.generated, "
            "CASE WHEN t.typname = 'citext' THEN 'citext' WHEN NOT c.collisdeterministic THEN "
            "c.collnamespace::regnamespace || '.' || quote_ident(c.collname) END, a.default_sql FROM a "
            "JOIN pg_type t ON t.oid = a.oid LEFT JOIN pg_collation c ON c.oid = a.attcollation "
            "WHERE t.typtype <> 'd' ORDER BY a.attnum",
            (self.table(schema, name),),
        )
        if not rows and session.value("SELECT to_regclass(?)::text", (self.table(schema, name),)) is None:
            return None
        return [
            Column(
                name=column,
                field=types.field_of(column, oid, modifier, nullable=not required),
                sql=sql,
                required=required and not filled and not generated,
                generated=generated,
                default=f"({default})" if required and default is not None and not generated else None,
                collation=collation,
            )
            for column, oid, modifier, sql, required, filled, generated, collation, default in rows
        ]

    def primary_key(self, session: Session, schema: str | None, name: str) -> list[str]:
        # A name without a schema need not be in the first schema of the search path.
        rows = session.rows(
            "SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid "
            "AND a.attnum = ANY(i.indkey) WHERE i.indisprimary AND i.indrelid = to_regclass(?) "
            "ORDER BY array_position(i.indkey::int2[], a.attnum)",
            (self.table(schema, name),),
        )
        return [column for (column,) in rows]

    def running_transactions(self, session: Session) -> set[str]:
        # A snapshot does not list those that began after the last one that has ended. A lock lasts until others see
        # what was written.
        rows = session.rows(
            "SELECT transactionid::text FROM pg_locks "
            "WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted"
        )
        return {number for (number,) in rows}

    def sql_type(self, field: pa.Field, *, key: bool = False) -> str:
        """As the catalogue spells it; every type can be indexed but json."""
        if key and (is_nested(field.type) or hint_of(field) == "json"):
            raise DeclarationError(f"The column {field.name!r} is JSON, which PostgreSQL cannot take as a key.")
        return types.sql_type(field)

    def column_type(self, field: pa.Field, *, key: bool = False) -> str:
        if is_binary_json(field) and not key:
            return "jsonb"
        length = length_of(field)
        return self.sql_type(field, key=key) if length is None else f"character varying({length})"

    def fits(self, column: Column, field: pa.Field) -> bool:
        """Whether COPY writes the values into the column unchanged."""
        return types.takes(column.sql, field)

    def views_over(self, session: Session, names: Sequence[tuple[str | None, str]]) -> list[str]:
        ours = ", ".join("to_regclass(?)" for _ in names)
        tables = [self.table(*each) for each in names]
        rows = session.rows(
            "SELECT DISTINCT r.ev_class::regclass::text FROM pg_depend d JOIN pg_rewrite r ON r.oid = d.objid "
            "WHERE d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass "
            f"AND d.refobjid IN ({ours}) AND r.ev_class NOT IN ({ours}) ORDER BY 1",
            (*tables, *tables),
        )
        return [str(view) for (view,) in rows]

    def copy_in(self, session: Session, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        targets = self._targets(session, table, schema)
        names = self.listed(schema.names)
        sent = 0
        cursor: psycopg.Cursor[Any] = session.driver.cursor()
        with cursor.copy(f"COPY {table} ({names}) FROM STDIN (FORMAT binary)".encode()) as stream:
            stream.write(copy.HEADER)
            for batch in batches:
                for part in copy.encode(batch, targets):
                    stream.write(part)
                    sent += len(part)
            stream.write(copy.TRAILER)
        return sent

    def _targets(self, session: Session, table: str, schema: pa.Schema) -> list[copy.CopyTarget]:
        columns = session.rows(
            "SELECT attname, atttypid::bigint, atttypmod FROM pg_attribute "
            "WHERE attrelid = to_regclass(?) AND attnum > 0 AND NOT attisdropped",
            (table,),
        )
        targets = {name: copy.CopyTarget(oid, modifier) for name, oid, modifier in columns}
        for name in schema.names:
            if name not in targets:
                raise WeftError(f"The table {table} has no column {name!r}, or is not there.")
        return [targets[name] for name in schema.names]

    # ----------------------------------------------------------------------------------------------- words of a dialect

    def create_schema(self, session: Session, schema: str) -> None:
        """Without the lock of CREATE where it exists."""
        if not self.driver.has_schema(session, schema):
            self.driver.create_schema(session, schema)

    def change_type(self, schema: str | None, name: str, column: Column, kind: str) -> str:
        """With its collation, where that is not the one of the type."""
        with self.driver.session("read") as session:
            collation = session.value(
                "SELECT c.collnamespace::regnamespace || '.' || quote_ident(c.collname) FROM pg_attribute a "
                "JOIN pg_type t ON t.oid = a.atttypid AND t.typcollation <> a.attcollation "
                "JOIN pg_collation c ON c.oid = a.attcollation WHERE a.attrelid = to_regclass(?) AND a.attname = ?",
                (self.table(schema, name), column.name),
            )
        change = super().change_type(schema, name, column, kind)
        return change if collation is None else f"{change} COLLATE {collation}"

    def temporary(self, name: str) -> str:
        """In the session's own schema, whatever other tables are called."""
        return f"pg_temp.{self.quote(name)}"

    def create_temporary(self, session: Session, name: str, columns: str) -> None:
        """Create a table that is dropped at the end of the transaction."""
        self.drop_temporary(session, name)
        session.run(f"CREATE TEMPORARY TABLE {self.temporary(name)} ({columns}) ON COMMIT DROP")

    def create_temporary_as(self, session: Session, name: str, select: str, keys: dict[str, str] | None = None) -> int:
        """Create a table that is dropped at the end of the transaction; the server reports how many rows it got."""
        self.drop_temporary(session, name)
        cursor = session.run(f"CREATE TEMPORARY TABLE {self.temporary(name)} ON COMMIT DROP AS {select}")
        return int(cursor.rowcount)

    def filled(self, session: Session, table: str) -> None:
        """No autovacuum looks at temporary tables: without this the planner guesses their size."""
        session.run(f"ANALYZE {table}")

    def index_rows(self, session: Session, name: str) -> None:
        """The server finds a name for it."""
        session.run(f"CREATE INDEX ON {self.temporary(name)} ({self.quote(ROW)})")

    def create_key_index(self, session: Session, schema: str | None, name: str, keys: Sequence[str]) -> None:
        """The server finds a name that is free and short enough."""
        session.run(f"CREATE INDEX ON {self.table(schema, name)} ({self.listed(keys)})")

    def by_bytes(self, expression: str, field: pa.Field) -> str:
        # A UUID has no collation, and no need of one.
        return expression if hint_of(field) is not None else f'{expression} COLLATE "C"'

    def by_letters(self, column: Column) -> str:
        name = self.quote(column.name)
        return name if column.collation is None else f'{name}::text COLLATE "C" AS {name}'

    def sorts_fast(self, field: pa.Field) -> bool:
        """Numbers and times: count(DISTINCT …) sorts them in half the time that GROUP BY hashes them. Texts are
        compared by a collation, which takes longer."""
        kind = field.type
        return bool(pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind))

    def is_sortable(self, field: pa.Field) -> bool:
        return not is_nested(field.type) and hint_of(field) != "json"

    def lock(self, session: Session, schema: str | None, name: str) -> None:
        """Take an advisory lock: readers and appends by hand do not wait."""
        session.run(f"SET LOCAL lock_timeout = '{_LOAD_LOCK}'")
        session.run(
            "SELECT pg_advisory_xact_lock(?, hashtext(coalesce(?::text, current_schema()) || '.' || ?))",
            (_LOCK_SPACE, schema, name),
        )
        # Not DEFAULT, which is what the server has for new sessions: no limit.
        session.run(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")

    def as_key(self, expression: str, column: Column) -> str:
        """As citext, or by a collation that takes different letters for the same."""
        if column.collation == "citext":
            return f"CAST({expression} AS {column.sql})"
        return expression if column.collation is None else f"CAST({expression} AS text) COLLATE {column.collation}"

    def distinct(self, left: str, right: str, column: Column) -> str:
        """Columns as they are, which is fastest; texts by their letters, also where keys are not; json, which has no
        equality, as texts and where they differ as jsonb: the same value may be written in two ways. Types that travel
        as texts are compared as such: they have no equality (xml), or one that takes different values for the same
        (interval, circle). What is equal may look different: such a row is written once more."""
        if hint_of(column.field) == "json" and column.sql != "jsonb":
            return (
                f"CASE WHEN {left}::text IS NOT DISTINCT FROM {right}::text THEN FALSE "
                f"ELSE {left}::jsonb IS DISTINCT FROM {right}::jsonb END"
            )
        if column.collation is not None:
            return f'{left}::text COLLATE "C" IS DISTINCT FROM {right}::text COLLATE "C"'
        if column.field.type == pa.string() and types.parse(column.sql)[0] not in _TEXTS:
            return f"{left}::text IS DISTINCT FROM {right}::text"
        return f"{left} IS DISTINCT FROM {right}"

    def cast(self, expression: str, field: pa.Field, column: Column) -> str:
        """A value that the type would round or cut off is an error."""
        there, pattern = types.cast(expression, field, column.sql), pattern_between(field, column.field)
        if pattern is None:
            return there
        return types.checked(expression, there, f"CAST({expression} AS text) ~ '{pattern}'", column.sql)

    def row_hash(self, expressions: Sequence[str]) -> str:
        """Hash the row's text, in which nulls are empty and empty texts quoted."""
        return f"md5(ROW({', '.join(expressions)})::text)"

    def checksum(self, row_hash: str) -> str | None:
        return f"sum(('x' || left({row_hash}, 15))::bit(60)::bigint)"

    def add_seconds(self, expression: str, seconds: float) -> str:
        return f"({expression} + INTERVAL '{seconds:.6f} seconds')"

    def instant(self, expression: str, column: pa.Field) -> str:
        """Values without a zone are in UTC."""
        check_event_time(column)
        if pa.types.is_date(column.type):
            return f"(CAST({expression} AS timestamp) AT TIME ZONE 'UTC')"
        return expression if column.type.tz else f"({expression} AT TIME ZONE 'UTC')"

    def ordered(self, expression: str, field: pa.Field) -> str:
        """There is no max() of UUIDs before PostgreSQL 18; their texts have the same order."""
        return f'CAST({expression} AS text) COLLATE "C"' if hint_of(field) == "uuid" else expression

    def before_all(self, field: pa.Field) -> str:
        """There is no year 0 in PostgreSQL, but one before Christ."""
        return super().before_all(field).replace("0000-", "0001-").removesuffix("'") + " BC'"

    def refuses_name(self, name: str) -> str | None:
        if len(name.encode()) > _NAME_BYTES:
            return f"a name of PostgreSQL has at most {_NAME_BYTES} bytes"
        if name in _SYSTEM_COLUMNS:
            return "every table of PostgreSQL has a column of its own with this name"
        return super().refuses_name(name)

    def check_deferred(self, session: Session) -> None:
        """And then defer them again: a later statement may insert what an earlier one refers to."""
        session.run("SET CONSTRAINTS ALL IMMEDIATE")
        session.run("SET CONSTRAINTS ALL DEFERRED")

    def is_rejection(self, error: BaseException) -> bool:
        """Values (SQLSTATE class 22), constraints (23), rows or keys that are too large for a page (54000), and what a
        trigger raises (P0001). Not deadlocks, resources, or an operator's intervention."""
        return isinstance(error, SchemaError) or any(
            isinstance(cause, psycopg.Error)
            and ((cause.sqlstate or "")[:2] in ("22", "23") or cause.sqlstate in ("54000", "P0001"))
            for cause in causes(error)
        )

    def is_duplicate(self, error: BaseException) -> bool:
        return any(isinstance(cause, psycopg.errors.UniqueViolation) for cause in causes(error))

    def mark_rows(self, session: Session, name: str) -> str | None:
        """In a sequence, which no rollback changes. It ends with the table."""
        session.run(
            f"CREATE TEMPORARY SEQUENCE IF NOT EXISTS {_MARK} OWNED BY {self.temporary(name)}.{self.quote(ROW)}"
        )
        # Numbers begin at 0, sequences at 1.
        return f"setval('pg_temp.{_MARK}', {self.quote(ROW)} + 1) > 0"

    def marked_row(self, session: Session) -> int | None:
        return int(session.value(f"SELECT last_value FROM pg_temp.{_MARK}")) - 1

    def copied_rows(self, error: BaseException) -> int | None:
        """The server says at which line it is, from 1."""
        context = error.diag.context if isinstance(error, psycopg.Error) else None
        line = re.match(r"COPY [^,]+, \D*(\d+)", context or "")
        return None if line is None else int(line[1]) - 1

    def suspects(self, session: Session, load: Load, source: str, values: dict[str, str]) -> list[Suspect]:
        """Foreign keys are looked up after all rows of a statement, and UPDATE … FROM may read all of them first."""
        rules = constraints.of_table(session, self.table(load.schema, load.table))
        return breaking(self, session, source, values, rules)
