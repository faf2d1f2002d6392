"""What the rows of a load must be: tried on the rows themselves, before any of them is written."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

import weft
from pipelines.conftest import Database
from weft import DeclarationError, LoadRefusedError
from weft.expectations import Expectation, accepted, freshness, not_null, range, row_count, sql, unique
from weft.server.quarantine import read_quarantine

ROWS = [
    {"id": 1, "kind": "a", "amount": 10},
    {"id": 2, "kind": "b", "amount": 20},
    {"id": 2, "kind": None, "amount": -5},
    {"id": 4, "kind": "z", "amount": 1000},
]
BROKEN: list[tuple[Expectation, list[int]]] = [
    (not_null("kind"), [-5]),
    (unique("id"), [-5, 20]),
    (accepted("kind", ["a", "b"]), [1000]),
    (range("amount", min=0), [-5]),
    (range("amount", max=100), [1000]),
    (range("amount", 0, 100), [-5, 1000]),
    (sql("amount < 500 OR kind = 'a'"), [1000]),
]
by_expectation = pytest.mark.parametrize(("expectation", "bad"), BROKEN, ids=[str(each) for each, _ in BROKEN])


def pipeline(*expectations: Expectation, rows: list[dict[str, Any]] = ROWS, **options: Any) -> Any:
    @weft.pipeline(target="sales", expectations=list(expectations), **options)
    def sales() -> list[dict[str, Any]]:
        return rows

    return sales


def amounts(database: Database) -> list[int]:
    return sorted(row["amount"] for row in database.rows("sales"))


@by_expectation
def test_a_load_fails_whole(database: Database, expectation: Expectation, bad: list[int]) -> None:
    database.execute(pipeline(rows=[{"id": 0, "kind": "a", "amount": 0}]))
    database.project.pipelines.clear()
    with pytest.raises(LoadRefusedError) as caught:
        database.execute(pipeline(expectation))
    assert str(expectation) in caught.value.what
    assert f"{len(bad)} of 4 rows" in caught.value.what
    assert amounts(database) == [0]


@by_expectation
def test_bad_rows_alone_are_put_aside(database: Database, expectation: Expectation, bad: list[int]) -> None:
    (loaded,) = database.execute(pipeline(expectation, on_quality_failure="quarantine"))
    assert amounts(database) == sorted({10, 20, -5, 1000} - set(bad))
    assert (loaded.counts.rows_read, loaded.counts.inserted) == (4, 4 - len(bad))
    assert loaded.counts.quarantined == len(bad)
    aside = database.rows("sales__quarantine")
    assert sorted(json.loads(row["payload"])["amount"] for row in aside) == bad
    assert {row["_weft_error"] for row in aside} == {f"expectation {expectation}"}
    assert {row["_weft_pipeline"] for row in aside} == {"sales"}


def test_the_service_groups_what_was_put_aside(database: Database) -> None:
    declared = pipeline(not_null("kind"), range("amount", 0, 100), on_quality_failure="quarantine")
    assert read_quarantine(declared) == []
    for _ in ("once", "again"):
        database.execute(declared)
    (table,) = read_quarantine(declared)
    assert (table["table"], table["count"]) == ("sales__quarantine", 4)
    assert {each["error"]: each["count"] for each in table["groups"]} == {
        "expectation not_null(kind)": 2,
        "expectation range(amount, min=0, max=100)": 2,
    }
    assert {json.loads(each["payload"])["amount"] for each in table["groups"]} == {-5, 1000}


def test_a_warning_loads_all(database: Database) -> None:
    (loaded,) = database.execute(pipeline(not_null("kind"), range("amount", max=5000), on_quality_failure="warn"))
    assert loaded.counts.inserted == 4
    assert len(loaded.counts.warnings) == 1
    assert loaded.counts.warnings[0].startswith("not_null(kind): 1 of 4 rows")


def test_each_may_react_in_its_own_way(database: Database) -> None:
    (loaded,) = database.execute(
        pipeline(
            not_null("kind", on_failure="warn"), range("amount", max=100, on_failure="quarantine"), unique("amount")
        )
    )
    assert (loaded.counts.inserted, loaded.counts.quarantined, len(loaded.counts.warnings)) == (3, 1, 1)


@pytest.mark.parametrize("mode", ["merge", "scd2", "truncate"])
def test_in_every_mode(database: Database, mode: str) -> None:
    keys = {} if mode == "truncate" else {"keys": ["id"]}
    rows = [row for row in ROWS if row["kind"] is not None]
    (loaded,) = database.execute(
        pipeline(range("amount", max=100, on_failure="quarantine"), rows=rows, mode=mode, **keys)
    )
    assert (loaded.counts.inserted, loaded.counts.quarantined) == (2, 1)
    assert amounts(database) == [10, 20]


def test_how_many_rows(database: Database) -> None:
    database.execute(pipeline(row_count(min=4, max=4)))
    database.project.pipelines.clear()
    with pytest.raises(LoadRefusedError, match=r"row_count\(min=5\): 4 rows"):
        database.execute(pipeline(row_count(min=5)))
    database.project.pipelines.clear()
    with pytest.raises(LoadRefusedError, match=r"row_count\(max=3\): 4 rows") as caught:
        # All rows together: there is none to put aside.
        database.execute(pipeline(row_count(max=3), on_quality_failure="quarantine"))
    assert str(caught.value).endswith('on_quality_failure="warn" loads them all the same.')


def test_how_fresh(database: Database) -> None:
    database.run(
        "CREATE TABLE raw (id BIGINT, at_ TIMESTAMP NULL)", "INSERT INTO raw VALUES (1, '2026-01-01 00:00:00')"
    )

    @weft.pipeline(target="fresh", expectations=[freshness("at_", timedelta(hours=1))])
    def fresh() -> str:
        return "SELECT id, at_ FROM raw"

    with pytest.raises(LoadRefusedError, match=r"freshness\(at_, 3600.0\): the latest is of 2026-01-01 00:00:00"):
        database.execute(fresh)
    database.run("DELETE FROM raw")
    with pytest.raises(LoadRefusedError, match="no time at all"):
        database.execute(fresh)


def test_values_are_values(database: Database) -> None:
    """Not parts of a statement."""
    hostile = "a'); DROP TABLE sales; --"
    rows = [{"id": 1, "kind": hostile, "amount": 1}, {"id": 2, "kind": "\\", "amount": 2}]
    database.execute(pipeline(accepted("kind", [hostile, "\\"]), rows=rows))
    assert amounts(database) == [1, 2]


def test_an_unknown_column(database: Database) -> None:
    with pytest.raises(DeclarationError, match=r"not_null\(kinds\)[\s\S]*Did you mean 'kind'"):
        database.execute(pipeline(not_null("kinds")))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: not_null(), "takes names of columns"),
        (lambda: accepted("a", []), "takes a list of values"),
        (lambda: accepted("a", [object()]), "not object"),
        (lambda: range("a"), "needs min, max or both"),
        (lambda: row_count(), "needs min, max or both"),
        (lambda: row_count(min=-1), "numbers of rows"),
        (lambda: sql(" "), "takes a condition"),
        (lambda: freshness("a", -1), "timedelta or seconds"),
        (lambda: not_null("a", on_failure="explode"), "on_failure is one of fail, warn, quarantine"),
        (lambda: row_count(min=1, on_failure="quarantine"), "none of them can be put aside"),
        (lambda: pipeline("not_null"), "is not an expectation"),
        (lambda: pipeline(on_quality_failure="ignore"), "It can be 'fail', 'warn', 'quarantine'"),
    ],
)
def test_refused_where_declared(make: Any, said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        make()


def test_a_table_is_not_emptied_because_all_rows_are_bad(database: Database) -> None:
    database.execute(pipeline(mode="truncate"))
    database.project.pipelines.clear()
    with pytest.raises(LoadRefusedError, match="All 4 rows for sales were put aside"):
        database.execute(pipeline(range("amount", max=-100, on_failure="quarantine"), mode="truncate"))
    assert amounts(database) == [-5, 10, 20, 1000]


def test_preview_counts_what_would_be_put_aside(database: Database) -> None:
    from datetime import UTC, datetime

    from weft.engine.preview import preview

    database.execute(pipeline())
    database.project.pipelines.clear()
    made = pipeline(range("amount", max=100, on_failure="quarantine"))
    found = preview(made, made.targets[0], datetime.now(UTC))
    assert found.refused is None
    assert (found.counts.inserted, found.counts.quarantined) == (3, 1)  # type: ignore[union-attr]
    assert len(amounts(database)) == 4


def test_decimals_and_times_are_compared_as_such(database: Database) -> None:
    from datetime import datetime
    from decimal import Decimal

    rows = [{"id": 1, "n": Decimal("10.50"), "at_": datetime(2026, 1, 1, 5)}]
    noon = datetime(2026, 1, 1, 12)
    good = [range("n", min=9), range("n", max=Decimal(11)), accepted("n", [Decimal("10.5")]), range("at_", max=noon)]
    database.execute(pipeline(*good, rows=rows))
    for bad in (range("n", max=9), range("at_", min=noon)):
        database.project.pipelines.clear()
        with pytest.raises(LoadRefusedError):
            database.execute(pipeline(bad, rows=rows))
