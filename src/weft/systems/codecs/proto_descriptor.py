"""Schemas of Protobuf in their compiled form, a FileDescriptorProto in base64. The registry clients for Python, Go and
.NET register them so. Some registries then return the text of the .proto file, others what they were given."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pyarrow as pa

from weft.systems.codecs.cursor import Cursor
from weft.systems.codecs.proto_schema import ProtoMessage, parse
from weft.systems.codecs.protobuf_reading import read_at
from weft.systems.codecs.registered import SchemaProblem

# No .proto file is without braces and semicolons.
_BASE64 = re.compile(r"[A-Za-z0-9+/]+=*")
# Messages and enums in messages are bytes, which are read when their turn comes: no column holds itself.
_DESCRIPTORS = """
message File {
  optional string package = 2; repeated bytes messages = 4; repeated bytes enums = 5; optional string syntax = 12;
}
message Message {
  optional string name = 1; repeated Field fields = 2; repeated bytes messages = 3; repeated bytes enums = 4;
  optional Options options = 7; repeated Range reserved = 9; repeated string reserved_names = 10;
}
message Field {
  optional string name = 1; optional int32 number = 3; optional int32 label = 4; optional int32 type = 5;
  optional string type_name = 6; optional int32 oneof = 9; optional bool is_optional = 17;
}
message Options { optional bool is_entry = 7; }
message Range { optional int32 first = 1; optional int32 behind = 2; }
message Enum { optional string name = 1; repeated Value values = 2; }
message Value { optional string name = 1; optional int32 number = 2; }
"""
_TYPES = (
    *("", "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "group", "", "bytes"),
    *("uint32", "", "sfixed32", "sfixed64", "sint32", "sint64"),
)
_LABELS = ("", "optional ", "required ", "repeated ")


def as_text(schema: str) -> str:
    """Return the text of a .proto file, for a schema in either form. Options and imports are left out."""
    if not _BASE64.fullmatch(schema):
        return schema
    try:
        file = _read("File", base64.b64decode(schema, validate=True))
    except ValueError as error:
        raise SchemaProblem("its schema is neither a .proto file nor a compiled one") from error
    lines = [f'syntax = "{file["syntax"] or "proto2"}";']
    if file["package"]:
        lines.append(f"package {file['package']};")
    is_proto3 = file["syntax"] == "proto3"
    for each in file["messages"]:
        lines += _message(_read("Message", each), is_proto3)
    return "\n".join([*lines, *map(_enum, file["enums"])])


@cache
def _descriptor(name: str) -> ProtoMessage:
    found = parse(_DESCRIPTORS).types[name]
    assert isinstance(found, ProtoMessage)
    return found


def _read(name: str, data: bytes) -> dict[str, Any]:
    array, bad = read_at(_descriptor(name), Cursor(pa.array([data], pa.binary())))
    if bad:
        raise ValueError(bad[0])
    (found,) = array.to_pylist()
    return dict(found)


def _message(message: dict[str, Any], is_proto3: bool) -> Iterator[str]:
    inner = [_read("Message", each) for each in message["messages"]]
    entries = {each["name"]: each["fields"] for each in inner if each["options"] and each["options"]["is_entry"]}
    yield f"message {message['name']} {{"
    for each in message["reserved"]:
        yield f"reserved {each['first']} to {each['behind'] - 1};"
    for name in message["reserved_names"]:
        yield f'reserved "{name}";'
    for each in inner:
        # Who counts the messages of a message counts those of its maps, too.
        yield from [f"message {each['name']} {{}}"] if each["name"] in entries else _message(each, is_proto3)
    yield from map(_enum, message["enums"])
    for each in message["fields"]:
        named, entry = f"{each['name']} = {each['number']};", entries.get((each["type_name"] or "").rpartition(".")[2])
        if entry is not None:
            yield f"map<{_type(entry[0])}, {_type(entry[1])}> {named}"
        elif each["oneof"] is not None and not each["is_optional"]:
            yield f"oneof of_{each['oneof']} {{ {_type(each)} {named} }}"
        else:
            is_plain = is_proto3 and each["label"] == 1 and not each["is_optional"]
            yield f"{'' if is_plain else _LABELS[each['label']]}{_type(each)} {named}"
    yield "}"


def _type(field: dict[str, Any]) -> str:
    name: str = field["type_name"] or _TYPES[field["type"]]
    return "group" if _TYPES[field["type"]] == "group" else name


def _enum(data: bytes) -> str:
    enum = _read("Enum", data)
    values = (f"{each['name']} = {each['number']};" for each in enum["values"])
    return f"enum {enum['name']} {{ {' '.join(values)} }}"
