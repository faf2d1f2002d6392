"""Inputs with columns of types that no other system holds."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import weft
from tests.engine.models.built import build, query, run
from weft.engine.readers import open_tables
from weft.errors import SchemaError
from weft.project import Project, current


@pytest.fixture
def arr(project: Path) -> None:
    weft.connect(url=f"duckdb:///{project}/arr.duckdb", name="duck")
    with closing(open_tables(current().connection("duck"))) as tables, tables.driver.session("publish") as session:
        session.run("CREATE TABLE arr (iv interval, id int, s varchar, b bignum)")
        session.run("INSERT INTO arr VALUES (INTERVAL 2 DAY, 1, 'a', 7)")


def rows(sql: str) -> list[tuple[Any, ...]]:
    with closing(open_tables(current().connection("duck"))) as tables, tables.driver.session("read") as session:
        return [tuple(row) for row in session.rows(sql)]


@pytest.mark.full
def test_in_the_database_itself(arr: None) -> None:
    options: dict[str, Any] = {"connection": "duck", "dependencies": ["duck.main.arr"], "engine": "pushdown"}

    @weft.model(**options)
    def by_sql(arr: Any) -> str:
        return "SELECT id, CAST(iv AS VARCHAR) AS iv FROM arr"

    @weft.model(**options)
    def by_ibis(arr: Any) -> Any:
        return arr

    @weft.model(**options)
    def everything(arr: Any) -> str:
        return "SELECT * FROM arr"

    build(by_sql)
    build(by_ibis)
    with pytest.raises(SchemaError, match=r"'iv' is of DuckDB's type INTERVAL[\s\S]*Leave it out of the query"):
        build(everything)
    assert rows("SELECT * FROM by_sql") == [(1, "2 days")]
    assert rows("SELECT * FROM by_ibis") == [(1, "a")]


@pytest.mark.spark
def test_elsewhere(arr: None) -> None:
    @weft.model(dependencies=["duck.main.arr"])
    def by_sql(arr: Any) -> str:
        return "SELECT id FROM (SELECT * FROM arr) WHERE s = 'a'"

    @weft.model(dependencies=["duck.main.arr"])
    def by_frame(arr: pa.Table) -> pa.Table:
        return arr

    @weft.model(dependencies=["duck.main.arr"])
    def everything(arr: Any) -> str:
        return "SELECT * FROM arr"

    assert build(by_sql).engine == "spark"
    build(by_frame)
    with pytest.raises(SchemaError, match=r"'iv' is of DuckDB's type INTERVAL[\s\S]*Leave it out of the query"):
        build(everything)
    assert query("SELECT id FROM by_sql") == [(1,)]
    assert query("SELECT id, s FROM by_frame") == [(1, "a")]


@pytest.mark.parametrize("system", ["mysql"], indirect=True)
def test_geometry(streams: Project) -> None:
    run("CREATE TABLE places (id int, place point)")
    run("INSERT INTO places VALUES (1, ST_PointFromText('POINT(1 2)'))")

    @weft.model(dependencies=["places"])
    def by_sql(places: Any) -> str:
        return "SELECT id, ST_AsText(place) AS place FROM places"

    @weft.model(dependencies=["places"])
    def by_ibis(places: Any) -> Any:
        return places

    build(by_sql)
    build(by_ibis)
    assert query("SELECT id, place FROM by_sql") == [(1, "POINT(1 2)")]
    assert query("SELECT * FROM by_ibis") == [(1,)]
