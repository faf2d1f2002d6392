"""JSON messages as columns of Arrow, and of each that cannot be one why not.

The values of a batch are joined by newlines and parsed at once: a message that begins with `{` and ends with `}` cannot
run into its neighbour, because a `{` never follows a `}` within an object, so as many rows as messages means that each
is a row. Whatever is odd about one of them (an error, two objects, a type that differs, a number that would be altered)
sends the batch to the careful way, which looks at each message by itself. Both give the same where the first gives
anything.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as arrow_json

from weft.columns import UTC_TIME
from weft.spark_support.lazy import F
from weft.spark_support.sessions import TIME_FORMATS, quoted
from weft.systems.codec import Parsed
from weft.systems.codecs import kinds
from weft.systems.codecs.columns import WHOLE, is_deeper, json_of, leaves, type_name, without_times
from weft.systems.codecs.repeated import colons_of, repeated_keys
from weft.types import FieldType, check_value, from_json, half_character, round_float32

if TYPE_CHECKING:
    from pyspark.sql import Column

# Nulls are written: a reader could not distinguish one that is left out from a column that does not exist.
_WRITTEN = {**TIME_FORMATS, "ignoreNullFields": "false"}
MAX_DEPTH = 32
"""Deeper values are refused: types of Spark and Parquet are walked by recursion. Arrow's reader dies of deep ones."""
_MOST_BRACKETS = 1000
_MOST_DIGITS = 100
_UUID = r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
# Arrow and Python read texts of this form as the same dates and times, or neither reads them.
_YEAR = r"^(000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})-\d\d-\d\d"
_ESCAPED_KEY = r'\\[^"]*"\s*:'
# Numbers that may be too large for a float: the careful parser rejects them.
_HUGE = r"[0-9][eE]\+?0*[1-9][0-9]{2}"
_TOO_DEEP = f"It is nested deeper than {MAX_DEPTH} levels."
_decode = msgspec.json.Decoder().decode


def _exact_number(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent of twenty digits: as one of seventeen, it is beyond all columns
        return Decimal(re.sub("[eE]-.*", "E-" + 17 * "9", text))


decode_exactly = msgspec.json.Decoder(float_hook=_exact_number).decode
_decode_parts = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_lines = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode_lines
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode, _encode_lines = msgspec.json.Encoder().encode, msgspec.json.Encoder().encode_lines


class JsonCodec:
    """JSON objects, whose keys are the columns."""

    is_parsed: ClassVar[bool] = True

    def decoder(self, known: Mapping[str, pa.DataType]) -> JsonDecoder:
        return JsonDecoder(known)

    def encoded(self, columns: Sequence[str]) -> Column:
        return F.to_json(F.struct(*(F.col(quoted(name)).alias(name) for name in columns)), _WRITTEN)


class JsonDecoder:
    """Parses the batches of one task. It remembers the types of columns: what comes next is most likely of them.
    `takes_all`: a column with values of several types is one of texts, those that are none as JSON. Else most decide,
    and the other rows are bad. `texts`: columns that are texts in the same way, in small letters."""

    def __init__(
        self, known: Mapping[str, pa.DataType], *, takes_all: bool = False, texts: Collection[str] = ()
    ) -> None:
        self.takes_all, self.texts = takes_all, texts
        self.known = {name.lower(): kind for name, kind in known.items()}
        self.seen: dict[str, pa.DataType] = {}
        self.tries_at_once = not texts

    def parse(self, values: pa.Array) -> Parsed:
        parsed = self.at_once(values) if self.tries_at_once else None
        if parsed is None:
            parsed = self._one_by_one(values)
            # Where no message was to blame, the next batch would be tried in vain too.
            self.tries_at_once = bool(parsed.bad)
        return parsed

    # ------------------------------------------------------------------------------------------------------- at once

    def at_once(self, values: pa.Array) -> Parsed | None:
        """Return the columns as Arrow's reader makes them; `None` where a message must be looked at by itself."""
        if not len(values) or not _is_regular(values):
            return None
        documents: dict[str, pa.Array] = {}
        if names := {name for name, kind in self.known.items() if isinstance(kind, pa.JsonType)}:
            lifted = _lifted(values, names)
            if lifted is None:
                return None
            text, documents = lifted
            if text.size == 3 * len(values):  # `{}` of each, of which Arrow's reader makes no rows
                return Parsed(documents, range(len(values)), {}, {})
        else:
            text = _lines(values)
        for _ in range(3):
            table = _read(text, self.seen)
            if table is None and self.seen:
                self.seen = {}  # a column may have become of a wider type
                continue
            if table is None or table.num_rows != len(values):
                return None
            if any(is_deeper(kind, MAX_DEPTH) for kind in table.schema.types):
                return None
            wanted = {each.name: self._read_as(each) for each in table.schema}
            if "" in wanted or "\0" in "".join(wanted) or len(set(map(str.lower, wanted))) < len(wanted):
                return None
            if None in wanted.values() or _has_texts(values, [name for name in wanted if self._is_whole(name)]):
                return None
            self.seen = {name: kind for name, kind in wanted.items() if kind is not None and not pa.types.is_null(kind)}
            if all(each.type.equals(wanted[each.name]) for each in table.schema):
                parsed = self._checked(table)
                return parsed if parsed is None else parsed._replace(columns={**parsed.columns, **documents})
        return None

    def _read_as(self, field: pa.Field) -> pa.DataType | None:
        """Return the type under which Arrow's reader must read a column; `None` for one that it cannot read."""
        known = self.known.get(field.name.lower())
        if known is None or pa.types.is_null(field.type):
            return without_times(field.type)
        if pa.types.is_temporal(known) or isinstance(known, pa.UuidType):
            return pa.string()
        return known if known.equals(WHOLE) or _can_be_read(known) else None

    def _is_whole(self, name: str) -> bool:
        known = self.known.get(name.lower())
        return known is not None and known.equals(WHOLE)

    def _checked(self, table: pa.Table) -> Parsed | None:
        """Return the columns that Arrow's reader made, of their final types; `None` if a value must be looked at."""
        if not all(map(_is_whole, table.columns)):
            return None
        read = {name: table.column(name).combine_chunks() for name in table.column_names}
        if not all(map(_is_exact, read.values())):
            return None
        columns = {name: _at_known_type(each, self.known.get(name.lower())) for name, each in read.items()}
        if any(each is None for each in columns.values()):
            return None
        column_kinds = {name.lower(): kinds.of_array(each) for name, each in read.items()}
        return Parsed(columns, range(table.num_rows), {}, column_kinds)

    # ---------------------------------------------------------------------------------------------------- one by one

    def _one_by_one(self, values: pa.Array) -> Parsed:
        texts = values.to_pylist()
        rows: dict[int, dict[str, Any]] = {}
        bad: dict[int, str] = {}
        for number, value in enumerate(texts):
            try:
                rows[number] = _object(value)
            except ValueError as error:
                bad[number] = str(error)
        numbers = list(rows)
        for place, key in repeated_keys([texts[each] for each in numbers], list(rows.values())).items():
            bad[numbers[place]] = f"It has the key {key!r} twice in one object."
            del rows[numbers[place]]
        fitted, misfits, close = self._split(rows, texts, self.known)
        by_column = kinds.merged_columns((_kinds_of(rows[number] for number in fitted), _kinds_of(close)))
        if mixed := {
            name: kinds.type_of(each)
            for name, each in by_column.items()
            if name not in self.known and (name in self.texts or kinds.is_mixed(each))
        }:
            if self.takes_all:
                mixed = dict.fromkeys(mixed, pa.string())
                for number, row in fitted.items():
                    row |= {name: _text(row[name], texts[number], name) for name in mixed if name in row}
            else:
                fitted, misfits, _ = self._split(rows, texts, {**self.known, **mixed})
        known = {**self.known, **mixed}
        names: dict[str, str] = {}
        for number in fitted:
            for name in rows[number]:
                names.setdefault(name.lower(), name)
        columns = {}
        for key, name in names.items():
            column = [row.get(key) for row in fitted.values()]
            kind = _storage(known[key]) if key in known else kinds.type_of(kinds.of_values(column))
            columns[name] = pa.array(column, kind)
        return Parsed(columns, list(fitted), dict(sorted((bad | misfits).items())), by_column)

    def _split(
        self, rows: Mapping[int, dict[str, Any]], texts: Sequence[bytes], known: Mapping[str, pa.DataType]
    ) -> tuple[dict[int, dict[str, Any]], dict[int, str], list[dict[str, Any]]]:
        """Return the rows whose values fit the known types, as their columns hold them and with keys in small letters;
        why the others do not; and those of the others that would fit wider types."""
        fitted: dict[int, dict[str, Any]] = {}
        bad: dict[int, str] = {}
        close = []
        usual = {key: _usual(kind) for key, kind in known.items()}
        decimals = {key for key, kind in known.items() if pa.types.is_decimal(kind)}
        for number, row in rows.items():
            held, is_close = {}, True
            for name, value in row.items():
                key = name.lower()
                held[key] = value
                if value is None or key not in known or usual[key](value):
                    continue
                kind = known[key]
                if isinstance(kind, pa.JsonType):
                    held[key] = _document(_decode_parts(texts[number])[name])
                    continue
                exact = decode_exactly(texts[number])[name] if key in decimals else value
                try:
                    held[key] = _fitted(name, exact, kind)
                except ValueError as error:
                    bad.setdefault(number, str(error))
                    is_close = is_close and _is_close(value, kind)
            if number not in bad:
                fitted[number] = held
            elif is_close:
                close.append(row)
        return fitted, bad, close


def _object(value: bytes) -> dict[str, Any]:
    """Return the values of one message, or raise `ValueError` with the reason."""
    try:
        value.decode()
        row = _decode(value)
    except UnicodeDecodeError as error:
        raise ValueError(f"It is not UTF-8: byte {error.start} cannot be read.") from None
    except msgspec.DecodeError as error:
        raise ValueError(_why_refused(value, error)) from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if type(row) is not dict:
        raise ValueError(f"It is JSON, but not an object: it is {_NAMES[type(row)]}.")
    if "" in row:
        raise ValueError("It has a key without a name, which no column can have.")
    if any("\0" in name for name in row):
        raise ValueError("It has a key with the character \\u0000, which no column can have in its name.")
    if value.count(b"{") + value.count(b"[") > MAX_DEPTH and _is_deep(row):
        raise ValueError(_TOO_DEEP)
    if len({name.lower() for name in row}) < len(row):
        twice = [name for name, times in Counter(name.lower() for name in row).items() if times > 1]
        raise ValueError(f"It has two keys that are one column: {twice[0]!r} in upper and lower case.")
    return row


def _why_refused(value: bytes, error: msgspec.DecodeError) -> str:
    """Return why the parser refuses a message, also where that is JSON."""
    said = str(error).removeprefix("JSON is malformed: ")
    if isinstance(error, msgspec.ValidationError):
        return f"{_key_beyond(value)} a number beyond the largest of a 64-bit float."
    if ("surrogate" in said or "truncated" in said) and (half := half_character(value)) is not None:
        return f"The escape {half[1].decode()} in it stands for half a character, which no text can have."
    return f"It is not JSON: {'it ends too early' if 'truncated' in said else said}."


def _key_beyond(value: bytes) -> str:
    with suppress(msgspec.DecodeError, RecursionError):
        for name, part in _decode_parts(value).items():
            try:
                _decode(part)
            except msgspec.ValidationError:
                return f"{name!r} has"
    return "It has"


def _lifted(values: pa.Array, names: Collection[str]) -> tuple[pa.Buffer, dict[str, pa.Array]] | None:
    """Return messages without the keys of these names, a line each, and what they have there as JSON: of whatever types
    it is, it does not decide how the rest is read. `None` where a message must be looked at by itself."""
    try:
        lines = _lines(values)
        rows = _decode_lines(lines)
        spelled = list(dict.fromkeys(chain.from_iterable(rows)))
        if len(rows) != len(values) or len(set(map(str.lower, spelled))) < len(spelled):
            return None
        parts = {name: [row.pop(name, None) for row in rows] for name in spelled if name.lower() in names}
        documents = {name: _documents(each) for name, each in parts.items()}
    except (msgspec.DecodeError, RecursionError):
        return None
    rest = _encode_lines(rows)
    # Each key has a colon: of one that a message has twice, the first was dropped above.
    colons = rest.count(b":") + sum(
        (1 + name.count(":")) * (len(rows) - each.count(None)) for name, each in parts.items()
    )
    colons += sum(pc.sum(pc.count_substring(each, ":")).as_py() or 0 for each in documents.values())
    return (pa.py_buffer(rest), documents) if colons_of([lines]) == colons else None


def documents_of(values: pa.Array, columns: Iterable[str], names: Collection[str]) -> dict[str, pa.Array]:
    """Return what good messages have in these columns, as texts of JSON. `names`, in small letters: those that are
    wanted."""
    rows = [_decode_parts(each) for each in values.to_pylist()]
    spelled: dict[str, set[str]] = {}
    for name in {name for row in rows for name in row}:
        spelled.setdefault(name.lower(), set()).add(name)
    arrays = {}
    for column in columns:
        if column.lower() in names:
            own = spelled.get(column.lower(), ())
            parts = [next((row[name] for name in own if name in row), None) for row in rows]
            try:
                arrays[column] = _documents(parts)
            except RecursionError:  # which looks like one that is too deep, or has a key twice
                texts = [None if each is None else _document(each) for each in parts]
                arrays[column] = pa.array(texts, pa.string())
    return arrays


def _documents(parts: Sequence[msgspec.Raw | None]) -> pa.Array:
    """Return JSON as texts, as `_document` does; `RecursionError` for one that is too deep or may have a key twice."""
    text = _encode(parts)
    if colons_of([text]) != _encode(_decode(text)).count(b":"):
        raise RecursionError
    compact = msgspec.json.format(text, indent=-1)
    if len(compact) < len(text):
        parts = _decode_list(compact)
    lines = _encode_lines(parts)
    ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == ord("\n"))
    offsets = np.concatenate([[0], ends - np.arange(len(ends))]).astype(np.int32)
    letters = lines.replace(b"\n", b"")
    texts = pa.StringArray.from_buffers(len(parts), pa.py_buffer(offsets), pa.py_buffer(letters))
    # `{` and `[` differ by one bit, and so do `e` and `E`.
    lowered = np.frombuffer(letters, np.uint8) | 0x20
    brackets = np.diff(np.searchsorted(np.flatnonzero(lowered == ord("{")), offsets))
    is_odd = brackets >= MAX_DEPTH
    if ((lowered[1:] == ord("e")) & (lowered[:-1] - ord("0") < 10)).any():
        is_odd |= pc.match_substring_regex(texts, _HUGE).to_numpy(zero_copy_only=False)
    for number in np.flatnonzero(is_odd).tolist():
        if _is_deep([_decode(texts[number].as_py())]):
            raise RecursionError
    return pc.if_else(pc.equal(texts, "null"), pa.scalar(None, pa.string()), texts)


def _document(raw: bytes | msgspec.Raw) -> str | None:
    """Return JSON as a text without blanks, with the digits that its numbers have; `None` of null."""
    text = msgspec.json.format(bytes(raw), indent=-1).decode()
    return None if text == "null" else text


def _lines(values: pa.Array) -> pa.Buffer:
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values), b"\n")
    return joined[0].as_buffer()


def _text(value: Any, message: bytes, column: str) -> str | None:
    """Return a value as a text, with all digits that the message has."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | dict):
        return _document(next(each for name, each in _decode_parts(message).items() if name.lower() == column))
    exact = next(each for name, each in decode_exactly(message).items() if name.lower() == column)
    # With an exponent a number could be taken for bits in base64.
    is_short = isinstance(exact, Decimal) and abs(exact.adjusted()) < _MOST_DIGITS
    return f"{exact:f}" if is_short else json_of(exact)


def _kinds_of(rows: Iterable[dict[str, Any]]) -> dict[str, kinds.Kinds]:
    values: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name.lower(), []).append(value)
    return {name: kinds.of_values(each) for name, each in values.items()}


def _can_be_read(kind: pa.DataType) -> bool:
    """Return whether Arrow's reader takes the same values for this type as `_fit`."""
    types = pa.types
    if types.is_list(kind):
        return _can_be_read(kind.value_type)
    if types.is_struct(kind):
        return all(_can_be_read(each.type) for each in kind)
    if types.is_decimal(kind):
        return not kind.equals(WHOLE)  # for which Arrow takes texts too: see `_has_texts`
    others = (types.is_boolean, types.is_integer, types.is_string, types.is_float64, types.is_null)
    return any(each(kind) for each in others)


def _has_texts(values: pa.Array, names: Sequence[str]) -> bool:
    """Return whether a message may have a text under one of these keys: for large integers Arrow takes texts too."""
    # A key with an escape may be any of them.
    patterns = [_ESCAPED_KEY, *(f'"{re.escape(name)}"\\s*:\\s*"' for name in names)] if names else []
    return any(pc.any(pc.match_substring_regex(values, pattern)).as_py() for pattern in patterns)


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
    what a list is of, and leaves an array that is shorter than its lists. It counts no digits of decimals."""
    if not pa.types.is_nested(column.type) and not pa.types.is_decimal(column.type):
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
            within = bounds["min"].as_py() > -kinds.EXACT and bounds["max"].as_py() < kinds.EXACT
            if not within or pc.any(pc.is_nan(leaf)).as_py():
                return False
    return True


# ---------------------------------------------------------------------------------------------------------- known types


def _storage(kind: pa.DataType) -> pa.DataType:
    """Return the type that a column of a known type is of: JSON and UUIDs travel as texts."""
    return pa.string() if isinstance(kind, pa.BaseExtensionType) else kind


def _at_known_type(array: pa.Array, kind: pa.DataType | None) -> pa.Array | None:
    """Return an array that Arrow read as a known type; `None` if a value must be looked at by itself."""
    if kind is None or array.type.equals(kind):
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), _storage(kind))
    if isinstance(kind, pa.UuidType):
        return array if pc.all(pc.match_substring_regex(array, _UUID)).as_py() is not False else None
    if not pc.all(pc.match_substring_regex(array, _YEAR)).as_py():
        return None
    for read_as in (pa.date32(),) if pa.types.is_date(kind) else (UTC_TIME, pa.timestamp("us")):
        try:
            return array.cast(read_as).cast(kind)
        except pa.ArrowInvalid:
            continue
    return None


def _is_close(value: Any, kind: pa.DataType) -> bool:
    """Return whether a column that has this type could have a wider one that holds the value."""
    types = pa.types
    if types.is_null(kind):
        return True
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))
    return isinstance(value, list | dict) and bool(types.is_list(kind) or types.is_struct(kind))


def _usual(kind: pa.DataType) -> Callable[[Any], bool]:
    """Return a fast check whether a value is in a column of this type as it is; `_fit` decides about the others."""
    types = pa.types
    if types.is_list(kind):
        inner = _usual(kind.value_type)
        return lambda value: type(value) is list and all(each is None or inner(each) for each in value)
    if types.is_struct(kind):
        fields = {each.name: _usual(each.type) for each in kind}
        return lambda value: (
            type(value) is dict
            and all(name in fields and (each is None or fields[name](each)) for name, each in value.items())
        )
    if types.is_int64(kind):
        return lambda value: type(value) is int and -(1 << 63) <= value < 1 << 63
    plain = next(
        (
            plain
            for matches, plain in ((types.is_string, str), (types.is_boolean, bool), (types.is_float64, float))
            if matches(kind)
        ),
        None,
    )
    return lambda value: type(value) is plain


def _fitted(name: str, value: Any, kind: pa.DataType) -> Any:
    """Return the value as a column of this type holds it; `ValueError` where it cannot."""
    if value is None:
        return None
    try:
        return _fit(value, kind)
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        shown = json_of(value)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
        why = f": {error}" if isinstance(error, ValueError) and not isinstance(error, pa.ArrowException) else ""
        what = f"{name!r} is {shown}, {_NAMES[type(value)]}, which does not fit {type_name(kind)}"
        raise ValueError(f"{what}{why.removesuffix('.')}.") from None


def _fit(value: Any, kind: pa.DataType) -> Any:
    types = pa.types
    if types.is_string(kind) or types.is_boolean(kind):
        if type(value) is not (str if types.is_string(kind) else bool):
            raise TypeError
        return value
    if types.is_integer(kind) or types.is_floating(kind):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError
        if types.is_floating(kind):
            number = float(value) if kind.bit_width == 64 else round_float32(value)
            if isinstance(value, int) and int(number) != value:
                raise ValueError("it has more digits than a float holds")
            return number
        if isinstance(value, float) and not value.is_integer():
            raise TypeError
        return pa.scalar(int(value), kind).as_py()
    if types.is_list(kind):
        if not isinstance(value, list):
            raise TypeError
        return [_fitted("element", each, kind.value_type) for each in value]
    if types.is_struct(kind):
        if not isinstance(value, dict):
            raise TypeError
        if more := [name for name in value if kind.get_field_index(name) < 0]:
            raise ValueError(f"the key {more[0]!r} is new")
        return {name: _fitted(name, each, kind.field(name).type) for name, each in value.items()}
    if isinstance(kind, pa.JsonType):
        return json_of(value)
    if kind.equals(WHOLE) and isinstance(value, str):
        raise TypeError
    for matches, field_type in _CHECKED:
        if matches(kind):
            declared = field_type(kind)
            checked = check_value(from_json(value, declared), declared)
            if types.is_timestamp(kind):
                return checked if kind.tz else checked.replace(tzinfo=None)
            return str(checked) if isinstance(kind, pa.UuidType) else checked
    raise TypeError


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
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    Decimal: "a number",
    bool: "a boolean",
    type(None): "null",
}
