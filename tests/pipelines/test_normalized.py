"""Normalizers in the annotations of a table: applied in the load's transaction, wherever the rows come from."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import pytest

import weft
from pipelines.conftest import Database
from weft import natural_key, pk
from weft.normalize import default, derive, lower, parse_int, parse_timestamp, trim
from weft.types import BigInt, Integer, String, Text, TimestampTZ

FIRST = datetime(2026, 1, 1, 9, tzinfo=UTC)


@weft.table
class People:
    id: Annotated[BigInt, pk()]
    email: Annotated[String[50] | None, lower(), trim()]
    age: Annotated[Integer | None, parse_int(on_failure="error")]
    seen: Annotated[TimestampTZ | None, parse_timestamp()]
    country: Annotated[Text, default("unknown")]
    label: Annotated[Text | None, derive("country || '-' || age")]


ROWS = [
    {"id": 1, "email": " Ann@X.ORG ", "age": "41", "seen": "2026-01-01T09:00:00Z", "country": None},
    {"id": 2, "email": "BOB@x.org", "age": "7", "seen": None, "country": "NL"},
]
WANTED = [
    {"id": 1, "email": "ann@x.org", "age": 41, "seen": FIRST, "country": "unknown", "label": None},
    {"id": 2, "email": "bob@x.org", "age": 7, "seen": None, "country": "NL", "label": "NL-7"},
]


def pipeline(data: Any, **options: Any) -> Any:
    weft.project.current().pipelines.clear()
    return weft.pipeline(**{"target": People, "mode": "merge", "name": "people", **options})(lambda: data)


def people(database: Database) -> list[dict[str, Any]]:
    names = list(WANTED[0])
    return [{name: row[name] for name in names} for row in database.rows("people")]


def raw(database: Database) -> None:
    database.run(
        "CREATE TABLE raw (id BIGINT, email VARCHAR(50), age VARCHAR(50), seen VARCHAR(50), country VARCHAR(50))",
        "INSERT INTO raw VALUES (1, ' Ann@X.ORG ', '41', '2026-01-01T09:00:00Z', NULL), "
        "(2, 'BOB@x.org', '7', NULL, 'NL')",
    )


@pytest.mark.parametrize("mode", ["append", "truncate", "merge", "scd2"])
def test_rows_of_this_process(database: Database, mode: str) -> None:
    (loaded,) = database.execute(pipeline(ROWS, mode=mode))
    assert people(database) == WANTED
    assert loaded.engine == "pushdown"


@pytest.mark.parametrize("mode", ["append", "truncate", "merge", "scd2"])
def test_rows_of_the_database(database: Database, mode: str) -> None:
    raw(database)
    declared = pipeline("SELECT * FROM raw", mode=mode)
    database.execute(declared)
    assert people(database) == WANTED
    if mode in ("merge", "scd2"):
        # What is compared is what was stored.
        assert database.execute(declared)[0].counts.unchanged == 2


def test_rows_of_another_database(database: Database, spark: Any, tmp_path: Path) -> None:
    raw(database)
    weft.connect(f"sqlite:///{tmp_path / 'target.db'}", name="there")
    (loaded,) = database.execute(pipeline("SELECT * FROM raw", source_connection="default", target_connection="there"))
    assert loaded.engine == "spark"
    found = weft.testing.table_rows("people", connection="there")
    assert [{name: row[name] for name in WANTED[0]} for row in found] == WANTED


@pytest.mark.every_system
def test_files(database: Database, spark: Any, tmp_path: Path) -> None:
    """There Spark applies them, and gives the columns their declared types."""
    if database.tables.dialect not in ("sqlite", "postgres"):
        pytest.skip("the target is the same for every source")
    raw(database)
    weft.register_connection(
        weft.ObjectStoreLocalConnection(name="lake", path=str(tmp_path / "lake"), format="parquet")
    )
    database.execute(
        pipeline("SELECT * FROM raw", mode="append", source_connection="default", target_connection="lake")
    )
    found = weft.read("people", source="lake").orderBy("id").toArrow()
    assert [{name: row[name] for name in WANTED[0]} for row in found.to_pylist()] == WANTED
    assert str(found.schema.field("age").type) == "int32"


def test_keys_are_compared_as_they_are_stored(database: Database) -> None:
    @weft.table
    class Accounts:
        email: Annotated[String[50], lower(), trim(), natural_key()]
        n: BigInt

    weft.project.current().pipelines.clear()

    @weft.pipeline(target=Accounts, mode="merge")
    def accounts() -> list[dict[str, Any]]:
        return rows

    rows = [{"email": "A@x.org", "n": 1}]
    database.execute(accounts)
    rows = [{"email": " a@X.org", "n": 2}]
    assert database.execute(accounts)[0].counts.updated == 1
    rows = [{"email": " a@X.org", "n": 3}, {"email": "A@x.org", "n": 4}]
    with pytest.raises(weft.LoadRefusedError, match=r"a@x.org"):
        database.execute(accounts)
    assert database.rows("accounts") == [{"email": "a@x.org", "n": 2}]


@pytest.mark.brief(
    "sqlite-query-append",
    "sqlite-rows-merge",
    "postgres-query-merge",
    "postgres-rows-scd2",
    "mysql-query-scd2",
    "mysql-rows-append",
    "duckdb-query-append",
    "duckdb-rows-merge",
)
@pytest.mark.parametrize("mode", ["append", "merge", "scd2"])
@pytest.mark.parametrize("is_there", [True, False], ids=["query", "rows"])
def test_a_value_that_cannot_be_parsed(database: Database, mode: str, is_there: bool) -> None:
    """The error says of which column, by which normalizer, and what it is."""
    rows = [*ROWS, {"id": 3, "email": None, "age": "old", "seen": None, "country": "IT"}]
    raw(database)
    database.run("INSERT INTO raw VALUES (3, NULL, 'old', NULL, 'IT')")
    with pytest.raises(weft.WeftError, match=r"age: parse_int\(\) cannot read") as caught:
        database.execute(pipeline("SELECT * FROM raw" if is_there else rows, mode=mode))
    assert "old" in caught.value.what
    assert "out of range" not in caught.value.what
    if database.tables.savepoints:
        assert "rejected 1 row, and nothing was written:\n    id=3" in caught.value.what
    assert people(database) == []


def test_its_row_alone_is_put_aside(database: Database) -> None:
    rows = [*ROWS, {"id": 3, "email": None, "age": "old", "seen": None, "country": "IT"}]
    (loaded,) = database.execute(pipeline(rows, on_bad_rows="quarantine"))
    assert people(database) == WANTED
    assert (loaded.counts.inserted, loaded.counts.quarantined) == (2, 1)
    (aside,) = database.rows("people__quarantine")
    assert json.loads(aside["payload"])["id"] == 3
