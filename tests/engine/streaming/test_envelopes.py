"""Messages of each envelope become changes, whatever form they come in; without Spark and databases."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

import weft
from weft.columns import hinted
from weft.engine.streaming.cdc.envelopes import OpenedChanges, StoredTable, opened
from weft.engine.streaming.cdc.newest import newest
from weft.systems.codecs.json import JsonCodec

DEBEZIUM = weft.CDC(envelope="debezium", key_field="after.id")
MAXWELL = weft.CDC(envelope="maxwell", key_field="data.id")
ROW = {"id": 1, "name": "a"}


def read(*messages: Any, cdc: Any = DEBEZIUM) -> OpenedChanges:
    """Open messages that were JSON."""
    parsed = JsonCodec().decoder({}).parse(pa.array([json.dumps(each).encode() for each in messages]))
    assert not parsed.bad
    return opened(pa.table(parsed.columns), cdc)


def change(op: str, before: Any = None, after: Any = None, **source: Any) -> dict[str, Any]:
    return {"op": op, "before": before, "after": after, "source": {"ts_ms": 5, **source}}


def shown(found: OpenedChanges) -> list[tuple[Any, ...]]:
    """Operation, keys and columns of each change."""
    columns = [*found.keys.values(), *found.columns.values()]
    return list(zip(found.op.tolist(), *(each.to_pylist() for each in columns), strict=True))


MESSAGES = [
    change("r", None, ROW, lsn=1),
    change("u", ROW, {"id": 1, "name": "b"}, lsn=2),
    change("d", {"id": 1, "name": None}, None, lsn=3),
    change("t", lsn=4),
]
CHANGES = [(4, 1, "a"), (1, 1, "b"), (2, 1, None), (3, None, None)]


def test_as_they_are() -> None:
    assert shown(read(*MESSAGES)) == CHANGES


def test_with_their_schemas() -> None:
    wrapped = [{"schema": {"type": "struct", "fields": []}, "payload": each} for each in MESSAGES]
    found = read(*wrapped, {"schema": {"type": "struct", "fields": []}, "payload": None})
    assert (shown(found), found.skipped, found.bad) == (CHANGES, 1, {})


def test_rows_as_texts() -> None:
    texts = [{**each, **{part: json.dumps(each[part]) for part in ("before", "after", "source")}} for each in MESSAGES]
    found = read(*texts)
    assert shown(found) == CHANGES
    assert found.ts.to_pylist() == [5, 5, 5, 5]


def test_an_update_that_changes_the_key() -> None:
    found = read(change("u", ROW, {"id": 2, "name": "a"}))
    assert [each[:2] for each in shown(found)] == [(2, 1), (1, 2)]
    counted = newest(found)
    assert (counted.updates, counted.deletes) == (1, 0)


def test_keys_that_are_decimals_or_bytes() -> None:
    one, two = ({"id": {"scale": 0, "value": each}} for each in ("AQ==", "Ag=="))
    found = newest(read(change("c", None, one, lsn=1), change("u", one, two, lsn=2), change("u", two, two, lsn=3)))
    assert found.rows["_weft_op"].to_pylist() == [2, 1]
    rows = pa.table({"op": ["c", "c"], "after": [{"id": b"\xff"}, {"id": b"\xfe"}]})
    assert newest(opened(rows, DEBEZIUM)).rows["_weft_key"].to_pylist() == ["ff", "fe"]


def test_maxwell() -> None:
    whole = {"database": "shop", "table": "t", "ts": 1_770_000_000, "xid": 9}
    found = read(
        {**whole, "type": "insert", "xoffset": 0, "data": ROW},
        {**whole, "type": "update", "commit": True, "data": {"id": 2, "name": "a"}, "old": {"id": 1}},
        {**whole, "type": "delete", "xid": 10, "commit": True, "data": {"id": 2, "name": "a"}},
        {"type": "table-alter", "database": "shop", "table": "t", "ts": 1_770_000_000},
        cdc=MAXWELL,
    )
    assert [each[:2] for each in shown(found)] == [(0, 1), (2, 1), (1, 2), (2, 2)]
    assert found.skipped == 1
    assert set(found.ts.to_pylist()) == {1_770_000_000_000}
    assert found.position.to_pylist() == sorted(found.position.to_pylist())


def test_a_custom_envelope_whose_row_is_called_payload() -> None:
    cdc = weft.CDC(
        envelope="custom",
        key_field="id",
        op_field="op",
        op_map={"I": "create", "D": "delete"},
        before_field="old",
        after_field="payload",
        ts_field="at",
    )
    found = read(
        {"op": "I", "id": 1, "payload": {"op": "x", "name": "a"}, "at": "2026-02-01T00:00:00Z"},
        {"op": "D", "id": 1, "payload": None, "at": "2026-02-01T00:00:01Z"},
        cdc=cdc,
    )
    assert found.bad == {}
    assert found.op.tolist() == [0, 2]
    assert found.keys["id"].to_pylist() == [1, 1]
    assert (found.ts[1].as_py() - found.ts[0].as_py()) == 1000


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"lsn": 9}, {"lsn": 10}),
        ({"file": "bin.000009", "pos": 900, "row": 1}, {"file": "bin.000010", "pos": 4, "row": 0}),
        ({"file": "bin.000009", "pos": 900, "row": 1}, {"file": "bin.000009", "pos": 1000, "row": 0}),
        ({"commit_lsn": "00000027:00000758:0003"}, {"commit_lsn": "00000027:00000759:0001"}),
        ({"commit_lsn": "00000027:00000ac0:0009"}, {"commit_lsn": "00000027:00000ac0:000a"}),
        ({"commit_lsn": "00000027:00000ac0:000a"}, {"commit_lsn": "00000027:00000ac0:0010"}),
        ({"file": "bin.999999", "pos": 900, "row": 1}, {"file": "bin.1000000", "pos": 4, "row": 0}),
        ({"scn": "999"}, {"scn": "1000"}),
        ({"scn": "999", "rs_id": "0x0a.01.0010", "ssn": 9}, {"scn": "999", "rs_id": "0x0a.01.0010", "ssn": 10}),
    ],
)
def test_positions_sort_as_the_log_does(before: dict[str, Any], after: dict[str, Any]) -> None:
    first, second = read(change("c", None, ROW, **before), change("c", None, ROW, **after)).position.to_pylist()
    # Those of another batch sort with them.
    (alone,) = read(change("c", None, ROW, **after)).position.to_pylist()
    assert first < second == alone


@pytest.mark.parametrize("texts", [("0000A", "0000F", "00010"), ("0/16B3749", "0/16B374A", "0/16B3750")])
def test_a_named_position_sorts_as_it_is(texts: tuple[str, ...]) -> None:
    cdc = weft.CDC(envelope="debezium", key_field="after.id", position_field="source.at")
    assert read(*(change("c", None, ROW, at=each) for each in texts), cdc=cdc).position.to_pylist() == list(texts)


def test_positions_of_maxwell_sort_over_files() -> None:
    places = ("binlog.000009:4", "binlog.000009:10", "binlog.999999:500", "binlog.1000000:4")
    whole = {"type": "insert", "ts": 1_770_000_000, "data": ROW, "xid": 9}
    found = read(*({**whole, "position": each} for each in places), cdc=MAXWELL).position.to_pylist()
    assert found == sorted(set(found))


def test_malformed() -> None:
    found = read(
        change("c", None, ROW),
        change("x", None, ROW),
        {"before": None, "after": ROW},
        change("u", ROW, None),
        change("c", None, {"name": "a"}),
        change("d"),
    )
    assert shown(found) == [(0, 1, "a")]
    assert found.bad == {
        1: "'x' is no operation.",
        2: "It has no operation at 'op'.",
        3: "It has no row at 'after'.",
        4: "It has no key at 'after.id'.",
        5: "It has no key at 'after.id'.",
    }


def test_a_truncate_alone() -> None:
    found = newest(read(change("t", lsn=7)))
    assert (found.rows.num_rows, found.truncates) == (0, (("00000000000000000007", 5),))


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_what_debezium_says_beside_the_rows(is_wrapped: bool) -> None:
    """Where one topic has all of it: the bounds of a transaction, a change of a schema, a heartbeat."""
    of_transaction = {"id": "571:53195829", "event_count": None, "data_collections": None, "ts_ms": 5}
    others = [
        {"status": "BEGIN", **of_transaction},
        {"status": "END", **of_transaction, "event_count": 1},
        {"source": {"db": "shop", "ts_ms": 5}, "ts_ms": 5, "ddl": "ALTER TABLE t ADD c int", "tableChanges": []},
        {"ts_ms": 5},
    ]
    place = {"id": "571:53195829", "total_order": 1, "data_collection_order": 1}
    sent = [{**change("c", None, ROW, lsn=1), "ts_ms": 5, "transaction": place}, *others, {"ts_ms": 5, "after": ROW}]
    found = read(*({"schema": {"type": "struct"}, "payload": each} if is_wrapped else each for each in sent))
    assert (shown(found), found.skipped) == ([(0, 1, "a")], len(others))
    assert found.bad == {5: "It has no operation at 'op'."}


def test_nothing_that_is_a_change() -> None:
    found = read({"hello": 1})
    assert (len(found.op), found.bad) == (0, {0: "It has no operation at 'op'."})
    assert newest(found).rows.num_rows == 0


def in_texts(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages with their rows as JSON in a text."""
    return [
        {**each, **{name: json.dumps(each[name]) for name in ("before", "after") if each[name] is not None}}
        for each in messages
    ]


def test_a_row_before_is_known_whatever_types_the_others_have() -> None:
    many = [change("u", {"id": n, "doc": {"a": n}}, {"id": n, "doc": {"a": n}}, lsn=n) for n in (1, 2)]
    found = read(*in_texts(*many, change("u", {"id": 3, "doc": [1]}, {"id": 4, "doc": [1]}, lsn=3)))
    assert found.bad == {}
    assert [each[:2] for each in shown(found)] == [(1, 1), (1, 2), (2, 3), (1, 4)]


def test_keys_of_several_types_are_texts() -> None:
    found = read(*in_texts(change("u", {"id": "x"}, {"id": 1}, lsn=1), change("u", {"id": 1}, {"id": 2}, lsn=2)))
    assert shown(found) == [(2, "x"), (1, "1"), (2, "1"), (1, "2")]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([{"a": 1}, [1], None, "b"], ['{"a":1}', "[1]", None, "b"]),
        ([5, "x", True], ["5", "x", "true"]),
        ([1, 12345678901234567890, 1.5], ["1", "12345678901234567890", "1.5"]),
    ],
)
def test_values_of_several_types_are_texts(values: list[Any], texts: list[str | None]) -> None:
    rows = [change("c", None, {"id": number, "doc": each}, lsn=number) for number, each in enumerate(values)]
    found = read(*in_texts(*rows))
    assert found.bad == {}
    assert found.columns["doc"].to_pylist() == texts


def test_a_column_that_is_json_in_the_target_has_its_values_as_they_are() -> None:
    values = [{"a": 1.10}, {"b": {"c": None}}, {}, [1, "x"]]
    rows = [change("c", None, {"id": n, "Doc": each, "other": {"a": 1}}) for n, each in enumerate(values)]
    messages = pa.Table.from_pylist(in_texts(*rows), pa.schema([("op", pa.string()), ("after", pa.string())]))
    found = opened(
        messages, DEBEZIUM, lambda: [StoredTable({"doc": hinted("doc", "json"), "id": pa.field("id", pa.int64())})]
    )
    assert [json.loads(each) for each in found.columns["Doc"].to_pylist()] == values
    assert found.columns["other"][0].as_py() == {"a": 1}


def test_what_cannot_be_read_is_named() -> None:
    broken, row = '{"id": 1', '  {"id": 1}'
    found = read(
        {"op": "c", "before": None, "after": broken},
        {"op": "u", "before": broken, "after": row},
        {"op": "u", "before": "null", "after": row},
        {"op": "u", "before": "5", "after": row},
        {"op": "c", "before": broken, "after": row},
        {"op": "c", "before": None, "after": ""},
    )
    assert found.op.tolist() == [1, 0]
    assert list(found.bad) == [0, 1, 3, 5]
    assert found.bad[0].startswith("Its row at 'after' cannot be read. It is not JSON")
    assert found.bad[1].startswith("Its row at 'before' cannot be read. It is not JSON")
    assert found.bad[3].endswith("not an object: it is a number.")
    assert found.bad[5] == "It has no row at 'after'."
