"""Messages of Protobuf as columns of Arrow, and rows as messages."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from weft.systems.codec import Registered
from weft.systems.codecs.cursor import Cursor
from weft.systems.codecs.proto_descriptor import as_text
from weft.systems.codecs.proto_schema import ProtoFile, ProtoMessage, field_type, parse
from weft.systems.codecs.protobuf_reading import read_at
from weft.systems.codecs.protobuf_writing import encoded, schema_of
from weft.systems.codecs.registered import (
    HEADER,
    Columns,
    Reader,
    RegisteredCodec,
    SchemaProblem,
    checked_columns,
    together,
)

_MOST_INDEXES = 32


class ProtobufCodec(RegisteredCodec):
    """Protobuf, whose fields are the columns. Fields have numbers, so every message is read by the newest schema."""

    kind: ClassVar[str] = "PROTOBUF"
    after_id: ClassVar[bytes] = b"\0"  # the first message of the file

    def reading(self, writer: Registered) -> Reader:
        written = _parsed(writer)
        newest = written if self.newest is None or self.newest.number == writer.number else _parsed(self.newest)

        def columns(values: pa.Array) -> tuple[Columns, dict[int, str]]:
            cursor = Cursor(values, HEADER)
            parts: list[Columns] = []
            places: list[Any] = []
            for path, rows in _by_indexes(cursor).items():
                try:
                    message = _as_newest(written.at(path), newest)
                    names = list(_columns(message))
                except SchemaProblem as problem:
                    cursor.fail(rows, f"It cannot be a row: {problem}.")
                    continue
                inner = cursor.part(rows)
                array, bad = read_at(message, inner)
                for number, why in bad.items():
                    cursor.fail(rows[number : number + 1], why)
                parts.append(dict(zip(names, array.flatten(), strict=True)))
                places.append(rows)
            if len(parts) == 1 and len(places[0]) == len(values):
                return parts[0], cursor.bad
            # All messages have a place, bad ones too, whose rows nobody takes.
            missing = np.setdiff1d(cursor.rows, np.concatenate([*places, np.zeros(0, np.int64)]))
            order = np.argsort(np.concatenate([*places, missing]))
            return together(parts, places, order, len(missing)), cursor.bad

        return columns

    def columns(self) -> Columns:
        assert self.newest is not None
        return {name: pa.array([], kind) for name, kind in _columns(_parsed(self.newest).at((0,))).items()}

    def schema_of(self, columns: pa.Schema, name: str) -> str:
        before = None if self.newest is None else _parsed(self.newest)
        return schema_of(columns, name, None if before is None else before.at((0,)))

    def messages(self, rows: pa.StructArray, text: str) -> pa.Array:
        return encoded(rows, parse(text).at((0,)))


def _parsed(schema: Registered) -> ProtoFile:
    return parse(as_text(schema.text), (as_text(text) for _, text in schema.references))


def _as_newest(message: ProtoMessage, newest: ProtoFile) -> ProtoMessage:
    """Return the newest form of a message; one that the newest schema does not have is its own."""
    newer = newest.types.get(message.name)
    return newer if isinstance(newer, ProtoMessage) else message


def _columns(message: ProtoMessage) -> dict[str, pa.DataType]:
    return checked_columns({each.name: field_type(each, (message,)) for each in message.fields})


def _by_indexes(cursor: Cursor) -> dict[tuple[int, ...], Any]:
    """Read which message of the file each is; return their numbers by the indexes of that message."""
    rows = cursor.rows
    counts = cursor.integers(rows)
    wrong = (counts < 0) | (counts > _MOST_INDEXES)
    if wrong.any():
        cursor.fail(rows[wrong], "It has no indexes of a message behind the id of its schema.")
        counts[wrong] = 0
    paths = np.full((len(rows), max(1, int(counts.max(initial=0)))), -1)
    paths[:, 0] = 0  # no index stands for the first message
    for level in range(int(counts.max(initial=0))):
        deeper = rows[counts > level]
        read = cursor.integers(deeper)
        paths[deeper, level] = np.where(read < 0, 1 << 62, read)  # which no file has
    good = rows[~cursor.are_bad(rows)]
    if not len(good):
        return {}
    different, which = np.unique(paths[good], axis=0, return_inverse=True)
    which = which.reshape(-1)
    return {
        tuple(each for each in path.tolist() if each != -1): good[which == number]
        for number, path in enumerate(different)
    }
