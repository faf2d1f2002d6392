"""Protobuf messages as columns: every type, fields by their numbers, and bad messages apart."""

from __future__ import annotations

import base64
import importlib
import json
import random
import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from systems.codecs.avro_values import zigzag
from systems.codecs.schemas import AllSchemas
from weft import DeclarationError, StorageError
from weft.systems.codec import Parsed, Registered
from weft.systems.codecs.proto_descriptor import as_text
from weft.systems.codecs.proto_schema import Enum, ProtoFile, ProtoMessage, parse
from weft.systems.codecs.protobuf import ProtobufCodec
from weft.systems.codecs.registered import SchemaProblem


def varint(value: int) -> bytes:
    left, parts = value & (1 << 64) - 1, bytearray()
    while left > 0x7F:
        parts.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*parts, left])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def sized(field: int, data: bytes | str) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return varint(field << 3 | 2) + varint(len(data)) + data


def fixed(field: int, form: str, value: Any) -> bytes:
    data = struct.pack(form, value)
    return varint(field << 3 | (1 if len(data) == 8 else 5)) + data


def parsed(messages: list[bytes], *schemas: str, newest: int | None = None, head: bytes = b"\0\0\0\0\1\0") -> Parsed:
    """The rows of messages, each with this head, where the schemas have the ids 1, 2 …"""
    known = AllSchemas("PROTOBUF", schemas)
    codec = ProtobufCodec(known, known.schema(newest) if newest else None)
    return codec.decoder({}).parse(pa.array([head + each for each in messages], pa.binary()))


def rows(found: Parsed) -> list[dict[str, Any]]:
    table = pa.table(dict(found.columns))
    table.validate(full=True)
    assert table.num_rows == len(found.good)
    return table.to_pylist()


SCALARS = """
// A comment; with "quotes" { and braces.
syntax = "proto3";
package shop.v1;
option java_package = "com.example";
/* Another
   one. */
message Scalars {
  reserved 100, 200 to 300; reserved "old";
  double a = 1; float b = 2; int32 c = 3; int64 d = 4; uint32 e = 5; uint64 f = 6; sint32 g = 7; sint64 h = 8;
  fixed32 i = 9; fixed64 j = 10; sfixed32 k = 11; sfixed64 l = 12; bool m = 13; string n = 14; bytes o = 15;
  Color p = 16 [deprecated = true, (confluent.field_meta) = { doc: "x" }];
  enum Color { option allow_alias = true; RED = 0; GREEN = 1; ALSO = 1; LOW = -5; }
}
service Nothing { rpc Ask (Scalars) returns (stream Scalars) { option (x) = { a: "b" }; } }
"""
VALUES: list[tuple[str, bytes, Any, Any]] = [
    ("a", fixed(1, "<d", 1.5), 1.5, 0.0),
    ("b", fixed(2, "<f", 0.5), 0.5, 0.0),
    ("c", number(3, -7), -7, 0),
    ("d", number(4, -(2**63)), -(2**63), 0),
    ("e", number(5, 2**32 - 1), 2**32 - 1, 0),
    ("f", number(6, 2**64 - 1), Decimal(2**64 - 1), Decimal(0)),
    ("g", varint(7 << 3) + zigzag(-3), -3, 0),
    ("h", varint(8 << 3) + zigzag(-(2**62)), -(2**62), 0),
    ("i", fixed(9, "<I", 2**32 - 1), 2**32 - 1, 0),
    ("j", fixed(10, "<Q", 2**64 - 1), Decimal(2**64 - 1), Decimal(0)),
    ("k", fixed(11, "<i", -1), -1, 0),
    ("l", fixed(12, "<q", -1), -1, 0),
    ("m", number(13, 1), True, False),
    ("n", sized(14, "é"), "é", ""),
    ("o", sized(15, b"\0\xff"), b"\0\xff", b""),
    ("p", number(16, -5), "LOW", "RED"),
]
FULL = b"".join(data for _, data, _, _ in VALUES)


def test_every_scalar() -> None:
    """All at once, in another order, none (which are zeros), and each alone."""
    backwards = b"".join(data for _, data, _, _ in reversed(VALUES))
    full = {name: value for name, _, value, _ in VALUES}
    none = {name: zero for name, _, _, zero in VALUES}
    alone = [data for _, data, _, _ in VALUES]
    found = parsed([FULL, b"", backwards, *alone], SCALARS)
    assert found.bad == {}
    assert rows(found) == [full, none, full, *({**none, name: value} for name, _, value, _ in VALUES)]


NESTED = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
message Order {
  message Line { string sku = 1; repeated int32 counts = 2; Kind kind = 3; }
  enum Kind { NORMAL = 0; GIFT = 1; }
  Line first = 1;
  repeated Line lines = 2;
  map<string, Line> by_name = 3;
  map<int64, bool> flags = 4;
  repeated string tags = 5;
  repeated double weights = 6;
  oneof payment { string card = 7; int64 cash = 8; }
  optional int32 maybe = 9;
  repeated Kind kinds = 10;
  repeated int32 loose = 11 [packed = false];
}
"""
EMPTY: dict[str, Any] = {
    "first": None,
    "lines": [],
    "by_name": [],
    "flags": [],
    "tags": [],
    "weights": [],
    "card": None,
    "cash": None,
    "maybe": None,
    "kinds": [],
    "loose": [],
}


def test_nested() -> None:
    line = sized(1, "a") + sized(2, varint(1) + varint(300)) + number(3, 1)
    read = {"sku": "a", "counts": [1, 300], "kind": "GIFT"}
    zero = {"sku": "", "counts": [], "kind": "NORMAL"}
    sent: list[tuple[bytes, dict[str, Any]]] = [
        (b"", {}),
        (sized(1, line) + sized(2, b"") + sized(2, line), {"first": read, "lines": [zero, read]}),
        (
            sized(3, sized(1, "x") + sized(2, line)) + sized(3, sized(1, "y")) + sized(4, number(1, -1) + number(2, 1)),
            {"by_name": [("x", read), ("y", None)], "flags": [(-1, True)]},
        ),
        (sized(5, "a") + sized(5, "") + sized(6, struct.pack("<dd", 1, 2)), {"tags": ["a", ""], "weights": [1.0, 2.0]}),
        # A list may be packed, unpacked, or both in one message.
        (fixed(6, "<d", 3.0) + sized(6, struct.pack("<d", 4)), {"weights": [3.0, 4.0]}),
        (sized(10, varint(1) + varint(0) + varint(9)), {"kinds": ["GIFT", "NORMAL", "9"]}),
        (number(11, 5) + number(11, -6) + sized(11, b"") + sized(11, varint(7)), {"loose": [5, -6, 7]}),
        (sized(7, "visa"), {"card": "visa"}),
        (number(8, 0) + number(9, 0), {"cash": 0, "maybe": 0}),
        # The last one counts, and messages are joined.
        (
            number(9, 1) + number(9, 2) + sized(1, sized(1, "b")) + sized(1, number(3, 1)),
            {
                "maybe": 2,
                "first": {"sku": "b", "counts": [], "kind": "GIFT"},
            },
        ),
        # What the schema does not have, in every form, and a known number of another type.
        (number(99, 1) + sized(98, "x") + fixed(97, "<d", 1.0) + fixed(96, "<f", 1.0) + sized(9, "no"), {}),
    ]
    found = parsed([data for data, _ in sent], NESTED)
    assert found.bad == {}
    assert rows(found) == [{**EMPTY, **expected} for _, expected in sent]


def test_well_known_types() -> None:
    schema = """
    syntax = "proto3";
    import "google/protobuf/timestamp.proto"; import "google/protobuf/wrappers.proto";
    import "google/protobuf/struct.proto"; import "google/protobuf/duration.proto";
    message M {
      google.protobuf.Timestamp at = 1; google.protobuf.Int64Value many = 2; .google.protobuf.Struct any = 3;
      repeated google.protobuf.Timestamp times = 4; google.protobuf.Duration took = 5; google.protobuf.Value one = 6;
    }
    """
    at = number(1, -1) + number(2, 999_999_999)
    moment = datetime(1969, 12, 31, 23, 59, 59, 999999, UTC)
    text, real, yes = sized(3, "é"), fixed(2, "<d", 2.0), number(4, 1)
    listed = sized(6, sized(1, text) + sized(1, real) + sized(1, yes) + sized(1, number(1, 0)))
    struct_ = sized(1, sized(1, "a") + sized(2, listed)) + sized(1, sized(1, "b") + sized(2, fixed(2, "<d", 0.5)))
    sent = (
        sized(1, at)
        + sized(2, number(1, 5))
        + sized(3, struct_)
        + sized(4, b"")
        + sized(5, number(1, 3))
        + sized(6, yes)
    )
    found = parsed([sent, sized(2, b""), sized(1, number(2, 10**9))], schema)
    assert found.bad == {2: "It has a Timestamp that is none."}
    nothing = {"at": None, "many": None, "any": None, "times": [], "took": None, "one": None}
    assert rows(found) == [
        {
            "at": moment,
            "many": 5,
            "any": '{"a": ["é", 2, true, null], "b": 0.5}',
            "times": [datetime(1970, 1, 1, tzinfo=UTC)],
            "took": {"seconds": 3, "nanos": 0},
            "one": "true",
        },
        {**nothing, "many": 0},
    ]


def test_proto2_and_references() -> None:
    other = 'syntax = "proto2"; package shop; message Address { required string city = 1; }'
    text = """syntax = "proto2"; package shop; import "address.proto";
    message Order { required int32 id = 1; optional string note = 2 [default = "none; }"]; optional Address to = 3;
      extensions 100 to max; extend Order { optional int32 more = 100; } }"""
    known = AllSchemas("PROTOBUF", [])
    known.schemas[1] = Registered(1, "PROTOBUF", text, (("address.proto", other),))
    sent = [number(1, 5) + sized(3, sized(1, "Delft")), number(1, 6) + sized(2, "x") + number(100, 1)]
    found = ProtobufCodec(known).decoder({}).parse(pa.array([b"\0\0\0\0\1\0" + each for each in sent]))
    assert rows(found) == [{"id": 5, "note": None, "to": {"city": "Delft"}}, {"id": 6, "note": "x", "to": None}]


MANY = """syntax = "proto3"; message A { int32 a = 1; message B { string b = 1; message C { bool c = 1; } } }
message D { double a = 1; }"""


def _told(file: ProtoFile) -> dict[str, Any]:
    """Everything of a file's types that a reader uses."""
    told: dict[str, Any] = {"messages": [each.name for each in file.messages]}
    for name, kind in file.types.items():
        if isinstance(kind, Enum):
            told[name] = kind.values
            continue
        fields = [
            (each.name, each.number, getattr(each.type, "name", each.type), each.repeated, each.presence)
            for each in kind.fields
        ]
        told[name] = (fields, kind.is_entry, kind.reserved, kind.reserved_names)
    return told


@pytest.mark.parametrize(
    "name",
    ["api.backend", "api.distribution", "api.http", "api.metric", "rpc.error_details", "rpc.context.attribute_context"],
)
def test_a_compiled_schema_is_that_of_its_file(name: str) -> None:
    """Google's files, as its compiler has them: maps, oneofs, nested messages, enums, reserved numbers."""
    path = f"google/{name.replace('.', '/')}"
    module = importlib.import_module(f"{path.replace('/', '.')}_pb2")
    compiled = base64.b64encode(module.DESCRIPTOR.serialized_pb).decode()
    imported = [base64.b64encode(each.serialized_pb).decode() for each in module.DESCRIPTOR.dependencies]
    file = Path(str(module.__file__)).with_name(f"{path.rpartition('/')[2]}.proto")
    ours = parse(as_text(compiled), map(as_text, imported))
    theirs = parse(file.read_text(), map(as_text, imported))
    # Of the maps, which count among the messages of a message.
    placeholders = ours.types.keys() - theirs.types.keys()
    told = {each: about for each, about in _told(ours).items() if each not in placeholders}
    assert told == _told(theirs)
    for each in module.DESCRIPTOR.message_types_by_name.values():
        inner = cast(ProtoMessage, ours.types[each.full_name]).inner
        assert [one.name for one in inner] == [one.full_name for one in each.nested_types]


def test_what_is_no_compiled_schema() -> None:
    good = base64.b64encode(b"\x12\x01a").decode()
    assert as_text(good) == 'syntax = "proto2";\npackage a;'
    for bad in ("a", "abcd", base64.b64encode(b"\x12\xff").decode()):
        with pytest.raises(SchemaProblem, match="is neither a"):
            as_text(bad)
        (why,) = parsed([b""], bad).bad.values()
        assert "neither a .proto file nor a compiled one" in why


def test_message_indexes() -> None:
    """The message of the file that each is: a zero is the first one. The columns are those of all."""
    known = AllSchemas("PROTOBUF", [MANY])
    head = b"\0\0\0\0\1"

    def path(*indexes: int) -> bytes:
        return head + zigzag(len(indexes)) + b"".join(map(zigzag, indexes))

    sent = [
        head + b"\0" + number(1, 1),
        path(0, 0) + sized(1, "x"),
        path(0) + number(1, 2),
        path(0, 0, 0) + number(1, 1),
        path(1) + fixed(1, "<d", 0.5),
        path(2),
        head + zigzag(-1),
        head,
    ]
    found = ProtobufCodec(known).decoder({}).parse(pa.array(sent, pa.binary()))
    assert rows(found) == [
        {"a": 1.0, "b": None, "c": None},
        {"a": None, "b": "x", "c": None},
        {"a": 2.0, "b": None, "c": None},
        {"a": None, "b": None, "c": True},
        {"a": 0.5, "b": None, "c": None},
    ]
    assert {row: why.split(":")[0] for row, why in found.bad.items()} == {
        5: "It cannot be a row",
        6: "It has no indexes of a message behind the id of its schema.",
        7: "It is truncated",
    }


def test_old_messages_are_read_by_the_newest_schema() -> None:
    old = 'syntax = "proto3"; package p; message M { int32 id = 1; string gone = 2; string name = 3; }'
    new = 'syntax = "proto3"; package p; message Other {} message M { int64 id = 1; string full = 3; bool ok = 4; }'
    sent = [
        b"\0\0\0\0\1\0" + number(1, -1) + sized(2, "x") + sized(3, "é"),
        b"\0\0\0\0\2" + zigzag(1) + zigzag(1) + number(1, 2**40) + number(4, 1),
    ]
    known = AllSchemas("PROTOBUF", [old, new])
    found = ProtobufCodec(known, known.schema(2)).decoder({}).parse(pa.array(sent))
    assert rows(found) == [{"id": -1, "full": "é", "ok": False}, {"id": 2**40, "full": "", "ok": True}]


def test_bad_messages_are_apart() -> None:
    bad = {
        b"\x08": "truncated",
        b"\x08\xff": "truncated",
        b"\x08" + b"\xff" * 11: "more than 64 bits",
        b"\x0b": "no schema can have",
        b"\0\1": "no schema can have",
        sized(14, b"\xff"): "not UTF-8",
        varint(14 << 3 | 2) + varint(2**63) + b"x": "truncated",
        b"\x09\0": "truncated",
    }
    values = list(bad)
    found = parsed([each for value in values for each in (FULL, value)], SCALARS)
    assert list(found.good) == [2 * row for row in range(len(values))]
    assert rows(found) == [{name: value for name, _, value, _ in VALUES}] * len(values)
    for row, value in enumerate(values):
        assert bad[value] in found.bad[2 * row + 1]
        assert list(parsed([value], SCALARS).bad) == [0]
    for schema in ("message", 'syntax = "proto3"; message M { Unknown a = 1; }', "message M { M inner = 1; }", ""):
        assert list(parsed([b""], schema).bad) == [0]


def test_odd_bytes() -> None:
    """Each is a row or bad, the same alone as among others, and none touches its neighbours."""
    line = sized(1, "a") + sized(2, varint(1) + varint(300)) + number(3, 1)
    whole = (
        sized(1, line) + sized(2, line) + sized(3, sized(1, "x") + sized(2, line)) + sized(5, "tag") + number(9, 300)
    )
    whole += sized(6, struct.pack("<dd", 1, 2)) + sized(10, varint(1) + varint(1))
    (expected,) = rows(parsed([whole], NESTED))
    chance = random.Random(7)
    odd = [whole[:size] for size in range(len(whole))]
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.choice([0, 1, 2, 127, 128, 255, chance.randrange(256)])
        odd.append(bytes(data))
    found = parsed([each for part in odd for each in (whole, part)], NESTED)
    kept = dict(zip(map(int, found.good), rows(found), strict=True))
    assert set(found.bad) | set(kept) == set(range(2 * len(odd)))
    assert all(kept[row] == expected for row in range(0, 2 * len(odd), 2))
    for row in chance.sample(range(len(odd)), 40):
        alone = parsed([odd[row]], NESTED)
        assert rows(alone) == ([kept[2 * row + 1]] if 2 * row + 1 in kept else [])


# -------------------------------------------------------------------------------------------------------------- writing

COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("text", pa.string()),
        ("price", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("tags", pa.list_(pa.string())),
        ("numbers", pa.list_(pa.int32())),
        ("inner", pa.struct([("x", pa.float64()), ("more", pa.struct([("y", pa.bool_())]))])),
        ("lines", pa.list_(pa.struct([("n", pa.int32())]))),
        ("by_name", pa.map_(pa.string(), pa.float32())),
        ("data", pa.binary()),
    ]
)


def test_rows_become_messages() -> None:
    full = {
        "id": -1,
        "text": "é",
        "price": Decimal("-1.25"),
        "at": datetime(1969, 1, 1, 0, 0, 0, 5, UTC),
        "day": date(2026, 1, 31),
        "tags": ["a", ""],
        "numbers": [1, -2],
        "inner": {"x": 0.5, "more": {"y": False}},
        "lines": [{"n": 1}, {"n": None}],
        "by_name": [("k", 0.5)],
        "data": b"\0",
    }
    none = dict.fromkeys(full)
    codec = ProtobufCodec(AllSchemas("PROTOBUF", []))
    text = codec.schema_of(COLUMNS, "shop.Order")
    codec.schemas.schemas[3] = Registered(3, "PROTOBUF", text)  # type: ignore[attr-defined]
    sent = codec.writing(text, 3).encode(pa.array([full, none, full], pa.struct(list(COLUMNS))))
    read = rows(codec.decoder({}).parse(sent))
    # There is no type for decimals and days, and no list that is null.
    back = {**full, "price": "-1.25", "day": "2026-01-31"}
    assert read == [back, {**none, "tags": [], "numbers": [], "lines": [], "by_name": []}, back]


def test_fields_keep_their_numbers() -> None:
    known = AllSchemas("PROTOBUF", ['syntax = "proto3"; package p; message M { string b = 7; int32 gone = 9; }'])
    codec = ProtobufCodec(known, known.schema(1))
    text = codec.schema_of(pa.schema([("a", pa.int32()), ("b", pa.string()), ("c", pa.bool_())]), "other")
    made = parse(text).at((0,))
    assert (made.name, {each.name: each.number for each in made.fields}) == ("p.M", {"a": 10, "b": 7, "c": 11})


def test_numbers_are_not_used_again() -> None:
    """Messages that were written before have values of other types under them."""
    reserved = 'reserved 12, 14 to 16; reserved "old", "a";'
    known = AllSchemas("PROTOBUF", [f'syntax = "proto3"; message M {{ {reserved} string b = 11; int32 gone = 13; }}'])
    codec = ProtobufCodec(known, known.schema(1))
    columns = [("a", pa.int32()), ("b", pa.string())]
    text = codec.schema_of(pa.schema(columns), "M")
    known.schemas[2] = Registered(2, "PROTOBUF", text)
    text = ProtobufCodec(known, known.schema(2)).schema_of(pa.schema([*columns[1:], ("c", pa.string())]), "M")
    made = parse(text).at((0,))
    assert {each.name: each.number for each in made.fields} == {"b": 11, "c": 18}
    assert made.reserved == [(12, 12), (14, 16), (13, 13), (17, 17)] and made.reserved_names == ["old"]
    # Where all behind are reserved there may be some before.
    known = AllSchemas("PROTOBUF", ['syntax = "proto3"; message M { reserved 3 to max; string b = 2; }'])
    codec = ProtobufCodec(known, known.schema(1))
    made = parse(codec.schema_of(pa.schema(columns), "M")).at((0,))
    assert {each.name: each.number for each in made.fields} == {"a": 1, "b": 2}
    assert made.reserved == [(3, 2**29 - 1)]
    with pytest.raises(DeclarationError, match="no number left"):
        codec.schema_of(pa.schema([*columns, ("c", pa.string())]), "M")


def test_what_protobuf_does_not_have_is_refused() -> None:
    codec = ProtobufCodec(AllSchemas("PROTOBUF", []))
    for kind in (pa.list_(pa.list_(pa.int32())), pa.list_(pa.map_(pa.string(), pa.int32()))):
        with pytest.raises(DeclarationError, match="'a' is a list or map of lists or maps"):
            codec.schema_of(pa.schema([("a", kind)]), "M")
    with pytest.raises(DeclarationError, match=r"'a\.b' cannot be a field of Protobuf"):
        codec.schema_of(pa.schema([("a.b", pa.int32())]), "M")
    columns = pa.schema([("a", pa.list_(pa.int32()))])
    text = codec.schema_of(columns, "M")
    with pytest.raises(StorageError, match="'a' has a null, which Protobuf does not have"):
        codec.writing(text, 1).encode(pa.array([{"a": [1, None]}], pa.struct(list(columns))))


def test_json_of_odd_numbers() -> None:
    schema = 'syntax = "proto3"; import "google/protobuf/struct.proto"; message M { google.protobuf.Value v = 1; }'
    found = parsed([sized(1, fixed(2, "<d", 1e300)), sized(1, b"\x1a\x05a"), sized(1, b"")], schema)
    assert list(found.bad) == [1]
    assert [json.loads(each["v"]) for each in rows(found)] == [10.0**300, None]
