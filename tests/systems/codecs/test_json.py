"""JSON messages become columns: the fast way and the careful way agree, and whatever is bad is bad alone."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weft.systems.codec import Parsed
from weft.systems.codecs import kinds
from weft.systems.codecs.columns import WHOLE, converted, storable, unified_schema
from weft.systems.codecs.json import JsonDecoder

BAD = {
    "no JSON": (b"{nope}", "It is not JSON: object keys must be strings (byte 1)."),
    "cut off": (b'{"n": 1', "It is not JSON: it ends too early."),
    "its neighbour's end": (b'"m": 1}', "It is not JSON"),
    "empty": (b"", "It is not JSON"),
    "blank": (b"\n", "It is not JSON"),
    "an array": (b"[1]", "not an object: it is an array"),
    "null": (b"null", "not an object: it is null"),
    "a string": (b'"{}"', "not an object: it is a string"),
    "two objects": (b'{"n": 1}{"n": 2}', "It is not JSON"),
    "not UTF-8": (b'{"s": "\xff"}', "It is not UTF-8: byte 7"),
    "half a character": (b'{"s": "\\ud800"}', r"The escape \ud800 in it stands for half a character"),
    "half a character before a text": (b'{"s": "\\\\ud800 \\udfff, and more"}', r"The escape \udfff in it stands"),
    "a newline in a string": (b'{"s": "a\nb"}', "It is not JSON"),
    "NaN": (b'{"n": NaN}', "It is not JSON"),
    "a number beyond all": (b'{"s": 1, "n": 1e400}', "'n' has a number beyond the largest of a 64-bit float."),
    "a deep number beyond all": (
        b'{"o": {"n": [1, -1e400]}}',
        "'o' has a number beyond the largest of a 64-bit",
    ),
    "a long number beyond all": (b'{"n": ' + b"9" * 5000 + b"}", "'n' has a number beyond the largest of a 64-bit"),
    "an array of a number beyond all": (b"[1e400]", "It has a number beyond the largest of a 64-bit float."),
    "a key without a name": (b'{"": 1}', "a key without a name"),
    "a key with a zero": (b'{"a\\u0000b": 1}', r"a key with the character \u0000"),
    "two spellings": (b'{"n": 1, "N": 2}', "two keys that are one column: 'n'"),
    "a key twice": (b'{"n": 1, "n": 1}', "the key 'n' twice in one object"),
    "a key twice inside": (b'{"n": 1, "o": [{"x": "a:b", "x": 2}]}', "the key 'x' twice in one object"),
    "a key twice, as an escape": (b'{"n": 1, "\\u006e": 2}', "the key 'n' twice in one object"),
    "a key twice beside a colon": (b'{"o": "\\u003a", "o": 2}', "the key 'o' twice in one object"),
    "deep": (b'{"n": ' + b"[" * 40 + b"]" * 40 + b"}", "deeper than 32 levels"),
    "deep objects": (b'{"n": ' + b'{"a": ' * 150 + b"1" + b"}" * 151, "deeper than 32 levels"),
    "long and deep": (b'{"n": ' + b'{"a": ' * 490 + b"1" + b"}" * 491, "deeper than 32 levels"),
    "as deep as kills": (b'{"n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deeper than 32 levels"),
    "not what is known": (b'{"known": "x"}', "'known' is \"x\", a string, which does not fit int32"),
    "a number too small for any": (
        b'{"d": 1.5e-99999999999999999999}',
        "'d' is 1.5E-99999999999999999, a number, which does not fit decimal(10,2)",
    ),
    "more than is known": (b'{"known": 3000000000}', "'known' is 3000000000, a number, which does not fit int32"),
}
KNOWN = {"known": pa.int32(), "d": pa.decimal128(10, 2)}


def parse(values: list[bytes], known: dict[str, pa.DataType] | None = None, *, carefully: bool = False) -> Parsed:
    reader = JsonDecoder(known or {})
    reader.tries_at_once = not carefully
    return reader.parse(pa.array(values, pa.binary()))


def one_column(values: list[Any], known: pa.DataType | None = None) -> pa.Array:
    """Messages with one key, read as one column."""
    parsed = parse([json.dumps({"a": value}).encode() for value in values], {"a": known} if known else None)
    assert not parsed.bad, parsed.bad
    return parsed.columns["a"]


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_message_is_bad_alone_wherever_it_is(kind: str, position: int) -> None:
    value, why = BAD[kind]
    messages = [b'{"n": 1, "known": 1}', b'{"n": 2}', b'{"n": 3}']
    messages.insert(position, value)
    parsed = parse(messages, KNOWN)
    assert list(parsed.bad) == [position]
    assert why in parsed.bad[position]
    assert list(parsed.good) == [number for number in range(4) if number != position]
    assert parsed.columns["n"].to_pylist() == [1, 2, 3]


@pytest.mark.parametrize(
    "message",
    [
        b'{"j": {"x": 1, "x": 2}}',
        b'{"j": 1, "j": {"a": 2}}',
        b'{"n": 1, "n": 2, "j": 3}',
        b'{"j": {"x": "\\u003a", "x": 1}}',
    ],
)
def test_a_key_twice_beside_documents(message: bytes) -> None:
    usual = [b'{"j": {"a:b": ":", "<": "\\u003c\\u003e"}, "n:m": 1}', b'{"j": null}']
    parsed = parse([*usual, message], {"j": pa.json_()})
    assert "twice in one object" in parsed.bad[2]
    assert (list(parsed.good), parsed.columns["j"].to_pylist()) == ([0, 1], [r'{"a:b":":","<":"\u003c\u003e"}', None])
    reader = JsonDecoder({"j": pa.json_()})
    assert reader.at_once(pa.array(usual, pa.binary())) is not None


def test_all_bad_messages_at_once() -> None:
    parsed = parse([value for value, _ in BAD.values()], KNOWN)
    assert list(parsed.bad) == list(range(len(BAD)))
    assert not parsed.columns


def test_two_wrongs_do_not_make_a_right() -> None:
    """As many objects as messages, and yet not one each."""
    parsed = parse([b"", b'{"n": 1}{"n": 2}', b'{"n": 3}'])
    assert list(parsed.bad) == [0, 1]
    parsed = parse([b'{"n": {}', b'"m": 2}', b'{"n": 3}{"n": 4}'])
    assert list(parsed.bad) == [0, 1, 2]


def test_newlines_within_values() -> None:
    parsed = parse([b'{\n  "n": 1,\n  "s": "a\\nb"\n}', b'{"n": 2}\n', b'\r\n{"n": 3}'])
    assert parsed.columns["n"].to_pylist() == [1, 2, 3]
    assert parsed.columns["s"].to_pylist() == ["a\nb", None, None]


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([1, None, -(2**63)], pa.int64(), None),
        ([1, 2.5], pa.float64(), [1.0, 2.5]),
        ([True, None], pa.bool_(), None),
        (["2026-01-01", "x"], pa.string(), None),
        (["2026-01-01", "2026-01-01T00:00:00Z"], pa.string(), None),
        ([2**63, 1], pa.decimal128(38, 0), [Decimal(2**63), Decimal(1)]),
        ([None], pa.null(), None),
        ([[1, 2], [], None], pa.list_(pa.int64()), None),
        ([["2026-01-01"]], pa.list_(pa.string()), None),
        (
            [{"b": 1}, {"c": "x"}],
            pa.struct({"b": pa.int64(), "c": pa.string()}),
            [{"b": 1, "c": None}, {"b": None, "c": "x"}],
        ),
        ([{"b": 2**64}], pa.struct({"b": pa.decimal128(38, 0)}), [{"b": Decimal(2**64)}]),
        ([[1, 2.5]], pa.list_(pa.float64()), [[1.0, 2.5]]),
    ],
)
def test_types_are_those_of_the_values(values: list[Any], kind: pa.DataType, expected: list[Any] | None) -> None:
    found = one_column(values)
    assert found.type.equals(kind), found.type
    assert found.to_pylist() == (values if expected is None else expected)


@pytest.mark.parametrize(
    ("known", "values", "expected"),
    [
        (pa.int16(), [1, 2.0], [1, 2]),
        (pa.float64(), [1, 2.5, 2**60], [1.0, 2.5, float(2**60)]),
        (pa.float32(), [0.5], [0.5]),
        (pa.string(), ["x", "1"], ["x", "1"]),
        (pa.struct({"b": pa.int64(), "c": pa.string()}), [{"b": 1}, {"c": "x"}], None),
        (pa.json_(), ["x", 1, {"b": None}, None], ['"x"', "1", '{"b":null}', None]),
        (pa.decimal128(38, 19), [0.5, 7, "1.25"], [Decimal("0.5"), Decimal(7), Decimal("1.25")]),
        (pa.date32(), ["2026-01-31"], [date(2026, 1, 31)]),
        (
            pa.timestamp("us", "UTC"),
            ["2026-01-31T12:00:00.123456+02:00", "2026-01-31 12:00:00", "2026-01-31"],
            [
                datetime(2026, 1, 31, 10, 0, 0, 123456, UTC),
                datetime(2026, 1, 31, 12, tzinfo=UTC),
                datetime(2026, 1, 31, tzinfo=UTC),
            ],
        ),
        (pa.timestamp("us"), ["2026-01-31T12:00:00"], [datetime(2026, 1, 31, 12)]),
        (pa.binary(), ["aGk="], [b"hi"]),
        (pa.uuid(), ["12345678-1234-5678-1234-567812345678"], ["12345678-1234-5678-1234-567812345678"]),
        (pa.list_(pa.int64()), [[1], []], [[1], []]),
    ],
)
def test_known_types_win(known: pa.DataType, values: list[Any], expected: list[Any] | None) -> None:
    found = one_column(values, known).to_pylist()
    assert found == (expected or [{"b": None, "c": None, **value} for value in values])


def test_a_decimal_is_what_was_sent_also_beside_a_bad_message() -> None:
    digits = "0.1234567890123456789"
    known = {"a": pa.decimal128(38, 19)}
    for messages in ([f'{{"a": {digits}}}'.encode()], [f'{{"a": {digits}}}'.encode(), b"bad"]):
        assert parse(messages, known).columns["a"].to_pylist() == [Decimal(digits)]


@pytest.mark.parametrize(
    ("known", "value"),
    [
        (pa.bool_(), 1),
        (pa.int64(), True),
        (pa.int64(), 1.5),
        (pa.int64(), "1"),
        (pa.int8(), 128),
        (pa.float64(), "1.5"),
        (pa.float64(), 2**53 + 1),
        (pa.string(), 1),
        (pa.string(), {"b": 1}),
        (pa.float32(), 1e39),
        (pa.decimal128(4, 2), 1.234),
        (pa.date32(), "yesterday"),
        (pa.timestamp("us", "UTC"), "2026-01-31T12:00:00.1234567Z"),
        (pa.timestamp("us", "UTC"), 5),
        (pa.binary(), "?"),
        (pa.uuid(), "x"),
        (pa.list_(pa.int64()), ["x"]),
        (pa.struct({"b": pa.int64()}), {"b": "x"}),
        (pa.struct({"b": pa.int64()}), {"c": 1}),
        (pa.struct({"b": pa.int64()}), [1]),
    ],
)
def test_what_does_not_fit_is_bad(known: pa.DataType, value: Any) -> None:
    parsed = parse([json.dumps({"a": value}).encode(), b'{"a": null}'], {"A": known})
    assert list(parsed.bad) == [0]
    assert "'a' is " in parsed.bad[0]
    assert parsed.columns["a"].to_pylist() == [None]


def test_large_integers_are_read_at_once() -> None:
    """One of them makes its column a decimal, for which Arrow takes texts too: only they need the careful way."""
    reader = JsonDecoder({"a": WHOLE})
    parsed = reader.parse(pa.array([b'{"a": 12345678901234567890, "s": "x\\n"}', b'{"a": 7}'], pa.binary()))
    assert parsed.columns["a"].to_pylist() == [Decimal(12345678901234567890), Decimal(7)]
    assert reader.tries_at_once  # where no message is to blame, the careful way gives this up
    for text in (b'{"a": "7"}', b'{"a" :\t"7"}', b'{"\\u0061": "7"}'):
        parsed = reader.parse(pa.array([text, b'{"a": 8}'], pa.binary()))
        assert list(parsed.bad) == [0]
        assert parsed.columns["a"].to_pylist() == [Decimal(8)]


def test_what_is_known_and_not_sent_is_no_column() -> None:
    """A merge would take it for nulls, and overwrite what the target has."""
    assert set(parse([b'{"n": 1}', b'{"n": 2}'], {"n": pa.int64(), "other": pa.string()}).columns) == {"n"}


def test_batches_of_one_task_with_new_keys_and_wider_types() -> None:
    reader = JsonDecoder({})
    found = [
        reader.parse(pa.array(values, pa.binary()))
        for values in (
            [b'{"n": 1, "t": "2026-01-01"}'],
            [b'{"n": 2.5, "t": "2026-01-02", "m": null}'],
            [b'{"n": "x", "M": {"b": []}}'],
            [b"{}"],
        )
    ]
    assert not any(each.bad for each in found)
    batches = [pa.table(each.columns) for each in found[:3]]
    schema = storable(unified_schema((batch.schema for batch in batches), []))
    assert schema == pa.schema({"n": pa.string(), "t": pa.string(), "M": pa.struct({"b": pa.list_(pa.string())})})
    rows = [converted(batch["n"].combine_chunks(), pa.string()).to_pylist() for batch in batches]
    assert rows == [["1"], ["2.5"], ["x"]]


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.sampled_from(["2026-01-01", "2026-01-01T00:00:00Z", "NaN"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "y"]), inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(st.sampled_from(["a", "b", "B", "_event_ts"]), VALUES, max_size=3)
KINDS = [
    *(pa.bool_(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.json_(), pa.date32()),
    *(pa.decimal128(10, 2), pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.list_(pa.int64())),
    *(pa.decimal128(38, 0), pa.uuid(), pa.list_(pa.float64()), pa.list_(pa.null())),
    *(pa.struct({"x": pa.int64(), "y": pa.list_(pa.string())}), pa.struct({"x": pa.decimal128(38, 0)}), pa.struct([])),
]


@given(
    st.lists(OBJECTS, min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(KINDS), max_size=2),
)
@example([{"a": 2**53 + 1}, {"a": 0.5}], {})
@example([{"a": [2**53 + 1, 0.5]}], {})
@example([{"a": -0.0}], {})
@example([{"a": 10**8}], {"a": pa.decimal128(10, 2)})
@example([{"a": [None, None]}], {})
@example([{"a": [None, 1]}, {"a": [2, 3]}], {})
@example([{"a": {"x": [None, "y"]}}, {"a": {"x": ["z"]}}], {})
@example([{"a": [{}, {"x": None}]}], {})
@example([{"a": [{"x": []}, {"x": [[None]]}]}], {})
def test_both_ways_give_the_same(rows: list[dict[str, Any]], known: dict[str, pa.DataType]) -> None:
    messages = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    fast, careful = parse(messages, known), parse(messages, known, carefully=True)
    assert fast.bad == careful.bad
    assert list(fast.good) == list(careful.good)
    assert set(fast.columns) == set(careful.columns)
    for name, column in fast.columns.items():
        other = careful.columns[name]
        assert column.type.equals(other.type), (name, column.type, other.type)
        assert repr(column.to_pylist()) == repr(other.to_pylist())
    types = [
        {name.lower(): kinds.type_of(each) for name, each in way.kinds.items() if name.lower() not in known}
        for way in (fast, careful)
    ]
    assert types[0] == types[1]
