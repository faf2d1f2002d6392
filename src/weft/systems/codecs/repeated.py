"""Keys that are in one object of JSON twice: parsers keep the last, and nobody knows which was meant."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from weft.systems.codecs.columns import json_of


class RepeatedKeyError(Exception):
    """An object has a key twice; the argument is the key."""


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object, for parsers of Python's `json`; raise for one with a key twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        keys: set[str] = set()
        raise RepeatedKeyError(next(key for key, _ in pairs if key in keys or keys.add(key)))  # type: ignore[func-returns-value]
    return members


def repeated_keys(texts: Sequence[bytes], parsed: Sequence[Any]) -> dict[int, str]:
    """Return which texts have a key twice in one object, and that key; `parsed` came out of them. Each key has a colon,
    so that one which was dropped is missed when all is written again, unless a text escapes colons."""
    if colons_of(texts) == json_of(parsed).count(":"):
        return {}
    keys = {number: _repeated_key(text) for number, text in enumerate(texts)}
    return {number: key for number, key in keys.items() if key is not None}


def colons_of(texts: Iterable[bytes]) -> int:
    """Return how many colons texts have; fewer than any if one of them may be written as an escape."""
    whole = b"\n".join(texts)
    # In full: many writers escape < and >, which begin alike.
    return -1 if b"\\u003a" in whole or b"\\u003A" in whole else whole.count(b":")


def _repeated_key(text: bytes) -> str | None:
    try:
        _decode(text.decode())
    except RepeatedKeyError as error:
        return str(error)
    except (ValueError, RecursionError):  # which the first parser took
        pass
    return None


_decode = json.JSONDecoder(object_pairs_hook=once, parse_int=str, parse_float=str, strict=False).decode
