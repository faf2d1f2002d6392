"""Changes of a table, applied batch by batch to a mirror on every database, leave what the source has in the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import count as numbers
from typing import Any

import pyarrow as pa
import pytest

from weft.columns import hinted
from weft.engine.streaming.cdc.applying import ChangeBatch
from weft.engine.streaming.cdc.envelopes import opened
from weft.engine.streaming.cdc.json_rows import StoredTable
from weft.engine.streaming.cdc.newest import newest
from weft.errors import LoadRefusedError, StorageError
from weft.pipelines.streaming.cdc import CDC
from weft.pipelines.streaming.execution import CdcReport
from weft.systems.load import Counts, Declared, Load
from weft.systems.sql import cdc_gate
from weft.systems.sql import commit as sql_commit
from weft.systems.sql.tables import Slice, SqlTables

NOW = datetime(2026, 3, 1, tzinfo=UTC)
BEGAN = 1_770_000_000_000
UNAVAILABLE = "__debezium_unavailable_value"
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
    with tables.driver.session("read") as session:
        columns = tables.columns(session, None, table)
    present = None if columns is None else {each.name.lower(): each for each in columns}
    stored = StoredTable({name: each.field for name, each in (present or {}).items()})
    is_json = "after" in schema.names and pa.types.is_string(schema.field("after").type)
    found = opened(pa.Table.from_pylist(messages, schema=schema), cdc, lambda: [stored] if is_json else [])
    assert not found.bad
    batch = ChangeBatch(cdc, found, newest(found), [], found.skipped)
    load = Load.declare(
        target=table, mode=mode, keys=cdc.keys, pipeline="mirrors", commit_key=key or f"batch {next(_numbers)}"
    )
    rows, load = batch.planned(replace(load, moment=NOW, **options), present, query)
    sql_commit.prepare(tables, load, rows.schema)
    counts = sql_commit.commit(tables, load, sql_commit.BatchedRows(rows.schema, rows.batches))
    return counts, batch.report([counts])


def mirror(tables: SqlTables, table: str = "mirror") -> list[dict[str, Any]]:
    sql = f"SELECT * FROM {tables.table(None, table)}"
    found = [each for batch in tables.read(Slice(sql), tables.describe(sql)) for each in batch.to_pylist()]
    return sorted(found, key=lambda each: each["id"])


def gate(tables: SqlTables) -> list[Any]:
    with tables.driver.session("read") as session:
        return session.rows(f"SELECT changed_key FROM {tables.driver.table('weft', 'cdc_gate')} ORDER BY changed_key")


def milliseconds(moment: datetime | None) -> int | None:
    """The time of a change."""
    return None if moment is None else round(moment.timestamp() * 1000) - BEGAN


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
    # Those too that another one of the batch replaces.
    assert (report.creates, report.updates, report.deletes, report.idempotent_skipped) == (0, 0, 0, 3)


def test_a_mirror_that_another_process_creates_meanwhile_keeps_its_gate(tables: SqlTables) -> None:
    apply(tables, [change("c", None, row(1, "a"), 10), change("d", row(1), None, 11)])
    known = gate(tables)
    load = Load.declare(target="mirror", mode="merge", keys=("id",), pipeline="mirrors")
    cdc_gate.forget(tables, load)  # as a process does that has seen no table before
    assert (gate(tables), bool(known)) == (known, True)
    with tables.driver.session("publish") as session:
        session.run(f"DROP TABLE {tables.table(None, 'mirror')}")
    cdc_gate.forget(tables, load)
    assert gate(tables) == []


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


@pytest.mark.brief("sqlite", "postgres")
def test_a_gate_of_an_earlier_form_is_refused(tables: SqlTables) -> None:
    apply(tables, [change("c", None, row(1, "a"), 1)])
    place = tables.driver.table("weft", "cdc_gate")
    with tables.driver.session("publish") as session:
        session.run(f"ALTER TABLE {place} DROP COLUMN row_key")
    with pytest.raises(StorageError, match="is of an earlier form") as refused:
        apply(tables, [change("c", None, row(2, "a"), 2)])
    assert f"DROP TABLE {place}" in str(refused.value.hint)
    with tables.driver.session("publish") as session:
        session.run(f"DROP TABLE {place}")
    apply(tables, [change("c", None, row(2, "a"), 2)])
    assert gate(tables) == [("2",)]


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


@pytest.mark.every_system
def test_a_number_in_json_is_exact_or_refused(tables: SqlTables) -> None:
    kind = "DECIMAL_TEXT(38,18)" if tables.dialect == "sqlite" else "DECIMAL(38,18)"
    with tables.driver.session("publish") as session:
        session.run(f"CREATE TABLE mirror (id bigint PRIMARY KEY, n {kind})")
    schema = MESSAGES.remove(1).set(1, pa.field("after", pa.string()))
    exact, longer = "12345678901234567890.123456789012345678", ["0.1234567890123456789", "1e-19"]
    apply(tables, [change("c", None, f'{{"id":1,"n":{exact}}}', 1)], schema=schema)
    for lsn, more in enumerate(longer, 2):
        with pytest.raises(LoadRefusedError):
            apply(tables, [change("u", None, f'{{"id":1,"n":{more}}}', lsn)], schema=schema)
    assert mirror(tables) == [{"id": 1, "n": Decimal(exact)}]


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
    unavailable = UNAVAILABLE
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
    assert mirror(tables) == [row(1, "long", 2), row(2, "new", 3), row(3, None, 3)]
    assert "1 updates of mirror do not say all values of a row that the table does not have" in caplog.text
    # It comes late, and says what was not said.
    apply(tables, [change("c", None, row(3, "late", 1), 2)])
    assert mirror(tables)[2] == row(3, "late", 3)


def test_a_row_that_lacks_a_value_which_may_not_be_null_is_left_out(
    tables: SqlTables, caplog: pytest.LogCaptureFixture
) -> None:
    with tables.driver.session("publish") as session:
        session.run("CREATE TABLE mirror (id bigint PRIMARY KEY, name varchar(99) NOT NULL, amount double precision)")
    apply(tables, [change("c", None, row(1, "a", 1), 1), change("u", None, row(2, UNAVAILABLE, 2), 3)])
    assert mirror(tables) == [row(1, "a", 1)]
    assert "1 of them are left out" in caplog.text
    apply(tables, [change("c", None, row(2, "b", 1), 2)])
    assert mirror(tables)[1:] == [row(2, "b", 1)]


@pytest.mark.every_system
def test_a_late_value_that_the_table_rejects_stops_nothing(tables: SqlTables) -> None:
    with tables.driver.session("publish") as session:
        session.run("CREATE TABLE mirror (id bigint PRIMARY KEY, name varchar(9), amount double precision)")
    apply(tables, [change("c", None, row(1, "a", 1), 1)])
    apply(tables, [change("u", None, row(1, UNAVAILABLE, 3), 3)])
    apply(tables, [change("u", None, row(1, "longer than that", 2), 2), change("c", None, row(2, "b"), 4)])
    # These two do not look at the length.
    name = "longer than that" if tables.dialect in ("duckdb", "sqlite") else "a"
    assert mirror(tables) == [row(1, name, 3), row(2, "b")]


def test_a_row_that_is_created_again_does_not_keep_a_value(tables: SqlTables) -> None:
    apply(tables, [change("c", None, row(1, "old", 1), 1)])
    # The create between the two comes late.
    apply(tables, [change("d", row(1), None, 2), change("u", None, row(1, UNAVAILABLE, 3), 4)])
    assert mirror(tables) == [row(1, None, 3)]
    apply(tables, [change("c", None, row(1, "new", 2), 3)])
    assert mirror(tables) == [row(1, "new", 3)]


@pytest.mark.parametrize(
    "again", [change("t", None, None, 1), change("d", row(1), None, 1)], ids=["truncate", "delete"]
)
def test_what_removed_a_row_and_comes_again_leaves_the_values_that_it_has_now(
    tables: SqlTables, again: dict[str, Any]
) -> None:
    apply(tables, [again, change("c", None, row(1, "a", 2), 2)])
    apply(tables, [again, change("u", None, row(1, UNAVAILABLE, 3), 3)])
    assert mirror(tables) == [row(1, "a", 3)]
    apply(tables, [{**again, "source": change("t", lsn=4)["source"]}, change("u", None, row(1, UNAVAILABLE, 5), 5)])
    assert mirror(tables) == [row(1, None, 5)]


def test_an_old_value_of_a_batch_is_not_taken_for_that_of_the_table(tables: SqlTables) -> None:
    apply(tables, [change("c", None, row(1, "c", 1), 1), change("u", None, row(1, "d", 4), 4)])
    apply(tables, [change("u", None, row(1, "b", 3), 3), change("u", None, row(1, UNAVAILABLE, 5), 5)])
    assert mirror(tables) == [row(1, "d", 5)]
    apply(tables, [change("u", None, row(1, "late", 2), 2)])
    assert mirror(tables) == [row(1, "d", 5)]


def test_a_history_refuses_each_value_that_is_not_said(tables: SqlTables) -> None:
    unavailable = change("u", None, row(1, "__debezium_unavailable_value", 2), 2)
    with pytest.raises(LoadRefusedError, match="do not say the values of name"):
        apply(tables, [change("c", None, row(1, "long", 1), 1), unavailable], mode="scd2")


@pytest.mark.parametrize("has_positions", [True, False])
def test_a_history_of_one_millisecond(tables: SqlTables, has_positions: bool) -> None:
    """As of a transaction that deletes a row and inserts it again, in whatever batches its changes come."""
    steps = [("c", None, row(1, "a")), ("d", row(1), None), ("c", None, row(1, "b")), ("u", None, row(1, "c"))]
    messages = [change(*each, lsn=number if has_positions else None, ts=5) for number, each in enumerate(steps)]
    for each in ([messages[0]], [messages[1]], messages[2:], [messages[1]], messages[2:]):
        apply(tables, each, mode="scd2")
    apply(tables, [change("u", None, row(1, "d"), 9 if has_positions else None, 6)], mode="scd2")
    found = [
        (each["name"], milliseconds(each["valid_from"]), milliseconds(each["valid_to"])) for each in mirror(tables)
    ]
    assert sorted(found) == [("a", 5, 5), ("b", 5, 5), ("c", 5, 6), ("d", 6, None)]


def test_a_history_that_gets_positions_later_knows_its_versions(tables: SqlTables) -> None:
    messages = [change("c", None, row(1, "a"), 1), change("u", None, row(1, "b"), 2)]
    apply(tables, messages, mode="scd2")
    with tables.driver.session("publish") as session:
        # As a table was made before there were positions.
        session.run(f"ALTER TABLE {tables.table(None, 'mirror')} DROP COLUMN {tables.quote('_weft_position')}")
    apply(tables, [*messages, change("u", None, row(1, "c"), 3)], mode="scd2")
    assert sorted(each["name"] for each in mirror(tables)) == ["a", "b", "c"]


@pytest.mark.parametrize("soft", [False, True])
def test_a_row_takes_its_values_along_when_its_key_changes(tables: SqlTables, soft: bool) -> None:
    cdc = replace(DEBEZIUM, delete_mode="soft", soft_delete_column="gone") if soft else DEBEZIUM
    apply(tables, [change("c", None, row(each, name), each) for each, name in ((1, "a"), (2, "b"), (3, "c"))], cdc)
    batch = [
        change("d", row(1), None, 4),
        # By way of another key, whose old row is another one.
        change("u", row(2), row(1, UNAVAILABLE, 5), 5),
        change("u", row(1), row(9, UNAVAILABLE, 6), 6),
        change("u", row(3), row(2, UNAVAILABLE, 7), 7),
        change("c", None, row(3, "new"), 8),
    ]
    wanted = [row(2, "c", 7), row(3, "new"), row(9, "b", 6)]
    for _ in range(2):
        apply(tables, batch, cdc)
        assert [each for each in mirror(tables) if not each.pop("gone", None)] == wanted


def test_a_row_that_has_its_new_key_already_keeps_its_values(
    tables: SqlTables, caplog: pytest.LogCaptureFixture
) -> None:
    """As a first copy finds it, or as a change leaves it that comes again when the gate has forgotten it."""
    with tables.driver.session("publish") as session:
        session.run("CREATE TABLE mirror (id bigint PRIMARY KEY, name varchar(9) NOT NULL, amount double precision)")
        session.run("INSERT INTO mirror VALUES (2, 'copied', 1)")
    apply(tables, [change("u", row(1), row(2, UNAVAILABLE, 5), 10)])
    assert mirror(tables) == [row(2, "copied", 5)]
    assert "do not say all values" not in caplog.text


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


def test_columns_that_are_called_as_those_of_the_gate(tables: SqlTables) -> None:
    names = ("id", "target", "pipeline", "position", "ts_ms", "changed_key", "row_key")
    named = pa.struct([(name, pa.int64() if name == "id" else pa.string()) for name in names])
    schema = pa.schema([("op", pa.string()), ("before", named), ("after", named), MESSAGES.field("source")])
    first, unavailable = dict.fromkeys(names, "a"), dict.fromkeys(names, UNAVAILABLE)
    for mode in ("merge", "scd2"):
        made = [change("c", None, {**first, "id": each}, each) for each in (1, 2)]
        apply(tables, made, schema=schema, mode=mode, table=mode)
        more = [change("u", {"id": 1}, {**(unavailable if mode == "merge" else first), "id": 3}, 5), change("t", lsn=4)]
        apply(tables, [*made, more[0]], schema=schema, mode=mode, table=mode)
        apply(tables, [made[0], more[1]], schema=schema, mode=mode, table=mode)
        current = [each for each in mirror(tables, mode) if each.get("is_current", True)]
        assert [{name: each[name] for name in names} for each in current] == [{**first, "id": 3}]


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


def test_long_keys_outlive_a_late_truncate(tables: SqlTables) -> None:
    cdc = CDC(envelope="debezium", key_field="after.id, after.part")
    long, old = {"id": "a" * 150, "part": "b" * 150}, {"id": "a" * 150, "part": "c" * 150}
    apply(tables, [change("c", None, old, 4), change("c", None, long, 9)], cdc, schema=PAIRS)
    apply(tables, [change("t", None, None, 5)], cdc, schema=PAIRS)
    assert mirror(tables) == [long]


def test_dates_as_keys_outlive_a_late_truncate(tables: SqlTables) -> None:
    """The messages have days since 1970, the table has dates."""
    day = pa.struct([("id", pa.int32()), ("name", pa.string())])
    schema = pa.schema([("op", pa.string()), ("before", day), ("after", day), MESSAGES.field("source")])
    with tables.driver.session("publish") as session:
        session.run("CREATE TABLE mirror (id date PRIMARY KEY, name varchar(9))")
    apply(tables, [change("c", None, {"id": each, "name": "a"}, each) for each in (1, 9)], schema=schema)
    apply(tables, [change("t", None, None, 5)], schema=schema)
    assert [each["id"] for each in mirror(tables)] == [date(1970, 1, 10)]


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


@pytest.mark.parametrize("soft", [False, True])
def test_rows_that_come_after_a_truncate_stay_where_others_are_put_aside(tables: SqlTables, soft: bool) -> None:
    cdc = replace(DEBEZIUM, delete_mode="soft", soft_delete_column="gone") if soft else DEBEZIUM
    with tables.driver.session("publish") as session:
        session.run(
            "CREATE TABLE mirror (id bigint PRIMARY KEY, name varchar(9) NOT NULL, amount double precision"
            f"{', gone timestamp NULL' if soft else ''})"
        )
    apply(tables, [change("c", None, row(each, "a", each), each) for each in (1, 2, 3)], cdc)
    messages = [
        change("t", lsn=4),
        change("c", None, row(1, "a", 1), 5),  # as it was
        change("c", None, row(2, "new", 2), 6),
        change("c", None, row(4, "new", 4), 7),
        change("c", None, row(5, None, 5), 8),
    ]
    counts, _ = apply(tables, messages, cdc, on_bad_rows="quarantine")
    assert counts.quarantined == 1
    there = [each for each in mirror(tables) if not each.pop("gone", None)]
    assert there == [row(1, "a", 1), row(2, "new", 2), row(4, "new", 4)]


@pytest.mark.every_system
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


@pytest.mark.parametrize("size", [1000])
def test_what_a_batch_reports(tables: SqlTables, size: int) -> None:
    messages = [change("c", None, row(each % 100, "x", each), each) for each in range(size)]
    counts, report = apply(tables, [*messages, messages[-1]])
    assert (counts.inserted, report.creates, report.idempotent_skipped) == (100, size, 1)
    assert report.lag_seconds is not None


JSON_VALUES = ({"a": 1}, {"b": None}, [1, "x"], 5, 1.5, True, "text", None)


@pytest.mark.parametrize("values", [JSON_VALUES, (5, 7), (True, False)])
def test_a_json_column_takes_any_json(tables: SqlTables, values: tuple[Any, ...]) -> None:
    doc = f"doc {tables.sql_type(hinted('doc', 'json'))}"
    with tables.driver.session("publish") as session:
        session.run(f"CREATE TABLE {tables.table(None, 'mirror')} (id BIGINT, {doc})")
    rows = [{"op": "c", "after": json.dumps({"id": n, "doc": each})} for n, each in enumerate(values)]
    apply(tables, rows, schema=pa.schema([("op", pa.string()), ("after", pa.string())]))
    assert [None if each["doc"] is None else json.loads(each["doc"]) for each in mirror(tables)] == list(values)
