"""The table that a load writes: how it is created, which columns it needs, and how it follows its declaration."""

from __future__ import annotations

import logging
import re

import pyarrow as pa

from weft.columns import hint_of, is_nested, length_of
from weft.errors import LoadRefusedError, WeftError
from weft.systems.changes import POSITION
from weft.systems.load import IS_CURRENT, ROW_HASH, SCD2_COLUMNS, VALID_FROM, VALID_TO, Load
from weft.systems.sql import cdc_gate, watermarks
from weft.systems.sql.tables import Column, SqlTables

_log = logging.getLogger("weft.engine")
# Tests stop a process here, by a handler on this logger.
_steps = logging.getLogger("weft.tables")


def ensure(tables: SqlTables, load: Load, written: pa.Schema) -> None:
    """Create the table where it is missing, add the declared columns that it lacks, and refuse rows that do not fit."""
    columns = _columns(tables, load)
    if columns is None:
        _steps.debug("missing")
        watermarks.forget(tables, load)
        if load.changes is not None:
            cdc_gate.forget(tables, load)
        _create(tables, load, written)
        columns = _columns(tables, load)
    if columns is None:
        raise WeftError(f"The table {load.name} could not be created.")
    if load.changes is not None and load.changes.is_history and POSITION not in {each.name for each in columns}:
        columns = _add_position(tables, load, columns)
    if load.declared is not None and load.declared.on_drift == "evolve":
        columns = _evolve(tables, load, written, columns)
    check_columns(load, written, columns)


def _add_position(tables: SqlTables, load: Load, columns: list[Column]) -> list[Column]:
    """Add the column that orders the versions of one time."""
    kind = tables.sql_type(pa.field(POSITION, pa.string()))
    try:
        with tables.driver.session("publish") as session:
            session.run(
                f"ALTER TABLE {tables.table(load.schema, load.table)} ADD COLUMN {tables.quote(POSITION)} {kind}"
            )
    except WeftError:
        # Another process may have been faster.
        if POSITION not in {each.name for each in _columns(tables, load) or columns}:
            raise
    return _columns(tables, load) or columns


def _columns(tables: SqlTables, load: Load) -> list[Column] | None:
    with tables.driver.session("read") as session:
        return tables.columns(session, load.schema, load.table)


# ------------------------------------------------------------------------------------------------------------- creation


def _create(tables: SqlTables, load: Load, written: pa.Schema) -> None:
    try:
        with tables.driver.session("publish") as session:
            if load.schema is not None:
                tables.create_schema(session, load.schema)
            session.run(create_statement(tables, load, written))
            if load.mode == "scd2":
                tables.create_key_index(session, load.schema, load.table, load.keys)
    except WeftError:
        # Another process may have been faster.
        if _columns(tables, load) is None:
            raise


def create_statement(tables: SqlTables, load: Load, written: pa.Schema) -> str:
    """Return the statement that creates the table: as it is declared, or else with the columns of its rows."""
    declared = load.declared.schema if load.declared is not None else None
    fields = list(declared if declared is not None else written)
    primary, unique = _keys(load)
    keyed = {*primary, *(name for group in unique for name in group), *(load.keys if load.tracks_rows else ())}
    definitions = []
    for field in fields:
        is_key = field.name in keyed
        required = is_key and (field.name in primary or field.name in load.keys)
        required = required or (declared is not None and not field.nullable)
        kind = tables.column_type(field, key=is_key)
        definitions.append(f"{tables.quote(field.name)} {kind}{' NOT NULL' if required else ''}")
    if load.mode == "scd2":
        definitions += [
            f"{tables.quote(field.name)} {tables.sql_type(field, key=field.name == VALID_FROM)}"
            f"{'' if field.nullable else ' NOT NULL'}"
            for field in scd2_fields()
        ]
        if load.changes is not None and load.changes.is_history:
            definitions.append(f"{tables.quote(POSITION)} {tables.sql_type(pa.field(POSITION, pa.string()))}")
        types = {field.name: tables.column_type(field, key=True) for field in fields if field.name in load.keys}
        definitions += tables.stage_index({key: types[key] for key in load.keys})
    if primary:
        definitions.append(f"PRIMARY KEY ({tables.listed(primary)})")
    definitions += [f"UNIQUE ({tables.listed(group)})" for group in unique]
    return f"CREATE TABLE IF NOT EXISTS {tables.table(load.schema, load.table)} ({', '.join(definitions)})"


def _keys(load: Load) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the primary key and the unique ones. In an scd2 table a key has many rows."""
    if load.mode == "scd2":
        return (), []
    declared = load.declared
    primary = declared.primary_key if declared is not None else ()
    unique = list(declared.unique) if declared is not None else []
    if load.mode == "merge":
        primary = primary or load.keys
        if set(load.keys) not in [set(primary), *map(set, unique)]:
            unique.append(load.keys)
    return primary, [group for group in unique if set(group) != set(primary)]


def scd2_fields() -> list[pa.Field]:
    """Return the columns that scd2 maintains itself."""
    instant = pa.timestamp("us", "UTC")
    return [
        pa.field(VALID_FROM, instant, nullable=False),
        pa.field(VALID_TO, instant),
        pa.field(IS_CURRENT, pa.bool_(), nullable=False),
        pa.field(ROW_HASH, pa.string()),
    ]


# ---------------------------------------------------------------------------------------------------------------- drift


def _evolve(tables: SqlTables, load: Load, written: pa.Schema, columns: list[Column]) -> list[Column]:
    """Add the columns that the table lacks (they may be null, because its rows have no value for them), and widen those
    that are declared wider than they are."""
    changes = evolution(tables, load, written, columns)
    if not changes:
        return columns
    try:
        with tables.driver.session("publish") as session:
            for statement in changes:
                session.run(statement)
                _log.warning("The table %s has changed: %s", load.name, statement)
    except WeftError as error:
        # Another run of the pipeline may have done the same; what is still missing was refused by the database.
        again = _columns(tables, load) or columns
        if evolution(tables, load, written, again):
            raise LoadRefusedError(f"The table {load.name} cannot be changed: {error.what}", hint=error.hint) from None
    return _columns(tables, load) or columns


def evolution(tables: SqlTables, load: Load, written: pa.Schema, columns: list[Column]) -> list[str]:
    """Return the statements that change the table to its declaration."""
    declared = list(load.declared.schema or ()) if load.declared is not None else []
    present = {column.name: column for column in columns}
    table = tables.table(load.schema, load.table)
    wanted = {field.name: field for field in [*written, *declared]}
    changes = [
        f"ALTER TABLE {table} ADD COLUMN {tables.quote(name)} {tables.column_type(field)}"
        for name, field in wanted.items()
        if name not in present
    ]
    for field in (*declared, *(() if load.changes is None else load.changes.wider)):
        column = present.get(field.name)
        if column is not None and tables.widens_columns and _is_wider(field, column):
            kind = tables.column_type(field, key=field.name in load.keys)
            change = tables.change_type(load.schema, load.table, column, kind)
            changes.append(f"ALTER TABLE {table} {change}")
    return changes


def _is_wider(field: pa.Field, column: Column) -> bool:
    """Whether a declared column holds all that the stored one holds, and more."""
    new, old = field.type, column.field.type
    if pa.types.is_integer(new) and pa.types.is_integer(old):
        return bool(new.bit_width > old.bit_width)
    if pa.types.is_float64(new) and pa.types.is_float32(old):
        return True
    if pa.types.is_decimal(new) and pa.types.is_decimal(old):
        whole, parts = new.precision - new.scale - (old.precision - old.scale), new.scale - old.scale
        return bool(whole >= 0 and parts >= 0 and whole + parts > 0)
    if pa.types.is_string(new) and pa.types.is_string(old) and hint_of(field) is None:
        length, wanted = length_in(column), length_of(field)
        return length is not None and (wanted is None or wanted > length)
    return False


def length_in(column: Column) -> int | None:
    """Return how many characters a column takes; `None` where there is no limit."""
    length = re.search(r"char[^(]*\((\d+)\)", column.sql, re.IGNORECASE)
    return None if length is None else int(length[1])


def _holds_json(kind: pa.DataType) -> bool:
    return is_nested(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)


def check_columns(load: Load, written: pa.Schema, columns: list[Column]) -> None:
    """Raise where the table cannot hold the rows."""
    present = {column.name: column for column in columns}
    for name in written.names:
        if name not in present:
            raise load.no_column(name, list(present))
        if present[name].generated:
            raise LoadRefusedError(
                f"The column {name!r} of {load.name} is generated by the database.", hint="Leave it out of the source."
            )
        kind = present[name].field.type
        if load.on_bad_rows == "fail" and is_nested(written.field(name).type) and not _holds_json(kind):
            raise LoadRefusedError(
                f"The column {name!r} of {load.name} is of the type {present[name].sql or kind}, and the source has "
                "lists or objects for it.",
                hint="Take a value out of them in SQL, or load them into a JSON or text column.",
            )
    if load.mode == "scd2":
        for name in SCD2_COLUMNS:
            if name not in present:
                raise LoadRefusedError(
                    f"The table {load.name} has no column {name!r}, which scd2 needs.",
                    hint="Let the first load create the table, or add valid_from, valid_to, is_current and row_hash.",
                )
    # Changes may be deletes alone, which bring no columns. An insert without the column is refused by the database.
    for column in columns if load.changes is None else ():
        own = SCD2_COLUMNS if load.mode == "scd2" else ()
        if column.required and column.name not in written.names and column.name not in own:
            raise LoadRefusedError(
                f"The column {column.name!r} of {load.name} may not be null and has no default, but the source has "
                "no such column.",
                hint="Add it to the source, or give it a default.",
            )
