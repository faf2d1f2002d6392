"""`incremental_column` and `$watermark`: each row once, and none skipped without a word."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import weft
from pipelines.conftest import Database
from weft import DeclarationError, LoadRefusedError
from weft.engine import incremental, session
from weft.engine.preview import preview
from weft.engine.readers import opened_tables
from weft.engine.run import PipelineRun, plan_load, prepare_load, produce, understand
from weft.engine.validate import validate
from weft.systems.load import Counts
from weft.systems.watermark import LoadWatermark
from weft.transforms import filter_where

# A file of DuckDB is opened anew for each transaction, and what these prove is not the database's.
CREATE = "CREATE TABLE raw_events (id BIGINT, name VARCHAR(20), seen_at TIMESTAMP NULL)"


def insert(database: Database, *rows: tuple[int, str | None]) -> None:
    moments = ["NULL" if at is None else f"'2026-01-01 {at}'" for _, at in rows]
    values = [f"({number}, 'n{number}', {moment})" for (number, _), moment in zip(rows, moments, strict=True)]
    database.run(f"INSERT INTO raw_events VALUES {', '.join(values)}")


@pytest.fixture
def events(database: Database) -> Database:
    database.run(CREATE)
    insert(database, (1, "00:00:01"), (2, "00:00:02"))
    return database


def ids(database: Database, table: str = "copies") -> list[int]:
    return sorted(row["id"] for row in database.rows(table))


def test_each_row_once(events: Database) -> None:
    @weft.pipeline(target="copies", incremental_column="id")
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    assert events.execute(copy)[0].counts.inserted == 2
    assert events.execute(copy)[0].counts.rows_read == 0
    insert(events, (3, "00:00:03"))
    assert events.execute(copy)[0].counts.inserted == 1
    assert ids(events) == [1, 2, 3]


@pytest.mark.parametrize(
    ("earlier", "seen", "later"),
    [
        ("2026-01-01 00:00:02", "2026-01-01 00:00:03", "2026-01-01 00:00:03.5"),
        ("2026-01-01T00:00:02.000", "2026-01-01T00:00:03.000", "2026-01-01T00:00:03.500"),
        ("2026-01-01 00:00:02.000000", "2026-01-01 00:00:03.000000", "2026-01-01 00:00:03.000001"),
        ("2026-01-01T00:00:02Z", "2026-01-01T00:00:03Z", "2026-01-01T00:00:04Z"),
        ("2026-01-01T02:00:02+02:00", "2026-01-01T02:00:03+02:00", "2026-01-01T02:00:04+02:00"),
    ],
)
def test_times_that_sqlite_keeps_as_texts(project: Path, earlier: str, seen: str, later: str) -> None:
    """A target of files knows how far it has come as a time, in no form."""
    connection = weft.connect(url=f"sqlite:///{project}/texts.db")
    last = LoadWatermark.of("at", datetime(2026, 1, 1, 0, 0, 3, tzinfo=UTC), 2)
    with opened_tables(connection) as tables:
        with tables.driver.session("publish") as writing:
            writing.run("CREATE TABLE texts (at TIMESTAMP)")
            for text in (earlier, seen, later):
                writing.run("INSERT INTO texts VALUES (?)", (text,))
        found = incremental.of_query(tables, "SELECT at FROM texts", "at", last, None)
        with tables.driver.session("read") as reading:
            assert reading.rows(found.sql) == [(later,)]
    assert found.late == 0


def test_by_time(events: Database) -> None:
    @weft.pipeline(target="copies", incremental_column="seen_at")
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    events.execute(copy)
    insert(events, (3, "00:00:03"))
    events.execute(copy)
    assert ids(events) == [1, 2, 3]


def test_the_mark_in_the_query(events: Database) -> None:
    """As in the guide: no incremental_column, but a comparison with $watermark."""

    @weft.pipeline(target="copies")
    def copy(conn: object) -> str:
        return "SELECT id, name, seen_at FROM raw_events WHERE seen_at > $watermark -- not $watermark, nor '$watermark'"

    events.execute(copy)
    events.execute(copy)
    assert ids(events) == [1, 2]
    insert(events, (3, "00:00:03"))
    events.execute(copy)
    assert ids(events) == [1, 2, 3]


@pytest.mark.parametrize(("computed", "last"), [("id * 10", 30), ("id * 0.5E0", 1.5), ("lower(name)", "n3")])
def test_the_mark_against_what_a_query_computes(events: Database, computed: str, last: object) -> None:
    """In SQLite its values alone show the type, and what is below them."""

    @weft.pipeline(target="copies", incremental_column="position")
    def copy() -> str:
        return f"SELECT id, {computed} AS position FROM raw_events WHERE {computed} > $watermark"

    assert events.execute(copy)[0].counts.inserted == 2
    insert(events, (3, None))
    assert events.execute(copy)[0].counts.inserted == 1
    assert events.execute(copy)[0].counts.rows_read == 0
    assert {row["id"]: row["position"] for row in events.rows("copies")}[3] == last


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)  # the others refuse such a number
def test_the_mark_against_numbers_in_a_column_of_times(database: Database) -> None:
    database.run("CREATE TABLE readings (taken_at TIMESTAMP)", "INSERT INTO readings VALUES (1767225600)")

    @weft.pipeline(target="copies")
    def copy() -> str:
        return "SELECT taken_at FROM readings WHERE taken_at > $watermark"

    assert database.execute(copy)[0].counts.inserted == 1
    assert database.execute(copy)[0].counts.rows_read == 0


@pytest.mark.brief("sqlite")
def test_a_mark_in_quotation_marks(events: Database) -> None:
    @weft.pipeline(target="copies")
    def copy() -> str:
        return "SELECT id, name FROM raw_events WHERE id > '$watermark'"

    with pytest.raises(DeclarationError, match="Leave them out"):
        events.execute(copy)


@pytest.mark.brief("sqlite")
def test_a_lookback_without_a_mark(events: Database) -> None:
    @weft.pipeline(target="copies", mode="merge", keys=["id"], lookback=5)
    def copy() -> str:
        return "SELECT id, name FROM raw_events"

    with pytest.raises(DeclarationError, match=r"no watermark[\s\S]*incremental_column"):
        events.execute(copy)


@pytest.mark.brief("sqlite", "postgres", "mysql")
def test_a_failed_run_leaves_it(events: Database) -> None:
    @weft.pipeline(target="copies", incremental_column="id", expectations=[weft.expectations.range("id", max=2)])
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    events.execute(copy)
    insert(events, (3, "00:00:03"))
    with pytest.raises(LoadRefusedError, match=r"range\(id, max=2\)"):
        events.execute(copy)
    events.run("UPDATE raw_events SET id = 2 WHERE id = 3")
    insert(events, (4, "00:00:04"))
    with pytest.raises(LoadRefusedError):
        events.execute(copy)
    assert ids(events) == [1, 2]
    events.run("DELETE FROM raw_events WHERE id = 4")
    found = events.execute(copy)[0]
    assert (found.counts.rows_read, found.late) == (0, 1)


def test_late_rows_are_counted(events: Database) -> None:
    @weft.pipeline(target="copies", incremental_column="seen_at")
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    assert events.execute(copy)[0].late == 0
    insert(events, (3, "00:00:00"), (4, "00:00:01"), (5, "00:00:09"))
    found = events.execute(copy)[0]
    assert (found.counts.inserted, found.late) == (1, 2)
    # Told once.
    assert events.execute(copy)[0].late == 0
    insert(events, (6, "00:00:00"))
    assert events.execute(copy)[0].late == 1
    assert events.execute(copy)[0].late == 0


def test_a_lookback_reaches_them(events: Database) -> None:
    @weft.pipeline(
        target="copies", mode="merge", keys=["id"], incremental_column="seen_at", lookback=timedelta(seconds=5)
    )
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    insert(events, (3, "00:00:10"))
    events.execute(copy)
    insert(events, (4, "00:00:06"), (5, "00:00:05"), (6, "00:00:01"))
    found = events.execute(copy)[0]
    # At 5 seconds and 1 second: the lookback begins after them.
    assert found.late == 2
    assert ids(events) == [1, 2, 3, 4]
    assert events.execute(copy)[0].late == 0


@pytest.mark.every_system
def test_a_lookback_of_hours_reaches_days(database: Database) -> None:
    """A date minus twelve hours is no other date: rows of the last day are read again all the same."""

    @weft.pipeline(target="copies", mode="merge", keys=["id"], incremental_column="day", lookback=timedelta(hours=12))
    def copy() -> str:
        return "SELECT id, day FROM raw_days"

    database.run("CREATE TABLE raw_days (id BIGINT, day DATE)", "INSERT INTO raw_days VALUES (1, '2026-01-05')")
    database.execute(copy)
    database.run("INSERT INTO raw_days VALUES (2, '2026-01-05'), (3, '2026-01-04')")
    assert database.execute(copy)[0].late == 1
    assert ids(database) == [1, 2]


@pytest.mark.brief("sqlite", "postgres", "mysql")
def test_rows_that_land_before_they_are_read(events: Database) -> None:
    """They are read, and so not late: not in this run, nor in the next."""

    @weft.pipeline(target="copies", incremental_column="seen_at", transforms_pre=[filter_where("id <> 9")])
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    insert(events, (9, "00:00:01"))
    load = plan_load(copy, copy.targets[0], "k", weft_now())
    ready = prepare_load(copy, copy.targets[0], load, understand(copy, produce(copy)))
    insert(events, (3, "00:00:01"), (9, "00:00:01"))
    ready.job.run(ready.data)
    assert ids(events) == [1, 2, 3]
    assert events.execute(copy)[0].late == 0
    insert(events, (4, "00:00:01"), (9, "00:00:01"))
    assert events.execute(copy)[0].late == 1


@pytest.mark.brief("sqlite", "postgres", "mysql")
def test_another_lookback(events: Database) -> None:
    def copy(seconds: int | None) -> Any:
        back = None if seconds is None else timedelta(seconds=seconds)
        events.project.pipelines.clear()
        return weft.pipeline(
            target="copies", name="copy", mode="merge", keys=["id"], incremental_column="seen_at", lookback=back
        )(lambda: "SELECT id, name, seen_at FROM raw_events")

    insert(events, (3, "00:00:10"))
    assert events.execute(copy(None))[0].late == 0
    # What was below the watermark is read again, and is not late. How many came between cannot be told, once.
    for seconds in (5, 9, 3, 9, None):
        assert events.execute(copy(seconds))[0].late == 0
        assert events.execute(copy(seconds))[0].late == 0
    events.execute(copy(5))
    insert(events, (4, "00:00:04"))
    # Below what both read.
    assert events.execute(copy(1))[0].late == 1


@pytest.mark.brief("sqlite", "postgres", "mysql")
def test_late_rows_need_not_be_counted(events: Database) -> None:
    def copy(count_late: bool) -> Any:
        events.project.pipelines.clear()
        return weft.pipeline(target="copies", name="copy", incremental_column="id", count_late=count_late)(
            lambda: "SELECT id, name, seen_at FROM raw_events"
        )

    insert(events, (5, None))
    events.run("INSERT INTO raw_events (name) VALUES ('nobody')")
    for _ in range(2):
        (found,) = events.execute(copy(False))
        assert (found.late, found.without_value) == (0, 0)
        insert(events, (4, None))
    assert ids(events) == [1, 2, 5]
    insert(events, (6, None))
    # What was not counted is not known: from now on it is.
    assert events.execute(copy(True))[0].late == 0
    insert(events, (3, None))
    (found,) = events.execute(copy(True))
    assert (found.late, found.without_value) == (1, 1)
    assert ids(events) == [1, 2, 5, 6]


@pytest.mark.brief("sqlite", "postgres", "mysql")
def test_watermarks_of_before(events: Database) -> None:
    """Tables that an older version made lack a column."""

    @weft.pipeline(target="copies", incremental_column="id")
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    events.execute(copy)
    table = events.tables.driver.table("weft", "watermarks")
    events.run(f"ALTER TABLE {table} DROP COLUMN counted_to")
    insert(events, (3, None), (0, None))
    assert events.execute(copy)[0].late == 1
    assert events.execute(copy)[0].late == 0
    assert ids(events) == [1, 2, 3]


@pytest.mark.brief("sqlite", "postgres", "mysql")
def test_a_table_that_is_gone(events: Database) -> None:
    """It is made anew with all that the source has, also where the first try fails, and whichever pipeline makes it."""

    def copy(name: str, **options: Any) -> Any:
        events.project.pipelines.clear()
        return weft.pipeline(target="copies", name=name, **options)(lambda: "SELECT id, name, seen_at FROM raw_events")

    for name in ("one", "other"):
        events.execute(copy(name, incremental_column="id"))
    assert ids(events) == [1, 1, 2, 2]
    events.run("DROP TABLE copies")
    insert(events, (3, None))
    with pytest.raises(LoadRefusedError):
        events.execute(copy("one", incremental_column="id", expectations=[weft.expectations.row_count(max=1)]))
    assert ids(events) == []
    (found,) = events.execute(copy("one", incremental_column="id"))
    assert found.counts.inserted == 3
    assert events.execute(copy("other", incremental_column="id"))[0].counts.inserted == 3
    events.run("DROP TABLE copies")
    (found,) = events.execute(copy("other", incremental_column="id"))
    assert (found.counts.inserted, found.late) == (3, 0)
    assert "The table copies is gone" in found.counts.warnings[0]
    # One that was emptied is not gone.
    events.run("DELETE FROM copies")
    assert events.execute(copy("other", incremental_column="id"))[0].counts.inserted == 0
    events.run("DROP TABLE copies")
    events.execute(copy("whole"))
    assert events.execute(copy("other", incremental_column="id"))[0].counts.inserted == 3


@pytest.mark.brief("object_store_local")
@pytest.mark.parametrize("kind", ["delta_local", "object_store_local"])
def test_late_rows_of_files(spark: Any, local: Any, tmp_path: Path, kind: str) -> None:
    """Their target has one row for each that was read."""
    weft.connect(kind=kind, path=str(tmp_path / "lake"), name="lake")

    @weft.pipeline(target="copies", source_connection="default", target_connection="lake", incremental_column="id")
    def copy() -> str:
        return "SELECT id FROM raw"

    def run(key: str) -> int:
        made = PipelineRun(copy, key, weft_now())
        made.execute()
        return made.loaded[0].late

    weft.load([{"id": 5}], target="raw")
    assert run("a") == 0
    weft.load([{"id": 4}, {"id": 6}], target="raw")
    assert run("b") == 1
    assert run("c") == 1


def test_rows_without_a_value_are_counted(events: Database) -> None:
    @weft.pipeline(target="copies", incremental_column="seen_at")
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    insert(events, (3, None))
    found = events.execute(copy)[0]
    assert (found.counts.inserted, found.without_value) == (2, 1)


def test_rows_that_come_while_it_runs_are_not_lost(events: Database) -> None:
    """The bound is fixed before the rows are read: what comes between is read by the next run."""

    @weft.pipeline(target="copies", incremental_column="id")
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    target = copy.targets[0]
    load = plan_load(copy, target, "first", weft_now())
    ready = prepare_load(copy, target, load, understand(copy, produce(copy)))
    insert(events, (3, "00:00:03"))
    ready.job.run(ready.data)
    assert ids(events) == [1, 2]
    events.execute(copy)
    assert ids(events) == [1, 2, 3]


def test_two_runs_at_once_do_not_load_twice(events: Database) -> None:
    """Two processes that share no run log: the second finds that the watermark has moved."""

    @weft.pipeline(target="copies", incremental_column="id")
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    events.execute(copy)
    insert(events, (3, "00:00:03"))
    target = copy.targets[0]
    load = plan_load(copy, target, "first", weft_now())
    ready = prepare_load(copy, target, load, understand(copy, produce(copy)))
    events.execute(copy)
    with pytest.raises(LoadRefusedError, match="Another run of copy"):
        ready.job.run(ready.data)
    assert ids(events) == [1, 2, 3]


@pytest.mark.brief("sqlite", "postgres", "mysql")
def test_another_column_starts_anew(events: Database) -> None:
    @weft.pipeline(target="copies", name="copy", mode="merge", keys=["id"], incremental_column="id")
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    events.execute(copy)
    del events.project.pipelines["copy"]

    @weft.pipeline(target="copies", name="copy", mode="merge", keys=["id"], incremental_column="seen_at")
    def again() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    assert events.execute(again)[0].counts.unchanged == 2
    assert events.execute(again)[0].counts.rows_read == 0


def test_an_empty_source(database: Database) -> None:
    database.run(CREATE)

    @weft.pipeline(target="copies", incremental_column="id")
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    assert database.execute(copy)[0].counts.rows_read == 0
    assert database.rows("copies") == []
    insert(database, (1, "00:00:01"))
    database.execute(copy)
    assert ids(database) == [1]


def test_a_hostile_value_is_a_value(database: Database) -> None:
    database.run("CREATE TABLE raw_texts (word VARCHAR(50))", "INSERT INTO raw_texts VALUES ('b'' OR 1=1 --')")

    @weft.pipeline(target="copies", incremental_column="word")
    def copy() -> str:
        return "SELECT word FROM raw_texts"

    database.execute(copy)
    database.run("INSERT INTO raw_texts VALUES ('c')", "INSERT INTO raw_texts VALUES ('a')")
    database.execute(copy)
    assert sorted(row["word"] for row in database.rows("copies")) == ["b' OR 1=1 --", "c"]


def weft_now() -> Any:
    from datetime import UTC, datetime

    return datetime.now(UTC)


def test_refused_where_declared() -> None:
    with pytest.raises(DeclarationError, match="append would store the same rows again"):
        weft.pipeline(target="t", incremental_column="a", lookback=5)(lambda: "SELECT 1")
    with pytest.raises(DeclarationError, match="the rest would be deleted"):
        weft.pipeline(target="t", mode="truncate", incremental_column="a")(lambda: "SELECT 1")


def test_an_unknown_column(events: Database) -> None:
    @weft.pipeline(target="copies", incremental_column="seen_att")
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    with pytest.raises(DeclarationError, match=r"no column 'seen_att'[\s\S]*Did you mean 'seen_at'"):
        events.execute(copy)


@pytest.mark.parametrize("options", [{"mode": "truncate"}, {"mode": "merge", "keys": ["id"], "handle_deletes": "hard"}])
def test_what_reads_only_new_rows_deletes_none(events: Database, options: dict[str, Any]) -> None:
    @weft.pipeline(target="copies", **options)
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events WHERE id > $watermark"

    with pytest.raises(DeclarationError, match="the rest would be deleted"):
        events.execute(copy)


def test_nor_passes_over_what_a_limit_leaves_out(events: Database) -> None:
    with pytest.raises(DeclarationError, match="past the rows that limit or sample_pct leaves out"):
        weft.pipeline(target="t", incremental_column="id", transforms_pre=[weft.transforms.limit(1)])(
            lambda: "SELECT 1"
        )


def test_append_by_another_column_is_refused(events: Database) -> None:
    @weft.pipeline(target="copies", name="copy", incremental_column="id")
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    events.execute(copy)
    del events.project.pipelines["copy"]

    @weft.pipeline(target="copies", name="copy", incremental_column="seen_at")
    def again() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    with pytest.raises(DeclarationError, match="has a watermark by 'id'"):
        events.execute(again)
    assert ids(events) == [1, 2]


def test_decimals_are_numbers(database: Database) -> None:
    """Also on SQLite, which stores them as texts."""
    kind = "DECIMAL_TEXT(10,2)" if database.tables.dialect == "sqlite" else "DECIMAL(10,2)"
    database.run(f"CREATE TABLE raw (id BIGINT, n {kind})", "INSERT INTO raw VALUES (1, '-999.50'), (2, '9.00')")

    @weft.pipeline(target="copies")
    def copy() -> str:
        return "SELECT id, n FROM raw WHERE n > $watermark"

    database.execute(copy)
    database.run("INSERT INTO raw VALUES (3, '11.00')")
    database.execute(copy)
    assert ids(database) == [1, 2, 3]


@pytest.mark.every_system
def test_texts_of_another_collation(database: Database) -> None:
    if database.tables.dialect != "mysql":
        pytest.skip("the others compare what they are given")
    database.run(
        "CREATE TABLE raw (id BIGINT, word VARCHAR(20) COLLATE utf8mb4_unicode_ci)", "INSERT INTO raw VALUES (1, 'a')"
    )

    @weft.pipeline(
        target="copies", incremental_column="word", expectations=[weft.expectations.accepted("word", ["a", "b"])]
    )
    def copy() -> str:
        return "SELECT id, word FROM raw"

    database.execute(copy)
    database.run("INSERT INTO raw VALUES (2, 'b')")
    database.execute(copy)
    assert ids(database) == [1, 2]


@pytest.mark.full
@pytest.mark.parametrize("column", ["id", "seen_at"])
def test_an_idle_run_into_delta(
    events: Database, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    """It commits nothing. While the table stays as it was when it was last read, Spark is not needed to know that."""
    weft.connect(kind="delta_local", path=str(tmp_path / "lake"), name="lake")

    @weft.pipeline(target="copies", source_connection="default", target_connection="lake", incremental_column=column)
    def copy() -> str:
        return "SELECT id, name, seen_at FROM raw_events"

    def commits() -> int:
        return len(list((tmp_path / "lake/copies/_delta_log").glob("*.json")))

    assert events.execute(copy)[0].counts.inserted == 2
    written = commits()
    assert events.execute(copy)[0].counts.rows_read == 0
    with monkeypatch.context() as guarded:
        guarded.setattr(session, "spark", lambda **_: pytest.fail("Spark was started"))
        (idle,) = events.execute(copy)
        told = preview(copy, copy.targets[0], datetime.now(UTC))
        assert (told.engine, told.counts) == ("none", Counts())
        *_, load = validate(copy)
        assert load.detail == "append, nothing is new; the table is there; exactly once"
    assert (idle.counts.rows_read, idle.engine, commits()) == (0, "none", written)
    insert(events, (3, "00:00:03"))
    assert events.execute(copy)[0].counts.inserted == 1
    # A commit of another hand counts too.
    other = "SELECT id + 6 AS id, name, seen_at FROM raw_events WHERE id = 3"
    weft.load(other, source="default", target="copies", connection="lake")
    insert(events, (4, "00:00:04"))
    assert events.execute(copy)[0].counts.inserted == (1 if column == "seen_at" else 0)
