"""The types that columns of declared tables have: classes for annotations, such as `name: String[256] | None`.

Each stands for one canonical Arrow field (`weft.columns`); `column_field` gives it. Nothing heavy is imported here,
because every module that declares a table imports this one.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from weft.errors import DeclarationError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

# Every database indexes and stores texts up to here as VARCHAR; longer ones are Text.
MAX_LENGTH = 65_535
_MAX_DIGITS = 38
_NUMERIC_DEFAULT = (38, 18)


class _Named(type):
    def __repr__(cls) -> str:
        return cls.__name__


class ColumnType(metaclass=_Named):
    """The base of all column types. They stand in annotations and are never made into objects."""

    arrow: ClassVar[str] = ""
    """The name of the Arrow type, as `_arrow` reads it."""
    hint: ClassVar[str | None] = None

    def __init_subclass__(cls, *, arrow: str | None = None, hint: str | None = None) -> None:
        cls.arrow, cls.hint = arrow or cls.arrow, hint or cls.hint

    def __new__(cls, *arguments: object, **named: object) -> Any:
        example = f"{cls.__name__}[…]" if cls.__name__ in ("String", "Numeric") else cls.__name__
        raise DeclarationError(
            f"The column type {cls.__name__} is not called.", hint=f"Write it without parentheses: {example}."
        )

    @classmethod
    def field(cls, name: str, nullable: bool) -> pa.Field:
        """Return the canonical Arrow field of a column of this type."""
        import pyarrow as pa

        from weft.columns import hinted

        if cls.hint is not None:
            return hinted(name, cls.hint, nullable=nullable)
        return pa.field(name, _arrow(cls.arrow), nullable=nullable)


class SmallInt(ColumnType, arrow="int16"):
    """Whole numbers of 16 bits."""


class Integer(ColumnType, arrow="int32"):
    """Whole numbers of 32 bits."""


class BigInt(ColumnType, arrow="int64"):
    """Whole numbers of 64 bits."""


class Float(ColumnType, arrow="float32"):
    """Floating-point numbers of 32 bits."""


class Double(ColumnType, arrow="float64"):
    """Floating-point numbers of 64 bits."""


class Boolean(ColumnType, arrow="bool"):
    """True or false."""


class Text(ColumnType, arrow="string"):
    """Text of any length."""


class Date(ColumnType, arrow="date"):
    """Days."""


class Timestamp(ColumnType, arrow="local"):
    """Times of a calendar and a clock in microseconds, without a time zone."""


class TimestampTZ(ColumnType, arrow="utc"):
    """Instants in microseconds."""


class JSON(ColumnType, arrow="string", hint="json"):
    """JSON, as text that keeps its form."""


class JSONB(ColumnType, arrow="string", hint="json"):
    """JSON; PostgreSQL stores it as `jsonb` where the column is one, the others as they store `JSON`."""


class UUID(ColumnType, arrow="string", hint="uuid"):
    """Universally unique identifiers."""


class Bytes(ColumnType, arrow="binary"):
    """Bytes."""


class _Sized(_Named):
    """Gives `String[256]` and `Numeric[10, 2]`: a class of their own, the same one each time."""

    def __getitem__(cls, size: Any) -> Any:
        numbers = size if isinstance(size, tuple) else (size,)
        if not all(type(number) is int for number in numbers):
            raise DeclarationError(f"{cls.__name__}[{_shown(size)}] takes whole numbers.", hint=cls._example())
        return cls._of(*numbers)  # type: ignore[attr-defined]

    def _example(cls) -> str:
        return "Write String[256], or Text for any length." if cls.__name__ == "String" else "Write Numeric[10, 2]."


@cache
def _sized(base: Any, name: str, **attributes: int) -> Any:
    return type(base)(name, (base,), {"__doc__": base.__doc__, **attributes})


class String(ColumnType, metaclass=_Sized, arrow="string"):
    """Text of at most n characters: `String[256]`. Without a number, of any length."""

    max_length: ClassVar[int | None] = None

    @classmethod
    def _of(cls, *numbers: int) -> Any:
        if len(numbers) != 1 or not 1 <= numbers[0] <= MAX_LENGTH:
            raise DeclarationError(
                f"String[{_shown(numbers)}] is not a column type: a text has 1 to {MAX_LENGTH:,} characters.",
                hint="Use Text for longer ones." if numbers and numbers[0] > MAX_LENGTH else cls._example(),
            )
        return _sized(String, f"String[{numbers[0]}]", max_length=numbers[0])


class Numeric(ColumnType, metaclass=_Sized):
    """Decimal numbers with p digits, s of them behind the point: `Numeric[10, 2]`. Alone: 38 digits, 18 behind it."""

    precision: ClassVar[int] = _NUMERIC_DEFAULT[0]
    scale: ClassVar[int] = _NUMERIC_DEFAULT[1]

    @classmethod
    def _of(cls, *numbers: int) -> Any:
        precision, scale = (*numbers, 0)[:2]
        if len(numbers) > 2 or not 1 <= precision <= _MAX_DIGITS or not 0 <= scale <= precision:
            close = min(max(precision, 1), _MAX_DIGITS)
            raise DeclarationError(
                f"Numeric[{_shown(numbers)}] is not a column type: a decimal has 1 to {_MAX_DIGITS} digits, and no "
                "more decimals than digits.",
                hint=f"Did you mean Numeric[{close}, {min(max(scale, 0), close)}]?",
            )
        return _sized(Numeric, f"Numeric[{precision}, {scale}]", precision=precision, scale=scale)

    @classmethod
    def field(cls, name: str, nullable: bool) -> pa.Field:
        """Return a field of decimals."""
        import pyarrow as pa

        return pa.field(name, pa.decimal128(cls.precision, cls.scale), nullable=nullable)


TYPES: dict[str, type[ColumnType]] = {
    each.__name__: each
    for each in (
        *(SmallInt, Integer, BigInt, Float, Double, Numeric, Boolean, Text, String),
        *(Date, Timestamp, TimestampTZ, JSON, JSONB, UUID, Bytes),
    )
}

# What people write instead: Python's own types, and the words of databases.
_ELSEWHERE = {
    **dict.fromkeys(("int", "int8"), "BigInt"),
    **dict.fromkeys(("bytes", "bytearray", "blob", "bytea"), "Bytes"),
    **dict.fromkeys(("datetime", "timestamptz"), "TimestampTZ"),
    **dict.fromkeys(("dict", "list"), "JSON"),
    "str": "Text",
    "varchar": "String",
    "int2": "SmallInt",
    "int4": "Integer",
    "float": "Double",
    "real": "Float",
    "bool": "Boolean",
    "Decimal": "Numeric[38, 18]",
    "decimal": "Numeric",
    "date": "Date",
    "datetime64": "Timestamp",
}


def check_type(kind: Any) -> type[ColumnType]:
    """Return a column type itself; a `DeclarationError` names the nearest one for anything else."""
    if isinstance(kind, type) and issubclass(kind, ColumnType) and kind is not ColumnType:
        return kind
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", None) or repr(kind)
    lowered = {each.lower(): each for each in TYPES}
    is_foreign_uuid = isinstance(kind, type) and name == "UUID"
    close = (
        ("UUID of weft.types" if is_foreign_uuid else None)
        or _ELSEWHERE.get(name)
        or _ELSEWHERE.get(name.lower())
        or lowered.get(nearest(name.lower(), lowered) or "")
    )
    raise DeclarationError(
        f"{name} is not a column type.",
        hint=(f"Did you mean {close}? " if close else "") + f"Types: {', '.join(TYPES)}.",
    )


def column_field(name: str, kind: Any, nullable: bool = False) -> pa.Field:
    """Return the canonical Arrow field (`weft.columns`) of a column that is declared with this type."""
    return check_type(kind).field(name, nullable)


def max_length(kind: Any) -> int | None:
    """Return how many characters a column of this type holds; `None` where it has no such limit."""
    return getattr(check_type(kind), "max_length", None)


def _arrow(name: str) -> pa.DataType:
    import pyarrow as pa

    from weft.columns import LOCAL_TIME, UTC_TIME

    named = {"date": pa.date32(), "local": LOCAL_TIME, "utc": UTC_TIME}
    return named[name] if name in named else getattr(pa, "bool_" if name == "bool" else name)()


def _shown(size: Any) -> str:
    return ", ".join(map(str, size)) if isinstance(size, tuple) else repr(size)
