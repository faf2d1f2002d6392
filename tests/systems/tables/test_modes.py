"""Every mode of a load on every database leaves what the oracle says, and reports it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import oracle
from weft.errors import LoadRefusedError
from weft.systems.load import Counts, Load
from weft.systems.sql import commit as sql_commit
from weft.systems.sql.tables import Slice, SqlTables

DAY = datetime(2026, 3, 1, tzinfo=UTC)
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("amount", pa.float64()),
        ("at", pa.timestamp("us", "UTC")),
    ]
)
_numbers = count()


def rows_of(tables: SqlTables, name: str) -> list[dict[str, Any]]:
    sql = f"SELECT * FROM {tables.table(None, name)}"
    schema = tables.describe(sql)
    found = [row for batch in tables.read(Slice(sql), schema) for row in batch.to_pylist()]
    for row in found:
        row.pop("row_hash", None)
    return found


def in_order(rows: list[dict[str, Any]]) -> list[Any]:
    return sorted(str([(name, str(value), value is None) for name, value in sorted(row.items())]) for row in rows)


def run(tables: SqlTables, load: Load, rows: list[dict[str, Any]], how: str = "batches") -> Counts:
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    sql_commit.prepare(tables, load, SCHEMA)
    if how == "query":
        # The same rows, from a table of this database.
        source = f"source_{next(_numbers)}"
        feed = Load.declare(target=source)
        sql_commit.prepare(tables, feed, SCHEMA)
        sql_commit.commit(tables, feed, sql_commit.BatchedRows(SCHEMA, table.to_batches()))
        sql = f"SELECT * FROM {tables.table(None, source)}"
        return sql_commit.commit(tables, load, sql_commit.QueriedRows(sql, SCHEMA))
    # In small batches, as a source would give them.
    return sql_commit.commit(tables, load, sql_commit.BatchedRows(SCHEMA, table.to_batches(max_chunksize=3)))


def check(tables: SqlTables, loads: list[tuple[dict[str, Any], list[dict[str, Any]]]], how: str = "batches") -> None:
    name = f"target_{next(_numbers)}"
    expected: list[dict[str, Any]] = []
    for number, (options, rows) in enumerate(loads):
        load = Load.declare(target=name, moment=DAY + timedelta(days=100, hours=number), **options)
        try:
            wanted, counts = oracle.apply(expected, rows, load)
        except oracle.RefusedError:
            with pytest.raises(LoadRefusedError):
                run(tables, load, rows, how)
        else:
            found = run(tables, load, rows, how)
            expected = wanted
            assert _without_bytes(found) == counts
        if expected or number:
            assert in_order(rows_of(tables, name)) == in_order(expected)


def _without_bytes(counts: Counts) -> Counts:
    return Counts(**{**{each: getattr(counts, each) for each in Counts.__dataclass_fields__}, "bytes": 0})


def _row(**values: Any) -> dict[str, Any]:
    return {"id": 1, "name": "a", "amount": 1.0, "at": DAY, **values}


ROW = st.fixed_dictionaries(
    {
        "id": st.integers(1, 4),
        "name": st.sampled_from(["a", "b", "", None]),
        "amount": st.sampled_from([0.0, 1.5, None]),
        "at": st.integers(0, 5).map(lambda hours: DAY + timedelta(hours=hours)),
    }
)
ROWS = st.lists(ROW, max_size=6)
BY_KEY = st.lists(ROW, max_size=4, unique_by=lambda row: row["id"])
BY_EVENT = st.lists(ROW, max_size=6, unique_by=lambda row: (row["id"], row["at"]))
several = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=max(8, settings.get_profile("weft").max_examples // 8),
)


@pytest.mark.brief("sqlite-batches", "postgres-query", "mysql-batches", "duckdb-query")
@pytest.mark.parametrize("how", ["batches", "query"])
def test_append_and_truncate(tables: SqlTables, how: str) -> None:
    one, two = [_row(), _row(id=2)], [_row(id=3, name=None)]
    check(tables, [({"mode": "append"}, one), ({"mode": "append"}, two), ({"mode": "append"}, [])], how)
    check(tables, [({"mode": "append"}, one), ({"mode": "truncate"}, two), ({"mode": "truncate"}, [])], how)
    check(tables, [({"mode": "append"}, one), ({"mode": "truncate", "allow_empty": True}, [])], how)


@several
@given(loads=st.lists(BY_KEY, min_size=1, max_size=4), deletes=st.sampled_from([None, "hard"]))
def test_merge(tables: SqlTables, loads: list[Any], deletes: str | None) -> None:
    options = {"mode": "merge", "keys": ["id"], "handle_deletes": deletes}
    check(tables, [(options, rows) for rows in loads])


@several
@given(loads=st.lists(ROWS, min_size=1, max_size=3))
def test_merge_of_rows_that_share_a_key(tables: SqlTables, loads: list[Any]) -> None:
    # Only what the tie does not decide.
    plain = [[{**row, "name": "n", "amount": 1.0} for row in rows] for rows in loads]
    options = {"mode": "merge", "keys": ["id"], "deduplicate_by": ["at"]}
    check(tables, [(options, rows) for rows in plain])
    check(tables, [({"mode": "merge", "keys": ["id"]}, rows) for rows in plain])


def test_merge_of_chosen_columns(tables: SqlTables) -> None:
    options = {"mode": "merge", "keys": ["id"], "update_columns": ["name"], "compare_columns": ["name"]}
    rows = [_row(), _row(id=2)]
    changed = [_row(amount=9.0), _row(id=2, name="b", amount=9.0)]
    check(tables, [(options, rows), (options, changed)], "query")


def test_merge_by_two_keys_and_null_keys(tables: SqlTables) -> None:
    options = {"mode": "merge", "keys": ["id", "name"]}
    check(tables, [(options, [_row(), _row(name="b")]), (options, [_row(amount=2.0), _row(name="c")])])
    check(tables, [(options, [_row()]), (options, [_row(name=None)])])


@several
@given(loads=st.lists(BY_KEY, min_size=1, max_size=4), deletes=st.sampled_from([None, "soft"]))
def test_scd2(tables: SqlTables, loads: list[Any], deletes: str | None) -> None:
    options = {"mode": "scd2", "keys": ["id"], "handle_deletes": deletes}
    check(tables, [(options, rows) for rows in loads])


@several
@given(
    loads=st.lists(BY_EVENT, min_size=1, max_size=4),
    deletes=st.sampled_from([None, None, "soft"]),
    ttl=st.sampled_from([None, None, 86_400 * 99.9]),
)
def test_scd2_by_event_time(tables: SqlTables, loads: list[Any], deletes: str | None, ttl: float | None) -> None:
    options = {
        "mode": "scd2",
        "keys": ["id"],
        "event_timestamp_column": "at",
        "handle_deletes": deletes,
        "ttl_seconds": ttl,
    }
    check(tables, [(options, rows) for rows in loads])


def test_scd2_of_one_key_over_time(tables: SqlTables) -> None:
    options = {"mode": "scd2", "keys": ["id"], "compare_columns": ["name"], "event_timestamp_column": "at"}
    hours = [DAY + timedelta(hours=hour) for hour in range(6)]
    first = [_row(at=hours[0]), _row(at=hours[4], name="c")]
    late = [_row(at=hours[2], name="b")]
    for how in ("batches", "query"):
        check(tables, [(options, first), (options, late), (options, late), (options, first + late)], how)


@several
@given(events=BY_EVENT.flatmap(st.permutations), size=st.integers(1, 6))
def test_scd2_of_every_event(tables: SqlTables, events: list[dict[str, Any]], size: int) -> None:
    """Where the event time is compared too, a repeat is a version: the history is the same in any order of arrival."""
    name = f"target_{next(_numbers)}"
    options: dict[str, Any] = {"mode": "scd2", "keys": ["id"], "compare_columns": ["name", "at"]}
    for first in range(0, len(events), size):
        arrived = events[first : first + size]
        run(tables, Load.declare(target=name, event_timestamp_column="at", **options), arrived)
    again = run(tables, Load.declare(target=name, event_timestamp_column="at", **options), events)
    assert (again.inserted, again.updated, again.unchanged) == (0, 0, len(events))
    wanted = []
    for row in events:
        until = min((each["at"] for each in events if each["id"] == row["id"] and each["at"] > row["at"]), default=None)
        wanted.append({**row, "valid_from": row["at"], "valid_to": until, "is_current": until is None})
    assert in_order(rows_of(tables, name)) == in_order(wanted)


def test_scd2_of_events_in_a_version_that_its_ttl_has_closed(tables: SqlTables) -> None:
    """They end where it ended, also those that are young enough; what comes after that end is current."""
    options = {"mode": "scd2", "keys": ["id"], "event_timestamp_column": "at", "ttl_seconds": 86_400 * 30}
    days = [DAY + timedelta(days=day) for day in (60, 85, 89, 95)]  # loaded on the hundredth day
    loads = [[_row(at=days[0], name="a")], [_row(at=days[1], name="b")], [_row(at=days[3], name="c")]]
    check(tables, [(options, rows) for rows in [*loads, [_row(at=days[2], name="d")], *loads]])
    name = f"target_{next(_numbers)}"
    for rows in (loads[0], loads[1], loads[2]):
        run(tables, Load.declare(target=name, moment=DAY + timedelta(days=100), **options), rows)
    versions = sorted(rows_of(tables, name), key=lambda row: row["valid_from"])
    closed = days[0] + timedelta(days=30)
    assert [(each["name"], each["valid_to"]) for each in versions] == [("a", days[1]), ("b", closed), ("c", None)]


def test_scd2_of_many_columns(tables: SqlTables) -> None:
    """More than a function of SQLite takes as its arguments."""
    schema = pa.schema([(f"c{at}", pa.int64()) for at in range(300)])
    for last in (299, 299, 300):
        load = Load.declare(target="wide", mode="scd2", keys=["c0"])
        rows = pa.RecordBatch.from_pylist([{**{f"c{at}": at for at in range(300)}, "c299": last}], schema)
        sql_commit.prepare(tables, load, schema)
        sql_commit.commit(tables, load, sql_commit.BatchedRows(schema, [rows]))
    assert sorted((row["c299"], row["is_current"]) for row in rows_of(tables, "wide")) == [(299, False), (300, True)]


def test_the_clock_goes_back(tables: SqlTables) -> None:
    name = f"target_{next(_numbers)}"
    options: dict[str, Any] = {"target": name, "mode": "scd2", "keys": ["id"]}
    for moment, row in ((DAY, _row()), (DAY - timedelta(hours=1), _row(name="b")), (DAY, _row(name="c"))):
        run(tables, Load.declare(moment=moment, **options), [row])
    versions = sorted(rows_of(tables, name), key=lambda row: row["valid_from"])
    assert [row["name"] for row in versions] == ["a", "b", "c"]
    assert [row["is_current"] for row in versions] == [False, False, True]
    assert [row["valid_to"] for row in versions[:-1]] == [row["valid_from"] for row in versions[1:]]


def test_the_clock_goes_back_before_a_key_returns(tables: SqlTables) -> None:
    """Its new version begins after the end of the last one."""
    name = f"target_{next(_numbers)}"
    options: dict[str, Any] = {"target": name, "mode": "scd2", "keys": ["id"], "handle_deletes": "soft"}
    both = [_row(), _row(id=2)]
    for hours, rows in ((0, both), (2, both[1:]), (1, both)):
        run(tables, Load.declare(moment=DAY + timedelta(hours=hours), **options), rows)
    first, second = sorted((row for row in rows_of(tables, name) if row["id"] == 1), key=lambda row: row["valid_from"])
    assert (first["valid_to"], second["valid_to"]) == (DAY + timedelta(hours=2), None)
    assert first["valid_to"] <= second["valid_from"]


@pytest.mark.parametrize("mode", ["append", "truncate", "merge", "scd2"])
def test_the_same_load_twice_changes_nothing(tables: SqlTables, mode: str) -> None:
    name = f"target_{next(_numbers)}"
    keys = ["id"] if mode in ("merge", "scd2") else []
    load = Load.declare(target=name, mode=mode, keys=keys, commit_key="monday", moment=DAY)
    assert run(tables, load, [_row(), _row(id=2)]).inserted == 2
    before = rows_of(tables, name)
    assert run(tables, load, [_row(name="z"), _row(id=3)]) == Counts(replayed=True)
    assert in_order(rows_of(tables, name)) == in_order(before)


@pytest.mark.parametrize("event", [None, "at"])
def test_a_default_in_a_table_of_versions(tables: SqlTables, event: str | None) -> None:
    """A version without a value has the default, whatever the version before has."""
    text = tables.sql_type(pa.field("status", pa.string()), key=True)
    fields = [("id", pa.int64()), ("status", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))]
    schema = pa.schema(fields)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    with tables.driver.session("publish") as session:
        table = tables.table(None, "history")
        kind = f"{text} DEFAULT 'new' NOT NULL"
        columns = [*fields, *((name, pa.timestamp("us", "UTC")) for name in ("valid_from", "valid_to"))]
        columns += [("is_current", pa.bool_()), ("row_hash", pa.string())]
        definitions = [f"{tables.quote(name)} {tables.sql_type(pa.field(name, each))}" for name, each in columns]
        definitions[1] = f"{tables.quote('status')} {kind}"
        session.run(f"CREATE TABLE {table} ({', '.join(definitions)})")
    for number, row in enumerate(((1, "x", 1), (1, None, 2))):
        load = Load.declare(
            target="history",
            mode="scd2",
            keys=("id",),
            compare_columns=("n",) if event is None else None,
            event_timestamp_column=event,
            batch_id=number,
            commit_key="versions",
        )
        moment = start + timedelta(days=number)
        rows = pa.Table.from_pylist([dict(zip(schema.names, (*row, moment), strict=True))], schema)
        load = replace(load, null_is_default=True, moment=moment)
        sql_commit.prepare(tables, load, schema)
        sql_commit.commit(tables, load, sql_commit.BatchedRows(schema, rows.to_batches()))
    assert sorted((row["n"], row["status"]) for row in rows_of(tables, "history")) == [(1, "x"), (2, "new")]


DEFAULTS = pa.schema([("id", pa.int64()), ("status", pa.string()), ("n", pa.int64())])


@pytest.mark.parametrize("mode", ["append", "merge"])
@pytest.mark.parametrize("on_bad_rows", ["fail", "quarantine"])
def test_a_null_that_stands_for_the_default(tables: SqlTables, mode: str, on_bad_rows: str) -> None:
    """A key that a message does not have is null where another message has it; both take the same default."""
    text = tables.sql_type(pa.field("status", pa.string()), key=True)
    with tables.driver.session("publish") as session:
        session.run(
            f"CREATE TABLE {tables.table(None, 'orders')} (id BIGINT, status {text} DEFAULT 'it''s new' NOT NULL, "
            "n BIGINT DEFAULT 7 NOT NULL)"
        )
    keys = ("id",) if mode == "merge" else ()
    for number, rows in enumerate(([(1, None, None), (2, "x", 5)], [(3, None, 1), (2, None, 6)])):
        load = Load.declare(target="orders", mode=mode, keys=keys, on_bad_rows=on_bad_rows, batch_id=number)
        load = replace(load, null_is_default=True)
        found = [dict(zip(DEFAULTS.names, row, strict=True)) for row in rows]
        batches = pa.Table.from_pylist(found, DEFAULTS).to_batches()
        sql_commit.prepare(tables, load, DEFAULTS)
        counts = sql_commit.commit(tables, load, sql_commit.BatchedRows(DEFAULTS, batches))
        assert counts.quarantined == 0
    second = {"id": 2, "status": "x", "n": 6} if mode == "merge" else {"id": 2, "status": "it's new", "n": 6}
    wanted = [{"id": 1, "status": "it's new", "n": 7}, second, {"id": 3, "status": "it's new", "n": 1}]
    if mode == "append":
        wanted.append({"id": 2, "status": "x", "n": 5})
    assert in_order(rows_of(tables, "orders")) == in_order(wanted)
