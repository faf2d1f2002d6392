"""The columns of a frame, their types, however they are named, and how entries become them; tables as frames."""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, NoReturn, TypeGuard, get_args
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.columns import canonical_batch, canonical_schema
from weft.errors import DeclarationError, MissingExtraError, SchemaError, SettingsError, did_you_mean
from weft.systems.pages import FeedPage, FieldNames, PageFeed, Rejected, name_columns
from weft.types import FieldType, check_value

OnError = Literal["null", "raise", "quarantine"]
To = Literal["polars", "arrow", "pandas", "spark"]
_log = logging.getLogger("weft.dataframes")
_SHOWN_CHARACTERS = 60
# Longer ones are beyond every integer.
_HEX = "0[xX][0-9a-fA-F]{1,64}"
_EXPONENT = "[eE][+-]?[0-9]{1,9}"
_FLOAT = rf"-?[0-9]+(\.[0-9]*({_EXPONENT})?|{_EXPONENT})"
_ODD_WHOLE_NUMBER = f"^({_HEX}|{_FLOAT})$"
_MOST_DIGITS = 20
_USUAL_UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
# A value that does not fit: its row, its column, and why.
Fault = tuple[int, str, str]


def check_choice(option: str, value: object, literal: Any) -> None:
    """Raise for an option that is not one of the words of a `Literal`."""
    words = get_args(literal)
    if value not in words:
        listed = ", ".join(map(repr, words))
        raise SettingsError(f"{option} is {listed}; {value!r} is none of them.", hint=did_you_mean(str(value), words))


@dataclass(frozen=True)
class Layout:
    """The columns of a frame. A column whose name is `None` is left out."""

    schema: Mapping[str, Any] | None = None
    id_column: str | None = "_id"
    timestamp_column: str | None = "_ts"
    sequence_column: str | None = None
    delivery_column: str | None = None
    stream_column: str | None = None
    on_error: OnError = "null"
    columns: frozenset[str] | None = None
    """The columns to make, if not all."""
    schema_types: dict[str, Any] = field(init=False, default_factory=dict)
    """The types of the schema as it has them, under the names of the columns."""
    types: dict[str, pa.DataType] | None = field(init=False, default=None)
    """The types of the columns in Arrow."""
    checks: dict[str, _Check] = field(init=False, default_factory=dict)
    """What the texts of a column must be, where its Arrow type does not say it."""

    def __post_init__(self) -> None:
        check_choice("on_error", self.on_error, OnError)
        names = (self.stream_column, self.id_column, self.timestamp_column, self.sequence_column, self.delivery_column)
        own = [name for name in names if name is not None]
        for name in own:
            if not isinstance(name, str) or not name:
                raise DeclarationError(f"The name of a column is a text, not {name!r}.")
            if own.count(name) > 1:
                raise DeclarationError(f"Two columns would have the name {name!r}.", hint="Give one another name.")
        if self.schema is not None:
            types = _arrow_types(self.schema)
            columns = name_columns([name.encode() for name in types], self.reserved)
            named = zip(columns, types.values(), strict=True)
            object.__setattr__(self, "types", {name: kind for name, kind in named if self._has(name)})
            object.__setattr__(self, "schema_types", dict(zip(columns, self.schema.values(), strict=True)))
            checks = {name: check for name, kind in self.schema_types.items() if (check := _check_of(kind)) is not None}
            object.__setattr__(self, "checks", checks)
            if not columns and not own:
                raise SettingsError("A frame without any column has no rows.", hint="Name a field, or include the id.")

    @property
    def _own(self) -> dict[str | None, pa.DataType]:
        return {
            self.stream_column: pa.string(),
            self.id_column: pa.string(),
            self.timestamp_column: pa.int64(),
            self.sequence_column: pa.int64(),
            self.delivery_column: pa.int64(),
        }

    @cached_property
    def reserved(self) -> frozenset[str]:
        """The names that fields of entries cannot have."""
        return frozenset(name for name in self._own if name is not None)

    @cached_property
    def own_schema(self) -> pa.Schema:
        """The columns that are not fields."""
        return pa.schema([(name, kind) for name, kind in self._own.items() if self._has(name)])

    @cached_property
    def arrow_schema(self) -> pa.Schema | None:
        """All columns, where the fields are known."""
        if self.types is None:
            return None
        return pa.schema([*self.own_schema, *(pa.field(name, kind) for name, kind in self.types.items())])

    @property
    def field_names(self) -> FieldNames:
        """Which fields of an entry become columns."""
        return FieldNames(self.reserved, self.types if self.types is not None else self.columns)

    def _has(self, name: str | None) -> TypeGuard[str]:
        return name is not None and (self.columns is None or name in self.columns)

    def convert(self, page: FeedPage, stream: str) -> tuple[pa.RecordBatch, list[Rejected]]:
        """Return the columns of a page, and the entries that are in no row because they do not fit."""
        faults: list[Fault] = []
        arrays: dict[str, pa.Array] = {}
        if self._has(self.stream_column):
            arrays[self.stream_column] = pa.repeat(pa.scalar(stream), len(page))
        if self._has(self.id_column):
            arrays[self.id_column] = page.ids
        if self._has(self.timestamp_column) or self._has(self.sequence_column):
            for name, numbers in zip((self.timestamp_column, self.sequence_column), page.times(), strict=True):
                if self._has(name):
                    arrays[name] = _cast(numbers, pa.int64(), name, faults)
        if self._has(self.delivery_column):
            arrays[self.delivery_column] = pa.array(page.deliveries or [1] * len(page), pa.int64())
        if self.types is None:
            for name, values in page.fields.items():
                arrays[name] = values if page.is_typed else _text_or_bytes(values)
            for name, texts in page.unfit.items():
                for row in np.flatnonzero(texts.is_valid()).tolist():
                    faults.append((row, name, _no(texts[row], "value of its declared type")))
        else:
            for name, kind in self.types.items():
                values, unfit = page.fields.get(name), page.unfit.get(name)
                arrays[name] = pa.nulls(len(page), kind) if values is None else self._parse(values, kind, name, faults)
                if unfit is not None:
                    arrays[name] = pc.coalesce(arrays[name], self._parse(unfit, kind, name, faults))
        batch = pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))
        if not faults:
            return batch, []
        return self._judge(batch, page, stream, faults)

    def _parse(self, values: pa.Array, kind: pa.DataType, name: str, faults: list[Fault]) -> pa.Array:
        parsed, check = _parse(values, kind, name, faults), self.checks.get(name)
        return parsed if check is None else _checked(parsed, check, name, faults)

    def _judge(
        self, batch: pa.RecordBatch, page: FeedPage, stream: str, faults: list[Fault]
    ) -> tuple[pa.RecordBatch, list[Rejected]]:
        row, name, why = min(faults)
        first = f"the entry {page.ids[row]} of {stream!r}: {name!r} {why}"
        if self.on_error == "raise":
            # A declared stream gives its member the events again by itself, a group of Redis does not.
            again = "" if page.is_typed else ": in a group, only reads with claim_idle have these entries again"
            ways = 'on_error="null"' if page.is_typed else 'on_error="null" or "quarantine"'
            other = f'schema={{{name!r}: "string"}} reads them as texts'
            if name in page.fields and _is_bytes(_text_or_bytes(page.fields[name]).type):
                other = f'schema={{{name!r}: "bytes"}} reads them as bytes'
            if name == self.timestamp_column:
                other = "include_timestamp=False leaves it out"
            raise SchemaError(
                f"Cannot read {first}.",
                index=row,
                field=name,
                hint=f"{ways} goes on without such values, {other}. Nothing was acknowledged{again}.",
            )
        if self.on_error == "null":
            _log.warning("%d values of %r do not fit and are null, the first in %s.", len(faults), stream, first)
            return batch, []
        whys: dict[int, str] = {}
        for row, name, why in faults:
            whys[row] = f"{whys[row]}; {name!r} {why}" if row in whys else f"{name!r} {why}"
        keep = np.ones(len(page), np.bool_)
        keep[list(whys)] = False
        return batch.filter(pa.array(keep)), [Rejected(page.ids[row].as_py(), whys[row]) for row in sorted(whys)]


def _arrow_types(schema: Mapping[str, Any]) -> dict[str, pa.DataType]:
    if not isinstance(schema, Mapping):
        raise DeclarationError(
            f"A schema maps names of fields to types; this one is a {type(schema).__name__}.",
            hint='schema={"user_id": "string", "value": "int64"}',
        )
    return {name: _arrow_type(name, kind) for name, kind in schema.items()}


def _arrow_type(name: str, kind: Any) -> pa.DataType:
    if not isinstance(name, str):
        raise DeclarationError(f"The name of a field is a text, not a {type(name).__name__}.")
    if isinstance(kind, str):
        arrow = FieldType.parse(kind, field=name).arrow
    elif isinstance(kind, pa.DataType):
        arrow = None if isinstance(kind, pa.BaseExtensionType) else kind
    else:
        arrow = _from_polars(kind) or _from_spark(kind)
    if arrow is None:
        raise DeclarationError(
            f"The type of field {name!r} is {kind!r}, which is not the type of a column.",
            hint="Name it ('int64', 'uuid'), or give a type of polars, pyarrow or Spark with its parameters: "
            "pl.Decimal(10, 2).",
        )
    try:
        pa.array([], pa.string()).cast(arrow)
    except pa.ArrowNotImplementedError:
        raise DeclarationError(
            f"The type of field {name!r} is {arrow}, which cannot be read from a text.",
            hint="Read it as 'string', and parse it then.",
        ) from None
    return arrow


def _is_polars_type(kind: object) -> bool:
    """Return whether this is a type of polars, an instance or the class itself."""
    return (kind if isinstance(kind, type) else type(kind)).__module__.startswith("polars.")


def _from_polars(kind: Any) -> pa.DataType | None:
    if not _is_polars_type(kind):
        return None
    import polars as pl

    # The addresses of Python's objects; classes that say nothing without their parameters.
    if kind == pl.Object or kind is pl.Enum or kind is pl.Decimal:
        return None
    try:
        arrow = pl.Series("", [], pl.String if kind in (pl.Categorical, pl.Enum) else kind).to_arrow().type
    except pa.ArrowInvalid:  # it has no such type
        return None
    if pa.types.is_large_string(arrow) or pa.types.is_string_view(arrow):
        return pa.string()
    if pa.types.is_large_binary(arrow) or pa.types.is_binary_view(arrow):
        return pa.binary()
    return arrow


def _from_spark(kind: Any) -> pa.DataType | None:
    if isinstance(kind, type) or not type(kind).__module__.startswith("pyspark."):
        return None
    from pyspark.sql.pandas.types import to_arrow_type

    return to_arrow_type(kind)


def _text_or_bytes(values: pa.Array) -> pa.Array:
    """Texts, if all of them are UTF-8."""
    if not _is_bytes(values.type):
        return values
    try:
        return values.cast(pa.large_string() if pa.types.is_large_binary(values.type) else pa.string())
    except pa.ArrowInvalid:
        return values


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _parse(values: pa.Array, kind: pa.DataType, name: str, faults: list[Fault]) -> pa.Array:
    if values.type == kind:
        return values
    if not _is_bytes(values.type) and not _means_another(values.type, kind):
        try:
            return _cast(values, kind, name, faults)
        except pa.ArrowNotImplementedError:  # by its text then
            pass
    elif _is_bytes(kind) and _is_bytes(values.type):
        return _cast(values, kind, name, faults)
    texts = _cast(values, pa.string(), name, faults)
    return texts if pa.types.is_string(kind) else _cast(texts, kind, name, faults)


def _cast(values: pa.Array, kind: pa.DataType, name: str, faults: list[Fault], first: int = 0) -> pa.Array:
    """Return the values in another type. One that does not fit is null, and a fault."""
    try:
        return _cast_all(values, kind)
    except pa.ArrowInvalid:
        if len(values) == 1:
            faults.append((first, name, _no(values[0], kind)))
            return pa.nulls(1, kind)
    middle = len(values) // 2
    halves = (values[:middle], first), (values[middle:], first + middle)
    return pa.concat_arrays([_cast(half, kind, name, faults, begin) for half, begin in halves])


def _means_another(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether Arrow would take numbers for something else: whole ones for times, a float for all its digits."""
    if pa.types.is_integer(kind):
        return bool(pa.types.is_timestamp(wanted) or pa.types.is_boolean(wanted) or pa.types.is_date(wanted))
    return bool(pa.types.is_floating(kind) and pa.types.is_decimal(wanted))


def _cast_all(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(values.type):
        if pa.types.is_decimal(kind):
            return _decimals(values, kind)
        if (
            pa.types.is_integer(kind)
            and pc.any(pc.match_substring_regex(values, _ODD_WHOLE_NUMBER), min_count=0).as_py()
        ):
            return _whole_numbers(values, kind)
        if pa.types.is_floating(kind):
            return _floats(values, kind)
    elif pa.types.is_floating(values.type) and pa.types.is_string(kind):
        return float_texts(values)
    elif pa.types.is_integer(values.type) and kind in (pa.float32(), pa.float64()):
        return values.cast(kind, safe=False)  # the nearest one, as of a text
    try:
        return values.cast(kind)
    except pa.ArrowInvalid:
        if not (pa.types.is_timestamp(kind) and kind.tz and pa.types.is_string(values.type)):
            raise
        # Arrow takes no time without an offset for an instant; to us it is UTC.
        return pc.assume_timezone(values.cast(pa.timestamp(kind.unit)), "UTC").cast(kind)


def _decimals(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Arrow makes another number of a text that has too many digits."""
    before, after = kind.precision - kind.scale, kind.scale
    usual = rf"^-?[0-9]{{1,{before}}}" + (rf"(\.[0-9]{{1,{after}}})?$" if after else "$")
    if before > 0 and pc.all(pc.match_substring_regex(texts, usual), min_count=0).as_py():
        return texts.cast(kind)
    field = FieldType("decimal", kind.precision, kind.scale)
    try:
        return pa.array([check_value(text, field) for text in texts.to_pylist()], kind)
    except ValueError as error:
        raise pa.ArrowInvalid(str(error)) from None


def _whole_numbers(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Arrow takes sixteen digits of a hexadecimal number for its bits: the highest one would be the sign. It takes no
    text of a float, whose whole numbers are read where a column holds floats. All other texts are Arrow's to judge:
    whether one is a number must not depend on its neighbours."""
    return pa.array([None if each is None else _in_digits(each) for each in texts.to_pylist()], pa.string()).cast(kind)


def _in_digits(text: str) -> str:
    if re.fullmatch(_HEX, text):
        number = Decimal(int(text, 16))
    elif re.fullmatch(_FLOAT, text):
        number = Decimal(text)
    else:
        return text
    if number.adjusted() >= _MOST_DIGITS or number != number.to_integral_value():
        return ""
    return str(int(number))


def float_texts(values: pa.Array) -> pa.Array:
    """Return floats as JSON has them: those that no column holds are texts of JSON, and 2.0 is "2" to Arrow."""
    texts = values.cast(pa.string()).to_pylist()
    return pa.array([None if each is None else repr(float(each)) for each in texts], pa.string())


def _floats(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """A number that is too large is none; infinity is one by its name."""
    numbers = texts.cast(kind)
    if pc.any(pc.is_inf(numbers), min_count=0).as_py():
        is_named = pc.match_substring(texts, "inf", ignore_case=True)
        if not pc.all(pc.or_(pc.invert(pc.is_inf(numbers)), is_named), min_count=0).as_py():
            raise pa.ArrowInvalid("out of range")
    return numbers


def _no(value: pa.Scalar, kind: object) -> str:
    """Say that this is not a value of a type."""
    text = repr(value.as_py())
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
    return f"is {shown}, which is no {kind}"


@dataclass(frozen=True)
class _Check:
    """What texts must be that are a type of their own to us, or in polars, and texts in Arrow."""

    kind: str
    read: Callable[[str], str]
    """Returns the text of the column, or raises an error where it does not fit."""
    usual: str | None = None
    """A regular expression of texts that need not be read."""


def _check_of(kind: Any) -> _Check | None:
    if isinstance(kind, str):
        return _CHECKS.get(FieldType.parse(kind).base)
    if _is_polars_type(kind):
        import polars as pl

        if kind == pl.Enum:
            return _Check("category of its Enum", {text: text for text in kind.categories}.__getitem__)
    return None


def _uuid(text: str) -> str:
    return str(UUID(text))


def _json(text: str) -> str:
    json.loads(text, parse_constant=_refuse_constant)
    return text


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


_CHECKS = {"uuid": _Check("uuid", _uuid, _USUAL_UUID), "json": _Check("json", _json)}


def _checked(values: pa.Array, check: _Check, name: str, faults: list[Fault]) -> pa.Array:
    if check.usual is not None and pc.all(pc.match_substring_regex(values, check.usual), min_count=0).as_py():
        return values
    texts = values.to_pylist()
    for row, text in enumerate(texts):
        try:
            texts[row] = None if text is None else check.read(text)
        except (ValueError, KeyError, RecursionError):
            faults.append((row, name, _no(values[row], check.kind)))
            texts[row] = None
    return pa.array(texts, values.type)


def join(batches: list[pa.RecordBatch], layout: Layout, feed: PageFeed) -> pa.Table:
    """Return one table of all batches. Without a schema it has every field of any batch, as text or else as binary; of
    no batch, the fields that the feed knows."""
    if layout.arrow_schema is not None:
        return pa.Table.from_batches(batches, layout.arrow_schema)
    if not batches:
        fields = [pa.field(name, kind) for name, kind in feed.known_fields().items()]
        return pa.schema([*layout.own_schema, *fields]).empty_table()
    schema = pa.schema(list(types_of((batch.schema for batch in batches), layout).items()))
    if all(batch.schema.equals(schema) for batch in batches):
        return pa.Table.from_batches(batches, schema)
    return pa.Table.from_batches([_widened(batch, schema) for batch in batches], schema)


def types_of(schemas: Iterable[pa.Schema], layout: Layout) -> dict[str, pa.DataType]:
    """Return all columns of any of these, each in a type that holds them all."""
    kinds: dict[str, pa.DataType] = {each.name: each.type for each in layout.own_schema}
    for schema in schemas:
        for each in schema:
            known = kinds.get(each.name, each.type)
            kinds[each.name] = known if known == each.type else _wider(known, each.type)
    return kinds


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Bytes if one of them is, else texts."""
    kinds = (one, other)
    large = any(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) for kind in kinds)
    if any(map(_is_bytes, kinds)):
        return pa.large_binary() if large else pa.binary()
    return pa.large_string() if large else pa.string()


def _widened(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    held = set(batch.schema.names)
    arrays = [
        _as_wide(batch.column(each.name), each.type) if each.name in held else pa.nulls(len(batch), each.type)
        for each in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _as_wide(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_floating(values.type) and values.type != kind:
        values = float_texts(values)
    if values.type != kind and _is_bytes(kind) and not _is_bytes(values.type):
        values = values.cast(pa.large_string())  # a number has a text, which has bytes
    return values.cast(kind)


_NULLABLE = ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "boolean")


def check_frames(to: str, layout: Layout) -> None:
    """Raise for a kind of frames that cannot be made, before anything is read: its package is missing, or it does not
    have a type of the schema."""
    schema = layout.arrow_schema or pa.schema([])
    if to in ("polars", "pandas"):
        package(to)
    if to == "spark":
        canonical_schema(schema)
    for each in schema:
        if to == "polars" and pa.types.is_decimal256(each.type):
            raise DeclarationError(f"The type of field {each.name!r} is {each.type}; polars has up to 38 digits.")


def frame_of(table: pa.Table, to: str, layout: Layout) -> Any:
    """Return the table as a frame. A column with a polars type in the schema has exactly that type in polars."""
    if to == "arrow":
        return table
    if to == "pandas":
        pd = package("pandas")
        # Plain types of pandas hold no null: an integer would become a float, and above 2^53 another number.
        nullable = {pa.type_for_alias(name.lower()): pd.api.types.pandas_dtype(name) for name in _NULLABLE}
        return table.to_pandas(types_mapper=nullable.get)
    if to == "spark":
        from pyspark.sql.pandas.types import from_arrow_schema

        from weft.engine import session

        schema = canonical_schema(table.schema)
        batches = [canonical_batch(batch, schema) for batch in table.to_batches()]
        # By default Spark reads a time without a zone in the session's zone.
        kinds = from_arrow_schema(schema, prefer_timestamp_ntz=True)
        return session.spark().createDataFrame(pa.Table.from_batches(batches, schema), kinds)
    pl = package("polars")
    # Under numbers: polars would give a column without a name one of its own, which another may have.
    frame = pl.from_arrow(table.rename_columns([str(number) for number in range(table.num_columns)]), rechunk=False)
    frame.columns = table.column_names
    exact = {
        name: kind for name, kind in layout.schema_types.items() if name in frame.columns and _is_polars_type(kind)
    }
    return frame.cast(exact) if exact else frame


def prepare_frames(to: str) -> None:
    """Import and start what the first frame needs, while no lease runs. Of its first array pyarrow imports pandas."""
    frame_of(pa.table({"_id": pa.array([], pa.string())}), to, Layout())


def package(name: str) -> Any:
    """Return polars or pandas, which only those need who ask for its frames."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"Frames of {name} need a package that is not installed: {error}.",
            hint=f'pip install {name}, or ask for frames of another kind: to="arrow".',
        ) from error
