"""Messages of Avro as columns of Arrow, and rows as messages."""

from __future__ import annotations

import json
from typing import ClassVar

import pyarrow as pa

from weft.systems.codec import Registered
from weft.systems.codecs.avro_reading import reading
from weft.systems.codecs.avro_schema import AvroType, columns_of, longest_fixed, parse
from weft.systems.codecs.avro_writing import encoded, schema_of
from weft.systems.codecs.cursor import Cursor
from weft.systems.codecs.registered import HEADER, Columns, Reader, RegisteredCodec


class AvroCodec(RegisteredCodec):
    """Avro, whose fields are the columns. Messages of older schemas are read as the newest one."""

    kind: ClassVar[str] = "AVRO"

    def reading(self, writer: Registered) -> Reader:
        written = _parsed(writer)
        wanted = written if self.newest is None or self.newest.number == writer.number else _parsed(self.newest)
        names = list(columns_of(wanted))
        read, longest = reading(written, wanted), longest_fixed(written)

        def columns(values: pa.Array) -> tuple[Columns, dict[int, str]]:
            cursor = Cursor(values, HEADER, longest_fixed=longest)
            array = read(cursor, cursor.rows)
            cursor.finish()
            arrays = array.flatten() if wanted.kind == "record" else [array]
            return dict(zip(names, arrays, strict=True)), cursor.bad

        return columns

    def columns(self) -> Columns:
        assert self.newest is not None
        return {name: pa.array([], kind) for name, kind in columns_of(_parsed(self.newest)).items()}

    def schema_of(self, columns: pa.Schema, name: str) -> str:
        # A record of another name is another record: the registry would take it for incompatible.
        before = None if self.newest is None else _parsed(self.newest)
        return json.dumps(schema_of(columns, name if before is None or before.kind != "record" else before.name))

    def messages(self, rows: pa.StructArray, text: str) -> pa.Array:
        return encoded(rows)


def _parsed(schema: Registered) -> AvroType:
    return parse(schema.text, (text for _, text in schema.references))
