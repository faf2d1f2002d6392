"""What a table that is there has for columns."""

from __future__ import annotations

import pyarrow as pa
import pytest

from systems.tables import values
from weft.columns import hint_of, is_nested
from weft.errors import LoadRefusedError
from weft.systems.load import Load
from weft.systems.sql.commit import prepare
from weft.systems.sql.tables import SqlTables

pytestmark = pytest.mark.every_system


def test_no_such_table(tables: SqlTables) -> None:
    with tables.driver.session("publish") as session:
        assert tables.columns(session, None, "nowhere") is None
        assert tables.columns(session, "no schema", "nowhere") is None


def test_tables_of_ours_take_their_rows_unchanged(tables: SqlTables) -> None:
    values.create(tables, "typed", pa.schema(list(values.FIELDS.values())))
    with tables.driver.session("read") as session:
        columns = tables.columns(session, None, "typed")
    assert columns is not None
    assert [column.name for column in columns] == list(values.FIELDS)
    for column in columns:
        field = values.FIELDS[column.name]
        assert tables.fits(column, field), field
        assert not column.required and not column.generated
        if not is_nested(field.type):
            assert hint_of(column.field) == hint_of(field)


def test_lists_for_a_column_that_holds_none(tables: SqlTables) -> None:
    values.create(tables, "t", pa.schema([("n", pa.int64()), ("raw", pa.binary()), ("text", pa.string())]))
    load = Load.declare(target="t", mode="append")
    for name in ("n", "raw"):
        with pytest.raises(LoadRefusedError, match=f"The column '{name}' of t is of the type .* lists or objects"):
            prepare(tables, load, pa.schema([(name, pa.list_(pa.int64()))]))
    prepare(tables, load, pa.schema([("text", pa.list_(pa.int64()))]))


def test_what_an_insert_must_name(tables: SqlTables) -> None:
    whole = tables.sql_type(pa.field("x", pa.int32()))
    generated = "" if tables.dialect == "duckdb" else " STORED"
    with tables.driver.session("publish") as session:
        session.run(
            f"CREATE TABLE {tables.table(None, 'rules')} (needed {whole} NOT NULL, "
            f"filled {whole} DEFAULT 5 NOT NULL, free {whole}, "
            f"made {whole} GENERATED ALWAYS AS (free + 1){generated})"
        )
        columns = tables.columns(session, None, "rules")
    assert columns is not None
    assert {column.name: (column.required, column.generated) for column in columns} == {
        "needed": (True, False),
        "filled": (False, False),
        "free": (False, False),
        "made": (False, True),
    }
