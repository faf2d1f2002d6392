"""Rows that a target rejects: named by the error, or put aside alone."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from systems.tables.conftest import KINDS
from systems.tables.test_commit import DAY, load, run
from systems.tables.test_modes import rows_of
from weft.errors import LoadRefusedError, WeftError
from weft.normalize import expression, parse_int
from weft.systems.expectation import Expectation
from weft.systems.load import Load, Projected
from weft.systems.sql import commit as sql_commit
from weft.systems.sql import ledger, staging, target, trial
from weft.systems.sql.tables import SqlTables

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("n", pa.int64())])
MODES = pytest.mark.parametrize(
    ("mode", "keys"), [("append", []), ("truncate", []), ("merge", ["id"]), ("scd2", ["id"])]
)
# Each mode on SQLite and on one of the others at least, from one kind of source; both kinds on each database.
PAIRS = pytest.mark.brief(
    *(
        f"{kind}-{('once', 'query')[(i + j) % 2]}-{mode}-keys{j}"
        for i, kind in enumerate(KINDS)
        for j, mode in enumerate(("append", "truncate", "merge", "scd2"))
        if kind == "sqlite" or (i + j // 2) % 2 == 0
    )
)
BAD = (3, 57, 58)


def create(tables: SqlTables, mode: str = "append", more: str = "") -> None:
    """A table that takes no `n` from 100 on, with one row."""
    columns = f"id BIGINT, name VARCHAR(20), n BIGINT CHECK (n < 100){more}"
    if mode == "scd2":
        kinds = {field.name: tables.sql_type(field) for field in target.scd2_fields()}
        columns += "".join(f", {tables.quote(name)} {kind}" for name, kind in kinds.items())
    run(tables, f"CREATE TABLE t ({columns})")
    load(tables, [{"id": 1000, "name": "before", "n": 1}], mode=mode, keys=["id"] if mode in ("merge", "scd2") else [])


def rows(bad: tuple[int, ...] = BAD, count: int = 200) -> list[dict[str, Any]]:
    return [{"id": i, "name": f"n{i}", "n": 500 if i in bad else i % 100} for i in range(count)]


def ids(tables: SqlTables, name: str = "t") -> list[int]:
    return sorted(row["id"] for row in rows_of(tables, name))


def aside(tables: SqlTables) -> list[int]:
    found = rows_of(tables, "t__quarantine")
    assert all(row["_weft_error"] and row["_weft_pipeline"] == "t" for row in found)
    return sorted(json.loads(row["payload"])["id"] for row in found)


def once(given: list[dict[str, Any]], size: int = 30) -> Iterator[pa.RecordBatch]:
    """Batches that nobody can read twice."""
    yield from pa.Table.from_pylist(given, schema=SCHEMA).to_batches(max_chunksize=size)


def as_rows(tables: SqlTables, how: str, given: list[dict[str, Any]]) -> sql_commit.SourceRows:
    if how == "once":
        return sql_commit.BatchedRows(SCHEMA, once(given))
    load(tables, pa.Table.from_pylist(given, schema=SCHEMA), target="source")
    return sql_commit.QueriedRows(f"SELECT id, name, n FROM {tables.table(None, 'source')}", SCHEMA)


# ---------------------------------------------------------------------------------------------------- fail


@pytest.mark.every_system
def test_a_number_as_a_text_is_exact_or_refused(tables: SqlTables) -> None:
    kind = "DECIMAL_TEXT(38,2)" if tables.dialect == "sqlite" else "DECIMAL(38,2)"
    run(tables, f"CREATE TABLE t (id BIGINT, n {kind})")
    exact = ["1.25e2", "1500E-3", "-1.50e+1", "0E-20", "1.500", "12345678901234567890123456789.50"]
    for text in ("1.5e-12", "1.555", "15e-3", "1.2345678901234567891e1", "12345678901234567890.1239e1"):
        with pytest.raises(LoadRefusedError, match="rejected 1 row"):
            load(tables, pa.table({"id": [0], "n": [text]}))
    load(tables, pa.table({"id": range(len(exact)), "n": exact}))
    assert [row["n"] for row in sorted(rows_of(tables, "t"), key=lambda row: row["id"])] == list(map(Decimal, exact))


@PAIRS
@MODES
@pytest.mark.parametrize("how", ["once", "query"])
def test_the_error_names_the_rows(tables: SqlTables, mode: str, keys: list[str], how: str) -> None:
    create(tables, mode)
    source = as_rows(tables, how, rows())
    planned = Load.declare(target="t", mode=mode, keys=keys, commit_key="monday", moment=DAY)
    sql_commit.prepare(tables, planned, SCHEMA)
    with pytest.raises(LoadRefusedError, match="The table t rejected 3 rows, and nothing was written:") as caught:
        sql_commit.commit(tables, planned, source)
    lines = caught.value.what.splitlines()[1:]
    shown = [f"id={i}" if keys else f"id={i}, name=n{i}, n=500" for i in BAD]
    assert [line.strip().partition(": ")[0] for line in lines] == shown
    # The database's own reason.
    assert all("constraint" in line.lower() for line in lines)
    assert 'on_bad_rows="quarantine"' in str(caught.value.hint)
    assert caught.value.can_quarantine
    assert ids(tables) == [1000]
    assert not ledger.is_committed(tables, planned)
    # Nothing is left of the attempt: what is good goes in.
    assert load(tables, rows(bad=()), mode=mode, keys=keys, commit_key="monday").inserted == 200


@pytest.mark.brief(
    "sqlite-append-keys0", "postgres-truncate-keys1", "postgres-merge-keys2", "mysql-scd2-keys3", "duckdb-merge-keys2"
)
@MODES
def test_the_error_names_a_few_of_many(tables: SqlTables, mode: str, keys: list[str]) -> None:
    create(tables, mode)
    with pytest.raises(LoadRefusedError, match="rejected at least 5 rows") as caught:
        load(tables, rows(bad=tuple(range(20, 180))), mode=mode, keys=keys)
    assert [f"id={i}" in caught.value.what for i in (19, 20, 24, 25)] == [False, True, True, False]
    assert ids(tables) == [1000]


def test_one_row_of_a_source_that_is_longer_than_what_is_looked_through(
    tables: SqlTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_commit, "_RECENT_BYTES", 4096)
    create(tables)
    planned = Load.declare(target="t", moment=DAY)
    sql_commit.prepare(tables, planned, SCHEMA)
    given = rows(bad=(9_000,), count=20_000)
    if tables.dialect in ("postgres", "duckdb"):
        given = given[:9_060]  # both take more before they say anything
    with pytest.raises(LoadRefusedError, match=r"rejected (at least )?1 row, and") as caught:
        sql_commit.commit(tables, planned, sql_commit.BatchedRows(SCHEMA, once(given, 100)))
    assert ("at least" in caught.value.what) == (len(given) == 20_000)
    assert "id=9000, name=n9000" in caught.value.what
    assert ids(tables) == [1000]


def test_rows_that_contradict_each_other_are_named(tables: SqlTables) -> None:
    create(tables, more=", UNIQUE (name)")
    given = [*rows(bad=()), {"id": 500, "name": "n7", "n": 1}, {"id": 501, "name": "before", "n": 1}]
    with pytest.raises(LoadRefusedError, match="rejected 2 rows") as caught:
        load(tables, given)
    assert "id=500, name=n7" in caught.value.what
    assert "id=501, name=before" in caught.value.what
    assert ids(tables) == [1000]


@pytest.mark.parametrize("how", ["once", "query"])
def test_the_hint_about_a_key_that_is_there(tables: SqlTables, how: str) -> None:
    create(tables, more=", UNIQUE (id)")
    again = [{"id": 1000, "name": "again", "n": 1}]
    planned = Load.declare(target="t", commit_key="monday", moment=DAY)
    sql_commit.prepare(tables, planned, SCHEMA)
    for carry_out in (trial.attempt, sql_commit.commit):
        with pytest.raises(LoadRefusedError, match=r"rejected \d rows?, and nothing was written:") as caught:
            carry_out(tables, planned, as_rows(tables, how, again))
        hint = str(caught.value.hint)
        assert -1 < hint.index("incremental_column") < hint.index('mode="merge"') < hint.index("on_bad_rows")
    with pytest.raises(LoadRefusedError, match="rejected") as caught:
        load(tables, rows(bad=(3,), count=5))
    assert "incremental_column" not in str(caught.value.hint)


def test_values_that_do_not_fit_are_named(tables: SqlTables) -> None:
    """Where rows are converted on their way, and where a staging table does not take them."""
    if tables.dialect == "sqlite":
        pytest.skip("it takes any value in any column")
    run(tables, "CREATE TABLE t (id BIGINT, name VARCHAR(20), n SMALLINT)")
    with pytest.raises(LoadRefusedError, match="rejected 1 row, and") as caught:
        load(tables, [*rows(bad=()), {"id": 500, "name": "a", "n": 70_000}])
    assert "id=500, name=a, n=70000" in caught.value.what
    assert ids(tables) == []


def test_staged_rows_are_named(tables: SqlTables) -> None:
    if tables.one_writer:
        pytest.skip(f"{tables.dialect} takes one writer at a time")
    create(tables)
    planned = Load.declare(target="t", moment=DAY)
    sql_commit.prepare(tables, planned, SCHEMA)
    with staging.staging_table(tables, SCHEMA) as table:
        attempt, _, _ = staging.fill(tables, table, SCHEMA, once(rows()))
        with pytest.raises(LoadRefusedError, match="rejected 3 rows"):
            sql_commit.commit(tables, planned, sql_commit.StagedRows(table, SCHEMA, (attempt,)))
    assert ids(tables) == [1000]


def test_what_is_no_fault_of_a_row_is_said_as_it_is(tables: SqlTables) -> None:
    """A stored row that others need may not go: no source row is bad."""
    if tables.dialect == "sqlite":
        pytest.skip("it checks foreign keys only where it is told to")
    key = "BIGINT PRIMARY KEY"
    run(tables, f"CREATE TABLE t (id {key}, name VARCHAR(20), n BIGINT)")
    run(tables, "CREATE TABLE child (id BIGINT, parent BIGINT, FOREIGN KEY (parent) REFERENCES t (id))")
    load(tables, rows(bad=()), mode="merge", keys=["id"])
    run(tables, "INSERT INTO child VALUES (1, 7)")
    with pytest.raises(WeftError) as caught:
        load(tables, rows(bad=())[8:], mode="merge", keys=["id"], handle_deletes="hard")
    assert not isinstance(caught.value, LoadRefusedError)
    assert len(ids(tables)) == 200


# ---------------------------------------------------------------------------------------------- quarantine


@PAIRS
@MODES
@pytest.mark.parametrize("how", ["once", "query"])
def test_bad_rows_alone_are_put_aside(tables: SqlTables, mode: str, keys: list[str], how: str) -> None:
    create(tables, mode)
    source = as_rows(tables, how, rows())
    planned = Load.declare(target="t", mode=mode, keys=keys, commit_key="monday", on_bad_rows="quarantine", moment=DAY)
    sql_commit.prepare(tables, planned, SCHEMA)
    counts = sql_commit.commit(tables, planned, source)
    assert (counts.rows_read, counts.inserted, counts.quarantined, counts.unchanged) == (200, 197, 3, 0)
    good = [i for i in range(200) if i not in BAD]
    assert ids(tables) == good + [1000] * (mode != "truncate")
    assert aside(tables) == list(BAD)
    # Exactly once, both of them.
    assert sql_commit.commit(tables, planned, sql_commit.BatchedRows(SCHEMA, once(rows()))).replayed
    assert aside(tables) == list(BAD)
    if mode == "merge":
        again = load(tables, rows(), mode=mode, keys=keys, on_bad_rows="quarantine")
        assert (again.inserted, again.updated, again.unchanged, again.quarantined) == (0, 0, 197, 3)
        assert aside(tables) == list(BAD)


def test_all_rows_are_bad_or_none(tables: SqlTables) -> None:
    create(tables)
    assert load(tables, rows(bad=()), on_bad_rows="quarantine").quarantined == 0
    counts = load(tables, rows(bad=tuple(range(20)), count=20), on_bad_rows="quarantine")
    assert (counts.rows_read, counts.inserted, counts.quarantined) == (20, 0, 20)
    assert aside(tables) == list(range(20))


def test_rows_that_contradict_each_other(tables: SqlTables) -> None:
    """Each alone would be taken: the first one is, the others are put aside."""
    create(tables, more=", UNIQUE (name)")
    given = [*rows(), {"id": 500, "name": "n7", "n": 1}, {"id": 501, "name": "n8", "n": 1}]
    counts = load(tables, given, on_bad_rows="quarantine")
    assert (counts.rows_read, counts.inserted, counts.quarantined) == (202, 197, 5)
    assert aside(tables) == [*BAD, 500, 501]
    assert [i for i in ids(tables) if i >= 200] == [1000]


@pytest.mark.brief("sqlite-append", "postgres-merge", "mysql-append", "duckdb-merge")
@pytest.mark.parametrize("mode", ["append", "merge"])
def test_rows_that_only_contradict_each_other(tables: SqlTables, mode: str) -> None:
    create(tables, more=", UNIQUE (name)")
    given = [*rows(bad=()), {"id": 500, "name": "n7", "n": 1}, {"id": 501, "name": "n8", "n": 1}]
    keys = ["id"] if mode == "merge" else []
    counts = load(tables, given, mode=mode, keys=keys, on_bad_rows="quarantine")
    assert (counts.inserted, counts.quarantined) == (200, 2)
    assert aside(tables) == [500, 501]


@pytest.mark.brief("sqlite-scd2", "postgres-merge", "mysql-scd2", "duckdb-merge")
@pytest.mark.parametrize("mode", ["merge", "scd2"])
def test_values_that_no_column_takes_and_rows_that_the_table_refuses(tables: SqlTables, mode: str) -> None:
    """The first are found while rows are compared, the others while they are moved."""
    narrow = {"sqlite": "INTEGER_16"}.get(tables.dialect, "SMALLINT")
    create(tables, mode, more=f", w {narrow}")
    given = [{**row, "w": 1_000_000 if row["id"] in (4, 58, 199) else 1} for row in rows()]
    first = load(tables, given[:100], mode=mode, keys=["id"], on_bad_rows="quarantine")
    assert (first.inserted, first.updated, first.unchanged, first.quarantined) == (96, 0, 0, 4)
    changed = [{**row, "name": "new"} if row["id"] == 50 else row for row in given]
    second = load(tables, changed, mode=mode, keys=["id"], on_bad_rows="quarantine", moment=DAY + timedelta(days=1))
    assert (second.inserted, second.updated, second.unchanged, second.quarantined) == (99, 1, 95, 5)
    assert aside(tables) == [3, 4, 57, 58, 199]
    assert ids(tables) == sorted([i for i in range(199) if i not in (3, 4, 57, 58)] + [1000] + [50] * (mode == "scd2"))


@pytest.mark.brief(
    "sqlite-append-keys0", "sqlite-scd2-keys3", "postgres-merge-keys2", "mysql-truncate-keys1", "duckdb-merge-keys2"
)
@MODES
def test_many_bad_rows_are_found_by_few_statements(tables: SqlTables, mode: str, keys: list[str]) -> None:
    create(tables, mode)
    said: list[str] = []
    driver = tables.driver
    execute = driver.execute
    driver.execute = lambda *arguments: (said.append(arguments[1]), execute(*arguments))[1]  # type: ignore[method-assign]
    count, bad = 4096, tuple(range(100, 4096, 256))
    assert load(tables, rows(bad, count), mode=mode, keys=keys, on_bad_rows="quarantine").quarantined == len(bad)
    # Those before it, it alone, those behind it: halving took 70 statements for each. PostgreSQL also checks what is
    # deferred.
    assert len(said) < len(bad) * 25 + 100
    # Tries are not compared one by one: the rows of those that failed would be in the way.
    assert len([sql for sql in said if "LEFT JOIN" in sql and "_weft_stage" in sql]) == (1 if keys else 0)


STRICT = SCHEMA.append(pa.field("parent", pa.int64())).append(pa.field("small", pa.int64()))
FAULTS = {"check": {"n": 500}, "null": {"n": None}, "range": {"small": 1_000_000}, "key": {"parent": 99}}


def create_strict(tables: SqlTables) -> None:
    """A table that refuses rows for many reasons."""
    small = {"sqlite": "INTEGER_16"}.get(tables.dialect, "SMALLINT")
    run(tables, "CREATE TABLE parents (id BIGINT PRIMARY KEY)")
    run(tables, f"INSERT INTO parents VALUES {', '.join(f'({i})' for i in range(50))}")
    columns = "id BIGINT PRIMARY KEY, name VARCHAR(20) UNIQUE, n BIGINT NOT NULL CHECK (n < 100), parent BIGINT"
    run(tables, f"CREATE TABLE t ({columns}, small {small}, FOREIGN KEY (parent) REFERENCES parents (id))")


def strict_rows(count: int, breaks: Callable[[int], str | None]) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Rows, of which some break a rule; those that do, with the rule."""
    given, broken = [], {}
    for i in range(count):
        row = {"id": i, "name": f"n{i}", "n": i % 100, "parent": i % 50, "small": i % 1000}
        if (rule := breaks(i)) is not None:
            row |= FAULTS.get(rule) or {"name": f"n{i - 1}"}
            broken[i] = rule
        given.append(row)
    return given, broken


def reasons(tables: SqlTables) -> dict[int, str]:
    """By the row that was put aside, the reason."""
    found = [(json.loads(row["payload"])["id"], row["_weft_error"]) for row in rows_of(tables, "t__quarantine")]
    assert len(dict(found)) == len(found)
    return dict(found)


# None has all kinds, so it is on every system; each kind alone is once.
@pytest.mark.brief(
    "sqlite-check-append",
    "sqlite-null-merge",
    "sqlite-None-append",
    "sqlite-None-merge",
    "postgres-None-merge",
    "mysql-None-append",
    "duckdb-None-merge",
    *("postgres-key-append", "duckdb-range-merge", "mysql-unique-append"),
)
@pytest.mark.parametrize("mode", ["append", "merge"])
@pytest.mark.parametrize("rule", [*FAULTS, "unique", None])
def test_every_kind_of_bad_row_is_found_by_few_statements(tables: SqlTables, rule: str | None, mode: str) -> None:
    if tables.dialect == "sqlite" and rule == "key":
        pytest.skip("it checks foreign keys only where it is told to")
    create_strict(tables)
    kinds = [rule] if rule else [*FAULTS, "unique"]
    given, broken = strict_rows(2_000, lambda i: kinds[i // 50 % len(kinds)] if i % 50 == 37 else None)
    if tables.dialect == "sqlite":
        broken = {i: each for i, each in broken.items() if each != "key"}
    keys = ["id"] if mode == "merge" else []
    said: list[str] = []
    execute = tables.driver.execute
    tables.driver.execute = lambda *arguments: (said.append(arguments[1]), execute(*arguments))[1]  # type: ignore[method-assign]
    counts = load(tables, given, mode=mode, keys=keys, on_bad_rows="quarantine")
    # Halving took 50 statements for each.
    assert len(said) < 20 * len(broken) + 100
    assert (counts.rows_read, counts.inserted, counts.quarantined) == (2_000, 2_000 - len(broken), len(broken))
    why = reasons(tables)
    assert sorted(why) == sorted(broken)
    assert ids(tables) == [i for i in range(2_000) if i not in broken]
    for kind in kinds:
        assert len({re.sub(r"n?\d+", "N", why[i]) for i, each in broken.items() if each == kind}) <= 1


def test_the_reason_is_that_of_the_row_alone(tables: SqlTables) -> None:
    """Also where the database was asked for all rows that break a rule."""
    create_strict(tables)
    kinds = ["check", "null", "range", "key"] if tables.dialect != "sqlite" else ["check", "null", "range"]
    given, broken = strict_rows(40, lambda i: kinds[i % len(kinds)] if i % 5 == 2 else None)
    for i in broken:
        given[i] |= {"small": 1_000_000 + i} if broken[i] == "range" else {}
        given[i] |= {"parent": 100 + i} if broken[i] == "key" else {}
    load(tables, given, on_bad_rows="quarantine")
    why = reasons(tables)
    assert sorted(why) == sorted(broken)
    run(tables, "DELETE FROM t__quarantine")
    for i in broken:
        load(tables, pa.Table.from_pylist([given[i]], schema=STRICT), on_bad_rows="quarantine")
    assert reasons(tables) == why


@pytest.mark.brief("sqlite-0-append", "sqlite-0-merge", "postgres-0-merge", "mysql-0-append", "duckdb-0-append")
@pytest.mark.parametrize("mode", ["append", "merge"])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_rows_are_rejected_as_one_by_one(tables: SqlTables, mode: str, seed: int) -> None:
    """Rows with several faults, and rows that contradict others, some of which are bad themselves."""
    create_strict(tables)
    chance = random.Random(seed)
    given: list[dict[str, Any]] = []
    expected, names = [], set[str]()
    for i in range(300):
        row = {"id": i, "name": f"n{chance.randrange(900)}", "n": i % 100, "parent": i % 50, "small": i % 1000}
        for rule in FAULTS:
            if chance.random() < 0.04 and not (rule == "key" and tables.dialect == "sqlite"):
                row |= FAULTS[rule]
        given.append(row)
        is_good = row["n"] in range(100) and row["small"] < 1_000 and row["parent"] < 50 and row["name"] not in names
        if is_good:
            expected.append(i)
            names.add(row["name"])
    counts = load(tables, given, mode=mode, keys=["id"] if mode == "merge" else [], on_bad_rows="quarantine")
    assert ids(tables) == expected
    assert (counts.inserted, counts.quarantined) == (len(expected), 300 - len(expected))
    assert sorted(reasons(tables)) == sorted(set(range(300)) - set(expected))


def test_rows_that_are_updated_and_bad(tables: SqlTables) -> None:
    create_strict(tables)
    good, _ = strict_rows(500, lambda i: None)
    load(tables, [{**row, "small": 7} for row in good])
    kinds = ["check", "null", "range"]
    given, broken = strict_rows(500, lambda i: kinds[i % 3] if i % 25 == 7 else None)
    said: list[str] = []
    execute = tables.driver.execute
    tables.driver.execute = lambda *arguments: (said.append(arguments[1]), execute(*arguments))[1]  # type: ignore[method-assign]
    counts = load(tables, given, mode="merge", keys=["id"], on_bad_rows="quarantine")
    assert (counts.inserted, counts.quarantined) == (0, len(broken))
    assert sorted(reasons(tables)) == sorted(broken)
    assert {row["id"]: row["small"] for row in rows_of(tables, "t")} == {i: 7 if i in broken else i for i in range(500)}
    # SQLite reads all rows of an UPDATE before it changes one, and is asked nothing: its statements take little time.
    assert len(said) < (60 if tables.dialect == "sqlite" else 20) * len(broken) + 100


def test_rows_that_are_bad_are_not_gone(tables: SqlTables) -> None:
    """What a load removes is what its source no longer has."""
    create(tables, "merge")
    load(tables, rows(bad=()), mode="merge", keys=["id"])
    counts = load(tables, rows(), mode="merge", keys=["id"], on_bad_rows="quarantine", handle_deletes="hard")
    assert (counts.deleted, counts.quarantined) == (1, 3)
    assert ids(tables) == list(range(200))
    assert {row["id"]: row["n"] for row in rows_of(tables, "t")}[57] == 57


def test_the_right_one_of_rows_with_one_key_is_put_aside(tables: SqlTables) -> None:
    create(tables, "merge")
    given = [{"id": 1, "name": "a", "n": 1}, {"id": 1, "name": "b", "n": 500}, {"id": 2, "name": "a", "n": 1}]
    counts = load(
        tables, given, mode="merge", keys=["id"], deduplicate_by="name", on_bad_rows="quarantine", handle_deletes="hard"
    )
    assert (counts.rows_read, counts.inserted, counts.quarantined) == (3, 1, 1)
    assert ids(tables) == [2]


@pytest.mark.every_system
def test_a_text_that_cannot_even_be_staged(tables: SqlTables) -> None:
    if tables.dialect != "postgres":
        pytest.skip("other databases hold every text")
    create(tables)
    given = [*rows(bad=()), {"id": 500, "name": "a\0b", "n": 1}]
    with pytest.raises(LoadRefusedError, match="rejected 1 row, and"):
        load(tables, given)
    with pytest.raises(LoadRefusedError, match="rejected 1 row, and"):
        load(tables, given, mode="merge", keys=["id"])
    assert load(tables, given, on_bad_rows="quarantine").quarantined == 1
    assert aside(tables) == [500]
    with pytest.raises(LoadRefusedError, match="cannot even stage"):
        load(tables, given, mode="merge", keys=["id"], handle_deletes="hard", on_bad_rows="quarantine")


def test_times_that_python_does_not_have(tables: SqlTables) -> None:
    """Within lists and structs they are texts, in the table and in the quarantine."""
    times = pa.array([253_402_300_800_000_000, 0], pa.int64()).cast(pa.timestamp("us", "UTC"))
    nested = pa.ListArray.from_arrays([0, 1, 2], pa.StructArray.from_arrays([times], ["at"]))
    given = pa.table({"id": [1, 2], "doc": nested})
    load(tables, given)
    if tables.dialect == "duckdb":  # it has lists and structs of its own
        with tables.driver.session("read") as session:
            assert session.rows("SELECT epoch_us(doc[1].at) FROM t ORDER BY id") == [(253_402_300_800_000_000,), (0,)]
    else:
        docs = [json.loads(row["doc"])[0]["at"] for row in rows_of(tables, "t")]
        assert docs == ["10000-01-01 00:00:00.000000Z", "1970-01-01T00:00:00Z"]
    # What cannot be staged depends on the database: a time after 9999, a text with a zero.
    names = pa.array(["a\0b" if tables.dialect == "postgres" else "a", "b"])
    given = given.append_column("at", times).append_column("name", names)
    counts = load(tables, given, target="u", on_bad_rows="quarantine")
    assert (counts.inserted, counts.quarantined) == ((2, 0) if tables.dialect == "duckdb" else (1, 1))


# --------------------------------------------------------------------------------------------------------- expectations


def expecting(tables: SqlTables, given: list[dict[str, Any]], *names: str, **options: Any) -> Any:
    """A load whose rows must have a name, unless they are put aside."""
    checks = (Expectation("accepted", ("name",), names, reaction="quarantine"),)
    planned = replace(Load.declare(target="t", moment=DAY, **options), checks=checks)
    sql_commit.prepare(tables, planned, SCHEMA)
    return sql_commit.commit(tables, planned, sql_commit.BatchedRows(SCHEMA, once(given)))


@pytest.mark.parametrize("on_bad_rows", ["fail", "quarantine"])
def test_a_row_that_is_bad_in_two_ways_is_put_aside_once(tables: SqlTables, on_bad_rows: str) -> None:
    create(tables)
    given = [
        {"id": 1, "name": "a", "n": 1},
        {"id": 2, "name": "b", "n": 500},
        *([{"id": 3, "name": "a", "n": 500}] if on_bad_rows == "quarantine" else []),
    ]
    counts = expecting(tables, given, "a", on_bad_rows=on_bad_rows)
    assert (counts.rows_read, counts.inserted, counts.quarantined) == (len(given), 1, len(given) - 1)
    assert ids(tables) == [1, 1000]
    assert aside(tables) == [row["id"] for row in given[1:]]


@pytest.mark.parametrize("on_bad_rows", ["fail", "quarantine"])
def test_rows_that_are_not_as_expected_are_not_gone(tables: SqlTables, on_bad_rows: str) -> None:
    create(tables, "merge")
    load(tables, [{"id": i, "name": "a", "n": i} for i in (1, 2)], mode="merge", keys=["id"])
    given = [{"id": 1, "name": "a", "n": 5}, {"id": 2, "name": "b", "n": 5}]
    options = {"mode": "merge", "keys": ["id"], "handle_deletes": "hard", "on_bad_rows": on_bad_rows}
    counts = expecting(tables, given, "a", **options)
    assert (counts.updated, counts.deleted, counts.quarantined) == (1, 1, 1)
    assert sorted((row["id"], row["n"]) for row in rows_of(tables, "t")) == [(1, 5), (2, 2)]


@pytest.mark.parametrize("on_bad_rows", ["fail", "quarantine"])
def test_of_rows_with_one_key_the_one_that_counts_is_tried(tables: SqlTables, on_bad_rows: str) -> None:
    create(tables, "merge")
    given = [{"id": 1, "name": "a", "n": 1}, {"id": 1, "name": "b", "n": 2}, {"id": 2, "name": "a", "n": 1}]
    options = {"mode": "merge", "keys": ["id"], "deduplicate_by": "n", "on_bad_rows": on_bad_rows}
    counts = expecting(tables, given, "a", **options)
    assert (counts.rows_read, counts.inserted, counts.unchanged, counts.quarantined) == (3, 1, 0, 1)
    assert ids(tables) == [2, 1000]


@pytest.mark.every_system
def test_columns_that_cannot_be_made_are_found_by_few_statements(tables: SqlTables) -> None:
    parse = parse_int(on_failure="error")
    sql, kind = expression([parse], "name", tables.dialect, kind=pa.string(), quote=tables.quote, target=pa.int64())
    run(tables, "CREATE TABLE t (id BIGINT, n BIGINT)")
    made = (Projected(f"q.{tables.quote('id')}", SCHEMA.field("id")), Projected(sql, pa.field("n", kind)))
    planned = replace(Load.declare(target="t", moment=DAY, on_bad_rows="quarantine"), projection=made)
    sql_commit.prepare(tables, planned, SCHEMA)
    given = [{"id": i, "name": "x" if i % 50 == 37 else str(i), "n": 1} for i in range(2_000)]
    said: list[str] = []
    execute = tables.driver.execute
    tables.driver.execute = lambda *arguments: (said.append(arguments[1]), execute(*arguments))[1]  # type: ignore[method-assign]
    counts = sql_commit.commit(tables, planned, sql_commit.BatchedRows(SCHEMA, once(given, 500)))
    assert (counts.rows_read, counts.inserted, counts.quarantined) == (2_000, 1_960, 40)
    assert sorted(reasons(tables)) == list(range(37, 2_000, 50))
    assert len(said) < 20 * 40 + 100


@pytest.mark.every_system
@pytest.mark.parametrize("mode", ["append", "merge"])
def test_rows_behind_those_whose_columns_cannot_be_made(tables: SqlTables, mode: str) -> None:
    parse = parse_int(on_failure="error")
    sql, kind = expression([parse], "name", tables.dialect, kind=pa.string(), quote=tables.quote, target=pa.int64())
    run(tables, "CREATE TABLE t (id BIGINT, n BIGINT)")
    made = (Projected(f"q.{tables.quote('id')}", SCHEMA.field("id")), Projected(sql, pa.field("n", kind)))
    keys = ["id"] if mode == "merge" else []
    declared = Load.declare(target="t", moment=DAY, on_bad_rows="quarantine", mode=mode, keys=keys)
    planned = replace(declared, projection=made)
    sql_commit.prepare(tables, planned, SCHEMA)
    given = [{"id": i, "name": "x" if i in (2, 3, 4) else str(i), "n": 1} for i in range(1, 11)]
    counts = sql_commit.commit(tables, planned, as_rows(tables, "query", given))
    assert (counts.rows_read, counts.inserted, counts.quarantined) == (10, 7, 3)
    assert ids(tables) == [1, 5, 6, 7, 8, 9, 10]


def test_a_row_that_does_not_write_what_it_breaks_is_good(tables: SqlTables) -> None:
    """Also beside one that is rejected for it."""
    create(tables, "merge")
    run(tables, "INSERT INTO t (id, name, n) VALUES (2, 'b', 1), (3, 'c', 1)")
    given = [{"id": 10, "name": "x", "n": 500}, {"id": 2, "name": "y", "n": 500}, {"id": 3, "name": "z", "n": 500}]
    options = {"mode": "merge", "keys": ["id"], "update_columns": ["name"], "on_bad_rows": "quarantine"}
    planned = Load.declare(target="t", moment=DAY, **options)
    sql_commit.prepare(tables, planned, SCHEMA)
    counts = sql_commit.commit(tables, planned, sql_commit.BatchedRows(SCHEMA, once(given)))
    assert (counts.inserted, counts.updated, counts.quarantined) == (0, 2, 1)


@pytest.mark.every_system
def test_columns_that_are_made_on_the_way(tables: SqlTables) -> None:
    """Rows are named as they would be written."""
    create(tables)
    made = (
        Projected(f"q.{tables.quote('id')}", SCHEMA.field("id")),
        Projected(f"q.{tables.quote('n')} * 2", SCHEMA.field("n")),
    )
    planned = replace(Load.declare(target="t", moment=DAY), projection=made)
    sql_commit.prepare(tables, planned, SCHEMA)
    given = [{"id": 1, "name": "a", "n": 1}, {"id": 2, "name": "b", "n": 60}]
    with pytest.raises(WeftError) as caught:
        sql_commit.commit(tables, planned, sql_commit.BatchedRows(SCHEMA, once(given)))
    # Where there are no savepoints, only the database's own message is left.
    assert "id=2, n=120: " in caught.value.what or not tables.savepoints
    assert ids(tables) == [1000]
    as_query = as_rows(tables, "query", given)
    with pytest.raises(LoadRefusedError, match="id=2, n=120: "):
        sql_commit.commit(tables, planned, as_query)
    assert ids(tables) == [1000]
