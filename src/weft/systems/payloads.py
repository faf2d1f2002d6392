"""Rows that are put aside, as JSON that every reader takes and out of which the same values come again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

# A name of Weft's own: Avro writes a float of a union as {"float": …}.
_FLOAT = "_weft_float"
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: object, default: Callable[[Any], object]) -> str:
    """Return a row as JSON, which has no word for NaN and infinity: `{"_weft_float": "NaN"}` stands for it. `default`
    says what stands for values of other types."""
    try:
        return json.dumps(value, ensure_ascii=False, default=default, allow_nan=False)
    except ValueError:
        return json.dumps(_worded(value, default), ensure_ascii=False, default=default)


def loads(text: str) -> Any:
    """Return the row that `dumps` made a text of, with its numbers as they are written there, for `encode`. NaN and
    infinity are floats."""
    return _decode(text)


def encode(value: object) -> bytes:
    """Return what `loads` returned as JSON again, with the same numbers."""
    return _encode(value)


def has_not_finite(value: object) -> bool:
    """Return whether a value is NaN or infinity, or has such a one in it."""
    if isinstance(value, float):
        return not math.isfinite(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(has_not_finite, inner))


def _worded(value: object, default: Callable[[Any], object]) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: json.dumps(float(value))}
    if isinstance(value, Mapping):
        return {name: _worded(each, default) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_worded(each, default) for each in value]
    if value is None or isinstance(value, str | int):
        return value
    plain = default(value)
    return plain if plain is value else _worded(plain, default)


def _restored(members: dict[str, Any]) -> Any:
    word = members.get(_FLOAT)
    return _WORDS.get(word, members) if len(members) == 1 and isinstance(word, str) else members


def _number(text: str) -> msgspec.Raw:
    return msgspec.Raw(text.encode())


_decode = json.JSONDecoder(object_hook=_restored, parse_int=_number, parse_float=_number).decode
_encode = msgspec.json.Encoder().encode
