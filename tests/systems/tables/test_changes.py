"""Changes of a table, applied batch by batch to a mirror on every database, leave what the source has in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count as numbers
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.engine.streaming.cdc.applying import ChangeBatch
from weft.engine.streaming.cdc.envelopes import opened
from weft.engine.streaming.cdc.newest import newest
from weft.errors import LoadRefusedError
from weft.pipelines.streaming.cdc import CDC
from weft.pipelines.streaming.execution import CdcReport
from weft.systems.load import Counts, Declared, Load
from weft.systems.sql import commit as sql_commit
from weft.systems.sql.tables import Slice, SqlTables

NOW = datetime(2026, 3, 1, tzinfo=UTC)
BEGAN = 1_770_000_000_000
DEBEZIUM = CDC(envelope="debezium", key_field="after.id")
ROW = pa.struct([("id", pa.int64()), ("name", pa.string()), ("amount", pa.float64())])
MESSAGES = pa.schema(
    [
        ("op", pa.string()),
        ("before", ROW),
        ("after", ROW),
        ("source", pa.struct([("lsn", pa.int64()), ("ts_ms", pa.int64())])),
    ]
)
_numbers = numbers()


def change(
    op: str, before: Any = None, after: Any = None, lsn: int | None = None, ts: int | None = None
) -> dict[str, Any]:
    at = None if lsn is None and ts is None else (lsn or 0) if ts is None else ts
    return {
        "op": op,
        "before": before,
        "after": after,
        "source": {"lsn": lsn, "ts_ms": None if at is None else BEGAN + at},
    }


def row(id_: int, name: str | None = None, amount: float | None = None) -> dict[str, Any]:
    return {"id": id_, "name": name, "amount": amount}


def apply(
    tables: SqlTables,
    messages: Sequence[dict[str, Any]],
    cdc: CDC = DEBEZIUM,
    table: str = "mirror",
    schema: pa.Schema = MESSAGES,
    mode: str = "merge",
    key: str | None = None,
    query: str | None = None,
    **options: Any,
) -> tuple[Counts, CdcReport]:
    """Apply a batch of messages as the engine does."""
    found = opened(pa.Table.from_pylist(messages, schema=schema), cdc)
    assert not found.bad
    batch = ChangeBatch(cdc, found, newest(found), [], found.skipped)
    with tables.driver.session("read") as session:
        columns = tables.columns(session, None, table)
    present = None if columns is None else {each.name.lower(): each for each in columns}
    load = Load.declare(
        target=table, mode=mode, keys=cdc.keys, pipeline="mirrors", commit_key=key or f"batch {next(_numbers)}"
    )
    rows, load = batch.planned(replace(load, moment=NOW, **options), present, query)
    sql_commit.prepare(tables, load, rows.schema)
    counts = sql_commit.commit(tables, load, sql_commit.Batches(rows.schema, rows.batches))
    return counts, batch.report([counts])


def mirror(tables: SqlTables, table: str = "mirror") -> list[dict[str, Any]]:
    sql = f"SELECT * FROM {tables.table(None, table)}"
    found = [each for batch in tables.read(Slice(sql), tables.describe(sql)) for each in batch.to_pylist()]
    return sorted(found, key=lambda each: each["id"])


def gate(tables: SqlTables) -> list[Any]:
    with tables.driver.session("read") as session:
        return session.rows(f"SELECT changed_key FROM {tables.driver.table('weft', 'cdc_gate')} ORDER BY changed_key")


def test_one_row_through_its_life(tables: SqlTables) -> None:
    counts, report = apply(tables, [change("c", None, row(1, "a", 1.5), 1), change("r", None, row(2, "b"), 2)])
    assert (counts.inserted, report.creates) == (2, 2)
    counts, report = apply(
        tables, [change("u", row(1, "a", 1.5), row(1, "b", 2.5), 3), change("d", row(2, "b"), None, 4)]
    )
    assert (counts.updated, counts.deleted) == (1, 1)
    assert (report.updates, report.deletes, report.idempotent_skipped) == (1, 1, 0)
    assert mirror(tables) == [row(1, "b", 2.5)]


def test_an_update_without_a_row_is_an_insert(tables: SqlTables) -> None:
    apply(tables, [change("u", None, row(1, "a"), 1)])
    assert mirror(tables) == [row(1, "a")]


def test_late_and_repeated_changes_do_nothing(tables: SqlTables) -> None:
    apply(
        tables, [change("c", None, row(1, "a"), 10), change("c", None, row(2, "a"), 12), change("d", row(2), None, 13)]
    )
    _, report = apply(
        tables,
        [change("u", None, row(1, "late"), 9), change("c", None, row(2, "a"), 12), change("d", row(2), None, 13)],
    )
    assert mirror(tables) == [row(1, "a")]
    # Of the key 2 the delete decides, which came before.
    assert (report.updates, report.deletes, report.idempotent_skipped) == (0, 0, 2)


def test_changes_of_one_time_without_a_position_come_in_their_order(tables: SqlTables) -> None:
    apply(tables, [change("c", None, row(1, "a"), ts=5), change("u", None, row(1, "b"), ts=5)])
    apply(tables, [change("u", None, row(1, "c"), ts=5)])
    apply(tables, [change("u", None, row(1, "late"), ts=4)])
    assert mirror(tables) == [row(1, "c")]


def test_changes_without_position_and_time_come_in_their_order(tables: SqlTables) -> None:
    apply(tables, [change("c", None, row(1, "b")), change("u", None, row(1, "a"))])
    apply(tables, [change("u", None, row(1, "c"))])
    assert mirror(tables) == [row(1, "c")]
    assert gate(tables) == []


def test_the_gate_is_kept_small(tables: SqlTables) -> None:
    apply(
        tables,
        [change("c", None, row(1), 1, 0), change("c", None, row(2), 2, 4000), change("d", row(3), None, 3, 5000)],
    )
    assert gate(tables) == [("1",), ("2",), ("3",)]
    apply(tables, [change("c", None, row(4), 4, 9001)])
    assert gate(tables) == [("3",), ("4",)]


def test_a_truncate_empties_what_was_before_it(tables: SqlTables) -> None:
    apply(tables, [change("c", None, row(each), each) for each in (1, 2, 3)])
    apply(tables, [change("c", None, row(9), 9)])
    # The row 9 was made after the truncate, which comes late.
    apply(tables, [change("c", None, row(5), 5), change("t", None, None, 6), change("c", None, row(7), 7)])
    assert mirror(tables) == [row(7), row(9)]
    apply(tables, [change("u", None, row(1), 4), change("t", None, None, 6)])
    assert mirror(tables) == [row(7), row(9)]


def test_positions_begin_anew_in_a_source_that_was_restored(tables: SqlTables) -> None:
    apply(tables, [change("c", None, row(1, "a"), 100_000, 0), change("t", None, None, 100_001, 1)])
    apply(tables, [change("c", None, row(2, "b"), 100_002, 2)])
    # One that comes again is known beside them.
    again = change("c", None, row(1, "a"), 100_000, 0)
    apply(tables, [again, change("u", None, row(2, "new"), 5, 10**9), change("c", None, row(3, "c"), 6, 10**9)])
    assert mirror(tables) == [row(2, "new"), row(3, "c")]
    apply(tables, [change("t", None, None, 7, 10**9 + 9000)])
    assert mirror(tables) == []


def test_a_truncate_at_the_time_of_a_change_without_positions_comes_after_it(tables: SqlTables) -> None:
    apply(tables, [change("c", None, row(1), ts=5), change("c", None, row(2), ts=6)])
    apply(tables, [change("t", ts=5)])
    assert mirror(tables) == [row(2)]


def test_deletes_and_truncates_alone(tables: SqlTables) -> None:
    """They bring no columns, and the table has one that may not be null."""
    with tables.driver.session("publish") as session:
        session.run("CREATE TABLE mirror (id bigint PRIMARY KEY, name varchar(9) NOT NULL, amount double precision)")
    apply(tables, [change("c", None, row(each, "a"), each) for each in (1, 2, 3)])
    key = pa.struct([("id", pa.int64())])
    schema = pa.schema([("op", pa.string()), ("before", key), ("after", pa.null()), MESSAGES.field("source")])
    apply(tables, [change("d", {"id": 1}, None, 4)], schema=schema)
    assert [each["id"] for each in mirror(tables)] == [2, 3]
    schema = schema.set(1, pa.field("before", pa.null()))
    counts, _ = apply(tables, [change("t", None, None, 5)], schema=schema)
    assert (counts.deleted, mirror(tables)) == (2, [])


def test_a_soft_delete_keeps_the_row(tables: SqlTables) -> None:
    cdc = replace(DEBEZIUM, delete_mode="soft", soft_delete_column="deleted_at")
    apply(tables, [change("c", None, row(1, "a"), 1), change("c", None, row(2, "b"), 2)], cdc)
    counts, _ = apply(tables, [change("d", row(1), None, 3)], cdc)
    assert counts.deleted == 1
    assert [each["deleted_at"] for each in mirror(tables)] == [NOW, None]
    assert mirror(tables)[0]["name"] == "a"
    apply(
        tables, [change("c", None, row(1, "again"), 4), change("t", None, None, 5), change("c", None, row(3), 6)], cdc
    )
    assert [each["deleted_at"] is None for each in mirror(tables)] == [False, False, True]
    apply(tables, [change("c", None, row(1, "back"), 7)], cdc)
    assert [(each["name"], each["deleted_at"]) for each in mirror(tables)][:1] == [("back", None)]


def test_a_value_that_is_not_said_stays(tables: SqlTables, caplog: pytest.LogCaptureFixture) -> None:
    unavailable = "__debezium_unavailable_value"
    apply(tables, [change("c", None, row(1, "long", 1), 1), change("c", None, row(2, "other", 1), 2)])
    apply(
        tables,
        [
            change("u", None, row(1, unavailable, 2), 3),
            change("u", None, row(2, "new", 2), 4),
            change("u", None, row(2, unavailable, 3), 5),
            # There is no row, and the change does not say all of it.
            change("u", None, row(3, unavailable, 3), 6),
        ],
    )
    assert mirror(tables) == [row(1, "long", 2), row(2, "new", 3)]
    assert "1 updates of mirror do not say the whole row" in caplog.text


def test_a_history_refuses_each_value_that_is_not_said(tables: SqlTables) -> None:
    unsaid = change("u", None, row(1, "__debezium_unavailable_value", 2), 2)
    with pytest.raises(LoadRefusedError, match="do not say the values of name"):
        apply(tables, [change("c", None, row(1, "long", 1), 1), unsaid], mode="scd2")


def test_a_key_change_says_all_values(tables: SqlTables) -> None:
    apply(tables, [change("c", None, row(1, "a"), 1), change("c", None, row(2, "b"), 2)])
    moved = change("u", row(2), row(1, "__debezium_unavailable_value"), 4)
    with pytest.raises(LoadRefusedError, match="change the key do not say the values of name"):
        apply(tables, [change("d", row(1), None, 3), moved])
    assert mirror(tables) == [row(1, "a"), row(2, "b")]


def test_a_key_change_that_comes_again_counts_nothing(tables: SqlTables) -> None:
    moved = [change("u", row(1, "a"), row(2, "a"), 2)]
    apply(tables, [change("c", None, row(1, "a"), 1)])
    apply(tables, moved)
    _, report = apply(tables, moved)
    assert (report.creates, report.updates, report.deletes) == (0, 0, 0)


def test_a_pipeline_that_was_reset_applies_its_changes_again(tables: SqlTables) -> None:
    messages = [change("c", None, row(1, "a"), 1), change("u", None, row(1, "b"), 2)]
    for query in ("first", "first", "second"):
        with tables.driver.session("publish") as session:
            if query == "second":
                session.run("DELETE FROM mirror")
        _, report = apply(tables, messages, query=query)
    assert (report.updates, mirror(tables)) == (1, [row(1, "b")])


def test_keys_of_several_columns(tables: SqlTables) -> None:
    pair = pa.struct([("id", pa.int64()), ("part", pa.string()), ("name", pa.string())])
    schema = pa.schema([("type", pa.string()), ("data", pair), ("old", pair), ("ts", pa.int64()), ("xid", pa.int64())])
    cdc = CDC(envelope="maxwell", key_field="data.id, data.part")

    def message(op: str, xid: int, data: dict[str, Any], old: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"type": op, "data": data, "old": old, "ts": BEGAN // 1000, "xid": xid}

    whole = {"id": 1, "part": "a", "name": "x"}
    apply(tables, [message("insert", 1, whole), message("insert", 2, {**whole, "part": "b"})], cdc, schema=schema)
    # The update changes a part of the key: Maxwell names what was changed alone.
    apply(
        tables,
        [message("update", 3, {**whole, "part": "c"}, {"part": "a"}), message("delete", 4, {**whole, "part": "b"})],
        cdc,
        schema=schema,
    )
    assert mirror(tables) == [{**whole, "part": "c"}]


PAIR = pa.struct([("id", pa.string()), ("part", pa.string())])
PAIRS = pa.schema([("op", pa.string()), ("before", PAIR), ("after", PAIR), MESSAGES.field("source")])


def test_keys_with_any_sign_outlive_a_late_truncate(tables: SqlTables) -> None:
    cdc = CDC(envelope="debezium", key_field="after.id, after.part")
    keys = [("a\x1fb", "c"), ("a", "b\x1fc"), ("\x1es", "\x1e")]
    made = [change("c", None, {"id": id_, "part": part}, 9) for id_, part in keys]
    apply(tables, made, cdc, schema=PAIRS)
    apply(tables, [change("t", None, None, 5)], cdc, schema=PAIRS)
    assert {(each["id"], each["part"]) for each in mirror(tables)} == set(keys)


def test_a_late_truncate_is_refused_where_newer_keys_are_unknown(tables: SqlTables) -> None:
    cdc = CDC(envelope="debezium", key_field="after.id, after.part")
    long = {"id": "a" * 150, "part": "b" * 150}
    apply(tables, [change("c", None, long, 9)], cdc, schema=PAIRS)
    with pytest.raises(LoadRefusedError, match="a key is too long"):
        apply(tables, [change("t", None, None, 5)], cdc, schema=PAIRS)
    assert mirror(tables) == [long]


def test_a_change_that_the_table_rejects_is_put_aside(tables: SqlTables) -> None:
    with tables.driver.session("publish") as session:
        session.run("CREATE TABLE mirror (id bigint PRIMARY KEY, name varchar(9) NOT NULL, amount double precision)")
    apply(tables, [change("c", None, row(each, "a"), each) for each in (1, 2)])
    messages = [
        change("u", None, row(1, None), 3),
        change("u", None, row(2, "b"), 4),
        change("c", None, row(3, None), 5),
        change("d", row(1), None, 6),
    ]
    counts, _ = apply(tables, messages, on_bad_rows="quarantine")
    assert (counts.updated, counts.deleted, counts.quarantined) == (1, 1, 1)
    assert mirror(tables) == [row(2, "b")]


def test_columns_that_are_too_narrow(tables: SqlTables) -> None:
    cdc = replace(DEBEZIUM, schema_evolution="evolve")
    with tables.driver.session("publish") as session:
        # DuckDB cannot change the type of a key.
        kind = "bigint" if tables.dialect == "duckdb" else "integer"
        session.run(f"CREATE TABLE mirror (id {kind} PRIMARY KEY, name varchar(3))")
    large = row(2**40, "longer than that", 1.5)
    apply(tables, [change("c", None, row(1, "abc", 2.5), 1)], cdc, declared=Declared(on_drift="evolve"))
    apply(tables, [change("c", None, large, 2)], cdc, declared=Declared(on_drift="evolve"))
    assert mirror(tables) == [row(1, "abc", 2.5), large]


# --------------------------------------------------------------------------------------------------------- the oracle

KEYS = st.integers(1, 5)


Version = tuple[int, str | None, float, int, int | None]
"""Id, name and amount of a row, the number of the change from which it was so, and that of the next one."""


@dataclass
class Source:
    """A table, and what happened to it."""

    stored: dict[int, dict[str, Any]] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)

    def write(self, lsn: int, row: dict[str, Any], before: dict[str, Any] | None = None) -> None:
        old = self.stored.get(row["id"])
        self.end(lsn, row["id"])
        self.versions.append((row["id"], row["name"], row["amount"], lsn, None))
        self.stored[row["id"]] = row
        self.log.append(change("u" if before or old else "c", before or old, row, lsn))

    def end(self, lsn: int, key: int) -> None:
        self.versions = [(*each[:4], lsn) if each[0] == key and each[4] is None else each for each in self.versions]

    def delete(self, lsn: int, key: int) -> dict[str, Any]:
        self.end(lsn, key)
        return self.stored.pop(key)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[list[dict[str, Any]]], Source]:
    """Batches of messages, repeated and in any order, and the source that they are of."""
    source = Source()
    for lsn in range(1, draw(st.integers(1, 14)) + 1):
        key, name = draw(KEYS), draw(st.sampled_from(["a", "b", None]))
        step = draw(st.sampled_from(["write", "write", "write", "delete", "move", "truncate"]))
        if step == "truncate":
            for each in list(source.stored):
                source.delete(lsn, each)
            source.log.append(change("t", lsn=lsn))
        elif step == "write" or key not in source.stored:
            source.write(lsn, row(key, name, draw(st.sampled_from([1.5, 2.5]))))
        elif step == "delete":
            source.log.append(change("d", source.delete(lsn, key), None, lsn))
        elif (other := draw(KEYS)) not in source.stored:
            before = source.delete(lsn, key)
            source.write(lsn, {**before, "id": other}, before)
    repeated = draw(st.lists(st.sampled_from(source.log), max_size=4)) if source.log else []
    batches: list[list[dict[str, Any]]] = [[]]
    for each in draw(st.permutations(source.log + repeated)):
        batches[-1].append(each)
        if draw(st.booleans()):
            batches.append([])
    return [each for each in batches if each], source


def checked(tables: SqlTables, examples: int, check: Callable[[list[list[dict[str, Any]]], Source], None]) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(histories())
    def all_of_them(history: tuple[list[list[dict[str, Any]]], Source]) -> None:
        check(*history)

    all_of_them()


def test_the_mirror_is_what_the_source_has(tables: SqlTables, count: Callable[..., int]) -> None:
    def check(batches: list[list[dict[str, Any]]], source: Source) -> None:
        table = f"mirror_{next(_numbers)}"
        apply(tables, [change("c", None, row(100, "x", 1.5), 0), change("d", row(100), None, 0, 1)], table=table)
        for each in batches:
            apply(tables, each, table=table)
        assert mirror(tables, table) == sorted(source.stored.values(), key=lambda each: each["id"])

    checked(tables, count(2000, 40 if tables.dialect == "sqlite" else 8), check)


def test_a_history_has_every_version(tables: SqlTables, count: Callable[..., int]) -> None:
    def check(batches: list[list[dict[str, Any]]], source: Source) -> None:
        table = f"history_{next(_numbers)}"
        apply(tables, [change("c", None, row(100, "x", 1.5), 0)], table=table, mode="scd2")
        for each in batches:
            apply(tables, each, table=table, mode="scd2")
        found = [each for each in mirror(tables, table) if each["id"] != 100]
        versions = [
            (each["id"], each["name"], each["amount"], number(each["valid_from"]), number(each["valid_to"]))
            for each in found
        ]
        assert all(each["is_current"] == (each["valid_to"] is None) for each in found)
        assert sorted(versions, key=str) == sorted(source.versions, key=str)

    checked(tables, count(2000, 40 if tables.dialect == "sqlite" else 8), check)


def number(moment: datetime | None) -> int | None:
    """The number of the change of a time."""
    return None if moment is None else round(moment.timestamp() * 1000) - BEGAN


@pytest.mark.parametrize("size", [1000])
def test_what_a_batch_reports(tables: SqlTables, size: int) -> None:
    messages = [change("c", None, row(each % 100, "x", each), each) for each in range(size)]
    counts, report = apply(tables, [*messages, messages[-1]])
    assert (counts.inserted, report.creates, report.idempotent_skipped) == (100, size, 1)
    assert report.lag_seconds is not None
