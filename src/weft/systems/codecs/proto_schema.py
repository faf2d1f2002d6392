"""Schemas of Protobuf: the text of a .proto file as messages with their fields.

A registry keeps this text. The packages that parse it bring a compiler of C++ (grpcio-tools) or leave the names of
types to their callers; what a reader needs of the language is little. Options, services and extensions are skipped.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from weft.columns import UTC_TIME
from weft.systems.codecs.registered import SchemaProblem

UINT64 = pa.decimal128(20, 0)
SCALARS = {
    "double": pa.float64(),
    "float": pa.float32(),
    **dict.fromkeys(("int32", "sint32", "sfixed32"), pa.int32()),
    **dict.fromkeys(("int64", "sint64", "sfixed64", "uint32", "fixed32"), pa.int64()),
    **dict.fromkeys(("uint64", "fixed64"), UINT64),
    "bool": pa.bool_(),
    "string": pa.string(),
    "bytes": pa.binary(),
}
_TOKEN = re.compile(
    r"""\s+|//[^\n]*|/\*.*?\*/|(?P<token>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\.?\w[\w.]*|[-+]?[\w.]+|.)""", re.DOTALL
)
_WELL_KNOWN = """
syntax = "proto3"; package google.protobuf;
message Timestamp { int64 seconds = 1; int32 nanos = 2; }
message Duration { int64 seconds = 1; int32 nanos = 2; }
message DoubleValue { double value = 1; } message FloatValue { float value = 1; }
message Int64Value { int64 value = 1; } message UInt64Value { uint64 value = 1; }
message Int32Value { int32 value = 1; } message UInt32Value { uint32 value = 1; }
message BoolValue { bool value = 1; } message StringValue { string value = 1; } message BytesValue { bytes value = 1; }
message Any { string type_url = 1; bytes value = 2; } message Empty {} message FieldMask { repeated string paths = 1; }
enum NullValue { NULL_VALUE = 0; }
message Struct { map<string, Value> fields = 1; } message ListValue { repeated Value values = 1; }
message Value { oneof kind { NullValue null_value = 1; double number_value = 2; string string_value = 3;
  bool bool_value = 4; Struct struct_value = 5; ListValue list_value = 6; } }
"""
_WRAPPERS = tuple(
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
MOST_NUMBER = 2**29 - 1
"""The greatest number of a field."""
TIMESTAMP = "google.protobuf.Timestamp"
JSON_TYPES = tuple(f"google.protobuf.{name}" for name in ("Struct", "Value", "ListValue"))


@dataclass(eq=False)
class Enum:
    name: str
    values: dict[int, str] = field(default_factory=dict)


@dataclass(eq=False)
class ProtoField:
    name: str
    number: int
    type_name: str
    type: str | Enum | ProtoMessage = ""
    """A scalar's name, or what the name of the type stands for."""
    repeated: bool = False
    presence: bool = False
    """Whether no value is another one than zero."""
    scope: str = ""

    @property
    def is_map(self) -> bool:
        return isinstance(self.type, ProtoMessage) and self.type.is_entry


@dataclass(eq=False)
class ProtoMessage:
    name: str
    fields: list[ProtoField] = field(default_factory=list)
    inner: list[ProtoMessage] = field(default_factory=list)
    """The messages that are declared inside, in their order."""
    is_entry: bool = False
    """Whether it is a key and a value of a map."""
    reserved: list[tuple[int, int]] = field(default_factory=list)
    """The numbers that no field may have, from one to another."""
    reserved_names: list[str] = field(default_factory=list)

    @property
    def is_wrapper(self) -> bool:
        return self.name in _WRAPPERS


@dataclass
class ProtoFile:
    messages: list[ProtoMessage]
    """The top-level messages, in their order."""
    types: dict[str, ProtoMessage | Enum]

    def at(self, path: Iterable[int]) -> ProtoMessage:
        """Return the message of these indexes: of one at the top, of one inside of it, and so on."""
        level = self.messages
        message = None
        for index in path:
            if not 0 <= index < len(level):
                raise SchemaProblem("its schema has no message of its indexes")
            message = level[index]
            level = message.inner
        if message is None:
            raise SchemaProblem("its schema has no message")
        return message


def parse(text: str, references: Iterable[str] = ()) -> ProtoFile:
    """Return the messages of a file. `references`: the files that it imports."""
    types: dict[str, ProtoMessage | Enum] = {}
    messages: list[ProtoMessage] = []
    for each in (_WELL_KNOWN, *references, text):
        try:
            messages = _Parser(each, types).file()
        except (StopIteration, ValueError) as error:
            if isinstance(error, SchemaProblem):
                raise
            raise SchemaProblem("its schema is no .proto file that can be read") from None
    for kind in list(types.values()):
        for each_field in kind.fields if isinstance(kind, ProtoMessage) else ():
            each_field.type = each_field.type or _resolved(each_field, types)
            if isinstance(each_field.type, ProtoMessage):
                each_field.presence = not each_field.repeated
    return ProtoFile(messages, types)


def _resolved(of: ProtoField, types: dict[str, ProtoMessage | Enum]) -> ProtoMessage | Enum:
    """Return what a name stands for: it is searched for from the inside out."""
    if of.type_name.startswith("."):
        resolved = types.get(of.type_name[1:])
    else:
        scopes = of.scope.split(".") if of.scope else []
        names = (".".join([*scopes[:size], of.type_name]) for size in range(len(scopes), -1, -1))
        resolved = next((types[name] for name in names if name in types), None)
    if resolved is None:
        raise SchemaProblem(f"its schema names the type {of.type_name!r}, which it does not have")
    return resolved


class _Parser:
    def __init__(self, text: str, types: dict[str, ProtoMessage | Enum]) -> None:
        self._tokens: Iterator[str] = (match["token"] for match in _TOKEN.finditer(text) if match["token"])
        self._next: list[str] = []
        self._types = types
        self._is_proto3 = False

    def file(self) -> list[ProtoMessage]:
        messages: list[ProtoMessage] = []
        package = ""
        for word in iter(lambda: self._take(end=""), ""):
            if word in ("syntax", "edition"):
                self._take("=")
                self._is_proto3 = self._take().strip("\"'") == "proto3"
                self._skip()
            elif word == "package":
                package = self._take()
                self._skip()
            elif word == "message":
                messages.append(self._message(package))
            elif word == "enum":
                self._enum(package)
            elif word != ";":
                self._skip()  # an import, option, service or extension
        return messages

    def _message(self, scope: str, name: str | None = None) -> ProtoMessage:
        name = name or self._take()
        message = ProtoMessage(f"{scope}.{name}".lstrip("."))
        self._types[message.name] = message
        self._take("{")
        while (word := self._take()) != "}":
            self._member(message, word)
        return message

    def _member(self, message: ProtoMessage, word: str, *, oneof: bool = False) -> None:
        if word == "message":
            message.inner.append(self._message(message.name))
        elif word == "enum":
            self._enum(message.name)
        elif word == "oneof":
            self._take()
            self._take("{")
            while (inner := self._take()) != "}":
                self._member(message, inner, oneof=True)
        elif word == "reserved":
            self._reserved(message)
        elif word in ("option", "extensions", "extend"):
            self._skip()
        elif word == "map" and self._peek() == "<":
            self._map(message)
        elif word != ";":
            label = word if word in ("optional", "required", "repeated") else ""
            kind = self._take() if label else word
            if kind == "group":
                raise SchemaProblem("its schema has a group, which is not read")
            presence = oneof or (label != "repeated" and (bool(label) or not self._is_proto3))
            self._field(message, kind, repeated=label == "repeated", presence=presence)

    def _reserved(self, message: ProtoMessage) -> None:
        for part in " ".join(iter(self._take, ";")).split(","):
            first, _, last = part.strip().partition(" to ")
            if first[:1].isdigit():
                message.reserved.append((int(first, 0), MOST_NUMBER if last == "max" else int(last or first, 0)))
            else:
                message.reserved_names.append(first.strip("\"'"))

    def _field(self, message: ProtoMessage, kind: str, *, repeated: bool = False, presence: bool = False) -> ProtoField:
        name = self._take()
        self._take("=")
        number = int(self._take(), 0)
        self._skip()
        scalar = kind if kind in SCALARS else ""
        one = ProtoField(name, number, kind, scalar, repeated, presence, message.name)
        message.fields.append(one)
        return one

    def _map(self, message: ProtoMessage) -> None:
        self._take("<")
        key = self._take()
        self._take(",")
        value = self._take()
        self._take(">")
        entry = ProtoMessage(f"{message.name}.", is_entry=True)
        one = self._field(message, "", repeated=True)
        one.type = entry
        entry.name += f"{one.name}_entry"
        for number, (name, kind) in enumerate((("key", key), ("value", value)), 1):
            scalar = kind if kind in SCALARS else ""
            entry.fields.append(ProtoField(name, number, kind, scalar, scope=message.name))
        self._types[entry.name] = entry

    def _enum(self, scope: str) -> None:
        enum = Enum(f"{scope}.{self._take()}".lstrip("."))
        self._types[enum.name] = enum
        self._take("{")
        while (word := self._take()) != "}":
            if word in ("option", "reserved"):
                self._skip()
            elif word != ";":
                self._take("=")
                sign = -1 if self._peek() == "-" and self._take() else 1
                enum.values.setdefault(sign * int(self._take(), 0), word)
                self._skip()

    # ----------------------------------------------------------------------------------------------------------- tokens

    def _take(self, wanted: str | None = None, end: str | None = None) -> str:
        tokens = self._tokens if end is None else itertools.chain(self._tokens, [end])
        token = self._next.pop() if self._next else next(tokens)
        if wanted is not None and token != wanted:
            raise ValueError(f"{token!r} is there, where {wanted!r} is expected")
        return token

    def _peek(self) -> str:
        if not self._next:
            self._next.append(next(self._tokens))
        return self._next[-1]

    def _skip(self) -> None:
        """Skip to the end of a statement: a semicolon, or the brace that closes what it opened."""
        depth = 0
        while True:
            word = self._take()
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(word, 0)
            if depth == 0 and word in (";", "}"):
                return


def arrow_type(of: str | Enum | ProtoMessage, inside: tuple[ProtoMessage, ...] = ()) -> pa.DataType:
    """Return the type of a column that holds values of a type."""
    if isinstance(of, str):
        return SCALARS[of]
    if isinstance(of, Enum) or of.name in JSON_TYPES:
        return pa.string()
    if of.name == TIMESTAMP:
        return UTC_TIME
    if of.is_wrapper:
        return arrow_type(of.fields[0].type)
    if of in inside:
        raise SchemaProblem(f"{of.name} holds itself, and no column has a type for that")
    return pa.struct([(each.name, field_type(each, (*inside, of))) for each in of.fields])


def field_type(of: ProtoField, inside: tuple[ProtoMessage, ...] = ()) -> pa.DataType:
    """Return the type of a column that holds a field."""
    if isinstance(of.type, ProtoMessage) and of.type.is_entry:
        key, value = of.type.fields
        return pa.map_(arrow_type(key.type), arrow_type(value.type, inside))
    kind = arrow_type(of.type, inside)
    return pa.list_(kind) if of.repeated else kind
