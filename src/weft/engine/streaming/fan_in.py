"""Columns that several sources have: one column of the rows of all, of a type that holds every value exactly.

Spark would unite any two types: of an integer and a double it makes a double, of a number and a text a number.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.engine.streaming.target_columns import is_own
from weft.errors import DeclarationError
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.pipelines.streaming.windows import Window
from weft.spark_support.columns import HINT
from weft.spark_support.lazy import F, T
from weft.spark_support.sessions import union_of
from weft.systems.stream_source import FrameRows, ReaderRows

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

# How many digits Spark gives to integers that become decimals, and up to which number a float holds each of them.
_DIGITS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 20}
_EXACT_IN = {"float": ("tinyint", "smallint"), "double": ("tinyint", "smallint", "int", "float")}
_NAMES = {"bigint": "int64", "int": "int32", "double": "float64", "float": "float32", "boolean": "bool"}
_NAMES |= {"binary": "bytes", "timestamp_ntz": "timestamp without a time zone"}

IsRead = Callable[[str], bool]
"""Says whether a column of the sources is read."""


class Clash(NamedTuple):
    """A column for which no type holds the values of two sources exactly."""

    column: str
    one: tuple[str, DataType]
    other: tuple[str, DataType]

    def error(self) -> DeclarationError:
        (one, kind), (other, another) = self.one, self.other
        return DeclarationError(
            f"The column {self.column!r} is {_shown(kind)} in {one} and {_shown(another)} in {other}, and no type "
            "holds the values of both exactly.",
            hint="Give it one type in both: in the fields of a stream, or for messages and files by "
            f'weft.Source(…, columns={{"{self.column}": …}}). Or name the columns in transform_sql and leave this '
            "one out. Or read them by two pipelines, each of which casts it in its transform_sql.",
        )


def united(one: DataType, other: DataType) -> DataType | None:
    """Return the type that Spark makes of two if it holds each value of both exactly; else `None`."""
    names = one.simpleString(), other.simpleString()
    if names[0] == names[1] or isinstance(other, T.NullType):
        return one
    if isinstance(one, T.NullType):
        return other
    if isinstance(one, T.StructType) and isinstance(other, T.StructType):
        types: dict[str, DataType | None] = {each.name: each.dataType for each in one}
        for each in other:
            before = types.get(each.name)
            types[each.name] = each.dataType if before is None else united(before, each.dataType)
        fields = [T.StructField(name, kind) for name, kind in types.items() if kind is not None]
        return T.StructType(fields) if len(fields) == len(types) else None
    if isinstance(one, T.ArrayType) and isinstance(other, T.ArrayType):
        inner = united(one.elementType, other.elementType)
        # Spark adds the keys that one of them lacks to objects, not to those of arrays.
        is_same = not isinstance(one.elementType, T.StructType)
        return T.ArrayType(inner) if inner is not None and is_same else None
    whole = [name for name in names if name in _DIGITS]
    if len(whole) == 2:
        return one if _DIGITS[names[0]] > _DIGITS[names[1]] else other
    for kind, name, another in ((one, names[0], names[1]), (other, names[1], names[0])):
        if another in _EXACT_IN.get(name, ()):
            return kind
    digits = [_precision(each) for each in (one, other)]
    if None in digits:
        return None
    scale = max(each[1] for each in digits if each)
    precision = max(each[0] - each[1] for each in digits if each) + scale
    return T.DecimalType(precision, scale) if precision <= 38 else None


def _precision(kind: DataType) -> tuple[int, int] | None:
    if isinstance(kind, T.DecimalType):
        return kind.precision, kind.scale
    digits = _DIGITS.get(kind.simpleString())
    return None if digits is None else (digits, 0)


def _shown(kind: DataType) -> str:
    text = kind.simpleString()
    return _NAMES.get(text, text)


def clashes(schemas: Iterable[tuple[str, Mapping[str, DataType]]]) -> list[Clash]:
    """Return the columns whose types cannot be united exactly. Spark takes `Id` and `id` for one column."""
    first_types: dict[str, tuple[str, DataType]] = {}
    clashing: dict[str, Clash] = {}
    for source, types in schemas:
        for name, kind in types.items():
            key = name.lower()
            if key not in first_types:
                first_types[key] = source, kind
            elif (both := united(first_types[key][1], kind)) is None:
                clashing.setdefault(key, Clash(name, first_types[key], (source, kind)))
            else:
                first_types[key] = first_types[key][0], both
    return list(clashing.values())


def refuse_clashes(schemas: Iterable[tuple[str, Mapping[str, DataType]]], is_read: IsRead) -> list[str]:
    """Raise for a column whose types cannot be united exactly; return those of them that nothing reads."""
    unread = []
    for clash in clashes(schemas):
        if is_read(clash.column):
            raise clash.error()
        unread.append(clash.column)
    return unread


def columns_read(pipeline: StreamingPipeline) -> IsRead:
    """Return what says whether the window of a pipeline, or else its SQL, may read a column."""
    return read_by(pipeline.transform_sql) if pipeline.window is None else read_by_window(pipeline.window)


def read_by(sql: str | None) -> IsRead:
    """Return what says whether SQL may read a column; without SQL all columns are written."""
    return functools.partial(_reads, sql)


def read_by_window(window: Window) -> IsRead:
    """Return what says whether a window reads a column."""
    aggregated = (name for each in window.aggregations for name in each.columns)
    names = {each.lower() for each in (window.event_time_column, *window.group_by, *aggregated)}
    return lambda column: column.lower() in names


def _reads(sql: str | None, column: str) -> bool:
    from sqlglot import exp, parse_one
    from sqlglot.errors import SqlglotError

    if sql is None or column.lower() in sql.lower():
        return True
    # `TABLE source` has all columns, and a doubled backtick spells a name in another way than it is.
    if re.search(r"\btable\b", sql, re.IGNORECASE) or "``" in sql:
        return True
    try:
        tree = parse_one(sql, read="spark")
    except SqlglotError:
        return True
    # It joins by all columns that both have.
    if any(str(each.args.get("method") or "").upper() == "NATURAL" for each in tree.find_all(exp.Join)):
        return True
    return any(not isinstance(each.parent, exp.Count) for each in tree.find_all(exp.Star))


def sets_aside(pipeline: StreamingPipeline) -> bool:
    """Return whether a pipeline has a place for bad rows, or drops them."""
    return pipeline.transform_on_error != "fail" or pipeline.dead_letters is not None


def refused(
    types: Mapping[str, Mapping[str, DataType]],
    declared: Mapping[str, Collection[str]],
    before: Mapping[str, Collection[str]],
    is_read: IsRead,
) -> dict[str, dict[str, str]]:
    """Return, by source, the columns whose types do not go together with those of the other sources, and why. The type
    that a source declares stands; else one that a batch `before` had, else the type of the first source. So the answer
    does not depend on which sources have rows."""
    reasons: dict[str, dict[str, str]] = {}
    for clash in clashes(types.items()):
        key = clash.column.lower()
        if not is_read(clash.column):
            continue
        having = [
            (_is_new(key, declared.get(source, ())), _is_new(key, before.get(source, ())), number, source, name, kind)
            for number, (source, columns) in enumerate(types.items())
            for name, kind in columns.items()
            if name.lower() == key
        ]
        first, *others = sorted(having, key=lambda each: each[:3])
        held = first[-1]
        for *_, source, name, kind in others:
            if (both := united(held, kind)) is not None:
                held = both
                continue
            what = f"{name!r} is {_shown(kind)}, and in {first[3]} it is {_shown(held)}"
            reasons.setdefault(source, {})[name] = f"{what}: no type holds the values of both exactly."
    return reasons


def _is_new(key: str, names: Collection[str]) -> bool:
    return key not in {each.lower() for each in names}


def rows_of_all(parts: Sequence[tuple[str, Any]], is_read: IsRead, *, first_decides: bool = False) -> Any:
    """Return one DataFrame of those of several sources, with the columns of all but those that clash and that nothing
    reads. Where the `first_decides`, others lack a column of another type."""
    if len(parts) == 1:
        return parts[0][1]
    if first_decides:
        types = {source: types_of(frame.schema) for source, frame in parts}
        lacking = refused(types, {}, {}, is_read)
        parts = [(source, frame.drop(*lacking.get(source, ()))) for source, frame in parts]
    unread = refuse_clashes(((source, types_of(frame.schema)) for source, frame in parts), is_read)
    rows, gone = [frame for _, frame in parts], {name.lower() for name in unread}
    if gone:
        rows = [each.drop(*(name for name in each.columns if name.lower() in gone)) for each in rows]
    return union_of(_all_hinted(rows))


def _all_hinted(frames: Sequence[Any]) -> list[Any]:
    """Return DataFrames that all have the columns of JSON and UUIDs that some have, with nulls: what the texts of a
    column are is known only where all say so."""
    hinted = {each.name.lower(): each for frame in frames for each in frame.schema if HINT in (each.metadata or {})}
    alike = []
    for frame in frames:
        others = {each.name.lower(): each for each in frame.schema}
        nulls = {
            others.get(name, each).name: F.lit(None).cast(each.dataType).alias(each.name, metadata=each.metadata)
            for name, each in hinted.items()
            if name not in others or isinstance(others[name].dataType, T.NullType)
        }
        alike.append(frame.withColumns(nulls) if nulls else frame)
    return alike


def types_of(schema: StructType) -> dict[str, DataType]:
    """Return the types of columns by their names."""
    return {each.name: each.dataType for each in schema}


def schema_of(types: Mapping[str, DataType]) -> StructType:
    """Return columns of these types, but for those of Weft."""
    return T.StructType([T.StructField(name, kind) for name, kind in types.items() if not is_own(name)])


# ------------------------------------------------------------------------------------------- types that values decide


def for_values(types: Mapping[str, DataType]) -> dict[str, DataType]:
    """Return types under which the values of another source are read: the wide ones of those that JSON has."""
    wide = {"tinyint": T.LongType(), "smallint": T.LongType(), "int": T.LongType(), "float": T.DoubleType()}
    return {
        name: wide.get(kind.simpleString(), kind)
        for name, kind in types.items()
        if not is_own(name) and not isinstance(kind, T.NullType)
    }


def types_of_rows(rows: FrameRows | ReaderRows) -> dict[str, DataType]:
    """Return the types of the columns of a source in a batch; of one of nulls alone it is not known."""
    from pyspark.sql.pandas.types import from_arrow_schema

    if isinstance(rows, ReaderRows):
        schema = from_arrow_schema(rows.columns(), prefer_timestamp_ntz=True)
    else:
        schema = rows.found or rows.frame().schema
    return {name: kind for name, kind in types_of(schema).items() if not isinstance(kind, T.NullType)}


def missing(
    source: str, others: Iterable[Mapping[str, DataType]], types: Mapping[str, Mapping[str, DataType]]
) -> dict[str, DataType]:
    """Return the types that columns have in other sources, the first of each, and that this one has not had."""
    own = {name.lower() for name in types[source]}
    columns: dict[str, tuple[str, DataType]] = {}
    for each in others:
        for name, kind in for_values(each).items():
            if name.lower() not in own:
                columns.setdefault(name.lower(), (name, kind))
    return dict(columns.values())


def updated(types: Mapping[str, DataType], newer: Mapping[str, DataType]) -> dict[str, DataType]:
    """Return the types of columns, each as it was last, in the spelling that it had last."""
    names = {name.lower() for name in newer}
    return {**{name: kind for name, kind in types.items() if name.lower() not in names}, **newer}


def settled(
    types: Mapping[str, Mapping[str, DataType]], fixed: Mapping[str, Mapping[str, DataType]], *, widens: bool
) -> dict[str, dict[str, DataType]]:
    """Return by source the types of columns under which its values must be read again: the one that is `fixed` in some
    source, else the double of an integer and a double, else that of the first."""
    again: dict[str, dict[str, DataType]] = {}
    for clash in clashes(types.items()):
        key = clash.column.lower()
        all_of_them = [kind for each in types.values() for name, kind in each.items() if name.lower() == key]
        held = [kind for each in fixed.values() for name, kind in each.items() if name.lower() == key]
        numbers = {each.simpleString() for each in all_of_them}
        chosen = held[0] if held else all_of_them[0]
        if not held and widens and numbers == {"bigint", "double"}:
            chosen = T.DoubleType()
        for source, columns in types.items():
            own = {name.lower() for name in fixed.get(source, {})}
            for name, kind in columns.items():
                if name.lower() == key and key not in own and kind.simpleString() != chosen.simpleString():
                    again.setdefault(source, {})[name] = for_values({name: chosen})[name]
    return again


def unchanged(
    asked: Mapping[str, DataType], before: Mapping[str, DataType], now: Mapping[str, DataType]
) -> dict[str, DataType]:
    """Return the types of columns that were read again under other types, and have the ones of before nevertheless."""
    return {
        name: before[name]
        for name, kind in asked.items()
        if name in before
        and name in now
        and before[name].simpleString() == now[name].simpleString() != kind.simpleString()
    }
