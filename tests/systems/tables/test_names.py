"""The tables of a database, by which an error names the one that may be meant."""

from __future__ import annotations

import pytest

import weft
from weft.engine.streaming.lookups import columns_of
from weft.project import Project, use
from weft.systems.sql.tables import SqlTables

pytestmark = pytest.mark.every_system


def test_names_of_a_schema(tables: SqlTables) -> None:
    with tables.driver.session("publish") as session:
        tables.create_schema(session, "marts")
        session.run(f"CREATE TABLE {tables.table(None, 'users')} (id INTEGER)")
        session.run(f"CREATE TABLE {tables.table('marts', 'daily')} (id INTEGER)")
        session.run(f"CREATE VIEW {tables.table(None, 'adults')} AS SELECT * FROM {tables.table(None, 'users')}")
        assert {"users", "adults"} <= set(tables.names(session, None))
        assert tables.names(session, "marts") == ["daily"]


@pytest.mark.parametrize("schema", [None, "marts"])
def test_a_lookup_that_is_not_there(tables: SqlTables, database_url: str, schema: str | None) -> None:
    with tables.driver.session("publish") as session:
        tables.create_schema(session, "marts")
        session.run(f"CREATE TABLE {tables.table(schema, 'users')} (id INTEGER)")
    tables.close()
    with use(Project()):
        weft.connect(url=database_url, name="here")
        assert columns_of("u", weft.Lookup(connection="here", table="users", schema=schema)).names == ["id"]
        with pytest.raises(weft.NotFoundError, match=r"There is no table (marts\.)?user on the connection") as caught:
            columns_of("u", weft.Lookup(connection="here", table="user", schema=schema))
        assert (caught.value.hint, caught.value.__notes__) == ("Did you mean 'users'?", ["lookup u"])
        with pytest.raises(weft.WeftError, match="nobody"):
            columns_of("u", weft.Lookup(connection="here", query="SELECT * FROM nobody"))


@pytest.mark.spark
def test_columns_that_differ_in_case_alone(tables: SqlTables, database_url: str) -> None:
    rows = [{"n": 1, "N": "one"}]
    with use(Project()):
        weft.connect(url=database_url, name="here")
        if not tables.folds_columns:
            weft.load(rows, target="twins", connection="here")
            assert weft.sql('SELECT n, "N" FROM here.twins', to="rows") == rows
            return
        with pytest.raises(weft.WeftError, match="twins has the columns 'n' and 'N', which are one column") as caught:
            weft.load(rows, target="twins", connection="here")
        assert "another name" in str(caught.value.hint)
        weft.load([{"n": 1}], target="twins", connection="here")
        with pytest.raises(weft.WeftError, match="twins has no column 'N'"):
            weft.load([{"N": 1}], target="twins", connection="here")
