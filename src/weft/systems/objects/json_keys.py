"""Lines of JSON in which keys are one column: Spark takes the last of them, or refuses the whole batch. And lines with
more than one object: Spark takes the first."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from weft.spark_support.lazy import F, T
from weft.systems.codecs.repeated import RepeatedKeyError, once

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

TWICE = "It has a key twice, two keys that are one column, or more than one object."
# The key of a line beside one that may have more than one object, so that looking for one costs no pass of its own.
MAY_HAVE_MORE = "_weft_more"
_decode_parts = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


def has_twice(schema: StructType) -> bool:
    """Return whether Spark found a key twice in one object: of such a line it makes two columns."""
    return any(len(set(each.names)) < len(each.names) for each in _objects(schema))


def _objects(kind: DataType) -> Iterator[StructType]:
    if isinstance(kind, T.ArrayType):
        yield from _objects(kind.elementType)
    elif isinstance(kind, T.StructType):
        yield kind
        for each in kind:
            yield from _objects(each.dataType)


def spellings(names: Collection[str], known: Collection[str]) -> dict[str, str]:
    """Return, by its name in small letters, how a column is spelled that keys spell in several ways: as it was before,
    else as the first of them."""
    before = {name.lower(): name for name in known}
    several = {name for name, times in Counter(map(str.lower, set(names))).items() if times > 1}
    return {name: before.get(name, min(each for each in names if each.lower() == name)) for name in several}


def one_key_each(names: Mapping[str, str], is_strict: bool, line: str | None) -> list[str] | None:
    """Return the objects of a line, their keys spelled as columns are; `None` where two keys are one column, and where
    another object follows without a comma. A line that is no JSON stays as it is, and is none if this `is_strict`:
    Spark may see keys in what Python cannot read."""
    if line is None:
        return None
    try:
        value = json.loads(line, object_pairs_hook=once)
        elements = [bytes(each).decode() for each in _decode_elements(line)] if isinstance(value, list) else [line]
    except RepeatedKeyError:
        return None
    except (ValueError, RecursionError) as error:
        return None if is_strict or _another_follows(error) else [line]
    rows = value if isinstance(value, list) else [value]
    if not all(isinstance(row, dict) for row in rows):
        return [line]
    if any(len({name.lower() for name in row}) < len(row) for row in rows):
        return None
    return [_spelled(names, row, element) for row, element in zip(rows, elements, strict=True)]


def _another_follows(error: Exception) -> bool:
    if not isinstance(error, json.JSONDecodeError) or error.msg != "Extra data":
        return False
    return error.doc.startswith("{", error.pos)


def _spelled(names: Mapping[str, str], row: Collection[str], text: str) -> str:
    if all(names.get(name.lower(), name) == name for name in row):
        return text
    try:
        parts = _decode_parts(text)
    except msgspec.DecodeError:  # what Python takes for JSON, as NaN
        return text
    keys = (msgspec.json.encode(names.get(name.lower(), name)) for name in parts)
    pairs = (key + b":" + bytes(part) for key, part in zip(keys, parts.values(), strict=True))
    return (b"{" + b",".join(pairs) + b"}").decode()


def objects_of(line: Column, names: Mapping[str, str], *, is_strict: bool) -> Column:
    """Return the objects of lines as `one_key_each` makes them. What is not UTF-8 stays: Python gets it altered."""
    objects = F.udf(partial(one_key_each, dict(names), is_strict), "array<string>", useArrow=False)(line)
    return F.when(F.is_valid_utf8(line), objects).otherwise(F.array(line))


def has_key_twice(line: Column) -> Column:
    """Return whether a line has a key twice, not counting those of objects in it: this needs no Python."""
    keys = F.json_object_keys(line)
    return F.array_size(keys) > F.array_size(F.array_distinct(keys))


def marked(lines: DataFrame) -> DataFrame:
    """Return lines, and beside each that may have more than one object a line that says so."""
    line = F.col("value")
    both = F.array(line, F.lit(f'{{"{MAY_HAVE_MORE}": true}}'))
    return lines.select(F.explode(F.when(_may_have_more(line), both).otherwise(F.array(line))).alias("value"))


def _may_have_more(line: Column) -> Column:
    return line.contains("}{") | line.contains("} {")


def some_have_more(lines: DataFrame) -> bool:
    """Return whether a line has more than one object."""
    line = F.col("value")
    has_more = F.udf(lambda text: one_key_each({}, False, text) is None, "boolean", useArrow=False)
    return not lines.where(_may_have_more(line)).where(has_more(line)).isEmpty()
