"""JSON messages as columns of Arrow, and of each that cannot be one why not.

The values of a batch are joined by newlines and parsed at once: a message that begins with `{` and ends with `}` cannot
run into its neighbour, because a `{` never follows a `}` within an object, so as many rows as messages means that each
is a row. Whatever is odd about one of them (an error, two objects, a type that differs, a number that would be altered)
sends the batch to the careful way, which looks at each message by itself. Both give the same where the first gives
anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as arrow_json

from weft.spark_support.lazy import F
from weft.spark_support.sessions import TIME_FORMATS, quoted
from weft.systems.codec import Parsed
from weft.systems.codecs.columns import WHOLE, is_deeper, json_of, leaves, text_of, without_times
from weft.types import FieldType, check_value, from_json, round_float32

if TYPE_CHECKING:
    from pyspark.sql import Column

# Nulls are written: a reader could not distinguish one that is left out from a column that does not exist.
_WRITTEN = {**TIME_FORMATS, "ignoreNullFields": "false"}
MAX_DEPTH = 32
"""Deeper values are refused: types of Spark and Parquet are walked by recursion. Arrow's reader dies of deep ones."""
_MOST_BRACKETS = 1000
_EXACT = 2.0**53
_TOO_DEEP = f"It is nested deeper than {MAX_DEPTH} levels."
_decode = msgspec.json.Decoder().decode
_decode_exactly = msgspec.json.Decoder(float_hook=Decimal).decode


class JsonCodec:
    """JSON objects, whose keys are the columns."""

    is_parsed: ClassVar[bool] = True

    def decoder(self, known: Mapping[str, pa.DataType]) -> JsonDecoder:
        return JsonDecoder(known)

    def encoded(self, columns: Sequence[str]) -> Column:
        return F.to_json(F.struct(*(F.col(quoted(name)).alias(name) for name in columns)), _WRITTEN)


class JsonDecoder:
    """Parses the batches of one task. It remembers the types of columns: what comes next is most likely of them."""

    def __init__(self, known: Mapping[str, pa.DataType]) -> None:
        self.known = {name.lower(): kind for name, kind in known.items()}
        self.seen: dict[str, pa.DataType] = {}
        self.tries_at_once = True

    def parse(self, values: pa.Array) -> Parsed:
        # Whether a value fits a known type is asked of each by itself.
        columns = self._at_once(values) if self.tries_at_once and not self.known else None
        if columns is not None:
            return Parsed(columns, range(len(values)), {})
        parsed = self._one_by_one(values)
        # Where no message was to blame, the next batch would be tried in vain too.
        self.tries_at_once = bool(parsed.bad)
        return parsed

    # ------------------------------------------------------------------------------------------------------- at once

    def _at_once(self, values: pa.Array) -> dict[str, pa.Array] | None:
        if not len(values) or not _is_regular(values):
            return None
        joined = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values), b"\n")
        text = joined[0].as_buffer()
        for _ in range(3):
            table = _read(text, self.seen)
            if table is None and self.seen:
                self.seen = {}  # a column may have become of a wider type
                continue
            if table is None or table.num_rows != len(values):
                return None
            if any(is_deeper(kind, MAX_DEPTH) for kind in table.schema.types):
                return None
            wanted = {each.name: without_times(each.type) for each in table.schema}
            if "" in wanted or len({name.lower() for name in wanted}) < len(wanted):
                return None
            self.seen = {name: kind for name, kind in wanted.items() if not pa.types.is_null(kind)}
            if all(each.type.equals(wanted[each.name]) for each in table.schema):
                if not all(map(_is_whole, table.columns)):
                    return None
                columns = {name: table.column(name).combine_chunks() for name in table.column_names}
                return columns if all(map(_is_exact, columns.values())) else None
        return None

    # ---------------------------------------------------------------------------------------------------- one by one

    def _one_by_one(self, values: pa.Array) -> Parsed:
        names: dict[str, str] = {}
        rows: list[dict[str, Any]] = []
        good: list[int] = []
        bad: dict[int, str] = {}
        for number, value in enumerate(values.to_pylist()):
            try:
                row = self._row(value)
            except ValueError as error:
                bad[number] = str(error)
                continue
            good.append(number)
            rows.append({name.lower(): each for name, each in row.items()})
            for name in row:
                names.setdefault(name.lower(), name)
        return Parsed(
            {name: self._array(key, [row.get(key) for row in rows]) for key, name in names.items()}, good, bad
        )

    def _row(self, value: bytes) -> dict[str, Any]:
        """Return the values of one message, as their columns hold them, or raise `ValueError` with the reason."""
        try:
            value.decode()
            row = _decode(value)
        except UnicodeDecodeError as error:
            raise ValueError(f"It is not UTF-8: byte {error.start} cannot be read.") from None
        except msgspec.DecodeError as error:
            raise ValueError(f"It is not JSON: {error}.") from None
        except RecursionError:
            raise ValueError(_TOO_DEEP) from None
        if type(row) is not dict:
            raise ValueError(f"It is JSON, but not an object: it is {_NAMES[type(row)]}.")
        if "" in row:
            raise ValueError("It has a key without a name, which no column can have.")
        if value.count(b"{") + value.count(b"[") > MAX_DEPTH and _is_deep(row):
            raise ValueError(_TOO_DEEP)
        if len({name.lower() for name in row}) < len(row):
            twice = [name for name, times in Counter(name.lower() for name in row).items() if times > 1]
            raise ValueError(f"It has two keys that are one column: {twice[0]!r} in upper and lower case.")
        for name, each in row.items() if self.known else ():
            if (known := self.known.get(name.lower())) is not None:
                exact = _decode_exactly(value)[name] if pa.types.is_decimal(known) else each
                row[name] = _fitted(name, exact, known)
        return row

    def _array(self, key: str, values: list[Any]) -> pa.Array:
        known = self.known.get(key)
        return _inferred(values) if known is None else pa.array(values, _storage(known))


def _is_regular(values: pa.Array) -> bool:
    """Return whether no message can run into the next, and Arrow's reader survives them."""
    try:
        texts = values.cast(pa.string())  # which looks whether it is UTF-8
    except pa.ArrowInvalid:
        return False
    if not pc.all(pc.and_(pc.starts_with(texts, "{"), pc.ends_with(texts, "}"))).as_py():
        return False
    # To count takes as long as half of all the rest, and a short one cannot be deep.
    long = texts.filter(pc.greater(pc.binary_length(texts), _MOST_BRACKETS))
    brackets = pc.add(pc.count_substring(long, "{"), pc.count_substring(long, "["))
    return not len(long) or pc.max(brackets).as_py() <= _MOST_BRACKETS


def _read(text: pa.Buffer, seen: Mapping[str, pa.DataType]) -> pa.Table | None:
    try:
        return arrow_json.read_json(
            pa.BufferReader(text),
            # In one block: where there are several, each ends at a newline, and a value may hold one.
            arrow_json.ReadOptions(use_threads=False, block_size=text.size + 1),
            arrow_json.ParseOptions(explicit_schema=pa.schema(list(seen.items())), unexpected_field_behavior="infer"),
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _is_whole(column: pa.ChunkedArray) -> bool:
    """Return whether an array is as its type says. Arrow's reader forgets nulls in lists that come before it has seen
    what a list is of, and leaves an array that is shorter than its lists."""
    if not pa.types.is_nested(column.type):
        return True
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _is_exact(column: pa.Array) -> bool:
    """Return whether each number is the one that was sent. Arrow reads an integer beyond 64 bits as the nearest float,
    and takes NaN for a number."""
    for leaf in leaves(column):
        if pa.types.is_floating(leaf.type) and leaf.null_count < len(leaf):
            bounds = pc.min_max(leaf)
            within = bounds["min"].as_py() > -_EXACT and bounds["max"].as_py() < _EXACT
            if not within or pc.any(pc.is_nan(leaf)).as_py():
                return False
    return True


def _inferred(values: list[Any]) -> pa.Array:
    """Return an array of JSON values, of the one type that they have, else of texts."""
    kinds = {type(value) for value in values if value is not None}
    try:
        if kinds == {int, float}:
            return pa.array([None if value is None else float(value) for value in values], pa.float64())
        return pa.array(values) if len(kinds) < 2 else _texts(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        if kinds != {int}:
            return _texts(values)
    try:
        return pa.array(values, WHOLE)
    except pa.ArrowInvalid:
        return _texts(values)


def _texts(values: list[Any]) -> pa.Array:
    return pa.array([text_of(value) for value in values], pa.string())


# ---------------------------------------------------------------------------------------------------------- known types


def _storage(kind: pa.DataType) -> pa.DataType:
    """Return the type that a column of a known type is of: JSON and UUIDs travel as texts."""
    return pa.string() if isinstance(kind, pa.BaseExtensionType) else kind


def _fitted(name: str, value: Any, kind: pa.DataType) -> Any:
    """Return the value as a column of this type holds it; `ValueError` where it cannot."""
    if value is None:
        return None
    try:
        return _fit(value, kind)
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        shown = text_of(value) or ""
        shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
        why = f" ({error})" if isinstance(error, ValueError) and not isinstance(error, pa.ArrowException) else ""
        raise ValueError(f"{name!r} is {shown}, which does not fit {kind}{why}.") from None


def _fit(value: Any, kind: pa.DataType) -> Any:
    types = pa.types
    if types.is_string(kind):
        return text_of(value)
    if types.is_boolean(kind) and not isinstance(value, bool):
        raise TypeError
    if types.is_integer(kind) or types.is_floating(kind):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError
        if types.is_floating(kind):
            return float(value) if kind.bit_width == 64 else round_float32(value)
        if isinstance(value, float) and not value.is_integer():
            raise TypeError
        return pa.scalar(int(value), kind).as_py()
    if isinstance(kind, pa.JsonType):
        return json_of(value)
    for matches, field_type in _CHECKED:
        if matches(kind):
            declared = field_type(kind)
            checked = check_value(from_json(value, declared), declared)
            if types.is_timestamp(kind):
                return checked if kind.tz else checked.replace(tzinfo=None)
            return str(checked) if isinstance(kind, pa.UuidType) else checked
    return pa.scalar(value, kind).as_py()


_CHECKED: list[tuple[Callable[[pa.DataType], bool], Callable[[Any], FieldType]]] = [
    (lambda kind: isinstance(kind, pa.UuidType), lambda _: FieldType("uuid")),
    (pa.types.is_decimal, lambda kind: FieldType("decimal", kind.precision, kind.scale)),
    (pa.types.is_timestamp, lambda _: FieldType("timestamp")),
    (pa.types.is_date, lambda _: FieldType("date")),
    (pa.types.is_binary, lambda _: FieldType("bytes")),
]


def _is_deep(value: Any) -> bool:
    layer, level = [value], 0
    while layer:
        level += 1
        if level > MAX_DEPTH + 1:
            return True
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return False


_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}
