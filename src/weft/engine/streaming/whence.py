"""From which place of its source a row is that a target rejected.

A target is given no places: it tells a rejected row by its values alone. So where rows are rejected, and only there,
the rows of the batch are made once more, each with its place, and the rejected ones are looked up among them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from weft.engine.streaming.letter import Letter

PLACE = "_weft_place"
"""The column of a place in a source: an offset, partition:offset, or a file."""
WHENCE = "_weft_whence"
"""The column of the fields of a letter that say where a row is from, as JSON."""


def written(source: str, offset: str | None) -> str:
    """The value of that column."""
    return json.dumps({"source": source, "offset": offset})


def told(letters: Sequence[Letter], rows: pa.Table) -> list[Letter]:
    """The letters of rejected rows, with where they are from if exactly that can be told by these rows."""
    # SQL that gives all columns has it twice.
    others = [number for number, name in enumerate(rows.column_names) if name != WHENCE]
    where = max(number for number, name in enumerate(rows.column_names) if name == WHENCE)
    rows = rows.select(others).append_column(WHENCE, rows.column(where))
    payloads = [json.loads(each.payload) for each in letters]
    comparable = {
        field.name: made
        for field in rows.schema
        if (made := _comparable(field)) is not None and all(field.name in each for each in payloads)
    }
    if not comparable:
        return list(letters)
    is_whole = all(name in comparable for each in payloads for name in each)
    wanted = defaultdict[Hashable, list[int]](list)
    for number, each in enumerate(payloads):
        wanted[_values(each, comparable)].append(number)
    places = defaultdict[Hashable, list[str]](list)
    for row in _alike(rows, payloads, comparable).to_pylist():
        places[_values(row, comparable)].append(row[WHENCE])
    found = list(letters)
    for values, numbers in wanted.items():
        # In one order, whatever order they were read in: a batch that is tried again has the same letters.
        candidates = sorted(places[values], key=lambda each: (len(each), each))
        # Of rows that are the same any may be the rejected one. Where a column could not be compared, nobody knows.
        if len(candidates) == len(numbers) == 1 or (is_whole and len(candidates) >= len(numbers)):
            for number, place in zip(numbers, candidates[-len(numbers) :], strict=True):
                found[number] = replace(found[number], **json.loads(place))
    return found


def _alike(rows: pa.Table, payloads: Sequence[Mapping[str, Any]], comparable: Iterable[str]) -> pa.Table:
    """The rows that have values of the payloads in columns of whole numbers and texts: few of many."""
    for name in comparable:
        kind = rows.schema.field(name).type
        values = [each[name] for each in payloads]
        is_plain = pa.types.is_string(kind) and all(each is None or _text(each) == each for each in values)
        if pa.types.is_integer(kind) or is_plain:
            rows = rows.filter(pc.is_in(rows[name], value_set=pa.array(values, kind)))
    return rows.select([*comparable, WHENCE])


def _values(row: Mapping[str, Any], comparable: Mapping[str, Callable[[Any], Hashable]]) -> Hashable:
    def value(name: str) -> Hashable:
        try:
            return None if row[name] is None else comparable[name](row[name])
        except (ValueError, TypeError, ArithmeticError):  # the database has a form of its own for it
            return repr(row[name])

    return tuple(map(value, comparable))


def _comparable(field: pa.Field) -> Callable[[Any], Hashable] | None:
    """What makes the same of a value here and of what a database says of it; `None` where nothing does."""
    kind, types = field.type, pa.types
    if field.name == WHENCE:
        return None
    if types.is_boolean(kind) or types.is_integer(kind):
        return int
    if types.is_float64(kind):
        return lambda value: repr(float(value))
    if types.is_decimal(kind):
        return lambda value: Decimal(str(value))
    if types.is_string(kind):
        return _text
    if types.is_binary(kind):
        return lambda value: value.hex() if isinstance(value, bytes) else str(value)
    if types.is_timestamp(kind):
        return _moment
    if types.is_date(kind):
        return str
    return None


def _text(value: Any) -> str:
    """A text. JSON is written anew: databases put its keys and spaces as they like."""
    if isinstance(value, str) and value.startswith(("{", "[")):
        with suppress(ValueError):
            value = json.loads(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _moment(value: Any) -> datetime:
    found = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found
