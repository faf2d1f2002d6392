"""Rows of changes in JSON: the columns of their tables decide how a value is read, and no number loses a digit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.columns import hint_of, is_nested
from weft.systems.codec import Parsed
from weft.systems.codecs.json import JsonDecoder, decode_exactly

# More digits than the decimal of any table; a number with even more is read as a text.
_EXACT = pa.decimal256(76, 38)
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


def rows_of(
    texts: pa.Array, stored: Sequence[StoredTable], left: Collection[str] = (), *, is_growing: bool = True
) -> Parsed:
    """Return rows for these tables. `left`: the columns about which the tables do not decide: keys, which are compared
    with those of other messages, and those of which the messages say what they are. `is_growing`: whether tables get
    the columns that they lack."""
    # Of whatever types: the column of the target decides about values, not most of the others.
    decoder = JsonDecoder({}, takes_all=True)
    parsed = decoder.parse(texts)
    known: dict[str, pa.DataType] = {}
    as_texts: set[str] = set()
    unsure = []
    for name, each in parsed.columns.items():
        if name in left or not _alters(each.type):
            continue
        there = [table.columns[name.lower()] for table in stored if name.lower() in table.columns]
        is_number = pa.types.is_floating(each.type)
        if is_number and not there and (is_growing or not stored):
            unsure.append(name)
        elif is_number and there and all(pa.types.is_decimal(column.type) for column in there):
            known[name] = _EXACT
        elif _is_list(each.type, pa.types.is_floating) and there and all(_is_list(one.type) for one in there):
            known[name] = pa.list_(_EXACT)
        elif any(map(_takes_texts, there)):
            known |= {} if is_number else {name: pa.json_()}
            as_texts.add(name)
    if known or as_texts:
        parsed = _read_again(texts, decoder, known, as_texts) or parsed
    return _without(parsed, _inexact(texts, parsed, unsure)) if unsure else parsed


def _read_again(
    texts: pa.Array, decoder: JsonDecoder, known: Mapping[str, pa.DataType], as_texts: set[str]
) -> Parsed | None:
    """Return rows with columns of these types, or else as texts with all digits."""
    if as_texts <= known.keys():
        again = JsonDecoder(known, takes_all=True)
        # What the others are is known.
        again.seen = {
            name: known.get(name, kind)
            for name, kind in decoder.seen.items()
            if not isinstance(known.get(name), pa.JsonType)
        }
        if (parsed := again.at_once(texts)) is not None:
            return parsed
    whole = {name.lower() for name in (*known, *as_texts) if not _is_list(known.get(name))}
    return JsonDecoder({}, takes_all=True, texts=whole).parse(texts) if whole else None


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


def _inexact(texts: pa.Array, parsed: Parsed, names: Iterable[str]) -> dict[int, str]:
    """Return the rows with a number in these columns that no float is, where no table says that it is a decimal."""
    bad: dict[int, str] = {}
    is_long = pc.match_substring_regex(texts, _LONG_NUMBER).to_numpy(zero_copy_only=False)
    for number in np.intersect1d(np.flatnonzero(is_long), np.asarray(parsed.good)).tolist():
        row = {name.lower(): each for name, each in decode_exactly(texts[number].as_py()).items()}
        for name in names:
            value = row.get(name.lower())
            if isinstance(value, Decimal) and not _is_float(value):
                why = f"{name!r} is {value}, which has more digits than a float holds."
                bad[number] = f"{why} Create the column of the table as a decimal, or send the number as a text."
    return bad


def _is_float(value: Decimal) -> bool:
    """Return whether a float has this name, shortest or not."""
    digits = len(value.normalize().as_tuple().digits)
    return digits <= _SURE_DIGITS or (digits <= _MOST_DIGITS and Decimal(f"{float(value):.{digits - 1}e}") == value)


def _without(parsed: Parsed, bad: Mapping[int, str]) -> Parsed:
    if not bad:
        return parsed
    kept = [place for place, number in enumerate(parsed.good) if number not in bad]
    columns = {name: each.take(pa.array(kept, pa.int64())) for name, each in parsed.columns.items()}
    good = [parsed.good[place] for place in kept]
    return parsed._replace(columns=columns, good=good, bad=dict(sorted({**parsed.bad, **bad}.items())))
