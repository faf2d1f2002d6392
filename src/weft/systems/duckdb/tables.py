"""Tables of a DuckDB file. It speaks Arrow itself; what is left is to name types."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import chain, compress
from typing import Any, ClassVar

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from weft.columns import canonical_batch, canonical_schema, hint_of, hinted, is_nested, nested_to_json
from weft.errors import DeclarationError, SchemaError
from weft.systems.duckdb import suspects
from weft.systems.duckdb.connection import DuckDBConnection
from weft.systems.duckdb.sessions import DuckDBSessions, is_rejection, waiting_turn
from weft.systems.file_connection import MEMORY
from weft.systems.load import Load
from weft.systems.sql.driver import Role, Session, SqlDriver
from weft.systems.sql.literals import literal
from weft.systems.sql.spellings import pattern_between
from weft.systems.sql.tables import ROW, Column, Slice, SqlTables, Suspect, bare_rows, causes, subquery
from weft.systems.sql.tokens import quote_name

# A batch's rows: a multiple of what DuckDB's own vectors have.
_READ_ROWS = 16 * 1024
# The rows of one INSERT: a row group of DuckDB's has 122,880 rows.
_WRITE_ROWS = 128 * 1024
_WRITE_BYTES = 64 * 1024 * 1024


class DuckDBTables(SqlTables):
    """The tables of one file. DuckDB keeps lists, structs and maps as they are."""

    dialect: ClassVar[str] = "duckdb"
    sessions: ClassVar[type[SqlDriver]] = DuckDBSessions
    default_schema: ClassVar[str | None] = "main"
    one_host: ClassVar[bool] = True
    one_writer: ClassVar[bool] = True
    savepoints: ClassVar[bool] = False
    clock: ClassVar[str | None] = "now()"
    enforces_lengths: ClassVar[bool] = False
    folds_tables: ClassVar[bool] = True

    connection: DuckDBConnection
    driver: DuckDBSessions

    def __getstate__(self) -> dict[str, Any]:
        if self.connection.path == MEMORY:
            raise DeclarationError(
                f"Spark's tasks cannot reach {self.connection.label}: it is in the memory of this process.",
                hint='Use a file: DuckDBConnection("warehouse.duckdb").',
            )
        return super().__getstate__()

    def waiting_turn(self, role: Role) -> AbstractContextManager[None]:
        """One process at a time can open the file, and the one that waits longest asks least often: next to busy
        processes it would never open it. So processes that open it often take turns before they ask."""
        return waiting_turn(self.connection.path or MEMORY, exclusive=role != "read")

    def create_index(self, name: str, table: str, columns: Sequence[str]) -> str | None:
        """Create no index: DuckDB keeps the least and the greatest value of each block of rows."""
        return None

    def drop_index(self, name: str) -> str | None:
        """Do nothing: `create_index` creates none."""
        return None

    def identity(self) -> str:
        """The file, however it was written."""
        path = self.connection.path or ""
        return f"duckdb:{self.connection.name or ''}:{MEMORY}" if path == MEMORY else f"duckdb:{os.path.realpath(path)}"

    # ---------------------------------------------------------------------------------------------------------- reading

    def describe(self, sql: str) -> pa.Schema:
        """Bind the query: DuckDB plans it and runs nothing."""
        with self.driver.session("read") as session:
            return _described(_relation(session.driver, sql))

    def read(self, part: Slice, schema: pa.Schema, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """A streaming result: rows are computed as they are asked for, in the snapshot of its beginning."""
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
        with self.driver.session("read") as session:
            relation = _relation(session.driver, part.sql)
            if not schema.names:
                yield bare_rows(session.value(f"SELECT count(*) FROM {subquery(part.sql)} AS q"))
                return
            by_name = dict(zip(relation.columns, relation.types, strict=True))
            selected = [_selected(self.quote(field.name), by_name.get(field.name)) for field in schema]
            if columns is not None or any(expression is not None for expression in selected):
                spelled = ", ".join(
                    f"{expression or self.quote(field.name)} AS {self.quote(field.name)}"
                    for expression, field in zip(selected, schema, strict=True)
                )
                relation = _relation(session.driver, f"SELECT {spelled} FROM {subquery(part.sql)} AS q")
            for batch in relation.to_arrow_reader(_READ_ROWS):
                if batch.num_rows:
                    yield canonical_batch(_finite(batch), schema)

    # ---------------------------------------------------------------------------------------------------------- writing

    def columns(self, session: Session, schema: str | None, name: str) -> list[Column] | None:
        """From the information schema; DuckDB compares names without regard to case."""
        rows = session.rows(
            "SELECT column_name, data_type, is_nullable, column_default, is_generated FROM information_schema.columns "
            "WHERE table_catalog = ? AND lower(table_schema) = lower(?) AND lower(table_name) = lower(?) "
            "ORDER BY ordinal_position",
            (self.driver.catalog, "main" if schema is None else schema, name),
        )
        if not rows:
            return None
        fields = _described(_relation(session.driver, f"SELECT * FROM {self.table(schema, name)}"), strict=False)
        texts = [column for column, kind, *_ in rows if kind == "VARCHAR"]
        collations = self._collations(session, self.table(schema, name), texts)
        return [
            Column(
                name=column,
                field=field,
                sql=kind,
                required=nullable == "NO" and default is None and generated != "ALWAYS",
                generated=generated == "ALWAYS",
                default=f"({default})" if nullable == "NO" and default and generated != "ALWAYS" else None,
                collation=collations.get(column),
            )
            for field, (column, kind, nullable, default, generated) in zip(fields, rows, strict=True)
        ]

    def _collations(self, session: Session, table: str, texts: list[str]) -> dict[str, str | None]:
        """Find them by comparing texts, because the catalogue does not show them."""
        if not texts:
            return {}
        tried = [f"bool_or({self.quote(column)} = '{like}')" for column in texts for like in _LIKE_A.values()]
        columns = f"SELECT {self.listed(texts)} FROM {table} WHERE FALSE"
        letters = ", ".join(["'a'"] * len(texts))
        (equal,) = session.rows(f"SELECT {', '.join(tried)} FROM ({columns} UNION ALL SELECT {letters}) AS q")
        pairs = zip(equal[::2], equal[1::2], strict=True)
        named = [".".join(compress(_LIKE_A, pair)) or None for pair in pairs]
        return dict(zip(texts, named, strict=True))

    def by_letters(self, column: Column) -> str:
        """There may be other collations; the plan of this is the same where a column has none."""
        name = self.quote(column.name)
        return f'{name} COLLATE "binary" AS {name}' if column.sql == "VARCHAR" else name

    def as_key(self, expression: str, column: Column) -> str:
        return expression if column.collation is None else f"{expression} COLLATE {column.collation}"

    def distinct(self, left: str, right: str, column: Column) -> str:
        """Texts by their letters, whatever the column's collation says."""
        if column.collation is not None:
            left, right = f'{left} COLLATE "binary"', f'{right} COLLATE "binary"'
        return super().distinct(left, right, column)

    def sql_type(self, field: pa.Field, *, key: bool = False) -> str:
        """DuckDB's own types, nested ones too."""
        hint = hint_of(field)
        return _HINTED[hint] if hint is not None else _sql(field.type)

    def fits(self, column: Column, field: pa.Field) -> bool:
        """Also where both are nested: what types such a column has is compared by their Arrow types."""
        same = column.field.type.equals(field.type) and hint_of(column.field) == hint_of(field)
        return bool(same) and (column.sql == self.sql_type(field) or is_nested(field.type))

    def copy_in(self, session: Session, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        """INSERT … SELECT from Arrow, a row group at a time."""
        names = self.listed(schema.names)
        as_json = [
            index for index, field in enumerate(schema) if is_nested(field.type) and _sql(field.type) == _HINTED["json"]
        ]
        sent = 0
        for group in _groups(batches):
            rows = pa.Table.from_batches(group).combine_chunks()
            for index in as_json:
                texts = nested_to_json(rows.column(index).combine_chunks())
                rows = rows.set_column(index, schema.names[index], texts)
            session.driver.register(_INCOMING, rows)
            try:
                session.driver.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM {_INCOMING}")
            finally:
                with suppress(duckdb.TransactionException):  # of a transaction that has failed: the reason is above
                    session.driver.unregister(_INCOMING)
            sent += rows.nbytes
        return sent

    # ----------------------------------------------------------------------------------------------- words of a dialect

    def table(self, schema: str | None, name: str) -> str:
        """With catalogue and schema, so that no temporary table is taken for it."""
        return self.driver.table("main" if schema is None else schema, name)

    def create_schema(self, session: Session, schema: str) -> None:
        session.run(f"CREATE SCHEMA IF NOT EXISTS {self.quote(self.driver.catalog)}.{self.quote(schema)}")

    def temporary(self, name: str) -> str:
        return f"temp.main.{self.quote(name)}"

    def create_key_index(self, session: Session, schema: str | None, name: str, keys: Sequence[str]) -> None:
        """None: DuckDB joins by hashes, and an index makes every later insert slower."""

    def cast(self, expression: str, field: pa.Field, column: Column) -> str:
        """DuckDB rounds, cuts off and drops the time of day: what comes back from the cast must be what went in."""
        there, same = self._cast(expression, field, column)
        if same is None:
            return there
        kind = column.sql.replace("'", "")
        wrong = f"error(CAST({expression} AS VARCHAR) || ' does not fit {kind}')"
        return f"CASE WHEN {expression} IS NULL OR {same} THEN {there} ELSE {wrong} END"

    def try_cast(self, expression: str, field: pa.Field, column: Column) -> str:
        there, same = self._cast(expression, field, column, "TRY_CAST")
        return there if same is None else f"CASE WHEN {same} THEN {there} END"

    def _cast(self, expression: str, field: pa.Field, column: Column, cast: str = "CAST") -> tuple[str, str | None]:
        """A value as a column's type, and the condition that it is the same then, where it may not be."""
        there, same = self._converted(expression, field, column, cast)
        if pattern := pattern_between(field, column.field):
            if column.sql == "TIMESTAMP_NS":
                pattern = pattern.replace("{1,6}0*", "{1,9}")
            is_spelled = f"regexp_matches(CAST({expression} AS VARCHAR), '{pattern}')"
            same = is_spelled if same is None else f"({is_spelled} AND {same})"
        return there, same

    def _converted(self, expression: str, field: pa.Field, column: Column, cast: str) -> tuple[str, str | None]:
        own = self.sql_type(field)
        if is_nested(field.type) and own != _HINTED["json"] and column.sql != own:
            within, same = self._nested(expression, field.type, column.field.type, cast)
            return f"{cast}({within} AS {column.sql})", same
        there = f"{cast}({expression} AS {column.sql})"
        if own == "VARCHAR" and column.sql in ("FLOAT", "DOUBLE"):
            return there, f"(NOT isinf({there}) OR {expression} ILIKE '%inf%')"
        is_local = column.sql.startswith(("DATE", "TIMESTAMP")) and column.sql != "TIMESTAMP WITH TIME ZONE"
        if own == "VARCHAR" and is_local:
            # DuckDB would leave the zone out. Nanoseconds have no instant: with a zone that shifts, they do not fit.
            instant = f"CAST({cast}({expression} AS TIMESTAMP WITH TIME ZONE) AS TIMESTAMP)"
            there = there if column.sql == "TIMESTAMP_NS" else f"{cast}({instant} AS {column.sql})"
            return there, f"{cast}({there} AS TIMESTAMP) = {instant}"
        if column.sql == own or is_nested(field.type) or column.sql in ("VARCHAR", "FLOAT", "DOUBLE"):
            return there, None
        back = own
        if own == "VARCHAR":
            # An instant is that of the text, also where its zone is another one than UTC.
            if not column.sql.startswith(_ROUNDED) or column.sql == "TIMESTAMP WITH TIME ZONE":
                return there, None
            # Compare as a type that has all the digits which the text may have.
            back = "DECIMAL(38,10)"
        same = f"{cast}({there} AS {back}) = {cast}({expression} AS {back})"
        if own == "VARCHAR" and pa.types.is_decimal(column.field.type):
            # A decimal with more digits behind the point may have too few before it: the text itself says it.
            same = _fits_scale(expression, column.field.type.scale)
        if own == "VARCHAR" and column.sql == "TIME":
            same = f"{expression} NOT LIKE '%-%'"  # a date
        return there, same

    def _nested(
        self, expression: str, kind: pa.DataType, other: pa.DataType, cast: str, depth: int = 0
    ) -> tuple[str, str | None]:
        """A list or an object with the keys of another type, and the condition that it is the same then.
        DuckDB would leave out the other keys, and refuses the statement where two types have no key in common."""
        item = f"v{depth}"
        if pa.types.is_list(kind) and pa.types.is_list(other):
            there, same = self._nested(item, kind.value_type, other.value_type, cast, depth + 1)
            return f"list_transform({expression}, lambda {item}: {there})", _all(expression, item, same)
        if pa.types.is_map(kind) and pa.types.is_map(other):
            _, same = self._nested(item, kind.item_type, other.item_type, cast, depth + 1)
            return expression, _all(f"map_values({expression})", item, same)
        if pa.types.is_struct(kind) and pa.types.is_struct(other):
            own = {each.name.lower(): each for each in kind}
            kept, conditions = [], []
            for each in other:
                there, same = "NULL", None
                if member := own.pop(each.name.lower(), None):
                    value = _member(expression, member.name)
                    there, same = self._nested(value, member.type, each.type, cast, depth)
                    conditions += [f"({value} IS NULL OR {same})"] if same else []
                kept.append(f"{self.quote(each.name)} := {there}")
            conditions += [f"{_member(expression, name.name)} IS NULL" for name in own.values()]
            return f"CASE WHEN {expression} IS NOT NULL THEN struct_pack({', '.join(kept)}) END", (
                f"({' AND '.join(conditions)})" if conditions else None
            )
        if is_nested(kind) and pa.types.is_string(other):
            return f"CAST(to_json({expression}) AS VARCHAR)", None  # a cast to text writes {'a': 1}
        if is_nested(kind) or is_nested(other) or pa.types.is_string(other):
            return expression, None
        return self._cast(expression, pa.field("", kind), Column("", pa.field("", other), _sql(other)), cast)

    def row_hash(self, expressions: Sequence[str]) -> str:
        """Hash a JSON list of texts, in which null, empty and shifted values differ."""
        texts = ", ".join(f"CAST({each} AS VARCHAR)" for each in expressions)
        return f"md5(CAST(to_json([{texts}]) AS VARCHAR))"

    def ordered(self, expression: str, field: pa.Field) -> str:
        """UUIDs as texts, which have the same order: what a driver gives of them is no value that a query takes."""
        return f"CAST({expression} AS VARCHAR)" if hint_of(field) == "uuid" else expression

    def add_seconds(self, expression: str, seconds: float) -> str:
        return f"({expression} + to_microseconds({round(seconds * 1_000_000)}))"

    def instant(self, expression: str, column: pa.Field) -> str:
        """Dates and times without a zone are UTC, as the session's zone is."""
        return f"CAST({expression} AS TIMESTAMP WITH TIME ZONE)"

    def is_rejection(self, error: BaseException) -> bool:
        """Whether DuckDB refused it, or Weft in its place."""
        return isinstance(error, SchemaError) or is_rejection(error)

    def is_duplicate(self, error: BaseException) -> bool:
        return any(isinstance(cause, duckdb.Error) and "uplicate key" in str(cause) for cause in causes(error))

    def unreadable(self, session: Session, source: str, expressions: Sequence[str]) -> list[int]:
        """By TRY, which takes no function that raises: what normalizers raise fails as a value of their column too."""
        tried = (f"TRY(({each.replace('ERROR(', '(')}) IS NULL) IS NULL" for each in expressions)
        rows = session.rows(f"SELECT {self.quote(ROW)} FROM {source} AS q WHERE {' OR '.join(tried)} ORDER BY 1")
        return [row for (row,) in rows]

    def suspects(self, session: Session, load: Load, source: str, values: dict[str, str]) -> list[Suspect]:
        """Return all rows that break a constraint: DuckDB does not read row by row."""
        return suspects.find(self, session, load, source, values)


def _fits_scale(text: str, scale: int) -> str:
    """The condition that a number in a text has no more digits behind the point than a column, but for zeros."""
    text = f"replace({text}, '_', '')"  # which DuckDB reads over
    mantissa = f"regexp_replace({text}, '[eE].*', '')"
    fraction, digits = f"length(regexp_extract({mantissa}, '[.]([0-9]*)', 1))", f"replace(trim({mantissa}), '.', '')"
    zeros = f"length({digits}) - length(rtrim({digits}, '0'))"
    exponent = f"TRY_CAST(regexp_extract({text}, '[eE]([+-]?[0-9]+)', 1) AS BIGINT)"
    return (
        f"CASE WHEN NOT regexp_matches({text}, '[eE]') "
        f"THEN NOT regexp_matches({text}, '[.][0-9]{{{scale}}}[0-9]*[1-9]') "
        f"ELSE NOT regexp_matches({mantissa}, '[1-9]') OR {fraction} - ({zeros}) - {exponent} <= {scale} END"
    )


_INCOMING = "_weft_incoming"
_LIKE_A = {"NOCASE": "A", "NOACCENT": "ä"}
"""The collations that take different letters for the same, and a letter that is an `a` to each."""
_INTEGERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT")
_ROUNDED = (*_INTEGERS, *(f"U{each}" for each in _INTEGERS), "DECIMAL", "DATE", "TIME")

# ---------------------------------------------------------------------------------------------------------------- types

_HINTED = {"uuid": "UUID", "json": "JSON", "time": "TIME"}
_SQL: list[tuple[Callable[[pa.DataType], bool], str]] = [
    (pa.types.is_boolean, "BOOLEAN"),
    (pa.types.is_int8, "TINYINT"),
    (pa.types.is_int16, "SMALLINT"),
    (pa.types.is_int32, "INTEGER"),
    (pa.types.is_int64, "BIGINT"),
    (pa.types.is_float32, "FLOAT"),
    (pa.types.is_float64, "DOUBLE"),
    (pa.types.is_date, "DATE"),
    (pa.types.is_string, "VARCHAR"),
    (pa.types.is_binary, "BLOB"),
]


def _sql(kind: pa.DataType) -> str:
    if pa.types.is_decimal(kind):
        return f"DECIMAL({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "TIMESTAMP WITH TIME ZONE" if kind.tz else "TIMESTAMP"
    if pa.types.is_map(kind):
        return _native((kind.key_type, kind.item_type), lambda key, item: f"MAP({key}, {item})")
    if pa.types.is_list(kind):
        return _native((kind.value_type,), lambda value: f"{value}[]")
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        # DuckDB has no struct without fields, and none whose names differ by case alone.
        if not names or len({name.lower() for name in names}) < len(names) or "" in names:
            return _HINTED["json"]
        quoted = [quote_name(name) for name in names]
        return _native(
            [field.type for field in kind],
            lambda *kinds: f"STRUCT({', '.join(f'{name} {each}' for name, each in zip(quoted, kinds, strict=True))})",
        )
    return next(sql for matches, sql in _SQL if matches(kind))


def _native(inner: Sequence[pa.DataType], spell: Callable[..., str]) -> str:
    kinds = [_sql(each) for each in inner]
    # If a part has to be JSON, the whole is JSON: no nested Arrow type can hold it.
    return _HINTED["json"] if _HINTED["json"] in kinds else spell(*kinds)


# Read as text: Arrow has no such type, or DuckDB gives it another meaning there (the offset of a time is left out).
_AS_TEXT = {"uuid": "uuid", "time": "time", "time_ns": None, "time with time zone": None, "enum": None, "bit": None}
_REFUSED = {"interval", "union", "variant", "bignum", "varint", "geometry"}


def _described(relation: duckdb.DuckDBPyRelation, *, strict: bool = True) -> pa.Schema:
    """The canonical schema; a table of which such columns are not asked for may have types that cannot be read."""
    plain = relation.limit(0).to_arrow_reader().schema
    fields = []
    for name, kind, field in zip(relation.columns, relation.types, plain, strict=True):
        described = _field(name, kind, field, strict=strict)
        fields.append(described if described is not None else canonical_schema(pa.schema([field])).field(0))
    return pa.schema(fields)


def _field(name: str, kind: Any, field: pa.Field, *, strict: bool) -> pa.Field | None:
    if refused := _refused(kind):
        if not strict:
            return pa.field(name, pa.string())
        raise SchemaError(
            f"Column {name!r} is of DuckDB's type {refused}, which no other system holds.",
            field=name,
            hint=f"Leave it out of the query, or say what it is there: CAST({name} AS VARCHAR).",
        )
    word = _word(kind)
    if word in _AS_TEXT:
        hint = _AS_TEXT[word]
        return pa.field(name, pa.string()) if hint is None else hinted(name, hint)
    if str(kind) == "JSON":
        return hinted(name, "json")
    return pa.field(name, pa.decimal128(38, 0)) if word in ("hugeint", "uhugeint") else None


def _selected(quoted: str, kind: Any) -> str | None:
    """Return what to select in place of a column whose type has no equal in Arrow."""
    word = _word(kind) if kind is not None else ""
    if word in _AS_TEXT:
        return f"CAST({quoted} AS VARCHAR)"
    # An error where 38 digits are not enough.
    return f"CAST({quoted} AS DECIMAL(38, 0))" if word in ("hugeint", "uhugeint") else None


def _word(kind: Any) -> str:
    return str(kind.id)


def _refused(kind: Any, *, inside: bool = False) -> str | None:
    word = _word(kind)
    if word in _REFUSED or (inside and word in ("bit", "time with time zone")):
        return str(kind)
    if word in ("list", "array", "struct", "map"):
        for _, child in kind.children:
            if not isinstance(child, int) and (refused := _refused(child, inside=True)):
                return refused
    return None


def _relation(driver: duckdb.DuckDBPyConnection, sql: str) -> duckdb.DuckDBPyRelation:
    statements = driver.extract_statements(sql)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise DeclarationError("A source is one query: SELECT …", hint=f"This is not a query: {sql.strip()[:80]}")
    # `sql` rather than `execute`, whose results are copied once more.
    return driver.sql(sql)


def _finite(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Refuse 'infinity': it is the largest number to Arrow, and a moment in the year 294247 to a reader."""
    for array, field in zip(batch.columns, batch.schema, strict=True):
        if pa.types.is_timestamp(field.type) or pa.types.is_date(field.type):
            bits = 31 if pa.types.is_date(field.type) else 63
            bounds = pc.min_max(array.cast(pa.int32() if bits == 31 else pa.int64()))
            if (1 << bits) - 1 in (bounds["max"].as_py(), -(bounds["min"].as_py() or 0)):
                raise SchemaError(f"Column {field.name!r} holds infinity, which is not a date.", field=field.name)
    return batch


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    group: list[pa.RecordBatch] = []
    for batch in chain(batches, [None]):
        if batch is not None and batch.num_rows:
            group.append(batch)
        rows, size = sum(each.num_rows for each in group), sum(each.nbytes for each in group)
        full = rows >= _WRITE_ROWS or size >= _WRITE_BYTES
        if group and (full or batch is None):
            yield group
            group = []


def _member(expression: str, name: str) -> str:
    return f"struct_extract({expression}, {literal(name, 'duckdb')})"


def _all(items: str, item: str, condition: str | None) -> str | None:
    """The condition that one is true of all items of a list."""
    if condition is None:
        return None
    return f"len(list_filter({items}, lambda {item}: NOT coalesce({item} IS NULL OR {condition}, FALSE))) = 0"
