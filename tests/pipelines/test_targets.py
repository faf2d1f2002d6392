"""One source, several targets: each of them exactly once, also when one fails and the run is repeated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest

import weft
from pipelines.conftest import Database
from weft import DeclarationError, LoadRefusedError, pk
from weft.engine import inputs
from weft.expectations import row_count, sql
from weft.systems.base import Connection
from weft.testing import table_rows
from weft.transforms import deduplicate_by, filter_where, limit, sample_pct
from weft.types import BigInt

ROWS = [{"id": 1, "n": 10}, {"id": 2, "n": 20}, {"id": 3, "n": 30}]


def numbers(database: Database, table: str) -> list[int]:
    return sorted(row["id"] for row in database.rows(table))


@pytest.fixture
def raw(database: Database) -> Database:
    database.run("CREATE TABLE raw (id BIGINT, n BIGINT)", "INSERT INTO raw VALUES (1, 10), (2, 20), (3, 30)")
    return database


def test_every_target_gets_all(raw: Database) -> None:
    @weft.pipeline(targets=[weft.target("one"), weft.target("two", mode="merge", keys=["id"])])
    def fan_out() -> str:
        return "SELECT id, n FROM raw"

    assert [each.target for each in raw.execute(fan_out, "k")] == ["one", "two"]
    assert numbers(raw, "one") == numbers(raw, "two") == [1, 2, 3]
    assert [each.counts.replayed for each in raw.execute(fan_out, "k")] == [True, True]
    raw.execute(fan_out)
    assert numbers(raw, "one") == [1, 1, 2, 2, 3, 3]
    assert numbers(raw, "two") == [1, 2, 3]


def test_rows_that_can_be_read_once(database: Database) -> None:
    @weft.pipeline(targets=["one", "two"])
    def fan_out() -> Iterator[dict[str, int]]:
        yield from ROWS

    database.execute(fan_out)
    assert numbers(database, "one") == numbers(database, "two") == [1, 2, 3]


@pytest.mark.brief("sqlite-False", "sqlite-True")
@pytest.mark.parametrize("lazily", [False, True])
def test_each_target_keeps_objects_in_its_way(
    database: Database, tmp_path: Path, lazily: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "BATCH_ROWS", 2)
    lite = weft.SQLiteConnection(str(tmp_path / "lite.db"), name="lite")
    duck = weft.DuckDBConnection(str(tmp_path / "duck.db"), name="duck")
    docs: list[Any] = [{"a": 1}, {"b": 2}, {"b": 3}, {"a": 4}]
    rows = [{"n": n, "doc": doc} for n, doc in enumerate(docs)]

    @weft.pipeline(targets=[weft.target("t", connection=each) for each in (lite, duck)], source_connection=lite)
    def both() -> Any:
        return iter(rows) if lazily else rows

    database.execute(both)
    assert [json.loads(row["doc"]) for row in table_rows("t", connection=lite)] == docs
    assert [row["doc"] for row in table_rows("t", connection=duck)] == [{"a": None, "b": None, **doc} for doc in docs]


@pytest.mark.brief("sqlite-False", "sqlite-True")
@pytest.mark.parametrize("lazily", [False, True])
def test_each_target_keeps_objects_that_no_type_holds(
    database: Database, tmp_path: Path, lazily: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "BATCH_ROWS", 2)
    places = [weft.SQLiteConnection(str(tmp_path / f"{name}.db"), name=name) for name in ("one", "two")]
    docs: list[Any] = [{"a": 2**70}, {"b": 2}, {"b": "x"}, {"b": 3}]
    rows = [{"n": n, "doc": doc} for n, doc in enumerate(docs)]

    @weft.pipeline(targets=[weft.target("t", connection=each) for each in places], source_connection=places[0])
    def both() -> Any:
        return iter(rows) if lazily else rows

    database.execute(both)
    for each in places:
        assert [json.loads(row["doc"]) for row in table_rows("t", connection=each)] == docs


@pytest.mark.parametrize("goes_on", [False, True])
def test_one_fails_and_the_run_is_repeated(raw: Database, goes_on: bool) -> None:
    broken = weft.target("second", expectations=[row_count(min=4)])

    @weft.pipeline(targets=["first", broken, "third"], continue_on_failure=goes_on)
    def fan_out() -> str:
        return "SELECT id, n FROM raw"

    with pytest.raises(LoadRefusedError, match="second"):
        raw.execute(fan_out, "k")
    assert numbers(raw, "first") == [1, 2, 3]
    raw.run("INSERT INTO raw VALUES (4, 40)")
    raw.execute(fan_out, "k")
    assert numbers(raw, "first") == [1, 2, 3]
    assert numbers(raw, "second") == [1, 2, 3, 4]
    assert numbers(raw, "third") == ([1, 2, 3] if goes_on else [1, 2, 3, 4])


def test_each_target_has_its_own_watermark(raw: Database) -> None:
    """What failed to reach one of them comes with the next run, and reaches the others once."""
    broken = weft.target("second", expectations=[row_count(min=4)])

    @weft.pipeline(targets=["first", broken], incremental_column="id")
    def fan_out() -> str:
        return "SELECT id, n FROM raw"

    with pytest.raises(LoadRefusedError):
        raw.execute(fan_out)
    raw.run("INSERT INTO raw VALUES (4, 40)")
    raw.execute(fan_out)
    assert numbers(raw, "first") == numbers(raw, "second") == [1, 2, 3, 4]


def test_into_two_databases(raw: Database, tmp_path: Path) -> None:
    """From any system into itself and into SQLite."""
    weft.connect(f"sqlite:///{tmp_path / 'other.db'}", name="other")

    @weft.pipeline(targets=["one", weft.target("two", connection="other")], source_connection="default")
    def fan_out() -> list[dict[str, int]]:
        return ROWS

    raw.execute(fan_out)
    assert numbers(raw, "one") == [1, 2, 3]
    assert [row["id"] for row in weft.testing.table_rows("two", connection="other")] == [1, 2, 3]


def test_options_of_the_pipeline_are_those_of_its_targets(local: Any) -> None:
    @weft.pipeline(targets=[weft.target("a"), weft.target("b", mode="append")], mode="merge", keys=["id"])
    def fan_out() -> str:
        return "SELECT 1 AS id"

    # Whoever says append has no use for keys.
    assert dict(fan_out.targets[0].options) == {"mode": "merge", "keys": ["id"]}


# ------------------------------------------------------------------------------------------------------------ functions


def test_what_the_function_takes(raw: Database) -> None:
    weft.connect("sqlite:///elsewhere.db", name="elsewhere")
    seen: list[Any] = []

    @weft.pipeline(target="t", source_connection="default", target_connection="elsewhere")
    def source_alone(conn: Connection) -> list[dict[str, int]]:
        seen.append(conn.name)
        return ROWS

    @weft.pipeline(target="t", source_connection="default", target_connection="elsewhere")
    def both(source: Connection, target: Connection) -> list[dict[str, int]]:
        seen.append((source.name, target.name))
        return ROWS

    raw.execute(source_alone)
    raw.execute(both)
    assert seen == ["default", ("default", "elsewhere")]


def test_coroutines(database: Database) -> None:
    @weft.pipeline(target="t")
    async def slow() -> list[dict[str, int]]:
        await asyncio.sleep(0)
        return ROWS

    database.execute(slow)

    async def inside() -> None:
        database.execute(slow)

    asyncio.run(inside())
    assert numbers(database, "t") == [1, 1, 2, 2, 3, 3]


def test_a_source_table(raw: Database) -> None:
    @weft.pipeline(target="t", source_table="raw")
    def copy() -> None:
        pass

    raw.execute(copy)
    assert numbers(raw, "t") == [1, 2, 3]


def test_nothing_to_load(database: Database) -> None:
    @weft.pipeline(target="t")
    def nothing() -> None:
        pass

    @weft.pipeline(target="t", source_table="raw")
    def too_much() -> str:
        return "SELECT 1 AS id"

    with pytest.raises(DeclarationError, match="gave nothing to load"):
        database.execute(nothing)
    with pytest.raises(DeclarationError, match="has a source_table, and its function gave something"):
        database.execute(too_much)


# ----------------------------------------------------------------------------------------------------------- transforms


def test_before_the_load(raw: Database) -> None:
    raw.run("INSERT INTO raw VALUES (1, 11), (5, 50)")

    @weft.pipeline(
        target="t",
        mode="merge",
        keys=["id"],
        transforms_pre=[filter_where("id < 4 -- some"), deduplicate_by("n"), sample_pct(100), limit(100)],
    )
    def copy() -> str:
        return "SELECT id, n FROM raw"

    raw.execute(copy)
    assert [(row["id"], row["n"]) for row in raw.rows("t")] == [(1, 11), (2, 20), (3, 30)]


def test_limits(raw: Database) -> None:
    @weft.pipeline(target="t", transforms_pre=[limit(2)])
    def some() -> str:
        return "SELECT id, n FROM raw"

    assert raw.execute(some)[0].counts.inserted == 2


def test_after_the_load_once_a_run(raw: Database) -> None:
    calls: list[object] = []

    def told(conn: Connection) -> None:
        calls.append(conn.kind)

    @weft.pipeline(target="t", transforms_post=["UPDATE t SET n = n + 1", told])
    def copy() -> str:
        return "SELECT id, n FROM raw"

    raw.execute(copy, "k")
    raw.execute(copy, "k")
    assert [row["n"] for row in raw.rows("t")] == [11, 21, 31]
    assert calls == [raw.tables.dialect] * 2


def test_after_the_load_as_often_as_it_failed(raw: Database) -> None:
    """The load is committed, what comes after it fails: the repeated run does only that."""

    @weft.pipeline(target="t", transforms_post=["UPDATE t SET n = 0", "INSERT INTO told VALUES (1)"])
    def copy() -> str:
        return "SELECT id, n FROM raw"

    with pytest.raises(weft.WeftError, match="told"):
        raw.execute(copy, "k")
    raw.run("CREATE TABLE told (n BIGINT)", "UPDATE t SET n = 7")
    raw.execute(copy, "k")
    assert [row["n"] for row in raw.rows("t")] == [7, 7, 7]
    assert raw.rows("told") == [{"n": 1}]


def test_columns_by_another_name(raw: Database) -> None:
    @weft.pipeline(target="t", column_map={"number": "id"})
    def copy() -> str:
        return "SELECT id, n FROM raw"

    raw.execute(copy)
    assert raw.rows("t")[0] == {"number": 1, "n": 10}


def test_a_step_that_takes_the_place_of_another_is_not_done(raw: Database) -> None:
    raw.run("CREATE TABLE told (n BIGINT)")

    def copy() -> str:
        return "SELECT id, n FROM raw"

    with pytest.raises(weft.WeftError):
        raw.execute(
            weft.pipeline(target="t", transforms_post=["UPDATE t SET n = 0", "INSERT INTO nowhere VALUES (1)"])(copy),
            "k",
        )
    raw.execute(weft.pipeline(target="t", transforms_post=["INSERT INTO told VALUES (1)"])(copy), "k")
    assert raw.rows("told") == [{"n": 1}]


def test_a_step_that_failed_is_not_done(raw: Database) -> None:
    """Also one that commits, as DDL does on MySQL."""

    @weft.pipeline(target="t", transforms_post=["DROP TABLE nowhere"])
    def copy() -> str:
        return "SELECT id, n FROM raw"

    for _ in range(2):
        with pytest.raises(weft.WeftError, match="nowhere"):
            raw.execute(copy, "k")


def test_what_a_target_says_itself_counts(local: Any) -> None:
    made = weft.pipeline(
        targets=[weft.target("a", on_quality_failure="fail", on_drift="evolve"), "b"],
        on_quality_failure="warn",
        on_drift="error",
    )(lambda: "SELECT 1 AS id")
    assert [(each.on_quality_failure, each.on_drift) for each in made.targets] == [
        ("fail", "evolve"),
        ("warn", "error"),
    ]


def test_a_source_for_targets_on_several_connections(local: Any) -> None:
    with pytest.raises(DeclarationError, match="its source must be named"):
        weft.pipeline(targets=[weft.target("a", connection="one"), weft.target("b", connection="two")])(lambda: "")


def test_every_failure_is_told(raw: Database) -> None:
    failing = [weft.target(name, expectations=[row_count(min=9)]) for name in ("one", "two")]

    @weft.pipeline(targets=failing, continue_on_failure=True)
    def copy() -> str:
        return "SELECT id, n FROM raw"

    with pytest.raises(weft.WeftError, match=r"2 targets of copy failed[\s\S]*one[\s\S]*two"):
        raw.execute(copy)


def test_no_rows_at_all(database: Database) -> None:
    @weft.table(load_columns=True)
    class Numbers:
        number: Annotated[BigInt, pk()]

    rows: list[dict[str, int]] = [{"id": 1}]

    @weft.pipeline(target=Numbers, mode="merge", column_map={"number": "id"})
    def numbers() -> list[dict[str, int]]:
        return rows

    database.execute(numbers)
    rows.clear()
    assert database.execute(numbers)[0].counts.rows_read == 0


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_double_quotes_are_names_also_over_frames(database: Database, spark: Any) -> None:
    """As in the databases: to Spark by itself `"n"` is a text, which is no number."""

    @weft.pipeline(
        target="few", transforms_pre=[filter_where('"n" < 3')], expectations=[sql('"n" > 0 AND "name" <> \'z\'')]
    )
    def few() -> Any:
        return spark.createDataFrame([(1, "a"), (2, "b"), (3, "z")], "n int, name string")

    database.execute(few)
    assert [row["n"] for row in database.rows("few")] == [1, 2]


def test_a_query_that_ends_in_a_comment(raw: Database) -> None:
    @weft.pipeline(target="copies")
    def copy() -> str:
        return "SELECT id, n FROM raw; -- all of them"

    assert raw.execute(copy)[0].counts.inserted == 3


@pytest.mark.parametrize("database", ["sqlite", "postgres", "mysql"], indirect=True)  # DuckDB renames the second
def test_two_columns_of_one_name(raw: Database) -> None:
    @weft.table
    class Copies:
        id: BigInt
        n: BigInt

    @weft.pipeline(target=Copies)
    def copy() -> str:
        return "SELECT id, n, n FROM raw"

    with pytest.raises(DeclarationError, match=r"more than one column 'n'[\s\S]*a name of its own"):
        raw.execute(copy)


def test_tables_that_are_not_there(raw: Database) -> None:
    """The error says what may have been meant: a table there, or one that another pipeline creates."""
    total = weft.pipeline(target="totals", name="total")(lambda: "SELECT count(*) AS n FROM raw")
    near = weft.pipeline(target="t", name="near")(lambda: "SELECT * FROM raws AS r")
    with pytest.raises(weft.WeftError, match=r"raws\b[\s\S]*Did you mean 'raw'\?"):
        raw.execute(near)
    early = weft.pipeline(target="t", name="early", mode="merge", keys=["n"])(lambda: "SELECT n FROM totals")
    with pytest.raises(weft.WeftError, match=r"totals[\s\S]*weft run total"):
        raw.execute(early)
    raw.execute(total)
    assert raw.execute(early)[0].counts.inserted == 1


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)  # the others have schemas
def test_a_table_whose_name_has_a_dot(database: Database) -> None:
    weft.load([{"id": 1}], target="raw.events")
    copy = weft.pipeline(target="t", name="copy")(lambda: "SELECT id FROM raw.events")
    with pytest.raises(weft.WeftError, match=r"FROM [`\"]raw\.events[`\"]"):
        database.execute(copy)
