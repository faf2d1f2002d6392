"""Values as Avro, one by one: what the codec, which reads many at once, is compared with."""

from __future__ import annotations

import struct
from typing import Any


def zigzag(value: int) -> bytes:
    left, parts = (value << 1) ^ (value >> 63), bytearray()
    while left > 0x7F:
        parts.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*parts, left])


def sized(data: bytes) -> bytes:
    return zigzag(len(data)) + data


def encode(value: Any, schema: Any) -> bytes:
    """A value of a schema without names of others. That of a union is (branch, value) or `None`."""
    kind = schema["type"] if isinstance(schema, dict) else schema
    if isinstance(kind, list):
        if value is None:
            return zigzag(kind.index("null"))
        branch, inner = value
        return zigzag(branch) + encode(inner, kind[branch])
    if isinstance(kind, dict):
        return encode(value, kind)
    match kind:
        case "null":
            return b""
        case "boolean":
            return bytes([value])
        case "int" | "long":
            return zigzag(value)
        case "float" | "double":
            return struct.pack("<f" if kind == "float" else "<d", value)
        case "bytes":
            return sized(value)
        case "string":
            return sized(value.encode())
        case "fixed":
            return bytes(value)
        case "enum":
            return zigzag(schema["symbols"].index(value))
        case "record":
            return b"".join(encode(value[each["name"]], each["type"]) for each in schema["fields"])
        case "array":
            items = b"".join(encode(each, schema["items"]) for each in value)
            return (zigzag(len(value)) + items if value else b"") + b"\0"
        case "map":
            items = b"".join(sized(key.encode()) + encode(each, schema["values"]) for key, each in value.items())
            # In the form that says how many bytes there are, too.
            return (zigzag(-len(value)) + zigzag(len(items)) + items if value else b"") + b"\0"
    raise AssertionError(kind)


def message(number: int, value: Any, schema: Any) -> bytes:
    """In Confluent's wire format."""
    return b"\0" + number.to_bytes(4, "big") + encode(value, schema)
