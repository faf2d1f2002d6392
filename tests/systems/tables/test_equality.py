"""What a target takes for equal: values of other types than the source's, and keys by its own collation."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from systems.tables.test_commit import DAY, load, run
from systems.tables.test_modes import rows_of
from weft.errors import LoadRefusedError, WeftError
from weft.systems.sql import commit as sql_commit
from weft.systems.sql.tables import SqlTables

# Columns whose texts differ from those of the values that go into them.
COLUMNS = {
    "sqlite": "f REAL, d DECIMAL_TEXT(10,3), w BIGINT, c TEXT, t TIMESTAMP, l TEXT",
    "postgres": "f REAL, d NUMERIC(10,3), w SMALLINT, c VARCHAR(9), t TIMESTAMP(0), l VARCHAR(9)",
    "mysql": "f FLOAT, d DECIMAL(10,3), w SMALLINT, c VARCHAR(9), t DATETIME, l VARCHAR(9) CHARACTER SET latin1",
    "duckdb": "f FLOAT, d DECIMAL(10,3), w SMALLINT, c VARCHAR, t TIMESTAMP_S, l VARCHAR",
}
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("at", pa.timestamp("us", "UTC")),
        ("f", pa.float32()),
        ("d", pa.decimal128(8, 1)),
        ("w", pa.decimal128(5, 1)),
        ("c", pa.string()),
        ("t", pa.timestamp("us")),
        ("l", pa.string()),
    ]
)


def versioned(tables: SqlTables) -> str:
    """The columns that scd2 keeps itself."""
    instant = pa.timestamp("us", "UTC")
    kinds = {"valid_from": instant, "valid_to": instant, "is_current": pa.bool_(), "row_hash": pa.string()}
    return ", ".join(f"{name} {tables.sql_type(pa.field(name, kind))}" for name, kind in kinds.items())


def row(number: int, at: datetime) -> dict[str, Any]:
    return {
        "id": number,
        "at": at,
        "f": 0.1 * number,
        "d": Decimal("1.5"),
        "w": Decimal("7.0"),
        "c": f"é{number}",
        "t": datetime(2026, 1, 1, number),
        "l": "Ä",
    }


@pytest.mark.brief(
    "sqlite-merge-None",
    "sqlite-scd2-at",
    "postgres-merge-None",
    "postgres-scd2-None",
    "mysql-merge-None",
    "mysql-scd2-at",
    "duckdb-merge-None",
    "duckdb-scd2-None",
)
@pytest.mark.parametrize("event", [None, "at"])
@pytest.mark.parametrize("mode", ["merge", "scd2"])
def test_the_same_values_again_are_no_change(tables: SqlTables, mode: str, event: str | None) -> None:
    if event and mode == "merge":
        pytest.skip("a merge has no event time")
    instant = tables.sql_type(pa.field("at", pa.timestamp("us", "UTC")))
    columns = f"id BIGINT, {tables.quote('at')} {instant}, {COLUMNS[tables.dialect]}"
    if mode == "scd2":
        columns += f", {versioned(tables)}"
    run(tables, f"CREATE TABLE t ({columns})")
    # Of one key two events, so that the later one is compared with what is stored of the earlier one.
    rows = [row(number, DAY) for number in range(1, 9)]
    if event:
        rows += [{**row(3, DAY + timedelta(hours=1)), "c": "x"}]
    options: dict[str, Any] = {"mode": mode, "keys": ["id"], "event_timestamp_column": event}
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    assert load(tables, table, **options).inserted == len(rows)
    stored = rows_of(tables, "t")
    again = load(tables, table, moment=DAY + timedelta(days=1), **options)
    assert (again.inserted, again.updated, again.unchanged) == (0, 0, len(rows))
    assert len(rows_of(tables, "t")) == len(stored)
    changed = pa.Table.from_pylist([{**row(5, DAY + timedelta(hours=2)), "f": 0.1 * 5 + 1e-7}], schema=SCHEMA)
    last = load(tables, changed, moment=DAY + timedelta(days=2), **options)
    assert (last.inserted, last.updated) == (0, 1)


# ----------------------------------------------------------------------------------------------------------- collations


ANY_CASE = [
    ("mysql", "VARCHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"),
    ("mysql", "VARCHAR(20) CHARACTER SET latin1 COLLATE latin1_swedish_ci"),
    ("mysql", "CHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci"),
    ("mysql", "VARCHAR(20) CHARACTER SET utf8mb3 COLLATE utf8mb3_general_ci"),
    ("sqlite", "TEXT COLLATE NOCASE"),
    ("sqlite", "VARCHAR(20) NOT NULL COLLATE NOCASE"),
    ("duckdb", "VARCHAR COLLATE NOCASE"),
    ("duckdb", "VARCHAR COLLATE NOCASE.NOACCENT"),
    ("postgres", "citext"),
    ("postgres", "any_case_text"),
    ("postgres", "text COLLATE any_case"),
]
"""Types of columns that compare texts without regard to case."""


@pytest.fixture
def any_case(tables: SqlTables, request: pytest.FixtureRequest) -> str:
    """One of these types, which the database has."""
    if tables.dialect == "postgres":
        with tables.driver.session("read") as session:
            if not session.row("SELECT 1 FROM pg_available_extensions WHERE name = 'citext'"):
                pytest.skip("the server has no extension citext")
        run(tables, "CREATE EXTENSION citext")
        run(tables, "CREATE DOMAIN any_case_text AS citext")
        run(tables, "CREATE COLLATION any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    return str(request.param)


@pytest.fixture
def keyed(tables: SqlTables, any_case: str) -> SqlTables:
    """A table whose key is compared without regard to case, with one row."""
    run(tables, f"CREATE TABLE t (k {any_case}, n BIGINT, PRIMARY KEY (k))")
    load(tables, [{"k": "a", "n": 1}], mode="merge", keys=["k"])
    return tables


@pytest.mark.parametrize(("database_url", "any_case"), ANY_CASE, indirect=True)
def test_keys_are_compared_as_the_target_does(keyed: SqlTables) -> None:
    def merge(*rows: tuple[str, int], **options: Any) -> Any:
        return load(keyed, [{"k": k, "n": n} for k, n in rows], mode="merge", keys=["k"], **options)

    def stored() -> list[tuple[str, int]]:
        return sorted((each["k"], each["n"]) for each in rows_of(keyed, "t"))

    # One key: the row that is there is the one that is meant.
    assert merge(("A", 2)).updated == 1
    assert stored() == [("a", 2)]
    for first, second in (("b", "B"), ("A", "a")):
        with pytest.raises(LoadRefusedError, match=rf"(?i)share a key: k={first} \(2 rows\)"):
            merge((first, 1), (second, 2))
    assert merge(("b", 4), ("B", 3), ("A", 2), deduplicate_by="n").inserted == 1
    assert stored() == [("a", 2), ("b", 4)]
    # Each key once more, in another case: nothing is missing from the source.
    assert merge(("A", 2), ("B", 4), handle_deletes="hard").deleted == 0
    sql = "SELECT k, n FROM (SELECT 'c' AS k, 1 AS n UNION ALL SELECT 'C', 2) AS q"
    with pytest.raises(LoadRefusedError, match="share a key"):
        query(keyed, sql)
    assert stored() == [("a", 2), ("b", 4)]


def query(tables: SqlTables, sql: str) -> Any:
    from weft.systems.load import Load

    planned = Load.declare(target="t", mode="merge", keys=["k"], moment=DAY)
    schema = tables.describe(sql)
    sql_commit.prepare(tables, planned, schema)
    return sql_commit.commit(tables, planned, sql_commit.QueriedRows(sql, schema))


@pytest.mark.parametrize(("database_url", "any_case"), ANY_CASE, indirect=True)
def test_versions_of_a_key_in_any_case(tables: SqlTables, any_case: str) -> None:
    run(tables, f"CREATE TABLE t (k {any_case}, n BIGINT, since DATE, {versioned(tables)})")

    def versions() -> list[tuple[int, bool]]:
        return sorted((each["n"], bool(each["is_current"])) for each in rows_of(tables, "t"))

    def add(*events: tuple[str, int]) -> tuple[int, int]:
        rows = [{"k": k, "n": n, "since": date(2026, 1, n)} for k, n in events]
        counts = load(tables, rows, mode="scd2", keys=["k"], event_timestamp_column="since")
        return counts.inserted, counts.updated

    assert add(("a", 1)) == (1, 0)
    assert add(("A", 4)) == (0, 1)
    assert versions() == [(1, False), (4, True)]
    # Of one key in both cases, between what is there and after it; and one that was not there.
    assert add(("A", 2), ("a", 3), ("a", 5), ("b", 6), ("B", 7)) == (2, 3)
    assert versions() == [(1, False), (2, False), (3, False), (4, False), (5, True), (6, False), (7, True)]
    with pytest.raises(LoadRefusedError, match="share a key"):
        add(("a", 9), ("A", 9))


@pytest.mark.parametrize(("database_url", "any_case"), ANY_CASE, indirect=True)
def test_versions_by_load_of_a_key_in_any_case(tables: SqlTables, any_case: str) -> None:
    run(tables, f"CREATE TABLE t (k {any_case}, n BIGINT, {versioned(tables)})")
    for days, key in enumerate(("a", "A", "a")):
        counts = load(
            tables, [{"k": key, "n": min(days, 1)}], mode="scd2", keys=["k"], moment=DAY + timedelta(days=days)
        )
        assert (counts.inserted, counts.updated) == [(1, 0), (0, 1), (0, 0)][days]
    assert sorted((each["n"], bool(each["is_current"])) for each in rows_of(tables, "t")) == [(0, False), (1, True)]


@pytest.mark.parametrize(("database_url", "any_case"), ANY_CASE, indirect=True)
def test_another_case_is_a_change_of_what_is_no_key(tables: SqlTables, any_case: str) -> None:
    run(tables, f"CREATE TABLE t (n BIGINT PRIMARY KEY, k {any_case})")
    for text, updated in (("Ada", 0), ("ADA", 1), ("ADA", 0)):
        assert load(tables, [{"n": 1, "k": text}], mode="merge", keys=["n"]).updated == updated
    assert [each["k"] for each in rows_of(tables, "t")] == ["ADA"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_keys_with_spaces_at_the_end(tables: SqlTables) -> None:
    run(tables, "CREATE TABLE t (k TEXT COLLATE RTRIM PRIMARY KEY, n BIGINT)")
    with pytest.raises(LoadRefusedError, match=r"share a key: k=a {1,2}\(2 rows\)"):
        load(tables, [{"k": "a", "n": 1}, {"k": "a ", "n": 2}], mode="merge", keys=["k"])
    assert rows_of(tables, "t") == []


@pytest.mark.every_system
def test_a_table_of_versions_has_its_index_from_the_beginning(tables: SqlTables) -> None:
    """One statement makes both where each one commits: a crash between two would leave the table without, for ever."""
    if tables.dialect != "mysql":
        pytest.skip("others make both in one transaction, or need no index")
    said: list[str] = []
    driver = tables.driver
    execute = driver.execute
    driver.execute = lambda *arguments: (said.append(arguments[1]), execute(*arguments))[1]  # type: ignore[method-assign]
    keys = [f"key{number}" for number in range(6)]
    rows = [{**dict.fromkeys(keys, "a"), "n": 1}]
    assert load(tables, rows, mode="scd2", keys=keys).inserted == 1
    assert load(tables, rows, mode="scd2", keys=keys, moment=datetime(2027, 1, 1, tzinfo=UTC)).unchanged == 1
    made = [statement for statement in said if "CREATE TABLE" in statement and "`t`" in statement]
    assert len(made) == 1
    assert not [statement for statement in said if statement.startswith(("ALTER", "CREATE INDEX"))]
    with tables.driver.session("read") as session:
        indexed = [each[4] for each in session.rows("SHOW INDEX FROM t")]
    assert indexed == keys[:4]


@pytest.mark.every_system
@pytest.mark.parametrize("nan", [float("nan"), "NaN"])
def test_nan_is_no_decimal(tables: SqlTables, nan: float | str) -> None:
    """PostgreSQL stores it, and then nobody could read the table."""
    kind = "DECIMAL_TEXT(10,2)" if tables.dialect == "sqlite" else "DECIMAL(10,2)"
    run(tables, f"CREATE TABLE t (id BIGINT, n {kind})")
    one = type(nan)("1.5")
    counts = load(tables, [{"id": 1, "n": nan}, {"id": 2, "n": one}, {"id": 3, "n": None}], on_bad_rows="quarantine")
    assert (counts.inserted, counts.quarantined) == (2, 1)
    assert [(row["id"], row["n"]) for row in rows_of(tables, "t")] == [(2, Decimal("1.50")), (3, None)]
    assert [json.loads(row["payload"])["id"] for row in rows_of(tables, "t__quarantine")] == [1]


@pytest.mark.every_system
@pytest.mark.parametrize("moment", [date(2026, 1, 31), datetime(2026, 1, 31, 12)])
def test_a_time_is_no_number(tables: SqlTables, moment: date) -> None:
    run(tables, "CREATE TABLE t (id BIGINT, n DOUBLE PRECISION)")
    with pytest.raises(WeftError):
        load(tables, [{"id": 1, "n": moment}])
    assert rows_of(tables, "t") == []


# ---------------------------------------------------------------------------------------------------------------- texts


@pytest.mark.every_system
@pytest.mark.parametrize("mode", ["merge", "scd2"])
def test_texts_of_one_key(tables: SqlTables, mode: str) -> None:
    """The target reads them as one number: before, one of them won by chance, or a key had two current versions."""
    more = f", {versioned(tables)}" if mode == "scd2" else ", PRIMARY KEY (k)"
    run(tables, f"CREATE TABLE t (k BIGINT NOT NULL, n BIGINT{more})")
    options: dict[str, Any] = {"mode": mode, "keys": ["k"]}
    load(tables, [{"k": 1, "n": 0}], **options)
    given = [{"k": "1", "n": "10"}, {"k": "01", "n": "9"}, {"k": "2", "n": "2"}]
    later = {"moment": DAY + timedelta(days=1), **options}
    with pytest.raises(LoadRefusedError, match=r"share a key: k=1 \(2 rows\)"):
        load(tables, given, **later)
    # The greatest number, not the greatest text.
    counts = load(tables, given, deduplicate_by="n", **later)
    assert (counts.inserted, counts.updated) == (1, 1)
    current = [row for row in rows_of(tables, "t") if row.get("is_current", True)]
    assert sorted((row["k"], row["n"]) for row in current) == [(1, 10), (2, 2)]
    # A text that is no number is a bad row, as before.
    bad = [{"k": "one", "n": "1"}, {"k": "3", "n": "3"}]
    with pytest.raises(LoadRefusedError, match=r"rejected 1 row, and nothing was written:\n    k=one, n=1|k=one:"):
        load(tables, bad, **later)
    counts = load(tables, bad, on_bad_rows="quarantine", **later)
    assert (counts.inserted, counts.quarantined) == (1, 1)
    assert [json.loads(row["payload"]) for row in rows_of(tables, "t__quarantine")] == [{"k": "one", "n": "1"}]


def test_texts_of_one_event_time(tables: SqlTables) -> None:
    kind = tables.sql_type(pa.field("since", pa.timestamp("us", "UTC")))
    run(tables, f"CREATE TABLE t (k BIGINT NOT NULL, n BIGINT, since {kind}, {versioned(tables)})")
    given = [{"k": 1, "n": 1, "since": "2026-01-01T12:00:00Z"}, {"k": 1, "n": 2, "since": "2026-01-01T13:00:00+01:00"}]
    options: dict[str, Any] = {"mode": "scd2", "keys": ["k"], "event_timestamp_column": "since"}
    with pytest.raises(LoadRefusedError, match="share a key"):
        load(tables, given, **options)
    assert load(tables, given[:1], **options).inserted == 1


@pytest.mark.parametrize("mode", ["merge", "scd2"])
@pytest.mark.parametrize("database_url", ["postgres", "mysql"], indirect=True)
def test_spaces_that_a_column_does_not_keep(tables: SqlTables, mode: str) -> None:
    """A CHAR has none at its end: the same row again is no change."""
    more = f", {versioned(tables)}" if mode == "scd2" else ""
    run(tables, f"CREATE TABLE t (k CHAR(5), c CHAR(5), at_ TIMESTAMP(6){more})")
    options: dict[str, Any] = {"mode": mode, "keys": ["k"]}
    for days in range(3):
        rows = [{"k": "a ", "c": "b  "}]
        counts = load(tables, rows, moment=DAY + timedelta(days=days), **options)
        assert (counts.inserted, counts.updated, counts.unchanged) == ((1, 0, 0) if not days else (0, 0, 1))
    assert [(row["k"], row["c"]) for row in rows_of(tables, "t")] == [("a", "b")]
    with pytest.raises(LoadRefusedError, match="share a key"):
        load(tables, [{"k": "a", "c": "1"}, {"k": "a ", "c": "2"}], **options)
    if mode == "scd2":
        options["event_timestamp_column"] = "at_"
        rows = [{"k": "c ", "c": "b  ", "at_": datetime(2026, 1, 1)}]
        assert [load(tables, rows, **options).inserted for _ in "12"] == [1, 0]
