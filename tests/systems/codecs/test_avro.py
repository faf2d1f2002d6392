"""Avro messages as columns: every type, old schemas read as the newest, and bad messages apart."""

from __future__ import annotations

import json
import math
import random
import struct
import threading
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from systems.codecs.avro_values import encode, message, sized, zigzag
from systems.codecs.schemas import AllSchemas
from weft import ConnectionFailedError, DeclarationError
from weft.systems.codec import Parsed, Registered
from weft.systems.codecs.avro import AvroCodec
from weft.systems.codecs.columns import converted, unified


def record(*fields: Any, name: str = "Order", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [dict(each) for each in fields], **more}


def field(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


def parsed(messages: list[bytes], *schemas: Any, newest: int | None = None) -> Parsed:
    """The rows of messages, where the schemas have the ids 1, 2 …"""
    known = AllSchemas("AVRO", schemas)
    codec = AvroCodec(known, known.schema(newest) if newest else None)
    return codec.decoder({}).parse(pa.array(messages, pa.binary()))


def rows(found: Parsed) -> list[dict[str, Any]]:
    table = pa.table(dict(found.columns))
    table.validate(full=True)
    assert table.num_rows == len(found.good)
    return table.to_pylist()


def both(values: list[dict[str, Any]], schema: Any) -> list[dict[str, Any]]:
    found = parsed([message(1, each, schema) for each in values], schema)
    assert found.bad == {}
    return rows(found)


DECIMAL = {"logicalType": "decimal", "precision": 9, "scale": 2}
CENTS = {"type": "bytes", **DECIMAL}
MILLIS, MICROS = ({"type": "long", "logicalType": f"timestamp-{unit}"} for unit in ("millis", "micros"))
INNER = record(field("x", "int"), field("y", ["null", "string"]), name="Inner")
EVERY = record(
    field("nothing", "null"),
    field("flag", "boolean"),
    field("small", "int"),
    field("large", "long"),
    field("single", "float"),
    field("real", "double"),
    field("data", "bytes"),
    field("text", "string"),
    field("choice", {"type": "enum", "name": "Choice", "symbols": ["RED", "GREEN"]}),
    field("four", {"type": "fixed", "name": "Four", "size": 4}),
    field("inner", INNER),
    field("numbers", {"type": "array", "items": ["null", "long"]}),
    field("lists", {"type": "array", "items": {"type": "array", "items": "string"}}),
    field("by_name", {"type": "map", "values": "double"}),
    field("records", {"type": "array", "items": record(field("n", "int"), name="Item")}),
)


def test_every_type() -> None:
    values = [
        {
            "nothing": None,
            "flag": number % 2 == 0,
            "small": (-1) ** number * (2**31 - 1 - number),
            "large": (-1) ** number * (2**63 - 1 - number),
            "single": 0.5 * number,
            "real": math.pi * number,
            "data": bytes([number, 0, 255]),
            "text": "é\0" * number,
            "choice": ["RED", "GREEN"][number % 2],
            "four": bytes([number]) * 4,
            "inner": {"x": number, "y": None if number % 2 else f"y{number}"},
            "numbers": [None, number][: number % 3],
            "lists": [["a"] * inner for inner in range(number % 4)],
            "by_name": {f"k{inner}": inner / 2 for inner in range(number % 3)},
            "records": [{"n": inner} for inner in range(number % 5)],
        }
        for number in range(20)
    ]

    def written(value: dict[str, Any]) -> dict[str, Any]:
        y = value["inner"]["y"]
        numbers = [None if each is None else (1, each) for each in value["numbers"]]
        return {**value, "inner": {**value["inner"], "y": None if y is None else (1, y)}, "numbers": numbers}

    expected = [{**each, "by_name": list(each["by_name"].items())} for each in values]
    assert both([written(each) for each in values], EVERY) == expected


@pytest.mark.parametrize(
    ("kind", "stored", "value"),
    [
        ({"type": "bytes", **DECIMAL}, (-12345).to_bytes(2, "big", signed=True), Decimal("-123.45")),
        ({"type": "bytes", **DECIMAL}, (5).to_bytes(20, "big"), Decimal("0.05")),
        ({"type": "bytes", **DECIMAL}, (-5).to_bytes(20, "big", signed=True), Decimal("-0.05")),
        ({"type": "bytes", **DECIMAL}, (1 << 130).to_bytes(20, "big"), None),
        ({"type": "bytes", **DECIMAL}, (-(1 << 127)).to_bytes(16, "big", signed=True), None),
        ({"type": "bytes", **DECIMAL}, b"", Decimal("0.00")),
        ({"type": "bytes", **DECIMAL}, (10**9).to_bytes(4, "big"), None),
        (
            {"type": "fixed", "name": "F", "size": 16, **DECIMAL},
            (-1).to_bytes(16, "big", signed=True),
            Decimal("-0.01"),
        ),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 38},
            (10**38 - 1).to_bytes(16, "big"),
            Decimal(10**38 - 1),
        ),
        ({"type": "bytes", "logicalType": "decimal", "precision": 40}, b"\1", b"\1"),
        ({"type": "string", "logicalType": "uuid"}, "not checked", "not checked"),
        ({"type": "fixed", "name": "F", "size": 16, "logicalType": "uuid"}, UUID(int=7).bytes, str(UUID(int=7))),
        ({"type": "int", "logicalType": "date"}, -1, date(1969, 12, 31)),
        ({"type": "int", "logicalType": "time-millis"}, 3_661_001, "01:01:01.001000"),
        ({"type": "long", "logicalType": "time-micros"}, 86_399_999_999, "23:59:59.999999"),
        ({"type": "long", "logicalType": "time-micros"}, 86_400_000_000, None),
        ({"type": "long", "logicalType": "timestamp-millis"}, -1, datetime(1969, 12, 31, 23, 59, 59, 999000, UTC)),
        ({"type": "long", "logicalType": "timestamp-millis"}, 2**62, None),
        ({"type": "long", "logicalType": "timestamp-millis"}, -(2**63), None),
        ({"type": "long", "logicalType": "timestamp-micros"}, 1, datetime(1970, 1, 1, 0, 0, 0, 1, UTC)),
        ({"type": "long", "logicalType": "timestamp-nanos"}, 1999, datetime(1970, 1, 1, 0, 0, 0, 1, UTC)),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, 5, datetime(1970, 1, 1, 0, 0, 0, 5)),
        ({"type": "long", "logicalType": "of-somebody"}, 5, 5),
        (
            {"type": "fixed", "name": "F", "size": 12, "logicalType": "duration"},
            struct.pack("<III", 1, 2, 2**32 - 1),
            {"months": 1, "days": 2, "millis": 2**32 - 1},
        ),
    ],
)
def test_logical_types(kind: Any, stored: Any, value: Any) -> None:
    """`None`: what no column can hold is a bad message, alone."""
    schema = record(field("v", kind), field("after", "string"))
    zero = {"bytes": b"", "string": "", "fixed": bytes(kind.get("size", 0))}.get(kind["type"], 0)
    sent = [message(1, {"v": each, "after": "x"}, schema) for each in (zero, stored, zero)]
    found = parsed(sent, schema)
    if value is None and not (isinstance(stored, bytes) and len(stored) == 16):
        assert list(found.bad) == [1] and list(found.good) == [0, 2]
        assert len(rows(found)) == 2
    elif value is not None:
        assert rows(found)[1] == {"v": value, "after": "x"}


def test_unions() -> None:
    """With null a column may be null. Numbers become the wider one. Any other choice has a key for each branch."""
    schema = record(
        field("a", ["null", "int"]),
        field("b", ["int", "null", "long"]),
        field("c", ["string", "int", INNER]),
        field("d", ["null", {"type": "array", "items": "int"}, "string"]),
    )
    inner = {"x": 1, "y": None}
    sent = [
        {"a": (1, 5), "b": (0, 1), "c": (0, "t"), "d": None},
        {"a": None, "b": None, "c": (1, 7), "d": (1, [1, 2])},
        {"a": (1, 6), "b": (2, 2**40), "c": (2, inner), "d": (2, "s")},
    ]
    assert both(sent, schema) == [
        {"a": 5, "b": 1, "c": {"string": "t", "int": None, "Inner": None}, "d": None},
        {"a": None, "b": None, "c": {"string": None, "int": 7, "Inner": None}, "d": {"array": [1, 2], "string": None}},
        {"a": 6, "b": 2**40, "c": {"string": None, "int": None, "Inner": inner}, "d": {"array": None, "string": "s"}},
    ]


def test_a_schema_that_is_no_record() -> None:
    assert both([{"value": "a"}], record(field("value", "string"))) == [{"value": "a"}]
    assert rows(parsed([message(1, "a", "string")], "string")) == [{"value": "a"}]
    assert rows(parsed([message(1, "a", "string")], '"string"')) == [{"value": "a"}]


# ----------------------------------------------------------------------------------------------------------- resolution

OLD = record(field("id", "int"), field("name", "string"), field("gone", {"type": "array", "items": "string"}))
NEW = record(
    field("id", "long"),
    field("full_name", ["null", "string"], aliases=["name"]),
    field("country", "string", default="NL"),
    field("price", ["null", {"type": "bytes", **DECIMAL}], default=None),
    field("tags", {"type": "array", "items": "string"}, default=["x"]),
    field("more", {"type": "map", "values": "int"}, default={}),
    field("inner", INNER, default={"x": 3, "y": None}),
    field("at", {"type": "long", "logicalType": "timestamp-millis"}, default=1000),
)
NEWEST = {"country": "NL", "price": None, "tags": ["x"], "more": [], "inner": {"x": 3, "y": None}}


def test_old_messages_are_read_as_the_newest_schema() -> None:
    """In one batch, in their order."""
    at = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    new = {"id": 2, "full_name": (1, "b"), **NEWEST, "tags": [], "more": {}, "at": 1000}
    old = {"id": 1, "name": "a", "gone": ["x", "y"]}
    found = parsed(
        [message(1, old, OLD), message(2, new, NEW), b"\0\0\0\0\1", message(1, {**old, "id": 3}, OLD)],
        OLD,
        NEW,
        newest=2,
    )
    assert list(found.good) == [0, 1, 3]
    assert rows(found) == [
        {"id": 1, "full_name": "a", **NEWEST, "at": at},
        {"id": 2, "full_name": "b", **NEWEST, "tags": [], "at": at},
        {"id": 3, "full_name": "a", **NEWEST, "at": at},
    ]


@pytest.mark.parametrize(
    ("old", "new", "stored", "value"),
    [
        ("int", "long", 1, 1),
        ("int", "double", 1, 1.0),
        ("long", "float", 3, 3.0),
        ("float", "double", 0.5, 0.5),
        ("string", "bytes", "é", "é".encode()),
        ("bytes", "string", "é".encode(), "é"),
        ("string", ["null", "string"], "a", "a"),
        ("int", ["null", "string", "long"], 1, {"string": None, "long": 1}),
        (["null", "string"], "string", (1, "a"), "a"),
        (["null", "string"], "string", None, "It cannot be read: null cannot be read as string."),
        (["null", "string"], ["string", "null"], (1, "a"), "a"),
        (["null", "string"], ["string", "null"], None, None),
        ("string", "int", "a", "cannot be read as the newest (2): v: string cannot be read as int."),
        ({"type": "array", "items": "int"}, {"type": "array", "items": "long"}, [1, 2], [1, 2]),
        (MILLIS, MICROS, 5, datetime(1970, 1, 1, 0, 0, 0, 5000, UTC)),
        ("long", MICROS, 5, datetime(1970, 1, 1, 0, 0, 0, 5, UTC)),
        (MILLIS, "long", 5, 5),
        (
            MILLIS,
            {"type": "long", "logicalType": "local-timestamp-millis"},
            5,
            "cannot be read as local-timestamp-millis.",
        ),
        ({"type": "bytes", **DECIMAL}, {"type": "bytes", **DECIMAL, "precision": 20}, b"\1", Decimal("0.01")),
        (
            {"type": "bytes", **DECIMAL},
            {"type": "bytes", **DECIMAL, "scale": 3},
            b"\1",
            "decimal(9,2) cannot be read as decimal(9,3).",
        ),
        (
            {"type": "enum", "name": "E", "symbols": ["A", "B", "C"]},
            {"type": "enum", "name": "E", "symbols": ["B", "A"], "default": "B"},
            "C",
            "B",
        ),
        (
            {"type": "enum", "name": "E", "symbols": ["A", "B"]},
            {"type": "enum", "name": "E", "symbols": ["B"]},
            "A",
            "It has a value that E does not have any more.",
        ),
    ],
)
def test_resolution(old: Any, new: Any, stored: Any, value: Any) -> None:
    one, two = record(field("v", old)), record(field("v", new))
    found = parsed([message(1, {"v": stored}, one)], one, two, newest=2)
    if found.bad:
        assert found.bad[0].endswith(value)
    else:
        assert rows(found) == [{"v": value}]


def test_a_field_without_a_default() -> None:
    old, new = record(field("a", "int")), record(field("a", "int"), field("b", "int"))
    found = parsed([message(1, {"a": 1}, old)], old, new, newest=2)
    assert found.bad == {
        0: "Its schema (1) cannot be read as the newest (2): b of Order is not in it, and has no default."
    }
    assert {name: each.type for name, each in found.columns.items()} == {"a": pa.int32(), "b": pa.int32()}


def test_several_schemas_without_a_newest_one() -> None:
    """Topics with records of several names have no schema of their own: the columns are those of all."""
    one = record(field("a", "int"), field("b", "string"), name="One")
    two = record(field("a", "long"), field("C", "boolean"), name="Two")
    found = parsed([message(2, {"a": 2**40, "C": True}, two), message(1, {"a": 1, "b": "x"}, one)], one, two)
    assert rows(found) == [{"a": 2**40, "b": None, "C": True}, {"a": 1, "b": "x", "C": None}]


def test_references() -> None:
    """A schema that uses the names of others, which use names themselves."""
    address = json.dumps(record(field("city", "shop.City"), name="Address", namespace="shop"))
    city = json.dumps(record(field("name", "string"), name="City", namespace="shop"))
    order = json.dumps(record(field("to", "Address"), field("from", ["null", "shop.Address"]), namespace="shop"))
    known = AllSchemas("AVRO", [])
    known.schemas[1] = Registered(1, "AVRO", order, (("shop.City", city), ("shop.Address", address)))
    sent = b"\0\0\0\0\1" + sized(b"Delft") + zigzag(1) + sized(b"Breda")
    found = AvroCodec(known).decoder({}).parse(pa.array([sent]))
    assert rows(found) == [{"to": {"city": {"name": "Delft"}}, "from": {"city": {"name": "Breda"}}}]


# ------------------------------------------------------------------------------------------------------------------ bad


def test_bad_messages_are_apart() -> None:
    good = message(1, {"id": 1, "name": "a", "gone": ["b"]}, OLD)
    bad = {
        b"": "does not begin with a zero byte",
        b'{"id": 1}': "does not begin with a zero byte",
        b"\0\0\0\1": "does not begin with a zero byte",
        b"\1" + good[1:]: "does not begin with a zero byte",
        b"\0\0\0\0\x09" + good[5:]: "has no schema of its id, 9",
        b"\0\0\0\0\2": r"Its schema \(2\) is of PROTOBUF, not of AVRO",
        b"\0\0\0\0\3": r"Its schema \(3\) cannot be a row: Node holds itself",
        good[:-1]: "truncated",
        good[:6]: "truncated",
        good[:5]: "truncated",
        good + b"\0": "bytes behind its end",
        good[:5] + zigzag(2**40) + good[6:]: "more than 32 bits",
        good[:6] + zigzag(2**62) + b"a": "truncated",
        good[:6] + zigzag(-5) + b"a": "truncated",
        good[:5] + b"\xff" * 12: "more than 64 bits",
        good[:6] + sized(b"\xff") + b"\0": "not UTF-8",
        good[:6] + sized(b"") + zigzag(2**60): "fewer items than it says",
        good[:6] + sized(b"") + zigzag(-(2**63)): "fewer items than it says|truncated",
    }
    known = AllSchemas("AVRO", [OLD])
    known.schemas[2] = Registered(2, "PROTOBUF", "", ())
    node = record(field("next", ["null", "Node"]), name="Node")
    known.schemas[3] = Registered(3, "AVRO", json.dumps(node), ())
    decoder = AvroCodec(known).decoder({})
    values = list(bad)
    found = decoder.parse(pa.array([each for value in values for each in (good, value)], pa.binary()))
    assert list(found.good) == [2 * number for number in range(len(values))]
    assert rows(found) == [{"id": 1, "name": "a", "gone": ["b"]}] * len(values)
    for number, value in enumerate(values):
        with pytest.raises(ValueError, match=bad[value]):
            raise ValueError(found.bad[2 * number + 1])
    for value in values:
        assert list(decoder.parse(pa.array([value], pa.binary())).bad) == [0]


def test_every_truncation_and_every_odd_byte() -> None:
    """No message is read beyond its end, none touches its neighbours, and each is a row or bad."""
    value = {
        **{each["name"]: None for each in EVERY["fields"]},
        "flag": True,
        "small": 300,
        "large": -(2**40),
        "single": 1.0,
        "real": 2.0,
        "data": b"abc",
        "text": "hello",
        "choice": "GREEN",
        "four": b"1234",
        "inner": {"x": 1, "y": (1, "why")},
        "numbers": [None, (1, 5)],
        "lists": [["a", "b"], []],
        "by_name": {"k": 0.5},
        "records": [{"n": 1}, {"n": 2}],
    }
    whole = message(1, value, EVERY)
    (expected,) = rows(parsed([whole], EVERY))
    cut = [whole[:size] for size in range(5, len(whole))]
    found = parsed([each for part in cut for each in (whole, part)], EVERY)
    assert rows(found) == [expected] * len(cut)
    chance = random.Random(5)
    odd = []
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(5, len(data))] = chance.choice([0, 1, 2, 127, 128, 255, chance.randrange(256)])
        odd.append(bytes(data))
    found = parsed([each for part in odd for each in (whole, part)], EVERY)
    assert set(found.bad) | set(map(int, found.good)) == set(range(600))
    kept = dict(zip(map(int, found.good), rows(found), strict=True))
    assert all(kept[number] == expected for number in range(0, 600, 2))
    # Each is the same alone as among others.
    for number in list(kept)[1:40:2]:
        assert rows(parsed([odd[number // 2]], EVERY)) == [kept[number]] if number % 2 else True


@pytest.mark.parametrize(
    "schema",
    [
        record(field("next", ["null", "Node"]), name="Node"),
        {"type": "record", "name": "M"},
        {"type": "enum", "name": "E"},
        {"type": "enum", "name": "E", "symbols": []},
        {"type": "array"},
        record(field("a", "Unknown")),
        record(field("a", "int"), field("A", "int")),
        {"type": 3},
        [],
        "",
    ],
)
def test_a_newest_schema_that_cannot_be_a_row(schema: Any) -> None:
    """Its messages are bad, the batch is not."""
    good = record(field("a", "int"))
    found = parsed([b"\0\0\0\0\2", message(1, {"a": 1}, good)], good, schema, newest=2)
    assert (list(found.bad), rows(found)) == ([0, 1], [])


def test_lists_of_nothing() -> None:
    """Their items have no bytes, so a short message could say that it has any number of them."""
    schema = record(field("v", {"type": "array", "items": "null"}))
    head = b"\0\0\0\0\1"
    sent = [head + zigzag(3) + zigzag(2) + b"\0", head + zigzag(2**40) + b"\0", head + zigzag(60_000) * 5 + b"\0"]
    found = parsed(sent, schema)
    assert list(found.bad) == [1, 2]
    assert rows(found) == [{"v": [None] * 5}]


def test_a_slice_of_messages() -> None:
    schema = record(field("n", "long"))
    values = pa.array([message(1, {"n": number}, schema) for number in range(10)], pa.binary())
    decoder = AvroCodec(AllSchemas("AVRO", [schema])).decoder({})
    assert rows(decoder.parse(values.slice(3, 4))) == [{"n": number} for number in range(3, 7)]
    assert rows(decoder.parse(values.cast(pa.large_binary()))) == [{"n": number} for number in range(10)]


def test_a_registry_that_is_away_is_no_bad_message() -> None:
    class Away:
        def schema(self, number: int) -> Registered | None:
            raise ConnectionFailedError("away")

    with pytest.raises(ConnectionFailedError):
        AvroCodec(Away()).decoder({}).parse(pa.array([message(1, 1, "int")]))


def test_the_newest_schema_is_of_another_format() -> None:
    with pytest.raises(DeclarationError, match=r'id 3\) is of PROTOBUF, not of AVRO[\s\S]*payload_format="protobuf"'):
        AvroCodec(AllSchemas("AVRO", []), Registered(3, "PROTOBUF", ""))


def test_it_compares_with_one_by_one() -> None:
    assert encode({"x": 1, "y": (1, "a")}, INNER) == b"\x02\x02\x02a"


# -------------------------------------------------------------------------------------------------------------- writing


def test_rows_become_messages() -> None:
    """Of every type, with nulls, also in lists, and in a slice of the rows."""
    columns = pa.schema(
        [
            ("id", pa.int64()),
            ("small", pa.int16()),
            ("text", pa.string()),
            ("price", pa.decimal128(38, 2)),
            ("at", pa.timestamp("us", "UTC")),
            ("local", pa.timestamp("us")),
            ("day", pa.date32()),
            ("tags", pa.list_(pa.string())),
            ("inner", pa.struct([("x", pa.float64()), ("more", pa.struct([("y", pa.bool_())]))])),
            ("by_name", pa.map_(pa.string(), pa.float32())),
            ("data", pa.binary()),
            ("nothing", pa.null()),
        ]
    )
    full = {
        "id": -(2**63),
        "small": -1,
        "text": "é",
        "price": Decimal("-1.25"),
        "day": date(1, 1, 1),
        "at": datetime(1969, 1, 1, 0, 0, 0, 5, UTC),
        "local": datetime(2026, 1, 1),
        "tags": ["a", None, ""],
        "inner": {"x": 0.5, "more": {"y": None}},
        "by_name": [("k", 0.5), ("l", None)],
        "data": b"\0",
        "nothing": None,
    }
    none = dict.fromkeys(full)
    codec = AvroCodec(AllSchemas("AVRO", []))
    text = codec.schema_of(columns, "shop.Order")
    codec.schemas.schemas[3] = Registered(3, "AVRO", text)  # type: ignore[attr-defined]
    values = pa.array([none, full, none, {**full, "tags": []}], pa.struct(list(columns)))
    sent = codec.writing(text, 3).encode(values.slice(1))
    assert rows(codec.decoder({}).parse(sent)) == [full, none, {**full, "tags": []}]
    # The next version of a schema is of its name.
    newer = AvroCodec(codec.schemas, codec.schemas.schema(3))
    assert json.loads(newer.schema_of(columns, "other"))["name"] == "Order"
    with pytest.raises(DeclarationError, match=r"'a\.b' cannot be a field of Avro"):
        codec.schema_of(pa.schema([("a.b", pa.int32())]), "M")


def test_maps_of_wider_numbers() -> None:
    array = pa.array([[("a", 1)], None, [("b", None), ("c", 3)]], pa.map_(pa.string(), pa.int32()))
    wider = pa.map_(pa.string(), pa.float64())
    assert unified([array.type, wider]).equals(wider)
    for each in (array, array.slice(1)):
        assert converted(each, wider).to_pylist() == each.to_pylist()


def test_unknown_ids_are_asked_at_once() -> None:
    """Bytes that no serializer wrote may name as many schemas as there are messages."""
    met = threading.Barrier(8)

    class Slow(AllSchemas):
        def schema(self, number: int) -> Registered | None:
            met.wait(10)
            return super().schema(number)

    messages = [b"\0" + number.to_bytes(4, "big") + b"x" for number in range(100, 108)]
    parsed = AvroCodec(Slow("AVRO", [])).decoder({}).parse(pa.array(messages, pa.binary()))
    assert [why.rpartition(" ")[2] for why in parsed.bad.values()] == [f"{number}." for number in range(100, 108)]
