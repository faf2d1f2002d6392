"""The source and offset of a row that a target rejected.

A target gets no offsets: it knows a rejected row by its values alone. So where rows are rejected, and only there, the
rows of the batch are made again, each with its origin, and the rejected ones are looked up among them.
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

from weft.columns import python_rows, with_bytes_shown
from weft.systems.dead_letter_store import DeadLetter

ORIGIN = "_weft_origin"
"""The column of the fields of a dead letter that name the origin of a row, as JSON."""


def origin_of(source: str, offset: str | None) -> str:
    """Return the value of that column."""
    return json.dumps({"source": source, "offset": offset})


def with_origins(letters: Sequence[DeadLetter], rows: pa.Table) -> list[DeadLetter]:
    """Return the letters of rejected rows, each with its origin where these rows show exactly one."""
    # SQL that gives all columns has it twice.
    others = [number for number, name in enumerate(rows.column_names) if name != ORIGIN]
    where = max(number for number, name in enumerate(rows.column_names) if name == ORIGIN)
    rows = with_bytes_shown(rows.select(others).append_column(ORIGIN, rows.column(where)))
    payloads = [json.loads(each.payload) for each in letters]
    comparable = {
        field.name: convert
        for field in rows.schema
        if (convert := _comparable(field)) is not None and all(field.name in each for each in payloads)
    }
    if not comparable:
        return list(letters)
    is_whole = all(name in comparable for each in payloads for name in each)
    wanted = defaultdict[Hashable, list[int]](list)
    for number, each in enumerate(payloads):
        wanted[_values(each, comparable)].append(number)
    places = defaultdict[Hashable, list[str]](list)
    for row in python_rows(_alike(rows, payloads, comparable)):
        places[_values(row, comparable)].append(row[ORIGIN])
    named = list(letters)
    for values, numbers in wanted.items():
        # In one order, whatever order they were read in: a batch that is tried again has the same letters.
        candidates = sorted(places[values], key=lambda each: (len(each), each))
        # Among equal rows any may be the rejected one. If a column could not be compared, the origin is unknown.
        if len(candidates) == len(numbers) == 1 or (is_whole and len(candidates) >= len(numbers)):
            for number, place in zip(numbers, candidates[-len(numbers) :], strict=True):
                named[number] = replace(named[number], **json.loads(place))
    return named


def _alike(rows: pa.Table, payloads: Sequence[Mapping[str, Any]], comparable: Iterable[str]) -> pa.Table:
    """Return the rows with values of the payloads in their columns of whole numbers and texts: few of many."""
    for name in comparable:
        kind = rows.schema.field(name).type
        values = [each[name] for each in payloads]
        is_plain = pa.types.is_string(kind) and all(each is None or _text(each) == each for each in values)
        if pa.types.is_integer(kind) or is_plain:
            rows = rows.filter(pc.is_in(rows[name], value_set=pa.array(values, kind)))
    return rows.select([*comparable, ORIGIN])


def _values(row: Mapping[str, Any], comparable: Mapping[str, Callable[[Any], Hashable]]) -> Hashable:
    def value(name: str) -> Hashable:
        try:
            return None if row[name] is None else comparable[name](row[name])
        except (ValueError, TypeError, ArithmeticError):  # the database has a form of its own for it
            return repr(row[name])

    return tuple(map(value, comparable))


def _comparable(field: pa.Field) -> Callable[[Any], Hashable] | None:
    """Return what makes a value here and the same value of a database equal; `None` where nothing does."""
    kind, types = field.type, pa.types
    if field.name == ORIGIN:
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
    """Return a text. JSON is written again: databases order its keys and put spaces as they like."""
    if isinstance(value, str) and value.startswith(("{", "[")):
        with suppress(ValueError):
            value = json.loads(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _moment(value: Any) -> datetime:
    moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
