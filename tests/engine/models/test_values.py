"""A model that changes nothing has the values of its stream, of every type, whichever way it is written."""

from __future__ import annotations

import re
from contextlib import closing
from datetime import UTC, date, datetime
from typing import Any

import pytest

import weft
from systems.field_types import VALUES
from tests.engine.models.built import build, query, run
from weft.columns import hint_of
from weft.engine.readers import open_tables
from weft.project import Project, current
from weft.systems.sql.tables import Slice

# Dates that every database takes.
SAMPLES: dict[str, list[Any]] = {
    **VALUES,
    "string": ["", "a", "a ", "A", "ä\n'\"\\", "x" * 1000],
    "bytes": [b"", b"\0\xff", b"abc"],
    "date": [date(1969, 12, 31), date(2026, 2, 28)],
    "timestamp": [datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC), datetime(2026, 1, 31, 12, tzinfo=UTC)],
    "json": ['{"a": [1, null], "b": 1.5}', "[]"],
}


def column(kind: str) -> str:
    return "f_" + re.sub(r"\W", "_", kind)


@pytest.fixture
def everything(streams: Project) -> list[dict[str, Any]]:
    weft.stream(name="everything", fields={column(kind): kind for kind in SAMPLES})(lambda: None)
    size = max(map(len, SAMPLES.values())) + 1
    import json

    rows = []
    for number in range(size):
        row: dict[str, Any] = {}
        for kind, values in SAMPLES.items():
            value = values[number] if number < len(values) else None
            row[column(kind)] = json.loads(value) if kind == "json" and value is not None else value
        rows.append(row)
    weft.publish_sync("everything", rows)
    return rows


def stored(table: str) -> list[dict[str, Any]]:
    with closing(open_tables(current().connection())) as tables:
        sql = f"SELECT * FROM {table}"
        schema = tables.describe(sql)
        rows = [row for batch in tables.read(Slice(sql), schema) for row in batch.to_pylist()]
    names = [column(kind) for kind in SAMPLES]
    return sorted(
        ({name: row[name] for name in names} | {"at": row["_weft_rowid"]} for row in rows), key=lambda r: r["at"]
    )


def of_stream() -> list[dict[str, Any]]:
    """The same read from the stream as Arrow."""
    from weft.engine.readers import read_all, stream_reader

    rows = [row for batch in read_all(stream_reader("everything")) for row in batch.to_pylist()]
    names = [column(kind) for kind in SAMPLES]
    return sorted(
        ({name: row[name] for name in names} | {"at": row["_weft_rowid"]} for row in rows), key=lambda r: r["at"]
    )


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{name: f"{type(value).__name__} {value!r}" for name, value in row.items()} for row in rows]


def without_types(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As MySQL gives the columns of a query: its booleans are integers, its instants are times without a zone."""
    return [
        {name: value.replace(tzinfo=None) if isinstance(value, datetime) else value for name, value in row.items()}
        for row in rows
    ]


def test_pushed_down(everything: list[dict[str, Any]]) -> None:
    @weft.model(engine="pushdown")
    def by_sql(everything):  # type: ignore[no-untyped-def]
        return "SELECT * FROM everything"

    @weft.model(materialise="incremental")
    def by_arrow(everything: pyarrow.Table):  # type: ignore[no-untyped-def]  # noqa: F821
        return everything

    @weft.model(engine="pushdown")
    def copied(by_sql):  # type: ignore[no-untyped-def]
        return "SELECT * FROM by_sql"

    expected = comparable(of_stream())
    for model in (by_sql, by_arrow, copied):
        assert build(model).counts.inserted == len(everything)
        found = stored(model.name)
        if weft.get_connection("default").kind == "mysql" and model is not by_arrow:
            assert without_types(found) == without_types(of_stream()), model.name
        else:
            assert comparable(found) == expected, model.name


@pytest.mark.spark
@pytest.mark.brief("sqlite", "mysql")
def test_on_spark(everything: list[dict[str, Any]]) -> None:
    @weft.model(engine="spark")
    def by_ibis(everything):  # type: ignore[no-untyped-def]
        return everything

    assert build(by_ibis).engine == "spark"
    assert comparable(stored("by_ibis")) == comparable(of_stream())


@pytest.mark.brief("postgres", "mysql")
def test_ibis_pushed_down(everything: list[dict[str, Any]]) -> None:
    @weft.model
    def by_ibis(everything):  # type: ignore[no-untyped-def]
        return everything

    build(by_ibis)
    assert comparable(stored("by_ibis")) == comparable(of_stream())
    with closing(open_tables(current().connection())) as tables:
        columns = tables.describe("SELECT * FROM by_ibis")
    assert {hint_of(field) for field in columns} == {None, "uuid", "json"}


@pytest.mark.parametrize("system", ["postgres"], indirect=True)
def test_arrays_become_json_and_other_foreign_types_texts(streams: Project) -> None:
    run("CREATE TABLE posts (id int, tags text[], ns int[], prices numeric(6,2)[], us uuid[], i interval, js jsonb[])")
    run(
        "INSERT INTO posts VALUES (2, NULL, NULL, NULL, NULL, NULL, NULL), "
        "(1, '{a,\"b,\\\"c\",NULL}', '{1,NULL}', '{1.50}', "
        "'{00000000-0000-0000-0000-000000000005}', '1 day', ARRAY['1'::jsonb])"
    )

    @weft.model(materialise="merge", key=["id", "i"])
    def by_sql(posts):  # type: ignore[no-untyped-def]
        return "SELECT * FROM posts WHERE id = 1"

    @weft.model
    def by_ibis(posts):  # type: ignore[no-untyped-def]
        return posts

    @weft.model
    def by_arrow(posts: pyarrow.Table):  # type: ignore[no-untyped-def]  # noqa: F821
        return posts

    for model in (by_sql, by_ibis, by_arrow, by_sql):
        build(model)
        lists = [f"{name}::jsonb" for name in ("tags", "ns", "prices", "us")]
        assert query(f"SELECT id, {', '.join(lists)}, i, js FROM {model.name} ORDER BY id LIMIT 1") == [
            (1, ["a", 'b,"c', None], [1, None], [1.5], ["00000000-0000-0000-0000-000000000005"], "1 day", "{1}")
        ], model.name
