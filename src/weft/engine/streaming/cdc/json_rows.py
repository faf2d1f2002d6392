"""Rows of changes in JSON: the columns of their tables decide how a value is read, and no number loses a digit but in a
column of floats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.columns import has_objects, hint_of, is_nested
from weft.systems.codec import Parsed
from weft.systems.codecs.json import JsonDecoder, decode_exactly

# More digits than the decimal of any table; a number with even more is read as a text.
_EXACT = pa.decimal256(76, 38)
# The type that a table gets for a column which it lacks and another table has as a decimal.
_NEW = pa.decimal128(38, 18)
# Each number of so many digits is the shortest name of a float.
_SURE_DIGITS, _MOST_DIGITS = 15, 17
_LONG_NUMBER = rf"[0-9](\.?[0-9]){{{_SURE_DIGITS}}}"


@dataclass(frozen=True)
class StoredTable:
    """A table that changes go to."""

    columns: Mapping[str, pa.Field]
    """By their names in small letters."""
    refuses_rows: bool = True
    """Whether it refuses a row by itself, as a database does."""
    makes_documents: bool = False
    """Whether a new column of objects or lists is one of JSON."""


def rows_of(
    texts: pa.Array, stored: Sequence[StoredTable], left: Collection[str] = (), *, is_growing: bool = True
) -> Parsed:
    """Return rows for these tables, whose columns decide the types. Columns of `left` keep the types of the messages:
    keys, which are compared with those of other messages, and columns whose types the messages name. `is_growing`:
    whether tables get the columns that they lack."""
    # Values of any type: the column of the target decides, not the type of most values.
    decoder = JsonDecoder({}, takes_all=True)
    parsed = decoder.parse(texts)
    known: dict[str, pa.DataType] = {}
    as_texts: set[str] = set()
    unsure: dict[str, str] = {}  # with what helps
    sized, documents = [], []
    for name, each in parsed.columns.items():
        if name in left or not _alters(each.type):
            continue
        there = [table.columns[name.lower()] for table in stored if name.lower() in table.columns]
        is_number = pa.types.is_floating(each.type)
        is_new = not stored or any(
            name.lower() not in table.columns and (is_growing or not table.columns) for table in stored
        )
        if not there and is_new and has_objects(each.type) and any(table.makes_documents for table in stored):
            known[name] = pa.json_()
            documents.append(name)
        elif not there and is_new and _has_floats(each.type):
            unsure[name] = _help(each.type) if stored else _AS_TEXT
        elif any(map(_takes_texts, there)):
            known |= {} if is_number else {name: pa.json_()}
            as_texts.add(name)
        elif (is_number and any(_loses(column.type, texts) for column in there)) or (
            _is_list(each.type, pa.types.is_floating) and any(_is_list(column.type) for column in there)
        ):
            known[name] = _EXACT if is_number else pa.list_(_EXACT)
            if is_new:
                sized.append(name)
    if known or as_texts:
        parsed = _read_again(texts, decoder, known, as_texts) or parsed
    for name, kind in known.items():
        if _is_list(kind) and name in parsed.columns and not _is_list(parsed.columns[name].type):
            parsed = _exact_lists(texts, parsed, name)
    parsed = _without(parsed, _inexact(texts, parsed, unsure)) if unsure else parsed
    for name in documents:
        # Objects of one type would have the keys of all.
        if name in parsed.columns:
            column = parsed.columns[name].cast(pa.json_())
            parsed = parsed._replace(columns={**parsed.columns, name: column})
    for name in sized:
        parsed = _sized(parsed, name) if name in parsed.columns else parsed
    return parsed


def with_exact_keys(texts: pa.Array, parsed: Parsed, keys: Collection[str], stored: Sequence[StoredTable]) -> Parsed:
    """Return rows whose keys differ where their numbers do: as texts, where a float has not all digits of one. A row
    whose key no table would distinguish from another one is a bad row."""
    for name in keys:
        if (column := parsed.columns.get(name)) is None:
            continue
        if pa.types.is_floating(column.type):
            among = parsed.good
        elif pa.types.is_string(column.type):  # perhaps of numbers of several types
            is_long = pc.fill_null(pc.match_substring_regex(column, _LONG_NUMBER), False)
            among = np.asarray(parsed.good)[is_long.to_numpy(zero_copy_only=False)].tolist()
        else:
            continue
        numbers = _numbers_beyond_floats(texts, among, {name})
        if not numbers:
            continue
        kinds = [each.columns[name.lower()].type for each in stored if name.lower() in each.columns]
        if not kinds or len(kinds) < len(stored) or any(map(pa.types.is_floating, kinds)):
            bad = {number: _too_long(name, value, _help(_NEW)) for number, (_, value) in numbers.items()}
            parsed = _without(parsed, bad)
            continue
        is_found = pa.array([number in numbers for number in parsed.good])
        digits = pa.array([_digits(numbers[number][1]) for number in parsed.good if number in numbers])
        column = number_texts(column) if pa.types.is_floating(column.type) else column
        parsed = parsed._replace(columns={**parsed.columns, name: pc.replace_with_mask(column, is_found, digits)})
    return parsed


def _read_again(
    texts: pa.Array, decoder: JsonDecoder, known: Mapping[str, pa.DataType], as_texts: set[str]
) -> Parsed | None:
    """Return rows with columns of these types, or else as texts with all digits."""
    if as_texts <= known.keys():
        again = JsonDecoder(known, takes_all=True)
        # The types of the other columns are known.
        again.seen = {
            name: known.get(name, kind)
            for name, kind in decoder.seen.items()
            if not isinstance(known.get(name), pa.JsonType)
        }
        if (parsed := again.at_once(texts)) is not None:
            return parsed
    whole = {name.lower() for name in (*known, *as_texts) if not _is_list(known.get(name))}
    return JsonDecoder({}, takes_all=True, texts=whole).parse(texts) if whole else None


def _exact_lists(texts: pa.Array, parsed: Parsed, name: str) -> Parsed:
    """Return rows with lists of decimals, one by one, where Arrow's reader could not read them all as such."""
    lists: list[list[Decimal | None] | None] = []
    bad: dict[int, str] = {}
    for number in parsed.good:
        row = decode_exactly(texts[number].as_py())
        items = next((each for key, each in row.items() if key.lower() == name.lower()), None)
        exact = None if items is None else [None if each is None else Decimal(each) for each in items]
        if long := [each for each in exact or () if each is not None and not _fits(each, _EXACT)]:
            bad[number] = f"{name!r} has {long[0]}, which has more digits than any decimal holds."
        lists.append(None if long else exact)
    columns = {**parsed.columns, name: pa.array(lists, pa.list_(_EXACT))}
    return _without(parsed._replace(columns=columns), bad)


def _alters(kind: pa.DataType) -> bool:
    """Return whether a value of this type may have another text than it had in its message: as objects of one type each
    has the keys of all, and a whole number among others is one with a fraction."""
    is_point = pa.types.is_struct(kind) and kind.get_field_index("wkb") >= 0  # of Debezium, which has its own text
    return (is_nested(kind) and not is_point) or pa.types.is_floating(kind)


def _takes_texts(column: pa.Field) -> bool:
    takes: bool = pa.types.is_string(column.type) and hint_of(column) in (None, "json")
    return takes


def _is_list(kind: pa.DataType | None, matches: Callable[[pa.DataType], bool] = pa.types.is_decimal) -> bool:
    return kind is not None and pa.types.is_list(kind) and matches(kind.value_type)


def _has_floats(kind: pa.DataType) -> bool:
    parts = (kind.field(at).type for at in range(kind.num_fields)) if is_nested(kind) else ()
    return pa.types.is_floating(kind) or any(map(_has_floats, parts))


def _loses(kind: pa.DataType, texts: pa.Array) -> bool:
    """Return whether a column of this type may have digits of these messages that a float has not: 9007199254740993.0
    is a whole number, and one whose fraction is too small for a float is none."""
    is_decimal: bool = pa.types.is_decimal(kind)
    is_whole: bool = pa.types.is_integer(kind)
    return is_decimal or (is_whole and pc.any(pc.match_substring_regex(texts, _LONG_NUMBER)).as_py() is True)


_AS_TEXT = "Send the number as a text."


def _help(kind: pa.DataType) -> str:
    return f"Create the column of the table as {'JSON' if is_nested(kind) else 'a decimal'}, or s{_AS_TEXT[1:]}"


def _inexact(texts: pa.Array, parsed: Parsed, names: Mapping[str, str]) -> dict[int, str]:
    """Return the rows with a number in these columns that no float is, where no table says that it is a decimal.
    `names`: with what helps."""
    numbers = _numbers_beyond_floats(texts, parsed.good, names)
    return {number: _too_long(name, value, names[name]) for number, (name, value) in numbers.items()}


def _too_long(name: str, value: Decimal, helps: str) -> str:
    return f"{name!r} is {value}, which has more digits than a float holds. {helps}"


def _numbers_beyond_floats(
    texts: pa.Array, among: Sequence[int], names: Iterable[str]
) -> dict[int, tuple[str, Decimal]]:
    """Return those of these rows with a number in these columns that no float is: the last such column, and the
    number."""
    numbers: dict[int, tuple[str, Decimal]] = {}
    is_long = pc.match_substring_regex(texts, _LONG_NUMBER).to_numpy(zero_copy_only=False)
    for number in np.intersect1d(np.flatnonzero(is_long), np.asarray(among, dtype=np.int64)).tolist():
        row = {name.lower(): each for name, each in decode_exactly(texts[number].as_py()).items()}
        for name in names:
            value = next((each for each in _numbers_in(row.get(name.lower())) if not _is_float(each)), None)
            if value is not None:
                numbers[number] = name, value
    return numbers


def number_texts(floats: pa.Array) -> pa.Array:
    """Return floats as texts that whole numbers and decimals have too."""
    texts = floats.cast(pa.string())
    has_exponent = pc.fill_null(pc.match_substring(texts, "e"), False)
    digits = pa.array([_digits(Decimal(each)) for each in texts.filter(has_exponent).to_pylist()], pa.string())
    return pc.replace_with_mask(texts, has_exponent, digits)


def _digits(value: Decimal) -> str:
    if abs(value.adjusted()) > _EXACT.precision:
        return str(value)
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _numbers_in(value: Any) -> Iterator[Decimal]:
    """Yield the numbers with a fraction or an exponent, those in objects and lists too."""
    if isinstance(value, Decimal):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(each)


def _is_float(value: Decimal) -> bool:
    """Return whether a float has this name, shortest or not."""
    digits = len("".join(map(str, value.as_tuple().digits)).strip("0")) or 1  # normalize() would round them
    return digits <= _SURE_DIGITS or (digits <= _MOST_DIGITS and Decimal(f"{float(value):.{digits - 1}e}") == value)


def _sized(parsed: Parsed, name: str) -> Parsed:
    """Return rows without those whose number the decimal of a new column cannot hold."""
    column = parsed.columns[name]
    try:
        if not pa.types.is_string(column.type):
            column.cast(pa.list_(_NEW) if pa.types.is_list(column.type) else _NEW)
            return parsed
    except pa.ArrowInvalid:
        pass
    bad: dict[int, str] = {}
    for place, value in enumerate(column.to_pylist()):
        for each in value if isinstance(value, list) else [value]:
            if each is not None and not _fits(Decimal(each), _NEW):
                kind = f"a decimal of {_NEW.precision} digits, {_NEW.scale} of them behind the point"
                why = f"{name!r} is {each}, which {kind}, that a table without the column gets, cannot hold."
                bad[parsed.good[place]] = f"{why} {_help(_NEW)}"
    parsed = _without(parsed, bad)
    if pa.types.is_string(column.type):  # as another number of the batch was too long
        values = [None if each is None else Decimal(each) for each in parsed.columns[name].to_pylist()]
        parsed = parsed._replace(columns={**parsed.columns, name: pa.array(values, _EXACT)})
    return parsed


def _fits(value: Decimal, kind: pa.DataType) -> bool:
    try:
        pa.scalar(value, kind)
    except pa.ArrowInvalid:
        return False
    return True


def _without(parsed: Parsed, bad: Mapping[int, str]) -> Parsed:
    if not bad:
        return parsed
    kept = [place for place, number in enumerate(parsed.good) if number not in bad]
    columns = {name: each.take(pa.array(kept, pa.int64())) for name, each in parsed.columns.items()}
    good = [parsed.good[place] for place in kept]
    return parsed._replace(columns=columns, good=good, bad=dict(sorted({**parsed.bad, **bad}.items())))
