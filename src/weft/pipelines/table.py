"""`@table`: a target table as a class, checked where it is declared.

@weft.table(schema="analytics")
class Events:
    event_id: Annotated[BigInt, pk()]
    name: Text | None
    received_at: TimestampTZ
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar, Unpack, overload

from weft.errors import DeclarationError, did_you_mean
from weft.options import errors_at, refuse_unknown, variants
from weft.systems.base import Connection
from weft.systems.load import LOAD_COLUMNS, SCD2_COLUMNS, full_name

if TYPE_CHECKING:
    import pyarrow as pa

    from weft.normalize import Normalizer

SPECIFICATION = "__weft_table__"
# PostgreSQL cuts names at 63 bytes without an error.
NAME_BYTES = 63


@dataclass(frozen=True)
class PrimaryKey:
    """Marks a column as part of the primary key."""


@dataclass(frozen=True)
class NaturalKey:
    """Marks a column as part of a unique key; columns with the same group form one."""

    group: str = ""


def pk() -> PrimaryKey:
    """Mark a column as (a part of) the primary key: `id: Annotated[BigInt, pk()]`."""
    return PrimaryKey()


def natural_key(group: str = "") -> NaturalKey:
    """Mark a column as unique. Columns with the same `group` are unique together."""
    if not isinstance(group, str):
        raise DeclarationError(f"natural_key: group must be a text, not {type(group).__name__}.")
    return NaturalKey(group)


@dataclass(frozen=True)
class TableColumn:
    name: str
    kind: Any
    """A type of `weft.types`: `BigInt`, `String[256]`."""
    nullable: bool = False
    normalizers: tuple[Normalizer, ...] = ()

    @property
    def field(self) -> pa.Field:
        """The column as a canonical Arrow field."""
        from weft.column_types import JSONB, column_field, max_length
        from weft.columns import binary_json, limited

        length = max_length(self.kind)
        if length is not None:
            return limited(self.name, length, nullable=self.nullable)
        field = column_field(self.name, self.kind, nullable=self.nullable)
        return binary_json(field) if self.kind is JSONB else field


@dataclass(frozen=True, eq=False)
class Table:
    """What a class under `@table` says about its table."""

    name: str
    schema: str | None = None
    connection: str | Connection | None = None
    columns: tuple[TableColumn, ...] = ()
    primary_key: tuple[str, ...] = ()
    natural_keys: tuple[tuple[str, ...], ...] = ()
    merge_keys: tuple[str, ...] = ()
    load_columns: bool = False
    origin: str = ""

    @property
    def full_name(self) -> str:
        """How errors and commands call it."""
        return full_name(self.schema, self.name)

    @property
    def keys(self) -> tuple[str, ...]:
        """By which rows are matched where a pipeline names no keys: `__merge_keys__`, the first natural key, the
        primary key."""
        return self.merge_keys or (self.natural_keys[0] if self.natural_keys else ()) or self.primary_key

    @cached_property
    def names(self) -> list[str]:
        """The names of the declared columns."""
        return [column.name for column in self.columns]


AnyTable = str | tuple[str | None, str] | list[str] | type[Any] | Table
"""A table by its name, or a class under `@weft.table`."""
Class = TypeVar("Class", bound=type)


class TableKeywords(TypedDict, total=False):
    """What `@weft.table` takes."""

    schema: str | None
    name: str | None
    connection: str | Connection | None
    load_columns: bool


@overload
def table(cls: Class, /) -> Class: ...
@overload
def table(**options: Unpack[TableKeywords]) -> Callable[[Class], Class]: ...
def table(cls: type | None = None, /, **options: Any) -> Any:
    """Declare a target table. Its name is that of the class in snake case, unless `name` says otherwise.

    Each annotation is a column: a type of `weft.types`, with `| None` where it may be null, and in `Annotated` also
    `pk()`, `natural_key()` and normalizers (`weft.normalize`), which are applied from left to right. `__merge_keys__`
    names the columns by which rows are matched. `load_columns` adds `_loaded_at` and `_batch_id`.
    """
    refuse_unknown(options, tuple(TableKeywords.__annotations__), "@table")

    def declare(cls: type) -> type:
        if not isinstance(cls, type):
            raise DeclarationError(f"@table decorates a class, not a {type(cls).__name__}.")
        setattr(cls, SPECIFICATION, _specify(cls, **options))
        return cls

    return declare if cls is None else declare(cls)


def table_of(cls: object) -> Table | None:
    """Return the table that a class under `@table` declares, or a table itself; `None` for anything else."""
    table = vars(cls).get(SPECIFICATION) if isinstance(cls, type) else cls
    return table if isinstance(table, Table) else None


def _specify(cls: type, *, schema: str | None = None, name: str | None = None, **options: Any) -> Table:
    where = f"Table {cls.__name__}"
    body = {key: value for key, value in vars(cls).items() if not key.startswith("__")}
    # The form without columns: `schema`, `name` and `primary_key` as plain attributes.
    schema = _text(schema if schema is not None else body.get("schema"), "schema", where)
    name = _text(name if name is not None else body.get("name"), "name", where) or snake_case(cls.__name__)
    columns, primary, natural = _columns(cls, where)
    listed = body.get("primary_key")
    if listed is not None:
        if primary:
            raise DeclarationError(f"{where}: its primary key is declared twice, by pk() and by primary_key.")
        primary = _names(listed, "primary_key", where)
    merge = _names(vars(cls).get("__merge_keys__", ()), "__merge_keys__", where)
    for option, names in (("primary_key", primary), ("__merge_keys__", merge)):
        for each in names:
            if columns and each not in (known := [column.name for column in columns]):
                raise DeclarationError(
                    f"{where}: {option} names {each!r}, which is not a column of it.",
                    hint=did_you_mean(each, known, f"Columns: {', '.join(known)}."),
                )
    nullable = [column.name for column in columns if column.name in primary and column.nullable]
    if nullable:
        raise DeclarationError(f"{where}: {nullable[0]!r} is in the primary key, so it cannot be nullable.")
    return Table(
        name=name,
        schema=schema,
        columns=columns,
        primary_key=primary,
        natural_keys=natural,
        merge_keys=merge,
        origin=f"{cls.__module__}.{cls.__qualname__}",
        **options,
    )


def _columns(cls: type, where: str) -> tuple[tuple[TableColumn, ...], tuple[str, ...], tuple[tuple[str, ...], ...]]:
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise DeclarationError(
            f"{where}: an annotation cannot be read: {error}.",
            hint="Import the types at the top of the module: from weft.types import BigInt, Text",
        ) from None
    columns: list[TableColumn] = []
    primary: list[str] = []
    natural: dict[str, list[str]] = {}
    for name, hint in hints.items():
        if name.startswith("__"):
            continue
        kind, nullable, marks = _read_hint(hint)
        normalizers = []
        for mark in marks:
            mark = _called(mark, name, where)
            if isinstance(mark, PrimaryKey):
                primary.append(name)
            elif isinstance(mark, NaturalKey):
                natural.setdefault(mark.group or name, []).append(name)
            else:
                normalizers.append(mark)
        _check_column(name, kind, where)
        _check_text(name, kind, normalizers, where)
        columns.append(TableColumn(name, kind, nullable, tuple(normalizers)))
    return tuple(columns), tuple(primary), tuple(map(tuple, natural.values()))


def _read_hint(hint: Any) -> tuple[Any, bool, list[Any]]:
    """Return the type, whether it may be null, and what `Annotated` adds, in either order of nesting."""
    marks: list[Any] = []
    nullable = False
    while True:
        if typing.get_origin(hint) is Annotated:
            hint, *more = typing.get_args(hint)
            marks += more
        elif typing.get_origin(hint) in (typing.Union, types.UnionType):
            rest = variants(hint)
            if len(rest) != 1:
                return hint, nullable, marks
            nullable, hint = nullable or types.NoneType in typing.get_args(hint), rest[0]
        else:
            return hint, nullable, marks


def _called(mark: Any, column: str, where: str) -> Any:
    if isinstance(mark, PrimaryKey | NaturalKey):
        return mark
    from weft.normalize import Normalizer

    if isinstance(mark, Normalizer):
        return mark
    name = getattr(mark, "__name__", None)
    hint = f"Call it: {name}()." if callable(mark) and name else "It takes pk(), natural_key() and normalizers."
    raise DeclarationError(
        f"{where}: column {column!r} is annotated with {mark!r}, which means nothing here.", hint=hint
    )


def _check_column(name: str, kind: Any, where: str) -> None:
    if name in SCD2_COLUMNS or name in LOAD_COLUMNS:
        option = "scd2 keeps" if name in SCD2_COLUMNS else "load_columns=True adds"
        raise DeclarationError(f"{where}: the column {name!r} is one that {option} itself.", hint="Leave it out.")
    if len(name.encode()) > NAME_BYTES:
        raise DeclarationError(f"{where}: the name of column {name!r} is longer than {NAME_BYTES} bytes.")
    from weft.column_types import check_type

    with errors_at(f"{where}: column {name!r}"):
        check_type(kind)


_PARSERS = {
    "int": "parse_int()",
    "float": "parse_numeric()",
    "bool": "parse_bool()",
    "date": "parse_date()",
    "local": "parse_timestamp()",
    "utc": "parse_timestamp()",
}


def _check_text(name: str, kind: Any, normalizers: list[Normalizer], where: str) -> None:
    """Refuse a step that takes and gives text in a column of another type, with nothing behind it that reads it."""
    if not normalizers or kind.arrow == "string":
        return
    from weft.normalize.base import Parser
    from weft.normalize.text import TextStep
    from weft.normalize.values import Sql

    last: Normalizer | None = None
    for each in normalizers:
        if isinstance(each, TextStep):
            last = each
        elif isinstance(each, Parser | Sql):
            last = None
    if last is not None:
        parser = _PARSERS.get(kind.arrow.rstrip("0123456789"), "parse_numeric()" if kind.arrow != "binary" else None)
        raise DeclarationError(
            f"{where}: {last.name} of the column {name!r} gives text, and the column is {kind!r}.",
            hint=f"Put {parser} behind it, or leave it out." if parser else "Leave it out.",
        )


def _text(value: object, option: str, where: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value or "\0" in value:
        raise DeclarationError(f"{where}: {option} must be a name, not {value!r}.")
    if len(value.encode()) > NAME_BYTES:
        raise DeclarationError(f"{where}: {option} is longer than {NAME_BYTES} bytes.")
    return value


def _names(value: object, option: str, where: str) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(each, str) and each for each in names):
        raise DeclarationError(f"{where}: {option} must be a list of column names.")
    return tuple(names)


def snake_case(name: str) -> str:
    """`CustomerDim` as `customer_dim`, `HTTPLog` as `http_log`."""
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()
