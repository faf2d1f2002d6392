"""The kinds of values that a column of messages has, and the type that follows from them: that of most values.

Kinds are a plain dict, which travels as JSON: how many values there are of each kind, under `items` the kinds of the
elements of arrays, under `keys` those of the values of objects by key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from weft.systems.codecs.columns import WHOLE

Kinds = dict[str, Any]
EXACT = 1 << 53
"""Up to here each integer is a float too."""
_RANGES = {
    "int": range(-EXACT, EXACT + 1),
    "long": range(-(1 << 63), 1 << 63),
    "whole": range(1 - 10**38, 10**38),
}
# A float that is `round` is also an integer: which of them a task reads depends on what it read before.
_NUMBERS = ("int", "long", "whole", "huge", "round", "float")
# The first wins a tie: an odd value is a text more often than anything else.
_FAMILIES = {"bool": ("bool",), "number": _NUMBERS, "list": ("list",), "object": ("object",), "text": ("text",)}
_OF_TYPES = {bool: "bool", str: "text", list: "list", dict: "object"}


def of_values(values: Iterable[Any]) -> Kinds:
    """Return the kinds of JSON values, as Python has them."""
    present = [value for value in values if value is not None]
    counts: Kinds = {}
    for kind, count in Counter(map(type, present)).items():
        if kind in (int, float):
            counts.update(Counter(_of_number(value) for value in present if type(value) is kind))
        else:
            counts[_OF_TYPES[kind]] = count
    if "list" in counts:
        counts["items"] = of_values(inner for value in present if type(value) is list for inner in value)
    if "object" in counts:
        objects = [value for value in present if type(value) is dict]
        names = dict.fromkeys(name for value in objects for name in value)
        counts["keys"] = {name: of_values(value.get(name) for value in objects) for name in names}
    return counts


def _of_number(value: Any) -> str:
    if isinstance(value, float):
        return "round" if value.is_integer() and abs(value) <= EXACT else "float"
    return next((kind for kind, values in _RANGES.items() if value in values), "huge")


def of_array(array: pa.Array) -> Kinds:
    """Return the kinds of the values of an array, as it was read from JSON."""
    types, count = pa.types, len(array) - array.null_count
    if not count:
        return {}
    if types.is_list(array.type):
        return {"list": count, "items": of_array(array.flatten())}
    if types.is_struct(array.type):
        names = [each.name for each in array.type]
        return {"object": count, "keys": dict(zip(names, map(of_array, array.flatten()), strict=True))}
    if types.is_floating(array.type):
        round_ones = pc.and_(pc.equal(array, pc.floor(array)), pc.less_equal(pc.abs(array), float(EXACT)))
        return _two("round", "float", count, round_ones)
    if types.is_integer(array.type):
        bounds = pc.min_max(array)
        if bounds["min"].as_py() >= -EXACT and bounds["max"].as_py() <= EXACT:
            return {"int": count}
        return _two("int", "long", count, pc.and_(pc.greater_equal(array, -EXACT), pc.less_equal(array, EXACT)))
    named = ((types.is_boolean, "bool"), (types.is_decimal, "whole"))
    return {next((kind for matches, kind in named if matches(array.type)), "text"): count}


def _two(one: str, other: str, count: int, is_one: pa.Array) -> Kinds:
    """Return how many values are of each of two kinds."""
    ones = pc.sum(is_one).as_py()
    return {kind: each for kind, each in ((one, ones), (other, count - ones)) if each}


def merged(parts: Iterable[Kinds]) -> Kinds:
    """Return the kinds of all these together."""
    all_of_them: Kinds = {}
    for part in parts:
        for kind, counted in part.items():
            if kind == "items":
                all_of_them[kind] = merged((all_of_them.get(kind, {}), counted))
            elif kind == "keys":
                all_of_them[kind] = merged_columns((all_of_them.get(kind, {}), counted))
            else:
                all_of_them[kind] = all_of_them.get(kind, 0) + counted
    return all_of_them


def merged_columns(parts: Iterable[Mapping[str, Kinds]]) -> dict[str, Kinds]:
    """Return the kinds of several columns, each by its name."""
    columns: dict[str, list[Kinds]] = {}
    for part in parts:
        for name, counted in part.items():
            columns.setdefault(name, []).append(counted)
    return {name: counted[0] if len(counted) == 1 else merged(counted) for name, counted in columns.items()}


def is_mixed(kinds: Kinds) -> bool:
    """Return whether no type holds all of these values as they are."""
    families = [name for name, members in _FAMILIES.items() if any(each in kinds for each in members)]
    if len(families) > 1 or "huge" in kinds or (_count(kinds, "float", "round") and _count(kinds, "long", "whole")):
        return True
    return any(map(is_mixed, (*filter(None, [kinds.get("items")]), *kinds.get("keys", {}).values())))


def type_of(kinds: Kinds) -> pa.DataType:
    """Return the type that most of these values have; null where there are none."""
    totals = {name: _count(kinds, *members) for name, members in _FAMILIES.items()}
    family = max(totals, key=lambda name: totals[name])
    if not totals[family]:
        return pa.null()
    if family == "list":
        return pa.list_(type_of(kinds["items"]))
    if family == "object":
        return pa.struct([(name, type_of(each)) for name, each in kinds["keys"].items()])
    return {"bool": pa.bool_(), "text": pa.string()}.get(family) or _number(kinds)


def _number(kinds: Kinds) -> pa.DataType:
    """Return the type of most numbers. Integers that no float is equal to are kept rather than a few fractions."""
    large = _count(kinds, "long", "whole", "huge")
    if _count(kinds, "float") > large or (not large and _count(kinds, "round")):
        return pa.float64()
    return WHOLE if _count(kinds, "whole", "huge") else pa.int64()


def _count(kinds: Kinds, *members: str) -> int:
    return sum(kinds.get(each, 0) for each in members)


def widened(known: pa.DataType, kinds: Kinds, *, widens: bool, grows: bool = True) -> pa.DataType:
    """Return the type of a column that had one already, and now has these values too. `widens`: an integer may become a
    wider number, unless that would alter another one. `grows`: objects may have new keys. What was undecided, such as
    the elements of an empty array, is decided."""
    types = pa.types
    if types.is_null(known):
        return type_of(kinds)
    if types.is_list(known):
        return pa.list_(widened(known.value_type, kinds.get("items", {}), widens=widens, grows=grows))
    if types.is_struct(known):
        keys = dict(kinds.get("keys", {}))
        fields = [
            (each.name, widened(each.type, keys.pop(each.name, {}), widens=widens, grows=grows)) for each in known
        ]
        return pa.struct([*fields, *((name, type_of(each)) for name, each in keys.items() if grows)])
    if widens and known.equals(pa.int64()):
        if _count(kinds, "whole"):
            return WHOLE
        if _count(kinds, "float") and not _count(kinds, "long"):
            return pa.float64()
    return known


def settled(
    columns: Mapping[str, Kinds],
    known: Mapping[str, pa.DataType],
    declared: Collection[str] = (),
    *,
    widens: bool = True,
    grows: bool = True,
) -> dict[str, pa.DataType]:
    """Return the types under which messages must be parsed once more: of columns with values of several types, and of
    known ones that are wider now. All names are in small letters."""
    types = {}
    for name, kinds in columns.items():
        if name not in known:
            if is_mixed(kinds):
                types[name] = type_of(kinds)
        elif name not in declared:
            wider = widened(known[name], kinds, widens=widens, grows=grows)
            if not wider.equals(known[name]):
                types[name] = wider
    return types
