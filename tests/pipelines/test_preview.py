"""Previews: what a run would do, told without doing it, and the same that the run then does."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import pytest

import weft
from pipelines.conftest import Database
from weft import LoadRefusedError, pk
from weft.engine import session
from weft.engine.preview import Preview, preview
from weft.engine.run import PipelineRun
from weft.engine.validate import validate
from weft.expectations import freshness, not_null, range
from weft.normalize import lower, parse_int
from weft.pipelines.declare import Pipeline
from weft.project import Project
from weft.transforms import filter_where
from weft.types import BigInt, Text

ROWS = [{"id": 1, "name": "A", "n": 10}, {"id": 2, "name": "B", "n": 20}, {"id": 3, "name": None, "n": 1000}]


@weft.table
class Things:
    number: Annotated[BigInt, pk()]
    name: Annotated[Text | None, lower()]
    n: BigInt


def look(pipeline: Pipeline, **options: Any) -> Preview:
    return preview(pipeline, pipeline.targets[0], datetime.now(UTC), **options)


def pipeline(rows: Any = ROWS, target: Any = "things", **options: Any) -> Pipeline:
    made: Pipeline = weft.pipeline(target=target, name="things", **options)(lambda: rows)
    return made


# -------------------------------------------------------------------------------------------------------- SQL databases


def test_rows_that_would_be_put_aside(database: Database) -> None:
    """By the database itself, with no table of theirs yet; and nothing of it stays."""
    database.run("CREATE TABLE things (id BIGINT, name VARCHAR(9) NOT NULL, n BIGINT)")
    made = pipeline(on_bad_rows="quarantine")
    found = look(made)
    assert found.refused is None
    assert found.counts is not None
    assert (found.counts.rows_read, found.counts.inserted, found.counts.quarantined) == (3, 2, 1)
    assert database.rows("things") == []
    with pytest.raises(weft.WeftError):
        database.rows("things__quarantine")
    (loaded,) = database.execute(made)
    assert replace(loaded.counts, bytes=0) == replace(found.counts, bytes=0)


def test_values_that_cannot_be_made(database: Database) -> None:
    @weft.table
    class Parsed:
        id: BigInt
        n: Annotated[BigInt | None, parse_int(on_failure="error")]

    rows = [{"id": 1, "n": "5"}, {"id": 2, "n": "five"}]
    made = pipeline(rows, Parsed, on_bad_rows="quarantine")
    for _ in "new", "there":
        found = look(made)
        assert found.refused is None
        assert found.counts is not None
        assert (found.counts.rows_read, found.counts.inserted, found.counts.quarantined) == (2, 1, 1)
        database.execute(made)


def test_a_new_table_and_what_is_expected(database: Database) -> None:
    found = look(pipeline(expectations=[not_null("name"), range("n", max=100, on_failure="quarantine")]))
    assert found.creates is not None
    assert isinstance(found.refused, LoadRefusedError)
    assert "not_null(name): 1 of 3 rows" in found.refused.what
    database.project.pipelines.clear()
    found = look(pipeline(expectations=[range("n", max=100, on_failure="quarantine"), not_null("id")]))
    assert found.refused is None
    assert found.counts is not None
    assert (found.counts.rows_read, found.counts.inserted, found.counts.quarantined) == (3, 2, 1)


def test_a_new_table_and_what_it_demands(database: Database) -> None:
    rows = [{"number": 1, "name": "a", "n": 1}, {"number": 1, "name": "b", "n": None}]
    found = look(pipeline(rows, Things))
    assert found.refused is not None
    assert "not_null(n): 1 of 2 rows" in found.refused.what
    assert "unique(number): 2 of 2 rows" in found.refused.what


@pytest.mark.parametrize("ttl", [None, 86_400 * 30])
def test_a_new_table_of_versions(database: Database, ttl: float | None) -> None:
    """Versions by the time of events: what is no change is no version, and old ones are closed at once."""
    now = datetime.now(UTC).replace(microsecond=0)
    events = [("a", 90, 1), ("a", 80, 1), ("a", 60, 2), ("b", 50, 1), ("b", 5, 2), ("c", 40, None), ("c", 35, None)]
    rows = [{"id": key, "at": now - timedelta(days=days), "n": n} for key, days, n in events]
    made = pipeline(rows, mode="scd2", keys=["id"], event_timestamp_column="at", ttl_seconds=ttl, compare_columns=["n"])
    told = look(made)
    assert told.creates is not None
    assert told.counts is not None
    assert (told.counts.inserted, told.counts.deleted) == (5, 2 if ttl else 0)
    (loaded,) = database.execute(made)
    assert replace(loaded.counts, bytes=0) == replace(told.counts, bytes=0)


def test_an_expectation_about_nothing(database: Database) -> None:
    made = pipeline(expectations=[not_null("nam")])
    with pytest.raises(weft.DeclarationError, match="Did you mean 'name'"):
        look(made, trial=False)


def test_what_is_pushed_down_needs_no_spark(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to run nor to be looked at beforehand, with and without its table."""
    database.run("CREATE TABLE raw (number BIGINT, name VARCHAR(9), n BIGINT)")
    database.run("INSERT INTO raw VALUES (1, 'A', 10), (2, 'B', 20)")
    sql = "SELECT number, name, n FROM raw"
    made = [
        weft.pipeline(target="copies", name="copies")(lambda: sql),
        weft.pipeline(target="new", name="new", incremental_column="number")(lambda: sql),
        weft.pipeline(target=Things, name="merged", mode="merge", transforms_pre=[filter_where("n > 0")])(lambda: sql),
        weft.pipeline(target="table", name="table", source_table="raw", mode="truncate")(lambda: None),
        weft.pipeline(target="rows", name="rows", expectations=[not_null("n")])(lambda: ROWS),
        weft.pipeline(target="totals", name="totals", on_bad_rows="quarantine")(
            lambda: "SELECT name, sum(n) AS n FROM raw GROUP BY name"
        ),
    ]
    monkeypatch.setattr(session, "spark", lambda **_: pytest.fail("Spark was started"))
    for _ in "new", "there":
        for each in made:
            assert [found.problem for found in validate(each) if found.problem] == []
            told = look(each)
            assert (told.engine, told.refused) == ("pushdown", None)
            (loaded,) = database.execute(each)
            assert loaded.engine == "pushdown"
            assert told.counts is not None
            assert told.counts.rows_read == loaded.counts.rows_read


@pytest.mark.brief("sqlite")
def test_what_only_spark_has(database: Database, spark: Any) -> None:
    """Tried by a task, where a run would write it."""
    frame = spark.createDataFrame([(1, "A", 10), (2, None, 20)], "id long, name string, n long")
    made = pipeline(frame, mode="merge", keys=["id"])
    for told in ((2, 0), (0, 2)):
        found = look(made)
        assert found.engine == "spark"
        assert found.counts is not None
        assert (found.counts.inserted, found.counts.unchanged) == told
        assert found.sample is not None
        assert found.sample.num_rows == 2
        (loaded,) = database.execute(made)
        assert (loaded.counts.inserted, loaded.counts.unchanged) == told


def test_events(local: Project) -> None:
    @weft.stream(fields={"name": "string"})
    def clicks() -> None:
        pass

    weft.publish_sync(clicks, [{"name": "a"}, {"name": None}])
    found = look(pipeline(clicks, expectations=[not_null("name", on_failure="warn")]))
    assert found.counts is not None
    assert (found.counts.inserted, len(found.counts.warnings)) == (2, 1)
    assert found.sample is not None
    assert found.sample.column("name").to_pylist() == ["a", None]


def test_a_database_that_is_not_there(local: Project, tmp_path: Path) -> None:
    """A preview does not make its file."""
    for kind in ("sqlite", "duckdb"):
        local.pipelines.clear()
        weft.connect(f"{kind}:///{tmp_path / kind}", name=kind)
        found = look(pipeline(target_connection=kind))
        assert found.creates is not None
        assert found.counts is not None
        assert found.counts.inserted == 3
        assert not (tmp_path / kind).exists()


# ------------------------------------------------------------------------------------------------------ files and Delta


@pytest.fixture
def lake(spark: Any, local: Project, tmp_path: Path) -> Project:
    weft.connect(kind="delta_local", path=str(tmp_path / "lake"), name="lake")
    weft.connect(kind="object_store_local", path=str(tmp_path / "files"), name="files")
    weft.load(ROWS, target="raw")
    return local


def run(pipeline: Pipeline) -> Any:
    made = PipelineRun(pipeline, f"k{datetime.now(UTC)}", datetime.now(UTC))
    made.execute()
    return made.loaded[0].counts


@pytest.mark.full
@pytest.mark.parametrize("place", ["lake", "files"])
def test_what_is_declared(lake: Project, tmp_path: Path, place: str) -> None:
    made = pipeline(
        "SELECT id, name, n FROM raw",
        Things,
        source_connection="default",
        target_connection=place,
        column_map={"number": "id"},
        expectations=[range("n", max=100, on_failure="warn")],
    )
    found = look(made)
    assert found.refused is None
    assert found.creates == "things (number bigint, name string, n bigint)"
    assert found.sample is not None
    assert found.sample.to_pylist()[0] == {"number": 1, "name": "a", "n": 10}
    assert found.counts is not None
    assert (found.counts.rows_read, found.counts.inserted) == (3, 3)
    assert found.counts.warnings == ("range(n, max=100): 1 of 3 rows",)
    assert not list(tmp_path.glob("*/things"))
    run(made)
    assert look(made).creates is None
    assert [each.problem for each in validate(made)] == [None] * 4


@pytest.mark.parametrize("place", ["lake", "files"])
def test_what_would_be_refused(lake: Project, place: str) -> None:
    options = {"source_connection": "default", "target_connection": place}
    broken = pipeline("SELECT id, name, n FROM raw", "things", expectations=[range("n", max=100)], **options)
    found = look(broken)
    assert found.refused is not None
    assert "range(n, max=100): 1 of 3 rows" in found.refused.what
    lake.pipelines.clear()
    lacking = pipeline("SELECT id AS number, name FROM raw", Things, **options)
    assert "has no column 'n'" in str([each.problem for each in validate(lacking)])
    lake.pipelines.clear()
    run(pipeline("SELECT id FROM raw", **options))
    lake.pipelines.clear()
    wider = pipeline("SELECT id, name FROM raw", **options)
    assert [each.problem for each in validate(wider)] == [None] * 4
    run(wider)  # which gives the table the column
    lake.pipelines.clear()
    widest = pipeline("SELECT id, name, n FROM raw", on_drift="error", **options)
    assert "column 'n'" in str([each.problem for each in validate(widest)])


@pytest.mark.brief("files")
@pytest.mark.parametrize("place", ["lake", "files"])
def test_dots_in_names_of_columns(lake: Project, place: str) -> None:
    copied = pipeline(
        "SELECT * FROM dotted",
        source_connection="default",
        target_connection=place,
        incremental_column="no.",
        expectations=[freshness("at.utc", timedelta(hours=1))],
    )
    for number in (1, 2):
        weft.load([{"no.": number, "at.utc": datetime.now(UTC)}], target="dotted")
        assert run(copied).inserted == 1


@pytest.mark.brief("merge")
@pytest.mark.parametrize("mode", ["append", "truncate", "merge", "scd2"])
def test_the_run_does_what_was_told(lake: Project, mode: str) -> None:
    keys = {"keys": ["id"]} if mode in ("merge", "scd2") else {}
    options = {"source_connection": "default", "target_connection": "lake", "mode": mode, **keys}
    made = pipeline("SELECT id, name, n FROM raw", **options)
    for changes in ([], [{"id": 2, "name": "C", "n": 20}, {"id": 4, "name": "D", "n": 1}]):
        if changes:
            weft.load(changes, target="raw", mode="merge", keys=["id"])
        told = look(made).counts
        done = run(made)
        assert told is not None
        assert replace(told, bytes=0) == replace(done, bytes=0)


@pytest.mark.brief("files")
@pytest.mark.parametrize("place", ["lake", "files"])
def test_sql_over_what_spark_reads(lake: Project, place: str) -> None:
    """Of Delta tables and files Spark runs the query of a pipeline."""
    weft.load(ROWS, target="sales.raw", connection=place)
    options = {"source_connection": place, "target_connection": "default", "column_map": {"number": "id"}}
    sql = "SELECT id, name, max(n) AS n FROM sales.raw GROUP BY ALL"
    made = pipeline(sql, Things, transforms_pre=[filter_where("n < 100")], **options)
    found = look(made)
    assert (found.engine, found.sql, found.refused) == ("spark", sql, None)
    assert found.counts is not None and found.counts.inserted == 2
    assert [each.problem for each in validate(made)] == [None] * 4
    assert run(made).inserted == 2
    lake.pipelines.clear()
    lacking = pipeline("SELECT id, nam FROM sales.raw", Things, **options)
    assert "do not have: nam" in str([each.problem for each in validate(lacking)])
    for each in ({"incremental_column": "n"}, {}):
        lake.pipelines.clear()
        sql = "SELECT id, name, n FROM sales.raw" if each else "SELECT id, name, n FROM sales.raw WHERE n > $watermark"
        with pytest.raises(weft.DeclarationError, match="has no watermarks"):
            run(pipeline(sql, Things, **options, **each))
