"""Messages that name the schema that wrote them, in Confluent's wire format: a zero, the id in four bytes, the value.

The messages of a batch are grouped by their schema. Each group is read at once, and all are put back in order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.errors import DeclarationError
from weft.spark_support.lazy import F
from weft.spark_support.sessions import quoted
from weft.systems.codec import Parsed, Registered, Schemas
from weft.systems.codecs.columns import converted, is_deeper, unified_schema
from weft.systems.codecs.cursor import Cursor

if TYPE_CHECKING:
    from pyspark.sql import Column

HEADER = 5
_MAX_DEPTH = 32
_ASKERS = 16
_NO_MAGIC = "It does not begin with a zero byte and the id of a schema: no serializer of a schema registry wrote it."
Columns = dict[str, pa.Array]
Reader = Callable[[pa.Array], tuple[Columns, dict[int, str]]]
"""Makes columns of messages, and says by number what is wrong with those that are no rows."""


class SchemaProblem(ValueError):
    """Why the messages of a schema cannot be rows."""


# Errors of a schema that its registry did not check.
_BROKEN = (SchemaProblem, AttributeError, KeyError, RecursionError, TypeError)


class RegisteredCodec:
    """A format whose schemas are in a registry."""

    is_parsed: ClassVar[bool] = True
    kind: ClassVar[str]
    """What registries call the format."""

    def __init__(self, schemas: Schemas, newest: Registered | None = None) -> None:
        """`newest`: the schema as which messages of all others are read; without it each is read as its own."""
        self.schemas, self.newest = schemas, newest
        if newest is not None and newest.kind != self.kind:
            raise DeclarationError(
                f"The newest schema of these messages (id {newest.number}) is of {newest.kind}, not of {self.kind}.",
                hint=f'payload_format="{newest.kind.lower()}"',
            )

    def decoder(self, known: Mapping[str, pa.DataType]) -> RegisteredDecoder:
        """Return a decoder. Columns have the types that the schema says, whatever they had before."""
        return RegisteredDecoder(self)

    def reading(self, writer: Registered) -> Reader:
        """Return what reads the messages of a schema. Raise `SchemaProblem`, where it cannot be read as the newest."""
        raise NotImplementedError

    def columns(self) -> Columns:
        """Return the columns of the newest schema, empty."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------------------- writing

    after_id: ClassVar[bytes] = b""
    """What is between the id and the value."""
    _written: tuple[str, int] | None = None

    def schema_of(self, columns: pa.Schema, name: str) -> str:
        """Return the schema of rows with these columns, as a next version of `newest`."""
        raise NotImplementedError

    def messages(self, rows: pa.StructArray, text: str) -> pa.Array:
        """Return the messages of rows, none of which is null, under a schema that `schema_of` made of their columns."""
        raise NotImplementedError

    def writing(self, text: str, number: int) -> RegisteredCodec:
        """Return a codec that writes rows under this schema, which has this id."""
        codec = copy.copy(self)
        codec._written = (text, number)
        return codec

    def encoded(self, columns: Sequence[str]) -> Column:
        from pyspark.sql.pandas.functions import arrow_udf

        def encode(rows: pa.Array) -> pa.Array:
            return self.encode(rows)

        udf: Any = arrow_udf
        encoded: Column = udf(encode, "binary")(F.struct(*(F.col(quoted(name)).alias(name) for name in columns)))
        return encoded

    def encode(self, rows: pa.StructArray) -> pa.Array:
        """In a task: return the messages of rows."""
        assert self._written is not None, "writing() comes first"
        text, number = self._written
        header = b"\0" + number.to_bytes(4, "big") + self.after_id
        return pc.binary_join_element_wise(pa.scalar(header, pa.binary()), self.messages(rows, text), b"")


class RegisteredDecoder:
    """Reads the messages of one task."""

    def __init__(self, codec: RegisteredCodec) -> None:
        self._codec = codec
        self._readers: dict[int, Reader | str] = {}

    def parse(self, values: pa.Array) -> Parsed:
        values = values.cast(pa.binary())
        bad: dict[int, str] = {}
        parts: list[Columns] = []
        places: list[Any] = []
        groups = _by_schema(values, bad)
        if new := [number for number in groups if number not in self._readers]:
            # Bytes that are something else name thousands of schemas, each of which is asked for.
            with ThreadPoolExecutor(min(len(new), _ASKERS)) as askers:
                self._readers.update(zip(new, askers.map(self._made, new), strict=True))
        for number, rows in groups.items():
            reader = self._readers[number]
            if isinstance(reader, str):
                bad |= dict.fromkeys(rows.tolist(), reader)
                continue
            columns, wrong = reader(values if len(rows) == len(values) else values.take(pa.array(rows)))
            if wrong:
                bad |= {int(rows[row]): why for row, why in wrong.items()}
                good = np.setdiff1d(np.arange(len(rows)), list(wrong))
                columns = {name: each.take(pa.array(good)) for name, each in columns.items()}
                rows = rows[good]
            parts.append(columns)
            places.append(rows)
        if not parts:
            return Parsed(self._no_rows(), [], dict(sorted(bad.items())))
        rows = np.concatenate(places)
        if len(parts) == 1:
            return Parsed(parts[0], rows.tolist(), dict(sorted(bad.items())))
        order = np.argsort(rows)
        return Parsed(together(parts, places, order), rows[order].tolist(), dict(sorted(bad.items())))

    def _no_rows(self) -> Columns:
        try:
            return {} if self._codec.newest is None else self._codec.columns()
        except _BROKEN:
            return {}

    def _made(self, number: int) -> Reader | str:
        schema, codec = self._codec.schemas.schema(number), self._codec
        if schema is None:
            return f"The schema registry has no schema of its id, {number}."
        if schema.kind != codec.kind:
            return f"Its schema ({number}) is of {schema.kind}, not of {codec.kind}."
        try:
            return codec.reading(schema)
        except SchemaProblem as problem:
            newest = codec.newest
            if newest is None or newest.number == number:
                return f"Its schema ({number}) cannot be a row: {problem}."
            return f"Its schema ({number}) cannot be read as the newest ({newest.number}): {problem}."
        except _BROKEN:
            return f"Its schema ({number}), or the newest one, is not one of {codec.kind}."


def _by_schema(values: pa.Array, bad: dict[int, str]) -> dict[int, Any]:
    """Return the numbers of messages by the ids of their schemas."""
    cursor = Cursor(values)
    is_long = cursor.end - cursor.position >= HEADER
    magic = cursor.buffer[np.minimum(cursor.position, len(cursor.buffer) - 1)]
    with_id = np.flatnonzero(is_long & (magic == 0))
    bad |= dict.fromkeys(np.flatnonzero(~is_long | (magic != 0)).tolist(), _NO_MAGIC)
    cursor.position[with_id] += 1
    ids = cursor.fixed(with_id, ">u4")
    return {int(each): with_id[ids == each] for each in np.unique(ids)}


def together(parts: list[Columns], places: Sequence[Any], order: Any, more: int = 0) -> Columns:
    """Return the columns of all parts, whose rows have these places, with null rows behind for `more`, and all rows in
    another order."""
    if not parts:
        return {}
    schemas = [pa.schema([(name, each.type) for name, each in part.items()]) for part in parts]
    schema = schemas[0] if all(each.equals(schemas[0]) for each in schemas) else unified_schema(schemas, ())
    columns = {}
    for each in schema:
        pieces = []
        for part, rows in zip(parts, places, strict=True):
            there = {name.lower(): array for name, array in part.items()}.get(each.name.lower())
            pieces.append(converted(pa.nulls(len(rows)) if there is None else there, each.type))
        columns[each.name] = pa.concat_arrays([*pieces, pa.nulls(more, each.type)]).take(pa.array(order))
    return columns


def checked_columns(columns: dict[str, pa.DataType]) -> dict[str, pa.DataType]:
    """Return the columns of a schema. Raise for those that no table can have."""
    if len({name.lower() for name in columns}) < len(columns):
        raise SchemaProblem("its schema has two fields that are one column, in upper and lower case")
    if any(is_deeper(each, _MAX_DEPTH) for each in columns.values()):
        raise SchemaProblem(f"its schema is nested deeper than {_MAX_DEPTH} levels")
    return columns
