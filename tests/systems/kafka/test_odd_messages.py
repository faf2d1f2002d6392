"""Odd messages of all kinds, batch after batch: each is a row with exactly its values, or bad once. No message changes
what becomes of another column's type. All that the driver and the tasks do, without Spark."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import odd_values
from weft.systems import messages
from weft.systems.codecs import kinds
from weft.systems.codecs.columns import message_type, storable
from weft.systems.codecs.json import JsonCodec
from weft.types import FieldType

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
NORMAL: dict[str, Callable[[random.Random], Any]] = {
    "flag": lambda dice: dice.random() < 0.5,
    "number": lambda dice: dice.randrange(1000),
    "price": lambda dice: dice.randrange(1000) / 8,
    "name": lambda dice: dice.choice(["é", "", "x" * 20]),
    "tags": lambda dice: [dice.randrange(9) for _ in range(dice.randrange(3))],
    "o": lambda dice: {"x": dice.randrange(9), "deep": {"y": [dice.choice("ab")]}},
}
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1.5, -0.0, 1e300, 2**53 + 1, -(2**63), 2**63, 2**64 - 1, 10**37, 10**40),
    *("", "maybe", "5", "true", "2026-01-31", "\x00", [], {}, [None], [1, "x"], [[1]], [1.5, 2**60], ["x", None]),
    *({"x": 1}, {"x": "1"}, {"X": 1}, {"x": None}, {"deep": {}}, {"deep": {"y": []}}, {"deep": {"y": [1]}}, {"z": {}}),
    *odd_values.INTEGERS,
    *odd_values.FLOATS,
    *odd_values.TEXTS,
]


def odd_message(dice: random.Random) -> dict[str, Any]:
    """A message of the usual keys, with a few odd values, without some keys and with others."""
    message = {name: make(dice) for name, make in NORMAL.items() if dice.random() < 0.9}
    for _ in range(dice.choice([0, 0, 0, 1, 1, 2])):
        message[dice.choice([*NORMAL, "more", "Name"])] = dice.choice(ODD)
    if "name" in message and "Name" in message:
        del message["name"]
    return message


def parse(
    values: list[dict[str, Any]], chunk: int, declared: dict[str, str], before: dict[str, pa.DataType], widens: bool
) -> tuple[pa.Table, dict[int, str], pa.Schema]:
    """What a micro-batch of these messages is: its rows with the offset of each, the bad ones, the columns as found."""
    batches = [
        pa.RecordBatch.from_pydict(
            {
                "value": pa.array([json.dumps(each).encode() for each in values[first : first + chunk]], pa.binary()),
                "partition": pa.array([0] * len(values[first : first + chunk]), pa.int32()),
                "offset": pa.array(range(first, min(first + chunk, len(values))), pa.int64()),
                "timestamp": pa.array([NOON] * len(values[first : first + chunk]), pa.timestamp("us", "UTC")),
            }
        )
        for first in range(0, len(values), chunk)
    ]
    types = {name: message_type(FieldType.parse(kind)) for name, kind in declared.items()}
    known = {**{name.lower(): kind for name, kind in before.items()}, **types}
    for _ in range(2):
        parsed = pa.Table.from_batches(
            messages.parse_messages(JsonCodec(), known, batches, offset_column="_weft_offset")
        )
        found = kinds.merged_columns(map(json.loads, parsed["kinds"].to_pylist()))
        more = kinds.settled(found, known, declared, widens=widens)
        known |= more
        if not more:
            break
    columns = messages.columns_of(parsed, [*before, *declared])
    rows = pa.Table.from_batches(messages.unpack(storable(columns), parsed.select(["good"]).to_batches()))
    bad = pa.Table.from_batches(messages.unpack(messages._BAD, parsed.select(["bad"]).to_batches())).to_pylist()
    assert len({each["offset"] for each in bad}) == len(bad)
    assert all(json.loads(each["payload"]) == values[int(each["offset"])] for each in bad)
    return rows, {int(each["offset"]): each["error"] for each in bad}, columns


def is_same(stored: Any, sent: Any) -> bool:
    """Whether a column holds exactly what was sent. Keys that an object does not have are null."""
    if isinstance(sent, dict):
        if not sent and stored in ("{}", {}):
            return True
        return isinstance(stored, dict) and all(is_same(each, sent.get(name)) for name, each in stored.items())
    if isinstance(sent, list):
        return isinstance(stored, list) and len(stored) == len(sent) and all(map(is_same, stored, sent))
    if isinstance(sent, bool) or sent is None or isinstance(sent, str):
        return type(stored) is type(sent) and stored == sent
    return isinstance(stored, int | float | Decimal) and not isinstance(stored, bool) and stored == sent


def fits(value: Any, kind: pa.DataType) -> bool:
    """Whether a value could be in a column of this type, said in other words than the code."""
    types = pa.types
    if value is None:
        return True
    if types.is_null(kind):
        return False
    if types.is_struct(kind):
        names = {each.name for each in kind}
        return (
            isinstance(value, dict)
            and set(value) <= names
            and all(fits(v, kind.field(k).type) for k, v in value.items())
        )
    if types.is_list(kind):
        return isinstance(value, list) and all(fits(each, kind.value_type) for each in value)
    if types.is_boolean(kind) or types.is_string(kind):
        return type(value) is (bool if types.is_boolean(kind) else str)
    if isinstance(value, bool | str | list | dict):
        return False
    if types.is_floating(kind):
        return isinstance(value, float) or (abs(value) < 10**300 and int(float(value)) == value)
    bound = 10**38 if types.is_decimal(kind) else 2**63
    return value == int(value) and -bound <= value < bound


@pytest.mark.brief("evolve-declared", "ignore-found")
@pytest.mark.parametrize("declares", [False, True], ids=["found", "declared"])
@pytest.mark.parametrize("widens", [True, False], ids=["evolve", "ignore"])
def test_each_message_is_a_row_or_bad_once(widens: bool, declares: bool, count: Callable[..., int]) -> None:
    for seed in range(count(2000, brief=10)):
        dice = random.Random(seed)
        declared = {"number": "int64", "flag": "bool", "name": "string"} if declares else {}
        before: dict[str, pa.DataType] = {}
        for _ in range(3):
            values = [odd_message(dice) for _ in range(dice.randrange(1, 12))]
            rows, bad, columns = parse(values, dice.randrange(1, 6), declared, before, widens)
            stored = {int(row.pop("_weft_offset").removeprefix("0:")): row for row in rows.to_pylist()}
            assert sorted([*stored, *bad]) == list(range(len(values))), seed
            types = {each.name.lower(): each.type for each in columns}
            for offset, row in stored.items():
                sent = {name.lower(): value for name, value in values[offset].items()}
                for name, value in row.items():
                    assert is_same(value, sent.pop(name.lower(), None)), (seed, offset, name)
                assert not any(value is not None for value in sent.values()), (seed, offset, sent)
            for offset, error in bad.items():
                known = types | {name.lower(): kind for name, kind in before.items() if name.lower() not in types}
                odd = {name: known.get(name.lower()) for name in values[offset] if repr(name) in error}
                assert any(kind is None or not fits(values[offset][name], kind) for name, kind in odd.items()), (
                    seed,
                    error,
                )
            for each in columns:
                if each.name.startswith("_") or pa.types.is_null(each.type):
                    continue
                earlier = before.get(each.name.lower())
                if earlier is not None and not pa.types.is_nested(earlier):
                    kept = {earlier} | (
                        {pa.float64(), pa.decimal128(38, 0)} if earlier == pa.int64() and widens else set()
                    )
                    assert each.type in kept, (seed, each, earlier)
                before[each.name.lower()] = each.type


@pytest.mark.parametrize(
    ("values", "kind", "bad"),
    [
        ([5, "abc", 7], pa.int64(), [1]),
        ([True, True, "maybe"], pa.bool_(), [2]),
        (["a", "b", 5], pa.string(), [2]),
        ([5, "5"], pa.int64(), [1]),
        (["x", True], pa.bool_(), [0]),
        (["x", [1]], pa.list_(pa.int64()), [0]),
        ([1, 2.5, None], pa.float64(), []),
        ([2**53 + 1, 2.5, 3], pa.int64(), [1]),
        ([2**53 + 1, 2.5, 3.5], pa.float64(), [0]),
        ([2**70, 1], pa.decimal128(38, 0), []),
        ([10**40, 1], pa.decimal128(38, 0), [0]),
        ([10**40], None, [0]),
        ([{"x": 1}, {"x": "a"}, {"x": 2}], pa.struct({"x": pa.int64()}), [1]),
        ([[1, "x"], [2, 3]], pa.list_(pa.int64()), [0]),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2, 10])
def test_the_type_is_that_of_most_values(
    values: list[Any], kind: pa.DataType | None, bad: list[int], chunk: int
) -> None:
    rows, found, columns = parse([{"a": value} for value in values], chunk, {}, {}, True)
    assert sorted(found) == bad
    if kind is not None:
        assert columns.field("a").type == kind
        assert rows["a"].to_pylist() == [value for number, value in enumerate(values) if number not in bad]
    else:
        assert "a" not in columns.names


def test_what_a_row_that_is_put_aside_brings_is_no_column() -> None:
    rows, bad, _ = parse([{"a": 1}, {"a": "x", "b": 1, "c": 1.5}, {"a": 2, "c": 3}], 1, {}, {}, True)
    assert rows.schema.field("c").type == pa.int64()
    assert rows.drop_columns(["_weft_offset"]).to_pylist() == [{"a": 1, "c": None}, {"a": 2, "c": 3}]
    assert list(bad) == [1]
