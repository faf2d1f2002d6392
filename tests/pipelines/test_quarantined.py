"""Rows that a target put aside: loaded once more, each once, or removed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, Any

import pyarrow as pa
import pytest

import weft
from pipelines.conftest import Database
from weft import LoadRefusedError, NotFoundError, pk
from weft.engine import quarantined
from weft.expectations import Expectation, not_null, range
from weft.normalize import derive, parse_int
from weft.project import current
from weft.server.quarantine import read_quarantine
from weft.systems.sql import quarantine
from weft.types import BigInt, Integer, String

ROWS = [
    {"id": 1, "kind": "a", "amount": 10},
    {"id": 2, "kind": None, "amount": 20},
    {"id": 3, "kind": "c", "amount": -5},
    {"id": 4, "kind": "d", "amount": 1000},
]
CHECKS = (not_null("kind"), range("amount", 0, 100))


def pipeline(*expectations: Expectation, rows: list[dict[str, Any]] = ROWS, **options: Any) -> Any:
    current().pipelines.clear()

    @weft.pipeline(target="sales", expectations=list(expectations), on_quality_failure="quarantine", **options)
    def sales() -> list[dict[str, Any]]:
        return rows

    return sales


def ids(database: Database, table: str = "sales") -> list[int]:
    return sorted(row["id"] for row in database.rows(table))


def aside(database: Database) -> list[int]:
    return sorted(json.loads(row["payload"])["id"] for row in database.rows("sales__quarantine"))


def group(declared: Any, error: str) -> str:
    (table,) = read_quarantine(declared)
    (found,) = [each["group"] for each in table["groups"] if error in each["error"]]
    return str(found)


def test_rows_are_loaded_as_the_pipeline_is_now(database: Database) -> None:
    database.execute(pipeline(*CHECKS))
    assert (ids(database), aside(database)) == ([1], [2, 3, 4])
    mended = pipeline(not_null("kind"), range("amount", 0, 1000))
    assert quarantined.count(mended, to_replay=True).rows == 3
    done = quarantined.replay(mended, expected=3)
    assert (done.rows, done.again, done.held) == (3, 2, {})
    assert (ids(database), aside(database)) == ([1, 4], [2, 3])
    # What failed again can be tried again.
    assert quarantined.replay(pipeline()).again == 0
    assert (ids(database), aside(database)) == ([1, 2, 3, 4], [])
    assert quarantined.replay(pipeline()).rows == 0


def test_a_group_alone_is_loaded_or_removed(database: Database) -> None:
    declared = pipeline(*CHECKS)
    database.execute(declared)
    database.execute(declared)
    nulls, amounts = group(declared, "not_null"), group(declared, "range")
    assert quarantined.replay(pipeline(), nulls).rows == 2
    assert (ids(database), aside(database)) == ([1, 1, 2, 2], [3, 3, 4, 4])
    with pytest.raises(LoadRefusedError, match="4 such rows in quarantine by now, not 3"):
        quarantined.purge(declared, amounts, expected=3)
    assert quarantined.purge(declared, amounts, expected=4).rows == 4
    assert (ids(database), aside(database)) == ([1, 1, 2, 2], [])
    with pytest.raises(NotFoundError, match="no group"):
        quarantined.purge(declared, amounts)


@contextmanager
def failing_at(step: str) -> Iterator[None]:
    """Let a load fail at a step of its commit."""

    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == step:
                raise InterruptedError(step)

    logger, handler = logging.getLogger("weft.commit"), Failing()
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def test_a_replay_that_fails_at_any_step_changes_nothing(database: Database) -> None:
    database.execute(pipeline(*CHECKS))
    mended = pipeline(range("amount", 0, 1000))
    for step in ("begun", "claimed", "staged", "checked", "moved", "recorded"):
        with failing_at(step), pytest.raises(InterruptedError):
            quarantined.replay(mended)
        assert (ids(database), aside(database)) == ([1], [2, 3, 4]), step
    with failing_at("committed"), pytest.raises(InterruptedError):
        quarantined.replay(mended)
    assert (ids(database), aside(database)) == ([1, 2, 4], [3])


def test_of_two_replays_of_the_same_rows_one_loads_them(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    database.execute(pipeline(*CHECKS))
    mended, read = pipeline(), quarantine.read

    def read_before_another(*arguments: Any) -> list[tuple[str, str]]:
        found = read(*arguments)
        monkeypatch.setattr(quarantine, "read", read)
        assert quarantined.replay(mended).rows == 3
        return found

    monkeypatch.setattr(quarantine, "read", read_before_another)
    with pytest.raises(LoadRefusedError, match="by another meanwhile"):
        quarantined.replay(mended)
    assert (ids(database), aside(database)) == ([1, 2, 3, 4], [])


@pytest.mark.parametrize("mode", ["merge", "scd2"])
def test_rows_are_merged_and_nothing_else_is_removed(database: Database, mode: str) -> None:
    options = {"mode": mode, "keys": ["id"], "handle_deletes": "hard" if mode == "merge" else "soft"}
    database.execute(pipeline(*CHECKS, **options))
    assert quarantined.replay(pipeline(**options)).again == 0
    assert ids(database) == [1, 2, 3, 4]
    if mode == "scd2":
        assert all(row["is_current"] for row in database.rows("sales"))


@pytest.mark.brief("sqlite-merge", "postgres-scd2", "mysql-truncate", "duckdb-merge")
@pytest.mark.parametrize("mode", ["merge", "scd2", "truncate"])
def test_rows_that_each_run_reads_are_there_once(database: Database, mode: str) -> None:
    """With the reason of the last run."""
    options: dict[str, Any] = {"mode": mode, "on_bad_rows": "quarantine"}
    rows = [*ROWS, {**ROWS[1], "id": 5}]
    if mode != "truncate":
        options["keys"] = ["id"]
        rows += [{**ROWS[0], "id": None}] * 2
    bad = len(rows) - 1

    def run(*expectations: Expectation, rows: list[dict[str, Any]] = rows) -> tuple[int, int]:
        (loaded,) = database.execute(pipeline(*expectations, rows=rows, **options))
        return loaded.counts.quarantined, len(database.rows("sales__quarantine"))

    for _ in "123":
        assert run(*CHECKS) == (bad, bad)
    assert run(not_null("kind"), range("amount", 0, 50)) == (bad, bad)
    errors = {row["_weft_error"] for row in database.rows("sales__quarantine")}
    assert any("max=50" in each for each in errors) and not any("max=100" in each for each in errors)
    # Those that do not come again stay.
    assert run(*CHECKS, rows=[ROWS[0], {**ROWS[3], "amount": 2000}]) == (1, bad + 1)
    # Another pipeline has its own.
    database.run("UPDATE sales__quarantine SET _weft_pipeline = 'other'")
    assert run(*CHECKS) == (bad, bad + bad + 1)


def test_a_table_that_each_run_replaces_takes_none(database: Database) -> None:
    declared = pipeline(*CHECKS, mode="truncate")
    database.execute(declared)
    done = quarantined.replay(declared)
    assert (done.rows, list(done.held.values())) == (0, [3])
    assert "each run replaces all of sales" in next(iter(done.held))
    assert quarantined.purge(declared).rows == 3


def test_normalizers_change_a_row_once(database: Database) -> None:
    """Rows that they could not change come as the source has them, others as they made them."""

    @weft.table
    class People:
        id: Annotated[BigInt, pk()]
        age: Annotated[Integer | None, parse_int(on_failure="error")]
        name: Annotated[String[5] | None, derive("name || '!'")]

    @weft.pipeline(target=People, column_map={"age": "years"}, on_bad_rows="quarantine")
    def people() -> list[dict[str, Any]]:
        rows = [(1, "31", "Ann"), (2, "32", "too long"), (3, "old", "Cleo")]
        return [{"id": number, "years": years, "name": name} for number, years, name in rows]

    (loaded,) = database.execute(people)
    assert loaded.counts.quarantined == 2
    kept = {json.loads(row["payload"])["id"]: row for row in database.rows("people__quarantine")}
    assert {key: row["_weft_rows_of"] for key, row in kept.items()} == {2: "table", 3: "source"}
    assert quarantined.replay(people).again == 2
    # Mended in the quarantine itself, by SQL.
    for old, new in (("too long", "Bob"), ("old", "33")):
        database.run(f"UPDATE people__quarantine SET payload = replace(payload, '{old}', '{new}')")
    assert quarantined.replay(people).again == 0
    found = sorted((row["id"], row["age"], row["name"]) for row in database.rows("people"))
    assert found == [(1, 31, "Ann!"), (2, 32, "Bob!"), (3, 33, "Cleo!")]


def test_values_come_back_as_they_were(database: Database) -> None:
    values = {
        "at": datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC),
        "day": date(2026, 3, 1),
        "price": Decimal("12345678.12"),
        "raw": b"\x00\xff",
        "flag": True,
        "big": 2**62 + 1,
        "text": 'é"\\ 1',
        "ratio": 0.1,
    }
    good, bad, worse = ({"id": number, "amount": 2 - number * 2, **values} for number in (1, 2, 3))
    database.execute(pipeline(range("amount", min=0), rows=[good, bad, worse]))
    # One that no column can hold stays, with the reason.
    database.run(
        "UPDATE sales__quarantine SET payload = replace(payload, '\"2026-03-01\"', '\"someday\"') "
        "WHERE payload LIKE '%\"id\": 3,%'"
    )
    assert quarantined.replay(pipeline(rows=[good])).again == 1
    (kept,) = database.rows("sales__quarantine")
    assert (json.loads(kept["payload"])["id"], "day" in kept["_weft_error"]) == (3, True)
    one, two = sorted(database.rows("sales"), key=lambda row: row["id"])
    assert {name: two[name] for name in values} == {name: one[name] for name in values}


def test_a_quarantine_of_an_older_version_goes_on(database: Database) -> None:
    declared = pipeline(*CHECKS)
    database.execute(declared)
    database.run("ALTER TABLE sales__quarantine DROP COLUMN _weft_rows_of")
    database.execute(declared)
    assert {row["_weft_rows_of"] for row in database.rows("sales__quarantine")} == {None, "table"}
    assert quarantined.replay(pipeline()).rows == 6
    assert (ids(database), aside(database)) == ([1, 1, 2, 2, 3, 3, 4, 4], [])


def test_bytes_that_are_no_text_are_not_loaded_as_they_are_shown(database: Database) -> None:
    texts = pa.array([b"good", b"\xff", b"\xff"]).cast(pa.string(), safe=False)

    @weft.pipeline(target="sales", on_bad_rows="quarantine")
    def sales() -> pa.Table:
        return pa.table({"id": pa.array([1, 2, 3]), "kind": texts})

    database.execute(sales)
    assert (ids(database), aside(database)) == ([1], [2, 3])
    done = quarantined.replay(sales)
    assert (done.rows, [*done.held.values()], aside(database)) == (0, [2], [2, 3])
