"""Rows that are put aside, as JSON that every reader takes and out of which the same values come again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

_FLOAT = "float"
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: object, default: Callable[[Any], object]) -> str:
    """Return a row as JSON, which has no word for NaN and infinity: `{"float": "NaN"}` stands for it. `default` says
    what stands for values of other types."""
    try:
        return json.dumps(value, ensure_ascii=False, default=default, allow_nan=False)
    except ValueError:
        return json.dumps(_worded(value, default), ensure_ascii=False, default=default)


def restored(row: Mapping[str, Any], documents: Collection[str]) -> dict[str, Any]:
    """Return a row that was read of the JSON of `dumps` with NaN and infinity in its columns. Those within values stay
    as they are, and so do columns of objects, `documents` in lower case: what looks alike may be what somebody sent."""
    return {name: value if name.lower() in documents else _restored(value) for name, value in row.items()}


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
    made = default(value)
    return made if made is value else _worded(made, default)


def _restored(value: Any) -> Any:
    word = value.get(_FLOAT) if isinstance(value, dict) and len(value) == 1 else None
    return _WORDS.get(word, value) if isinstance(word, str) else value
