"""A stream is a table: its name in SQL, and the hint where the table is not there yet."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from weft.engine.readers import open_tables
from weft.operate.hints import hint_for
from weft.project import Project, use
from weft.systems.sql.tables import Slice


def test_the_table_of_a_stream(system: Any) -> None:
    with use(Project()) as project:
        weft.register_connection(weft.connect(url=system.url, name="here"))

        @weft.stream(fields={"n": "int64"}, connection="here")
        def numbers() -> None:
            pass

        connection = project.connection("here")
        tables = open_tables(connection)
        sql = f"SELECT n FROM {connection.stream_table(numbers)}"
        with pytest.raises(weft.WeftError) as caught:
            tables.describe(sql)
            list(tables.read(Slice(sql), tables.describe(sql)))
        assert "weft streams publish numbers --data" in (hint_for(caught.value.what) or "")
        weft.publish_sync(numbers, [{"n": 1}, {"n": 2}])
        batches = tables.read(Slice(sql), tables.describe(sql))
        assert [row["n"] for batch in batches for row in batch.to_pylist()] == [1, 2]
        tables.close()
        weft.streams.close(project)


def test_a_stream_that_is_no_table() -> None:
    with use(Project()):

        @weft.stream(fields={"n": "int64"})
        def numbers() -> None:
            pass

        redis = weft.connect(url="redis://localhost", name="cache")
        with pytest.raises(weft.DeclarationError, match="On the connection 'cache' a stream is not a table"):
            redis.stream_table(numbers)
