"""Rows that a trigger rejects, or a check at the commit, and those that lack a time: found as all bad rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from systems.tables.test_bad_rows import SCHEMA, aside, ids, rows
from systems.tables.test_commit import DAY, load, run
from systems.tables.test_modes import rows_of
from weft.errors import LoadRefusedError
from weft.systems.load import Load
from weft.systems.sql import commit as sql_commit
from weft.systems.sql.tables import SqlTables

MODES = pytest.mark.parametrize("mode", ["append", "merge"])


def create(tables: SqlTables) -> None:
    run(tables, "CREATE TABLE t (id BIGINT PRIMARY KEY, name VARCHAR(20), n BIGINT)")


def check(tables: SqlTables, mode: str, why: str) -> None:
    keys = ["id"] if mode == "merge" else []
    with pytest.raises(LoadRefusedError, match=f"rejected 3 rows[\\s\\S]*{why}"):
        load(tables, rows(), mode=mode, keys=keys)
    assert ids(tables) == []
    counts = load(tables, rows(), mode=mode, keys=keys, on_bad_rows="quarantine")
    assert (counts.inserted, counts.quarantined) == (197, 3)
    assert aside(tables) == [3, 57, 58]
    assert len(ids(tables)) == 197


RAISES = {
    "postgres": (
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.n = 500 THEN RAISE EXCEPTION 'too many'; END IF; RETURN NEW; END $$",
        "CREATE TRIGGER few BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION refuse()",
    ),
    "mysql": (
        "CREATE TRIGGER few BEFORE INSERT ON t FOR EACH ROW "
        "IF NEW.n = 500 THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'too many'; END IF",
    ),
    "sqlite": ("CREATE TRIGGER few BEFORE INSERT ON t WHEN NEW.n = 500 BEGIN SELECT RAISE(ABORT, 'too many'); END",),
}


@pytest.mark.every_system
def test_rows_without_an_event_time(tables: SqlTables) -> None:
    """With `handle_deletes` they are refused: a key that were put aside would count as one that is gone."""
    given = [{"id": 1, "at": DAY}, *({"id": 1, "at": None} for _ in range(2)), {"id": 2, "at": None}]
    table = pa.Table.from_pylist(given, pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", "UTC"))]))
    scd2: dict[str, Any] = {"mode": "scd2", "keys": ["id"], "event_timestamp_column": "at"}
    deletes: dict[str, Any] = {"on_bad_rows": "quarantine", "handle_deletes": "soft", "deduplicate_by": ["at"]}
    for options in ({}, deletes):
        with pytest.raises(LoadRefusedError, match=r"share a key|no event time"):
            load(tables, table, **scd2, **options)
    counts = load(tables, table, **scd2, on_bad_rows="quarantine")
    assert (counts.inserted, counts.quarantined, counts.unchanged) == (1, 3, 0)
    assert aside(tables) == [1, 1, 2]
    assert {row["_weft_error"] for row in rows_of(tables, "t__quarantine")} == {
        "The row has no event time (at is null)."
    }


def test_rows_without_a_key_where_missing_ones_are_removed(tables: SqlTables) -> None:
    """Nobody knows whose rows they are: put aside, they would let all rows of the table be removed."""
    merge: dict[str, Any] = {"mode": "merge", "keys": ["id"], "on_bad_rows": "quarantine"}
    load(tables, [{"id": 1, "n": 1}, {"id": 2, "n": 2}], **merge)
    keyless = pa.Table.from_pylist([{"id": None, "n": 1}], pa.schema([("id", pa.int64()), ("n", pa.int64())]))
    with pytest.raises(LoadRefusedError, match=r"have no key \(id is null\)"):
        load(tables, keyless, **merge, handle_deletes="hard")
    assert ids(tables) == [1, 2]
    assert load(tables, keyless, **merge).quarantined == 1


@pytest.mark.every_system
@MODES
def test_what_a_trigger_raises(tables: SqlTables, mode: str) -> None:
    if tables.dialect not in RAISES:
        return  # DuckDB has no triggers
    create(tables)
    run(tables, *RAISES[tables.dialect])
    check(tables, mode, "too many")


@pytest.mark.brief("postgres-append", "postgres-merge")
@MODES
def test_a_foreign_key_that_is_checked_at_the_commit(tables: SqlTables, mode: str) -> None:
    """As Django declares all of them."""
    if tables.dialect != "postgres":
        return
    create(tables)
    run(tables, "CREATE TABLE numbers (n BIGINT PRIMARY KEY)", "INSERT INTO numbers SELECT generate_series(0, 99)")
    run(tables, "ALTER TABLE t ADD FOREIGN KEY (n) REFERENCES numbers DEFERRABLE INITIALLY DEFERRED")
    check(tables, mode, "foreign key")


@pytest.mark.brief("postgres")
def test_rows_of_two_loads_may_refer_to_each_other(tables: SqlTables) -> None:
    if tables.dialect != "postgres":
        return
    create(tables)
    run(tables, "CREATE TABLE numbers (id BIGINT PRIMARY KEY, name VARCHAR(20), n BIGINT)")
    run(tables, "ALTER TABLE t ADD FOREIGN KEY (n) REFERENCES numbers DEFERRABLE INITIALLY DEFERRED")
    loads = [Load.declare(target=name) for name in ("t", "numbers")]
    for each in loads:
        sql_commit.prepare(tables, each, SCHEMA)
    batch = pa.RecordBatch.from_pylist(rows(bad=()), SCHEMA)
    sql_commit.commit_together(tables, [(each, sql_commit.BatchedRows(SCHEMA, [batch])) for each in loads])
    assert len(ids(tables)) == len(ids(tables, "numbers")) == 200
