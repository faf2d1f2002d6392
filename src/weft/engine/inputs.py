"""The input of a load: SQL, a path, a stream, a frame or rows. `understand` decides which of them data is."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa

from weft.columns import (
    LOCAL_TIME,
    UTC_TIME,
    canonical_batch,
    canonical_field,
    canonical_schema,
    documents_of,
    hint_of,
    hinted,
    is_nested,
    leaves_calendar,
)
from weft.errors import DeclarationError, NotFoundError
from weft.streams.declare import Stream
from weft.systems.base import Connection, system_for
from weft.systems.sql import tokens
from weft.systems.stream_source import Packed

BATCH_ROWS = 65_536
_SQL = re.compile(
    # Past comments and a parenthesis; a path may begin with such a word too, but then goes on otherwise.
    r"\s*(--[^\n]*\n\s*|/\*.*?\*/\s*)*\(?\s*(select|with|values|table|from)(?=[\s(*])",
    re.IGNORECASE | re.DOTALL,
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class SourceSql:
    """A query, to be run by the source's database."""

    text: str


@dataclass(frozen=True)
class SparkSql:
    """Spark SQL over the tables and files of a connection that runs no queries itself."""

    text: str
    connection: Connection


@dataclass(frozen=True)
class Files:
    """A path or a prefix, on this machine or in an object store."""

    path: str


@dataclass(frozen=True)
class Events:
    """A stream."""

    stream: str | Stream


@dataclass(frozen=True)
class Frame:
    """A Spark DataFrame."""

    frame: Any
    packed: Packed | None = None
    """The same rows in a form that is faster to write."""


@dataclass(frozen=True)
class Memory:
    """Rows that this process has."""

    schema: pa.Schema
    batches: Iterable[pa.RecordBatch]
    with_documents: Callable[[Collection[str]], Memory] | None = None
    """Makes the same rows with these columns as JSON, in which objects have the keys that each was given; `None` where
    they are of one type already."""
    why_refused: str | None = None
    """Why the rows cannot be read, unless some of these columns are JSON."""


@dataclass(frozen=True)
class Readable:
    """Rows elsewhere that a task can read, by a `weft.engine.readers.RowReader`."""

    reader: Any


Input = SourceSql | SparkSql | Files | Events | Frame | Memory | Readable


def schema_of(rows: Input) -> pa.Schema:
    """Return the columns of a frame, of rows of this process, or of what a task reads."""
    if isinstance(rows, Frame):
        from weft.engine import frame_projection

        return frame_projection.schema_of(rows.frame)
    if isinstance(rows, Memory):
        return rows.schema
    assert isinstance(rows, Readable)
    schema: pa.Schema = rows.reader.schema
    return schema


def understand(data: object, *, has_source: bool, is_read_again: bool = False) -> Input:
    """Return what `data` is. With a `source=` connection a text is a query or a path there. `is_read_again`: rows of
    this process can be read several times."""
    if isinstance(data, Stream):
        return Events(data)
    if isinstance(data, os.PathLike):
        return Files(os.fspath(data))
    if isinstance(data, str):
        return _text(data, has_source)
    if type(data).__module__.startswith("pyspark."):
        if hasattr(data, "mapInArrow"):
            return Frame(data)
        raise DeclarationError(
            f"A load cannot read a value of type {type(data).__name__}.", hint="Give it a Spark DataFrame."
        )
    rows = _memory(data, is_read_again)
    return replace(rows, batches=list(rows.batches)) if is_read_again and rows.why_refused is None else rows


def for_connection(data: Input, connection: Connection) -> Input:
    """Return SQL as its source runs it: over files and Delta tables, Spark does."""
    system = system_for(connection.kind)
    is_for_spark = isinstance(data, SourceSql) and system.tables is None and system.takes_loads
    return SparkSql(data.text, connection) if is_for_spark else data  # type: ignore[union-attr]


def _text(text: str, has_source: bool) -> Input:
    if not text.strip():
        raise DeclarationError("The source of a load is an empty text.")
    if _SQL.match(text):
        query = tokens.without_end(text)
        if tokens.has_several(query):
            raise DeclarationError(
                f"One query is needed, and this has several statements: {' '.join(query.split())[:80]}",
                hint="Leave out what follows the first semicolon, or make one query of them.",
            )
        return SourceSql(query)
    if has_source:
        return Files(text)
    from weft.streams import runtime

    try:
        return Events(runtime.find(text))
    except NotFoundError as error:
        if _URL.match(text) or "/" in text or os.path.exists(text) or Path(text).suffix:
            return Files(text)
        raise DeclarationError(
            f"{text!r} is neither SQL nor a path nor a declared stream.",
            hint=f"SQL begins with SELECT or WITH. {error.hint or ''}".strip(),
        ) from None


def _memory(data: Any, is_read_again: bool = False) -> Memory:
    if isinstance(data, pa.Table | pa.RecordBatch):
        data = pa.table(data) if isinstance(data, pa.RecordBatch) else data
        return _of_table(data)
    if isinstance(data, pa.RecordBatchReader):
        return _of_batches(data.schema, data)
    if type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "columns"):
        return _of_pandas(data)
    if hasattr(data, "collect_schema") and hasattr(data, "collect"):  # a LazyFrame of polars
        data = data.collect()
    if type(data).__module__.partition(".")[0] == "polars" and hasattr(data, "columns"):
        data = _of_arrow_types(data)
    if hasattr(data, "__arrow_c_stream__"):
        return _of_table(pa.table(data))
    if isinstance(data, dict):
        raise DeclarationError("A load takes a list of dicts, not one dict.", hint="Put it in a list: [row].")
    if isinstance(data, list | tuple):
        if all(isinstance(row, dict) for row in data):
            return _of_given(rows_to_table(data), lambda name: [row.get(name) for row in data])
        data = iter(data)
    if isinstance(data, Iterable):
        return _of_iterator(iter(data), is_read_again)
    raise DeclarationError(
        f"A load cannot read a value of type {type(data).__name__}.",
        hint="It takes SQL, a Spark, polars or pandas frame, an Arrow table, rows as dicts, an iterator of these, "
        "a path or a stream. A model may return an Ibis expression too.",
    )


def _of_table(table: pa.Table) -> Memory:
    return _of_batches(table.schema, table.to_batches(max_chunksize=BATCH_ROWS))


def _of_batches(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Memory:
    wanted = canonical_schema(schema)
    return Memory(wanted, (canonical_batch(batch, wanted) for batch in batches))


def _of_arrow_types(frame: Any) -> Any:
    """Return a frame of polars without types that Arrow does not have; an error where it has Python's objects."""
    import polars as pl

    odd = [name for name, kind in frame.schema.items() if kind == pl.Object]
    if odd:
        # Arrow gets their addresses.
        raise DeclarationError(
            f"Column {odd[0]!r} has objects of Python's, which no table can hold.",
            hint="Give it a type of polars before, as texts have.",
        )
    wide = [name for name, kind in frame.schema.items() if str(kind) in ("Int128", "UInt128")]
    try:
        return frame.with_columns(pl.col(name).cast(pl.Decimal(38, 0)) for name in wide) if wide else frame
    except pl.exceptions.InvalidOperationError:
        raise DeclarationError(f"A column of {', '.join(wide)} has a number of more than 38 digits.") from None


def _of_pandas(frame: Any) -> Memory:
    """Return the rows of a frame, with those levels of its index that have a name. Objects are read as those of
    dicts, because pandas gives them no type."""
    if named := [name for name in frame.index.names if name is not None and name not in frame.columns]:
        frame = frame.reset_index(named)
    if not frame.columns.is_unique:
        twice = next(name for name in frame.columns if list(frame.columns).count(name) > 1)
        raise DeclarationError(f"Two columns of the frame have the name {str(twice)!r}.")
    nested: dict[str, list[Any]] = {}
    for name, column in frame.items():
        if column.dtype == object and not {*map(type, column)} <= {str, type(None)}:
            # A value that is missing may be NaN.
            pairs = zip(column.tolist(), column.isna(), strict=True)
            nested[str(name)] = [None if is_missing else value for value, is_missing in pairs]
    is_plain = [str(name) not in nested for name in frame.columns]
    try:
        plain = pa.Table.from_pandas(frame.loc[:, is_plain], preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError) as error:
        why = " ".join(map(str, error.args))
        raise DeclarationError(f"A column of the frame is of a type that no table can hold: {why}") from None
    columns = [_array(name, values, None) for name, values in nested.items()]
    typed = pa.Table.from_arrays([each for each, _ in columns], schema=pa.schema([field for _, field in columns]))
    both = [(plain if flag else typed).field(str(name)) for name, flag in zip(frame.columns, is_plain, strict=True)]
    arrays = [(typed if each.name in nested else plain).column(each.name) for each in both]
    return _of_given(pa.Table.from_arrays(arrays, schema=pa.schema(both)), nested.__getitem__)


def _of_iterator(pieces: Iterator[Any], is_read_again: bool) -> Memory:
    """Return the rows of an iterator of frames, tables, batches or dicts, of which only some are in memory at once."""
    first = next(pieces, None)
    if first is None:
        return Memory(pa.schema([]), [])
    if isinstance(first, dict):
        rows = [first, *itertools.islice(pieces, BATCH_ROWS - 1)]
        head = rows_to_table(rows)
        # Where objects are of one type, it can be read as that or as JSON.
        is_kept = is_read_again and any(map(is_nested, head.schema.types))
        return _of_given(head, lambda name: [row.get(name) for row in rows], list(pieces) if is_kept else pieces)
    of_first = _memory(first)
    return _of_pieces(of_first, list(pieces) if is_read_again and of_first.with_documents is not None else pieces)


def _of_pieces(head: Memory, pieces: Iterable[Any], documents: Collection[str] = ()) -> Memory:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from head.batches
        for piece in pieces:
            table = _memory(piece)
            if table.schema.names != head.schema.names:
                raise DeclarationError(
                    f"The batches of a load must have the same columns: first {', '.join(head.schema.names)}, "
                    f"then {', '.join(table.schema.names)}."
                )
            if documents and table.with_documents is not None:
                table = table.with_documents(documents)
            for batch in table.batches:
                yield canonical_batch(batch, head.schema)

    make = head.with_documents
    if make is None:
        return Memory(head.schema, batches(), why_refused=head.why_refused)
    return Memory(head.schema, batches(), lambda names: _of_pieces(make(names), pieces, names), head.why_refused)


def _of_given(
    table: pa.Table,
    values_of: Callable[[str], Sequence[Any]],
    more: Iterable[dict[str, Any]] = (),
    documents: Collection[str] = (),
) -> Memory:
    """Return the rows of a table whose columns were made of these values, and more rows, whose columns are
    the same."""
    typed = table
    for name in documents:
        at = table.schema.get_field_index(name)
        column = _documents(name, values_of(name), table.column(at).combine_chunks())
        table = table.set_column(at, hinted(name, "json"), column)
    schema = canonical_schema(table.schema)
    refused = next((each.metadata[_REFUSED].decode() for each in table.schema if each.type == _OF_NO_TYPE), None)

    def batches() -> Iterator[pa.RecordBatch]:
        if refused:
            raise DeclarationError(refused)
        for batch in table.to_batches(max_chunksize=BATCH_ROWS):
            yield canonical_batch(batch, schema)
        rest = iter(more)
        while some := list(itertools.islice(rest, BATCH_ROWS)):
            for batch in rows_to_table(some, schema).to_batches():
                yield canonical_batch(batch, schema)

    if documents or not any(map(is_nested, table.schema.types)):
        return Memory(schema, batches(), why_refused=refused)
    return Memory(schema, batches(), lambda names: _of_given(typed, values_of, more, names), refused)


def rows_to_table(rows: Iterable[dict[str, Any]], schema: pa.Schema | None = None) -> pa.Table:
    """Dicts as columns: those of all rows, in the order in which they first appear."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    if schema is not None:
        unknown = [name for name in names if name not in schema.names]
        if unknown:
            raise DeclarationError(
                f"A row has a column {unknown[0]!r} that the rows before it did not have.",
                hint="Give every row the same keys, or load a list, whose rows are all looked at first.",
            )
        names = dict.fromkeys(schema.names)
    arrays, fields = [], []
    for name in names:
        if not isinstance(name, str):
            raise DeclarationError(f"A row has the key {name!r}; column names are texts.")
        values = [row.get(name) for row in rows]
        array, field = _array(name, values, None if schema is None else schema.field(name))
        arrays.append(array)
        fields.append(field)
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


_OF_NO_TYPE, _REFUSED = pa.struct([("of no one type", pa.string())]), b"weft.refused"
"""Stands for the type of objects and lists that have none together, and in the metadata of their column why. As JSON
they can be stored."""


class _NoOneTypeError(DeclarationError):
    """Values of one column are of no one type."""


def _array(name: str, values: list[Any], field: pa.Field | None) -> tuple[pa.Array, pa.Field]:
    is_document = field is not None and hint_of(field) == "json"
    try:
        return _typed(name, values, field)
    except _NoOneTypeError as error:
        is_nested = all(value is None or isinstance(value, dict | list | tuple) for value in values)
        try:
            if not (is_document or field is None) or not is_nested or not all(map(_is_json, values)):
                raise
        except RecursionError:
            raise _too_deep(name) from None
        if is_document:
            return _documents(name, values, None), hinted(name, "json")
        return pa.nulls(len(values), _OF_NO_TYPE), pa.field(name, _OF_NO_TYPE, metadata={_REFUSED: error.what})


def _is_json(value: Any) -> bool:
    """Return whether JSON has a value, or a text in its place."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(each) for name, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or type(value) in _FAMILIES


def _typed(name: str, values: list[Any], field: pa.Field | None) -> tuple[pa.Array, pa.Field]:
    _refuse_mixed(name, values, None if field is None or hint_of(field) else field.type)
    is_document = field is not None and hint_of(field) == "json"
    if any(isinstance(value, UUID) for value in values):
        return pa.array([None if value is None else str(value) for value in values], pa.string()), hinted(name, "uuid")
    try:
        array = pa.array(values) if field is None or is_document else pa.array(values, field.type)
    except UnicodeEncodeError:
        raise _lone_surrogate(name) from None
    except OverflowError:
        what = "one is a whole number beyond 64 bits, which a Decimal holds"
        raise _NoOneTypeError(f"The values of column {name!r} are of no one type: {what}.") from None
    except (pa.ArrowException, TypeError) as error:
        raise _NoOneTypeError(f"The values of column {name!r} are of no one type: {error}") from None
    # Nanoseconds may be cut off here: only the range matters.
    in_microseconds = UTC_TIME if getattr(array.type, "tz", None) else LOCAL_TIME
    if pa.types.is_timestamp(array.type) and leaves_calendar(array.cast(in_microseconds, safe=False)):
        raise DeclarationError(f"A time of column {name!r} is outside of the years 1 to 9999 in UTC.")
    if is_document:
        return _documents(name, values, array), hinted(name, "json")
    return array, pa.field(name, array.type) if field is None else field


def _documents(name: str, values: Sequence[Any], array: pa.Array | None) -> pa.Array:
    """Return values as JSON. `array`: the same values of one type, if they have one."""
    canonical = None
    if array is not None and array.type != _OF_NO_TYPE:
        column = pa.field(name, array.type)
        batch = pa.RecordBatch.from_arrays([array], schema=pa.schema([column]))
        # What no table can hold is refused, as nanoseconds are.
        canonical = canonical_batch(batch, pa.schema([canonical_field(column)])).column(0)
    try:
        return documents_of(values, canonical)
    except UnicodeEncodeError:
        raise _lone_surrogate(name) from None
    except OverflowError:
        raise DeclarationError(f"A time of column {name!r} is outside of the years 1 to 9999 in UTC.") from None
    except RecursionError:
        raise _too_deep(name) from None


def _too_deep(name: str) -> DeclarationError:
    return DeclarationError(f"A value of column {name!r} is nested too deeply.")


def _lone_surrogate(name: str) -> DeclarationError:
    return DeclarationError(f"A value of column {name!r} has a lone surrogate, which no encoding can store.")


# What Arrow would make one type of, by altering some of the values: it cuts the time off, takes True for 1.0.
_FAMILIES: dict[type, str] = {
    bool: "booleans",
    **dict.fromkeys((int, float, Decimal), "numbers"),
    str: "texts",
    **dict.fromkeys((bytes, bytearray), "bytes"),
    date: "dates",
    datetime: "times",
    UUID: "UUIDs",
    **dict.fromkeys((list, tuple), "lists"),
    dict: "dicts",
}
_OF_ARROW: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pa.types.is_boolean, "booleans"),
    (lambda kind: pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind), "numbers"),
    (pa.types.is_string, "texts"),
    (pa.types.is_binary, "bytes"),
    (pa.types.is_date, "dates"),
    (lambda kind: pa.types.is_timestamp(kind) and kind.tz is None, "times without a zone"),
    (lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None, "times with a zone"),
)


def _family(kind: type) -> str | None:
    """Return the family of a type, or of that which it is made of, as pandas' times are of Python's."""
    if kind.__name__ == "NaTType":  # no time
        return None
    return next((_FAMILIES[each] for each in kind.__mro__ if each in _FAMILIES), None)


def _refuse_mixed(name: str, values: Collection[Any], kind: pa.DataType | None = None) -> None:
    """Refuse values of several types in one column, also within lists and dicts. `kind`: the type that it has."""
    kinds = {*map(type, values)}
    families = {family for each in kinds if (family := _family(each)) is not None}
    if "times" in families:
        families.remove("times")
        zones = {value.tzinfo is None for value in values if _family(type(value)) == "times"}
        families |= {"times without a zone" if each else "times with a zone" for each in zones}
    if time in kinds and any(type(value) is time and value.tzinfo is not None for value in values):
        # Arrow leaves it out.
        raise DeclarationError(f"A time of day of column {name!r} has a zone, which no table can hold.")
    families |= {family for matches, family in _OF_ARROW if kind is not None and families and matches(kind)}
    if len(families) > 1:
        raise _NoOneTypeError(f"The values of column {name!r} are of no one type: {' and '.join(sorted(families))}.")
    if list in kinds:
        inner = [each for value in values if type(value) is list for each in value]
        _refuse_mixed(name, inner, kind.value_type if kind is not None and pa.types.is_list(kind) else None)
    if dict in kinds:
        dicts = [value for value in values if type(value) is dict]
        known = {each.name: each.type for each in kind} if kind is not None and pa.types.is_struct(kind) else {}
        keys = {key for value in dicts for key in value}
        if kind is not None and pa.types.is_struct(kind) and (more := keys - known.keys()):
            # Arrow would leave it out.
            raise DeclarationError(
                f"An object of column {name!r} has a key {min(map(str, more))!r} that those before it did not have.",
                hint="Give every object the same keys, or load a list, whose rows are all looked at first.",
            )
        for key in keys:
            _refuse_mixed(f"{name}.{key}", [value[key] for value in dicts if key in value], known.get(key))
