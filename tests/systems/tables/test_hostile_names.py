"""Tables and columns may be called anything."""

from __future__ import annotations

import pyarrow as pa
import pytest

from systems.tables import values
from weft.errors import DeclarationError
from weft.systems.sql.tables import SqlTables

pytestmark = pytest.mark.every_system

NAMES = [
    "with space",
    'quo"te',
    "it's",
    "back`tick",
    "select",
    "Grüße 漢字",
    "🦀",
    "percent % %s",
    "question ?",
    "semi;colon -- comment",
    "dot.dot",
    "{brace} $1 :x",
    "back\\slash",
    "x" * 63,
]


def test_names(tables: SqlTables) -> None:
    # MySQL takes no letters beyond the basic plane in names.
    names = [name for name in NAMES if tables.dialect != "mysql" or max(name) <= "\uffff"]
    data = pa.table({name: [number, None] for number, name in enumerate(names)})
    for name in names:
        table = values.create(tables, name, data.schema)
        values.copy_in(tables, table, data)
        found = values.read_all(tables, f"SELECT * FROM {table}")
        assert found.schema.names == names
        assert sorted(map(str, found.to_pylist())) == sorted(map(str, data.to_pylist()))
        chosen = values.read_all(tables, f"SELECT * FROM {table}", names[3:1:-1])
        assert chosen.schema.names == names[3:1:-1]
        with tables.driver.session("read") as session:
            columns = tables.columns(session, None, name)
        assert columns is not None and [column.name for column in columns] == names


def test_schemas(tables: SqlTables) -> None:
    data = pa.table({"a b": [1]})
    with tables.driver.session("publish") as session:
        tables.create_schema(session, 'my "schema"')
    with tables.driver.session("publish") as session:
        tables.create_schema(session, 'my "schema"')  # where it is there, nothing happens
        table = tables.table('my "schema"', "or.ders")
        session.run(f"CREATE TABLE {table} ({tables.quote('a b')} {tables.sql_type(data.schema.field(0))})")
        tables.copy_in(session, table, data.schema, data.to_batches())
        columns = tables.columns(session, 'my "schema"', "or.ders")
        assert columns is not None and [column.name for column in columns] == ["a b"]
        assert tables.columns(session, None, "or.ders") is None
    assert values.read_all(tables, f"SELECT * FROM {table}").to_pylist() == [{"a b": 1}]


def test_temporary_tables(tables: SqlTables) -> None:
    data = pa.table({'a "b"': ["x", None]})
    with tables.driver.session("publish") as session:
        tables.drop_temporary(session, 'st"age')
        tables.create_temporary(
            session, 'st"age', f"{tables.quote(data.schema.names[0])} {tables.sql_type(data.schema.field(0))}"
        )
        stage = tables.temporary('st"age')
        tables.copy_in(session, stage, data.schema, data.to_batches())
        tables.filled(session, stage)
        assert tables.create_temporary_as(session, "co py", f"SELECT * FROM {stage} WHERE 1 = 1") == 2
        assert session.row(f"SELECT count(*) FROM {tables.temporary('co py')}") == (2,)
        for name in ("co py", 'st"age'):
            tables.drop_temporary(session, name)


def test_long_names(tables: SqlTables) -> None:
    data = pa.table({"x": [1]})
    longer = "é" * 40  # 80 bytes
    if tables.dialect == "postgres":
        # PostgreSQL would cut them off without a word.
        with pytest.raises(DeclarationError, match="63 bytes"):
            values.create(tables, longer, data.schema)
        with pytest.raises(DeclarationError, match="63 bytes"):
            values.create(tables, "short", pa.schema([(longer, pa.int64())]))
        return
    table = values.create(tables, longer, data.schema)
    values.copy_in(tables, table, data)
    assert values.read_all(tables, f"SELECT * FROM {table}").num_rows == 1
