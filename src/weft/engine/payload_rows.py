"""Rows that were put aside, out of their payloads in JSON, with the types that a target's columns have."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from typing import Any

import pyarrow as pa

from weft.systems.codecs.json import JsonDecoder
from weft.systems.codecs.kinds import settled
from weft.systems.log import ROWID
from weft.systems.payloads import encode, has_not_finite, loads

SHOWN = "its payload shows bytes that are no text: mend the SQL that makes a text of them, and read the source again"
"""Why rows are not loaded again of which a text is not UTF-8: what is shown would be loaded in its place."""


def parsed_rows(
    payloads: Sequence[str | dict[str, Any]],
    known: Mapping[str, pa.Field],
    types: Mapping[str, pa.DataType] | None = None,
    growing: Collection[str] = (),
    *,
    widens: bool = False,
) -> tuple[pa.Table, Sequence[int], dict[int, str]]:
    """Return payloads as columns, the numbers of those that are rows, and what is wrong with the others.

    Values are of these types; without any they are of the types that JSON has, and where a column is of another one (a
    time, a decimal, bytes) of that one. In the columns `growing` objects may have more keys, and integers may
    be wider numbers if it `widens`.
    """
    if types is None:
        types = {name: each.type for name, each in known.items() if not is_of_json(each.type)}
    # JSON has no word for them, so they are put in afterwards: by column, and by the number of the row.
    odd: dict[str, dict[int, float]] = {}
    texts = []
    refused: dict[int, str] = {}
    for number, row in enumerate(payloads):
        if not isinstance(row, str):
            not_finite = {name: each for name, each in row.items() if isinstance(each, float) and not isfinite(each)}
            for name, each in not_finite.items():
                odd.setdefault(name, {})[number] = each
            rest = {**row, **dict.fromkeys(not_finite)}
            inside = [name for name, each in rest.items() if has_not_finite(each)]
            if inside:
                refused[number] = f"{inside[0]!r} has NaN or infinity in it, which can be replayed as a column alone."
            texts.append(b"" if inside else _encoded(rest))
        else:
            texts.append(row.encode("utf-8", "surrogatepass"))
    parsed = JsonDecoder(types).parse(pa.array(texts, pa.binary()))
    before = {name.lower(): types[name] for name in growing if name in types}
    if wider := settled({name: each for name, each in parsed.kinds.items() if name in before}, before, widens=widens):
        parsed = JsonDecoder({**types, **wider}).parse(pa.array(texts, pa.binary()))
    parsed = parsed._replace(bad={**parsed.bad, **refused})
    names = {name.lower(): name for name in known}
    columns, fields = [], []
    for name, array in parsed.columns.items():
        if name in odd:
            # Beside texts they are texts.
            kind, convert = (pa.string(), json.dumps) if pa.types.is_string(array.type) else (pa.float64(), float)
            values = array.to_pylist()
            for place, number in enumerate(parsed.good):
                if number in odd[name]:
                    values[place] = convert(odd[name][number])
            array = pa.array(values, kind)
        field = known.get(names.get(name.lower(), ""), pa.field(name, pa.string()))
        if pa.types.is_null(array.type):
            array = pa.nulls(len(array), field.type)
        fields.append(field if array.type.equals(field.type) else pa.field(field.name, array.type))
        columns.append(array)
    if not columns:  # rows without a single key
        return pa.table({ROWID: pa.nulls(len(parsed.good), pa.int64())}), parsed.good, parsed.bad
    return pa.Table.from_arrays(columns, schema=pa.schema(fields)), parsed.good, parsed.bad


def is_of_json(kind: pa.DataType) -> bool:
    """Return whether JSON has values of a type."""
    types = pa.types
    others = (types.is_temporal, types.is_decimal, types.is_binary, types.is_large_binary)
    return not any(each(kind) for each in others)


def row_of(payload: str) -> dict[str, Any] | None:
    """Return the row that a payload is, if it is one, with its numbers as they are written."""
    try:
        row = loads(payload)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _encoded(row: dict[str, Any]) -> bytes:
    try:
        return encode(row)
    except UnicodeEncodeError:  # half of a pair of UTF-16, which the decoder refuses
        return json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")


def rejected_rows(
    texts: Sequence[str], known: Mapping[str, pa.Field], types: Mapping[str, pa.DataType] | None = None
) -> tuple[pa.Table, Sequence[int], dict[int, str]]:
    """Return the rows that a table or stream with these columns rejected, as `parsed_rows` does."""
    binary = [name for name, each in known.items() if pa.types.is_binary(each.type)]
    payloads: list[str | dict[str, Any]] = []
    for text in texts:
        row = row_of(text)
        if row is not None:
            row |= {name: _base64(row[name]) for name in binary if isinstance(row.get(name), str)}
        payloads.append(text if row is None else row)
    return parsed_rows(payloads, known, types)


def _base64(digits: str) -> str:
    """Return bytes as JSON has them, of the hexadecimal digits in a rejected row. What is no such digits stays."""
    try:
        return base64.b64encode(bytes.fromhex(digits)).decode()
    except ValueError:
        return digits
