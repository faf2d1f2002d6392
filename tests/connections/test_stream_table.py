"""A stream is a table: its name in SQL, and the hint where the table is not there yet."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

import weft
from weft.engine.readers import naming_declared, open_tables
from weft.engine.run import PipelineRun
from weft.operate.hints import hint_for
from weft.project import Project, use
from weft.systems.sql.tables import Slice
from weft.testing import table_rows


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


def test_streams_and_targets_by_their_own_names(system: Any) -> None:
    """In SQL as PostgreSQL reads it, on every database."""
    with use(Project()) as project:
        weft.register_connection(weft.connect(url=system.url, name="default"))

        @weft.stream(fields={"n": "int64"})
        def numbers() -> None:
            pass

        @weft.pipeline(target="marts.doubled", incremental_column="n", transforms_post=["SELECT 1 FROM events.numbers"])
        def doubled() -> str:
            return """SELECT s.n * 2 AS n, 'from events.numbers' AS origin -- from events.numbers
                from EVENTS . numbers AS s WHERE s.n > 0"""

        @weft.pipeline(target="total")
        def total() -> str:
            return "SELECT sum(d.n) AS n FROM marts.doubled AS d JOIN events.numbers AS s ON s.n * 2 = d.n"

        weft.publish_sync(numbers, [{"n": 1}, {"n": 2}])
        for pipeline in (doubled, total):
            PipelineRun(pipeline, "1", datetime.now(UTC)).execute()
        assert [row["origin"] for row in table_rows("marts.doubled")] == ["from events.numbers"] * 2
        assert [row["n"] for row in table_rows("total")] == [6]
        # A stream of another database is not meant.
        weft.register_connection(weft.connect(url="sqlite:///elsewhere.db", name="elsewhere"))
        elsewhere = open_tables(project.connection("elsewhere"))
        assert naming_declared("SELECT n FROM events.numbers", elsewhere) == "SELECT n FROM events.numbers"
        weft.streams.close(project)


def test_a_stream_that_is_no_table() -> None:
    with use(Project()):

        @weft.stream(fields={"n": "int64"})
        def numbers() -> None:
            pass

        redis = weft.connect(url="redis://localhost", name="cache")
        with pytest.raises(weft.DeclarationError, match="On the connection 'cache' a stream is not a table"):
            redis.stream_table(numbers)
