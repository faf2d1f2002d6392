"""What the values of Debezium's rows stand for: a whole batch of a column at a time, in Arrow.

Debezium writes a date as a number of days and a decimal as bytes; the schema of its messages says which is which, by
names such as `io.debezium.time.Date`. Messages without a schema say nothing: then the column of the mirror decides.
"""

from __future__ import annotations

import logging
import re
from binascii import a2b_base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.columns import LOCAL_TIME, UTC_TIME, hint_of, hinted, is_nested, nested_to_json
from weft.systems.codecs.columns import json_of, type_name

_log = logging.getLogger("weft.engine")
# A count of milliseconds below this is a time before the year 5138, one of microseconds above it a time after 1973.
_MICROS, _NANOS = 10**14, 10**17
_DAY = 86_400_000_000
# What Debezium sends for a large value that an update did not change: as a text, and as bytes in base64.
_UNAVAILABLE = pa.array(["__debezium_unavailable_value", "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="])
# And as the numbers of its letters, for an array of integers.
_LETTERS = list(b"__debezium_unavailable_value")
_ANY_DECIMAL = pa.decimal128(38, 18)
_PLAIN = {
    "boolean": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
}
_WHOLE = re.compile(r"([+-]?\d+)(\.0+)?", re.ASCII)
_TRUTH = {"true": 1, "t": 1, "1": 1, "false": 0, "f": 0, "0": 0}
_DIGITS = r"^[+-]?[0-9]+$"
# "20240131" is no number of days, nor of milliseconds, and "20240131120000" neither: the table may read them as dates.
_DAYS = r"^[+-]?[0-9]{1,7}$"
_INSTANTS = r"^([+-][0-9]+|[0-9]{1,7}|[0-9]{9,13}|[0-9]{15,})$"
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class Meaning:
    """What the schema of the messages says of a column."""

    type: str
    """The type of Kafka Connect: `int32`, `bytes`, `array` …"""
    name: str = ""
    """What it stands for, such as `io.debezium.time.Date`; empty for the type itself."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    items: Meaning | None = None
    """What the elements of an array are."""


def meanings(schema: Mapping[str, Any]) -> dict[str, Meaning]:
    """Return what the schema of an envelope in JSON says of the columns of its rows."""
    parts = {each.get("field"): each for each in schema.get("fields") or ()}
    row = parts.get("after") or parts.get("before") or {}
    return {each["field"]: _meaning(each) for each in row.get("fields") or ()}


def _meaning(schema: Mapping[str, Any]) -> Meaning:
    items = schema.get("items")
    return Meaning(
        str(schema.get("type")),
        schema.get("name") or "",
        {name: each for name, each in (schema.get("parameters") or {}).items() if each is not None},
        None if items is None else _meaning(items),
    )


def typed(
    rows: pa.Table,
    known: Mapping[str, Meaning],
    target: Iterable[pa.Field] = (),
    time_unit: str | None = None,
    *,
    has_bits: bool = True,
) -> pa.Table:
    """Return rows with the values that were meant. `known`: by the schema of the messages; `target`: the columns of the
    mirror; `time_unit`: that of times in messages without a schema, by their size where `None`; `has_bits`: whether a
    text without a schema may be bits in base64.

    Where a value cannot be read, its column is one of texts: the table refuses the row that has it, and no other."""
    wanted = {each.name.lower(): each for each in target}
    for at, name in enumerate(rows.column_names):
        array, to = rows.column(at).combine_chunks(), wanted.get(name.lower())
        convert = _by_meaning(known[name], to) if name in known else None
        convert = convert or _by_target(array, to, time_unit, has_bits and name not in known)
        if convert is None and name in known and pa.types.is_null(array.type) and known[name].type in _PLAIN:
            convert = Conversion(_same, _PLAIN[known[name].type])
        if convert is not None:
            rows = rows.set_column(at, *_converted(name, array, convert))
    return rows


def misfits(
    array: pa.Array,
    wanted: pa.Field,
    meaning: Meaning | None,
    time_unit: str | None = None,
    *,
    has_bits: bool = True,
    refuses_rows: bool = True,
) -> dict[int, str]:
    """Return the values that cannot be one of the column of the mirror, by their numbers, each with the reason.
    `refuses_rows`: whether the mirror refuses a row by itself. A database does: what only it knows is left to it, such
    as a date of the year 0, or the length of a text."""
    known = said(array)
    array = array if known is None else pc.if_else(pa.array(known), array, pa.scalar(None, array.type))
    convert = None
    is_scaled = pa.types.is_struct(array.type) and _family(wanted.type) == "number"  # a decimal with its scale
    is_list = pa.types.is_list(array.type) and pa.types.is_decimal(array.type.value_type)
    has_decimals = is_list or pa.types.is_decimal(array.type)
    # A list as a text may be one that no table reads.
    is_ours = is_scaled or is_list or pa.types.is_integer(wanted.type) or pa.types.is_boolean(wanted.type)
    if not refuses_rows or is_ours:
        convert = None if meaning is None else _by_meaning(meaning, wanted)
        convert = convert or _by_target(array, wanted, time_unit, has_bits and meaning is None)

    def check(values: pa.Array) -> pa.Array:
        if convert is None:
            _check_kind(wanted.type, values, refuses_rows)
        else:
            values = convert.values(values)
        if not refuses_rows and pa.types.is_integer(wanted.type):
            values.cast(wanted.type)
        return values

    reasons: dict[int, str] = {}
    row = 0
    for part, part_values in _parts(check, array):
        if isinstance(part_values, str):
            value, kind = part[0].as_py(), hint_of(wanted) or type_name(wanted.type)
            shown = value if isinstance(value, str) else _shown(part) if has_decimals else json_of(value)
            reasons[row] = f"Its {wanted.name!r} is {shown:.100}, which the table cannot have as {kind}: {part_values}"
        row += len(part)
    return reasons


def _parts(convert: Callable[[pa.Array], pa.Array], array: pa.Array) -> Iterator[tuple[pa.Array, pa.Array | str]]:
    """Yield an array in parts, each with what it is converted to, or with the reason where it is one value that cannot
    be. Halves of halves: a batch has few such values, and one by one takes hundreds of times as long."""
    try:
        converted = array if array.null_count == len(array) else convert(array)
    except _FAILURES as error:
        if len(array) == 1:
            yield array, str(error) or type(error).__name__
        else:
            yield from _parts(convert, array.slice(0, len(array) // 2))
            yield from _parts(convert, array.slice(len(array) // 2))
    else:
        yield array, converted


def _check_kind(kind: pa.DataType, array: pa.Array, refuses_rows: bool) -> None:
    """Raise if a column takes no values of this kind, such as a number for a timestamp. `refuses_rows`: the database
    itself decides about each value, and may take more."""
    family, wanted = _family(array.type), _family(kind)
    if wanted not in (family, "text") and not (refuses_rows and family in (*_TAKES.get(wanted, ()), "text")):
        raise ValueError(f"it is a value of the kind {family}")


def _family(kind: pa.DataType) -> str:
    types = pa.types
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_list(kind) or types.is_struct(kind):
        return "object or array"
    named = ((types.is_boolean, "boolean"), (types.is_temporal, "time"), (types.is_binary, "bytes"))
    return next((name for matches, name in named if matches(kind)), "text")


# MySQL has booleans as numbers.
_TAKES = {"number": ("boolean",), "boolean": ("number",), "time": ("number",)}


def said(column: pa.Array) -> np.ndarray | None:
    """Return which values are said, and do not stand for one that did not change; `None` where all are."""
    if pa.types.is_list(column.type) and pa.types.is_integer(column.type.value_type):
        if not pc.any(pc.equal(pc.list_value_length(column), len(_LETTERS))).as_py():
            return None
        is_known = np.array([each != _LETTERS for each in column.to_pylist()])
        return None if is_known.all() else is_known
    if pa.types.is_list(column.type) and pa.types.is_string(column.type.value_type):
        column = pc.list_element(pc.if_else(pc.equal(pc.list_value_length(column), 1), column, None), 0)
    if not pa.types.is_string(column.type) and not pa.types.is_binary(column.type):  # bytes come in Avro
        return None
    unknown = pc.is_in(column, value_set=_UNAVAILABLE.cast(column.type))
    return None if not pc.any(unknown).as_py() else ~unknown.to_numpy(zero_copy_only=False)


# ---------------------------------------------------------------------------------------------------------- conversions


class Conversion(NamedTuple):
    """How the values of a column are converted, and the field that they are then of."""

    values: Callable[[pa.Array], pa.Array]
    kind: pa.DataType = pa.string()
    hint: str | None = None

    def field(self, name: str) -> pa.Field:
        return pa.field(name, self.kind) if self.hint is None else hinted(name, self.hint)


_FAILURES = (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError, OverflowError, InvalidOperation, TypeError)


def _converted(name: str, array: pa.Array, convert: Conversion) -> tuple[pa.Field, pa.Array]:
    if array.null_count == len(array):  # of whatever type
        return convert.field(name), pa.nulls(len(array), convert.kind)
    try:
        return convert.field(name), convert.values(array)
    except _FAILURES:
        texts: list[str | None] = []
    if pa.types.is_decimal(array.type):  # with more digits than the decimal of the table: it decides
        return pa.field(name, pa.string()), _digits(array)
    why = ""
    for part, values in _parts(lambda each: convert.values(each).cast(pa.string()), array):
        if isinstance(values, str):
            texts.append(_shown(part))
            why = why or f"{texts[-1]:.100}: {values}"
        else:
            texts += [None] * len(part) if part.null_count == len(part) else values.to_pylist()
    _log.warning("The column %r has values that are not %s, such as %s", name, convert.hint or convert.kind, why)
    return pa.field(name, pa.string()), pa.array(texts, pa.string())


def _shown(part: pa.Array) -> str:
    """Return the one value of an array as a text."""
    if pa.types.is_decimal(part.type):
        return str(_digits(part)[0])
    if pa.types.is_list(part.type) and pa.types.is_decimal(part.type.value_type):
        return f"[{','.join(each or 'null' for each in _digits(part.flatten()).to_pylist())}]"
    return str((nested_to_json(part) if is_nested(part.type) else part)[0].as_py())


def _by_meaning(meaning: Meaning, wanted: pa.Field | None) -> Conversion | None:
    """Return how to convert a column by what the messages say of it; `None` where it is what it seems to be."""
    name = meaning.name.rpartition(".")[2]
    if name == "Bits":
        return _bits(int(meaning.parameters.get("length", 64)), wanted)
    if wanted is not None and pa.types.is_integer(wanted.type) and meaning.type.startswith("int"):
        return None  # a mirror may keep Debezium's own numbers
    if name == "Decimal":
        scale = int(meaning.parameters.get("scale", 0))
        precision = int(meaning.parameters.get("connect.decimal.precision", 38))
        return _decimals_of_bytes(min(max(precision, scale, 1), 38), scale)
    if name == "VariableScaleDecimal":
        return _scaled_decimals(wanted)
    if meaning.type == "array" and meaning.items is not None:
        return _lists(_by_meaning(meaning.items, _element(wanted)))
    if name == "Point" and _is_text(wanted):
        return _POINT
    if name == "MicroDuration" and _is_text(wanted):
        return _SPAN
    if name in _NAMED:
        return _NAMED[name]
    return _BYTES if meaning.type == "bytes" else None


def _by_target(array: pa.Array, wanted: pa.Field | None, time_unit: str | None, has_bits: bool) -> Conversion | None:
    """Return how to convert a column into the one of the mirror, where that has another idea of it."""
    if pa.types.is_decimal256(array.type) and (wanted is None or not pa.types.is_decimal(wanted.type)):
        return _of_exact(wanted)
    if pa.types.is_list(array.type) and pa.types.is_decimal256(array.type.value_type):
        return _lists(_by_target(array.values, _element(wanted), time_unit, has_bits))
    if wanted is None:
        return None
    if pa.types.is_null(array.type):
        return Conversion(lambda array: array, wanted.type, hint_of(wanted))
    types, kind, actual = pa.types, wanted.type, array.type
    is_number, is_text = types.is_integer(actual), types.is_string(actual)
    if types.is_date(kind) and (is_number or is_text):
        return _NAMED["Date"] if is_number else _either(_NAMED["Date"], _NAMED["IsoDate"], _DAYS)
    if types.is_timestamp(kind) and (is_number or is_text):
        zone = UTC_TIME if kind.tz else LOCAL_TIME
        numbers = _instants(time_unit, zone)
        moments = Conversion(lambda array: _moments(array).cast(zone), zone)
        return numbers if is_number else _either(numbers, moments, _INSTANTS)
    if hint_of(wanted) == "time" and (is_number or is_text):
        times, texts = _times(time_unit or "us"), Conversion(_same, kind, "time")
        # Texts of digits alone are no numbers: "235959" may be a time. A batch of both kinds has texts with a colon.
        has_clocks = is_text and pc.any(pc.match_substring(array, ":")).as_py()
        return times if is_number else _either(times, texts, _DIGITS) if has_clocks else texts
    if hint_of(wanted) == "uuid" and is_text:
        return Conversion(_same, kind, "uuid")
    if hint_of(wanted) == "json" and not types.is_nested(actual):
        return Conversion(_documents, kind, "json")
    if types.is_decimal(kind):
        if types.is_struct(actual):
            return _scaled_decimals(wanted)
        if types.is_decimal(actual):
            return Conversion(lambda array: array.cast(kind), kind)
        if is_text or is_number or types.is_floating(actual):
            return Conversion(lambda array: _decimals_of_text(array, kind), kind)
    if types.is_binary(kind) and is_text:
        return _BYTES
    if types.is_floating(kind) and is_text:
        return Conversion(lambda array: array.cast(kind), kind)
    if types.is_integer(kind) and types.is_floating(actual):
        return Conversion(lambda array: array.cast(pa.int64()), pa.int64())  # not of fractions
    if _is_text(wanted) and (is_number or types.is_floating(actual) or types.is_boolean(actual)):
        return Conversion(_same)
    is_text = is_text or types.is_binary(actual)
    if types.is_boolean(kind) and is_text:
        return Conversion(lambda array: pc.not_equal(_numbers_of_text(array, has_bits, _TRUTH), 0), kind)
    if types.is_integer(kind) and is_text:
        return Conversion(lambda array: _numbers_of_text(array, has_bits), pa.int64())
    if types.is_struct(actual) and actual.get_field_index("wkb") >= 0 and _is_text(wanted):
        return _POINT
    if types.is_list(kind) and types.is_list(actual):
        return _lists(_by_target(array.values, _element(wanted), time_unit, has_bits))
    return None


def _of_exact(wanted: pa.Field | None) -> Conversion:
    """Numbers with all digits, as the decimal of another table needs them. This one is of another type, or it lacks the
    column."""
    if wanted is None:
        return Conversion(lambda array: array.cast(_ANY_DECIMAL), _ANY_DECIMAL)
    if pa.types.is_integer(wanted.type):
        return Conversion(lambda array: array.cast(pa.int64()), pa.int64())  # not of fractions
    if pa.types.is_string(wanted.type) and hint_of(wanted) in (None, "json"):
        return Conversion(_digits, wanted.type, hint_of(wanted))
    # Through text: Arrow's own cast does not always give the nearest float.
    return Conversion(lambda array: array.cast(pa.string()).cast(pa.float64()), pa.float64())


def _either(numbers: Conversion, texts: Conversion, pattern: str) -> Conversion:
    """Texts, of which some are numbers: a batch with values of both kinds has them as texts. `pattern`: what a number
    looks like."""

    def convert(array: pa.Array) -> pa.Array:
        is_number = pc.match_substring_regex(array, pattern)
        nothing = pa.scalar(None, pa.string())
        digits, others = pc.if_else(is_number, array, nothing), pc.if_else(is_number, nothing, array)
        # A column without numbers is read as text only.
        if digits.null_count == len(array):
            return texts.values(array)
        return pc.coalesce(numbers.values(digits.cast(pa.int64())), texts.values(others))

    return Conversion(convert, texts.kind, texts.hint)


def _is_text(wanted: pa.Field | None) -> bool:
    return wanted is not None and pa.types.is_string(wanted.type) and hint_of(wanted) is None


def _documents(array: pa.Array) -> pa.Array:
    """Return JSON: a text is what it is, if it can be read as JSON, and else a string. One that begins as an object or
    an array stays as it is: the table refuses one that is cut off."""
    if pa.types.is_boolean(array.type) or pa.types.is_integer(array.type) or pa.types.is_decimal(array.type):
        return array.cast(pa.string())
    if not pa.types.is_string(array.type):
        return pa.array([None if each is None else json_of(each) for each in array.to_pylist()], pa.string())
    return pa.array([None if each is None else _document(each) for each in array.to_pylist()], pa.string())


def _document(text: str) -> str:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text if text.lstrip()[:1] in ("{", "[") else json_of(text)
    return text


def _points(array: pa.Array) -> pa.Array:
    """Return points as PostgreSQL writes them."""
    return pa.array([None if each is None else f"({each['x']},{each['y']})" for each in array.to_pylist()], pa.string())


def _element(wanted: pa.Field | None) -> pa.Field | None:
    return wanted.type.value_field if wanted is not None and pa.types.is_list(wanted.type) else None


def _lists(items: Conversion | None) -> Conversion | None:
    if items is None:
        return None

    def convert(array: pa.Array) -> pa.Array:
        # A slice has the elements of the whole array, some of which may be what cannot be read.
        lengths, values = pc.list_value_length(array).fill_null(0), array.flatten()
        offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths.cast(pa.int32()))])
        mask = array.is_null() if array.null_count else None
        return pa.ListArray.from_arrays(offsets, items.values(values), kind, mask=mask)

    kind = pa.list_(pa.field("element", items.kind))
    return Conversion(convert, kind)


# ------------------------------------------------------------------------------------------------------------ the types


def _instants(unit: str | None, kind: pa.DataType) -> Conversion:
    """Numbers since 1970, in this unit or in the one that their size suggests."""

    def convert(array: pa.Array) -> pa.Array:
        numbers = array.cast(pa.int64())
        if unit == "ms":
            numbers = pc.multiply_checked(numbers, 1000)
        elif unit == "ns":
            numbers = _floored(numbers)
        elif unit is None:
            size = pc.abs(numbers)
            millis = pc.if_else(pc.less(size, _MICROS), numbers, 0)
            nanos = pc.if_else(pc.greater_equal(size, _NANOS), numbers, 0)
            numbers = pc.if_else(pc.less(size, _MICROS), pc.multiply(millis, 1000), numbers)
            numbers = pc.if_else(pc.greater_equal(size, _NANOS), _floored(nanos), numbers)
        return numbers.cast(LOCAL_TIME).cast(kind)

    return Conversion(convert, kind)


def _floored(nanos: pa.Array) -> pa.Array:
    return pc.divide(pc.subtract(nanos, pc.if_else(pc.less(nanos, 0), 999, 0)), 1000)


def _times(unit: str) -> Conversion:
    """Numbers since midnight."""

    def convert(array: pa.Array) -> pa.Array:
        micros = _instants(unit, LOCAL_TIME).values(array).cast(pa.int64())
        inside = pc.all(pc.and_(pc.greater_equal(micros, 0), pc.less(micros, _DAY)), min_count=0).as_py()
        if inside is not False:
            return micros.cast(pa.time64("us")).cast(pa.string())
        return pa.array([None if each is None else _clock(each) for each in micros.to_pylist()], pa.string())

    return Conversion(convert, pa.string(), "time")


def _clock(micros: int) -> str:
    """Return a time as MySQL has it, of less than none and more than a day, and PostgreSQL's 24:00."""
    seconds, fraction = divmod(abs(micros), 10**6)
    return f"{'-' * (micros < 0)}{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{fraction:06}"


def _moments(array: pa.Array) -> pa.Array:
    """Return times in UTC of texts by ISO 8601, with a zone or without."""
    texts = pc.replace_substring_regex(array, r"(\.\d{6})\d+", r"\1")
    zoned = pc.if_else(
        pc.match_substring_regex(texts, r"(Z|[+-]\d\d(:?\d\d)?)$"), texts, pc.binary_join_element_wise(texts, "Z", "")
    )
    return zoned.cast(UTC_TIME)


def _days(array: pa.Array) -> pa.Array:
    return pc.utf8_rtrim(array, "Z").cast(pa.date32())


def _decoded(array: pa.Array) -> list[bytes | None]:
    if pa.types.is_binary(array.type):
        decoded: list[bytes | None] = array.to_pylist()
        return decoded
    return [None if each is None else a2b_base64(each, strict_mode=True) for each in array.to_pylist()]


def _decimals_of_bytes(precision: int, scale: int) -> Conversion:
    """Two's complement, the highest byte first, and as many digits behind the point as the schema says."""
    kind = pa.decimal128(precision, scale)

    def convert(array: pa.Array) -> pa.Array:
        if pa.types.is_decimal(array.type):  # Avro has them by itself
            return array.cast(kind)
        if not pa.types.is_string(array.type) and not pa.types.is_binary(array.type):
            return _decimals_of_text(array, kind)
        numbers = [None if each is None else int.from_bytes(each, "big", signed=True) for each in _decoded(array)]
        if any(each is not None and abs(each) >= 10**precision for each in numbers):
            raise ValueError(f"it has more than {precision} digits")
        packed = b"".join((each or 0).to_bytes(16, "little", signed=True) for each in numbers)
        valid = pc.is_valid(array).buffers()[1] if array.null_count else None
        return pa.Array.from_buffers(kind, len(array), [valid, pa.py_buffer(packed)])

    return Conversion(convert, kind)


def _scaled_decimals(wanted: pa.Field | None) -> Conversion:
    """Decimals that each say how many digits they have behind the point."""
    kind = wanted.type if wanted is not None and pa.types.is_decimal(wanted.type) else _ANY_DECIMAL

    def convert(array: pa.Array) -> pa.Array:
        scales, values = pc.struct_field(array, "scale").to_pylist(), _decoded(pc.struct_field(array, "value"))
        pairs = zip(scales, values, strict=True)
        return pa.array([None if value is None else _scaled(value, scale) for scale, value in pairs], kind)

    return Conversion(convert, kind)


def _scaled(value: bytes, scale: int) -> Decimal:
    return Decimal(int.from_bytes(value, "big", signed=True)).scaleb(-scale)


def _decimals_of_text(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(array.type):
        for each in array.to_pylist():
            if each is not None and not _NUMBER.fullmatch(each):
                raise ValueError(
                    "no number; Debezium's bytes of a decimal need the schema of the message, "
                    "or decimal.handling.mode=string in its connector"
                )
    if not pa.types.is_floating(array.type):
        return pa.array([None if each is None else Decimal(each) for each in array.to_pylist()], kind)
    return array.cast(kind)


def _digits(array: pa.Array) -> pa.Array:
    """Return decimals as texts, without zeros at their ends."""
    texts = array.cast(pa.string())
    if pc.any(pc.match_substring(texts, "E")).as_py():  # as a database may not see what it rounds
        texts = pa.array([None if each is None else f"{each:f}" for each in array.to_pylist()], pa.string())
    is_fraction = pc.match_substring(texts, ".")
    return pc.if_else(is_fraction, pc.utf8_rtrim(pc.utf8_rtrim(texts, "0"), "."), texts)


def _bit_numbers(array: pa.Array) -> pa.Array:
    return pa.array([None if each is None else int.from_bytes(each, "little") for each in _decoded(array)], pa.int64())


def _numbers_of_text(array: pa.Array, has_bits: bool, words: Mapping[str, int] | None = None) -> pa.Array:
    """Return numbers of texts that are such, or one of the words. Another one is bits in base64, if it may be."""
    if pa.types.is_binary(array.type):
        return _bit_numbers(array)

    def number(text: str) -> int:
        if words is not None and text.lower() in words:
            return words[text.lower()]
        if words is None and (whole := _WHOLE.fullmatch(text)) is not None:
            return int(whole[1])
        if not has_bits:
            raise ValueError("no whole number" if words is None else "neither true nor false")
        try:
            return int.from_bytes(a2b_base64(text, strict_mode=True), "little")
        except ValueError:
            what = "no whole number" if words is None else "neither true nor false"
            raise ValueError(f"{what}, and no bits in base64") from None

    return pa.array([None if each is None else number(each) for each in array.to_pylist()], pa.int64())


def _bits(length: int, wanted: pa.Field | None) -> Conversion:
    """Bits, the lowest byte first: a number, or zeros and ones as PostgreSQL writes them."""
    if length < 64 and (wanted is None or not pa.types.is_string(wanted.type)):
        return Conversion(_bit_numbers, pa.int64())

    def convert(array: pa.Array) -> pa.Array:
        numbers = [None if each is None else int.from_bytes(each, "little") for each in _decoded(array)]
        return pa.array([None if each is None else f"{each:0{length}b}" for each in numbers], pa.string())

    return Conversion(convert)


def _same(array: pa.Array) -> pa.Array:
    return array.cast(pa.string())


_POINT = Conversion(_points)
_SPAN = Conversion(lambda array: pc.binary_join_element_wise(array.cast(pa.string()), "microseconds", " "))
_BYTES = Conversion(lambda array: pa.array(_decoded(array), pa.binary()), pa.binary())
_DATE = Conversion(lambda array: array.cast(pa.int32()).cast(pa.date32()), pa.date32())
_NAMED: dict[str, Conversion] = {
    "Date": _DATE,
    "IsoDate": Conversion(_days, pa.date32()),
    "IsoTime": Conversion(lambda array: pc.utf8_rtrim(array, "Z"), pa.string(), "time"),
    "Timestamp": _instants("ms", LOCAL_TIME),
    "MicroTimestamp": _instants("us", LOCAL_TIME),
    "NanoTimestamp": _instants("ns", LOCAL_TIME),
    "IsoTimestamp": Conversion(lambda array: _moments(array).cast(LOCAL_TIME), LOCAL_TIME),
    "ZonedTimestamp": Conversion(_moments, UTC_TIME),
    "Time": _times("ms"),
    "MicroTime": _times("us"),
    "NanoTime": _times("ns"),
    "Uuid": Conversion(_same, pa.string(), "uuid"),
    "Json": Conversion(_same, pa.string(), "json"),
}
"""Conversions by the last part of a name, of Debezium's and of Kafka Connect's own."""
