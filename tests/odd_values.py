"""Odd events and messages, and what must become of them, said in plain Python.

odd = Odd(seed)
odd.event(FIELDS)        a dict for the library: values of any type under declared fields and under other keys
odd.json_event(FIELDS)   the text of one event: numbers of many digits, keys twice, escapes, and what is no JSON
odd.texts(FIELDS)        a row of CSV
read_json(text)          what that text says, or `None` where it says nothing
kept(value, kind)        what a reader must get of a value in a field of this type, or `MISFIT`
as_json(value)           what a reader must get of it over HTTP and from commands

Each seed gives the same events in every run.
"""

from __future__ import annotations

import base64
import json
import math
import random
import struct
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Context, Decimal
from typing import Any
from uuid import UUID

from weft.types import FieldType

FIELDS = {
    "string": "string",
    "bool": "bool",
    "int32": "int32",
    "int64": "int64",
    "float32": "float32",
    "float64": "float64",
    "price": "decimal(10,2)",
    "wide": "decimal(38,18)",
    "date": "date",
    "timestamp": "timestamp",
    "json": "json",
    "bytes": "bytes",
    "uuid": "uuid",
}
MISFIT = object()
"""No value of the field's type."""
NOT_JSON = object()
"""No value that JSON can hold: what does not fit its field cannot be kept beside it."""

TEXTS = [
    *("", " ", "0", "5", "-1.5", "1e5", "true", "maybe", "null", "NaN", "{}", "[1]", "\\N", "\\", "'\"`;--", "%s $1 ?"),
    *("a,b", "a\tb\nc\rd", "trailing  ", "\x00", "a\x00b", "\x01\x1e\x1f\x7f", "\u2028\u2029\ufeff"),
    *("e\u0301 é", "İıßẞ"),
    *("漢字🦀\U0010ffff", "\ufffe\uffff", "٣", "2026-01-31", "20260131", "2026-W05-6", "2026-02-30", "0001-01-01"),
    *("2026-01-31T12:00:00Z", "2026-01-31 12:00:00.123456+05:30", "2026-01-31T24:00:00", "9999-12-31T23:59:59-14:00"),
    *("2026-01-31T12:00:00.1234567Z", "2026-01-31T12:00:00,5", "2026-06-30T23:59:60Z", "12:00:00", "20260131T120000Z"),
    *("a1b2c3d4-e5f6-7890-abcd-ef1234567890", "{A1B2C3D4E5F67890ABCDEF1234567890}", "aGk=", "aGk", "-_=="),
    *("12345678901234567890.123456789012345678", "99999999.99", "1E+3", "1_000", " 7 ", ".5", "5.", "+1"),
    *("0x10", "x" * 70_000),
]
INTEGERS = [
    *(0, 1, -1, 7, 255, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**63),
    *(-(2**63), -(2**63) - 1, 2**64, 2**70, 10**37, 10**38, 10**40, -(10**400), 16777217, 99_999_999, 10**8),
]
FLOATS = [
    *(0.0, -0.0, 0.1, 1 / 3, 1.5, -2.25, 1e16, 1e22, 1e23, 1e-7, 9007199254740993.0, 1e300, 5e-324, 3.5e38, 1e-46),
    *(1.7976931348623157e308, 2.2250738585072014e-308, 0.001, 100.25, 12345678.9, 1e15 + 0.3, 4.35, 1e-18),
]
NOT_FINITE = [math.nan, math.inf, -math.inf]
DECIMALS = [
    *map(Decimal, ("0", "-0", "1.10", "1E+3", "1.005", "99999999.99", "100000000", "1E-18", "1E-19", "NaN", "sNaN")),
    *map(Decimal, ("Infinity", "12345678901234567890.123456789012345678", "1E+19", "1E+999999", "1E-999999")),
]
_ZONES = [None, UTC, *(timezone(timedelta(minutes=each)) for each in (330, -720, 840, -1, 1439))]
DAYS = [date(1, 1, 1), date(1582, 10, 10), date(1969, 12, 31), date(2000, 2, 29), date(9999, 12, 31)]
MOMENTS = [
    datetime(each.year, each.month, each.day, *clock, tzinfo=zone)
    for each in DAYS
    for clock in ((0, 0), (23, 59, 59, 999_999), (2, 30, 0, 1))
    for zone in _ZONES
]
BYTES = [b"", b"\x00", b"\xff\xfe", bytes(range(256)), b"text", b"'\\\"", b"x" * 70_000]
UUIDS = [UUID(int=0), UUID(int=2**128 - 1), UUID("a1b2c3d4-e5f6-7890-abcd-ef1234567890")]
KEYS = [
    *("", " ", "a b", "a.b", "a:b/c@d#e$f-g", "1st", "é", "É", "ß", "ss", "SS", "ı", "İ", "漢字", "🦀", "ﬁ"),
    *("select", "order"),
    *('"', "'", "`", "\\", "%s", "\x00", "a\x00", "\n", "ctid", "XMIN", "rowid", "oid", "k" * 63, "k" * 64, "é" * 40),
    *("_id", "_ts", "_seq", "_event_ts", "_", "__proto__", "String", "INT64", "name", "Name", "n", "id"),
    *("payload", "trailing "),
]
BAD_KEYS: list[Any] = ["_weft_rowid", "_WEFT_x", "\ud800", 1, None, True, b"k"]
# No JSON, or JSON with what no stream keeps.
BROKEN = [
    *('{"a":1', '{"a" 1}', "{'a':1}", '{"a":1,}', '{"a":NaN}', '{"a":Infinity}', '{"a":-Infinity}', '{"a":01}'),
    *('{"a":+1}', '{"a":.5}', '{"a":1.}', '{"a":"\\ud800"}', '{"\\udc00":1}', '{"a":"\\x41"}'),
    *('{"a":"\t"}', '{"a":tru}'),
    *("null", "1", '"x"', "[]x", '{"a":1e400}', '{"a":[-1e999]}', "{a:1}", "\ufeff{}", '{"a":"\x00"}'),
]


def nested(depth: int, bottom: Any = "bottom") -> Any:
    """A value so deep in arrays and objects."""
    for level in range(depth):
        bottom = [bottom] if level % 2 else {"in": bottom}
    return bottom


class Odd:
    """Makes odd events, the same ones for the same seed."""

    def __init__(self, seed: object) -> None:
        self.dice = random.Random(str(seed))

    def number(self) -> Any:
        dice = self.dice
        either: list[Callable[[], Any]] = [
            lambda: dice.choice(INTEGERS),
            lambda: dice.choice(FLOATS),
            lambda: dice.getrandbits(dice.randrange(1, 140)) * dice.choice([1, -1]),
            lambda: struct.unpack("<d", dice.randbytes(8))[0],
            lambda: dice.randrange(10**6) / 100,
        ]
        found = dice.choice(either)()
        return found if isinstance(found, int) or math.isfinite(found) else 0.5

    def text(self) -> str:
        dice = self.dice
        if dice.random() < 0.6:
            return dice.choice(TEXTS)
        letters = (
            dice.choice(["a", "é", "\x00", "\\", '"', "\n", "漢", "🦀", chr(dice.randrange(0xD800))]) for _ in range(30)
        )
        return "".join(letters)[: dice.randrange(30)]

    def document(self, depth: int = 3) -> Any:
        """Any JSON value."""
        dice = self.dice
        roll = dice.random()
        if depth and roll < 0.15:
            return [self.document(depth - 1) for _ in range(dice.randrange(4))]
        if depth and roll < 0.3:
            return {self.key(): self.document(depth - 1) for _ in range(dice.randrange(4))}
        if roll < 0.33:
            return nested(dice.choice([31, 32, 33, 60, 199]))
        return dice.choice([lambda: None, lambda: dice.random() < 0.5, self.number, self.text])()

    def key(self) -> str:
        return self.dice.choice(KEYS) if self.dice.random() < 0.3 else self.dice.choice("abcdef")

    def value(self) -> Any:
        """Any value that a Python program may publish."""
        dice = self.dice
        roll = dice.random()
        if roll < 0.6:
            return self.document()
        if roll < 0.64:
            return dice.choice([*NOT_FINITE, "\ud800", nested(201), {1: 2}, (1, 2), {"a": math.nan}, ["\udfff"], 1j])
        kinds: list[list[Any]] = [DECIMALS, DAYS, MOMENTS, BYTES, UUIDS]
        return dice.choice(dice.choice(kinds))

    def of_type(self, kind: str) -> Any:
        """A value that a field of this type holds."""
        dice = self.dice
        made: dict[str, Callable[[], Any]] = {
            "string": lambda: self.text(),
            "bool": lambda: dice.random() < 0.5,
            "int32": lambda: dice.randrange(-(2**31), 2**31),
            "int64": lambda: dice.randrange(-(2**63), 2**63),
            "float32": lambda: float32(dice.uniform(-1e30, 1e30)),
            "float64": lambda: dice.choice([each for each in FLOATS if repr(each) != "-0.0"]),
            "decimal(10,2)": lambda: Decimal(dice.randrange(-(10**10) + 1, 10**10)).scaleb(-2),
            "decimal(38,18)": lambda: Decimal((dice.randrange(2), tuple(dice.choices(range(10), k=38)), -18)),
            "date": lambda: date.fromordinal(dice.randrange(1, 3_652_060)),
            "timestamp": lambda: datetime(2, 1, 1, tzinfo=UTC) + timedelta(microseconds=dice.randrange(3 * 10**17)),
            "json": self.document,
            "bytes": lambda: dice.randbytes(dice.randrange(20)),
            "uuid": lambda: UUID(int=dice.getrandbits(128)),
        }
        return made[kind]()

    def event(self, fields: Mapping[str, str]) -> dict[Any, Any]:
        """An event: usual values of some fields, then odd ones under these fields or other keys."""
        dice = self.dice
        found: dict[Any, Any] = {name: self.of_type(kind) for name, kind in fields.items() if dice.random() < 0.5}
        for _ in range(dice.choice([0, 0, 1, 2, 3])):
            found[dice.choice([dice.choice(list(fields)), self.key()])] = self.value()
        if dice.random() < 0.03:
            found[dice.choice(BAD_KEYS)] = 1
        return found

    def json_event(self, fields: Mapping[str, str]) -> str:
        """The text of an event as a client may write it."""
        dice = self.dice
        if dice.random() < 0.04:
            return dice.choice(BROKEN)
        pairs = [
            (name, self._written(as_json(self.of_type(kind)))) for name, kind in fields.items() if dice.random() < 0.4
        ]
        for _ in range(dice.choice([0, 0, 1, 2, 3])):
            key = dice.choice([dice.choice(list(fields)), self.key()])
            pairs.append((key, dice.choice(NUMBERS) if dice.random() < 0.2 else self._written(self.document())))
        dice.shuffle(pairs)
        if pairs and dice.random() < 0.1:
            pairs.append((dice.choice(pairs)[0], self._written(self.document())))  # one key twice
        return "{" + ",".join(f"{self._written(key)}:{text}" for key, text in pairs) + "}"

    def texts(self, fields: Mapping[str, str]) -> dict[str, str]:
        """A row of texts, as CSV has them."""
        dice = self.dice
        found = {}
        for name, kind in fields.items():
            value = as_json(self.of_type(kind))
            text = value if isinstance(value, str) and kind != "json" else json.dumps(value)
            found[name] = dice.choice(TEXTS) if dice.random() < 0.04 else text if dice.random() < 0.5 else ""
        return found

    def _written(self, value: Any) -> str:
        return json.dumps(value, ensure_ascii=self.dice.random() < 0.5)


NUMBERS = [
    *("-0", "-0.0", "0e0", "1E5", "1e+5", "1.0", "100.00", "1.25e2", "12345678.900", "0.1000000000000000055", "1e-7"),
    *("12345678901234567890.123456789012345678", "1.000000000000000000001", "123456789012345678901234567890", "1e22"),
    *("9007199254740993", "9007199254740993.0", "9007199254740993.5", "18446744073709551616", "1e-400"),
    *("0.00", "1e308"),
    *("99999999.99", "99999999.991", "1e-18", "1e19", "0.30000000000000004", "4.35", "1" + "0" * 50),
    *("1" + "0" * 50 + ".5",),
]
"""Numbers as they are in JSON, which Python would write otherwise."""


def float32(number: float) -> float:
    """The nearest float of 32 bits."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


# ---------------------------------------------------------------------------------------------------------- the oracle


def read_json(text: str) -> dict[str, Any] | None:
    """What the text of an event says: an object, in which numbers with a fraction are `Number`s. `None`: nothing."""

    def refuse(name: str) -> Any:
        raise ValueError(name)

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError(pairs)  # nobody knows which value was meant
        return dict(pairs)

    try:
        text.encode()
        found = json.loads(text, parse_constant=refuse, parse_float=Number, object_pairs_hook=read_object)
        json.dumps(found, ensure_ascii=False).encode()  # half a character, by an escape
    except ValueError:
        return None
    return found if isinstance(found, dict) and all(math.isfinite(each) for each in _numbers(found)) else None


class Number(float):
    """A number with a fraction or an exponent, which knows its digits."""

    text: str

    def __new__(cls, text: str) -> Number:
        made = super().__new__(cls, text)
        made.text = text
        return made


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        return [each for inner in (value.values() if isinstance(value, dict) else value) for each in _numbers(inner)]
    return [value] if isinstance(value, float) else []


def plain(value: Any) -> Any:
    """A value of JSON with the floats that Python has, or `NOT_JSON`."""
    try:
        return _plain(value, 200)
    except ValueError:
        return NOT_JSON


def _plain(value: Any, depth: int) -> Any:
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        value.encode()
        return value
    if type(value) is int:
        return int(str(value))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(value)
        return float(value)
    if depth and type(value) is list:
        return [_plain(each, depth - 1) for each in value]
    if depth and type(value) is dict and all(type(key) is str for key in value):
        return {_plain(key, 0): _plain(each, depth - 1) for key, each in value.items()}
    raise ValueError("no JSON, or nested too deeply")


def kept(value: Any, kind: FieldType) -> Any:
    """What a field of this type gives back of a value, or `MISFIT`."""
    try:
        return None if value is None else _KEPT[kind.base](value, kind)
    except (ValueError, ArithmeticError):
        return MISFIT


def _need(is_met: bool) -> None:
    if not is_met:
        raise ValueError("another type")


def _kept_text(value: Any, _: FieldType) -> Any:
    _need(type(value) is str and bool(value.encode() or True))
    return value


def _kept_bool(value: Any, _: FieldType) -> Any:
    _need(type(value) is bool)
    return value


def _kept_int(value: Any, kind: FieldType) -> Any:
    bound = 2 ** (31 if kind.base == "int32" else 63)
    _need(type(value) is int and -bound <= value < bound)
    return value


def _kept_float(value: Any, kind: FieldType) -> Any:
    _need(
        type(value) in (int, float, Number)
        and Decimal(float(value)) == Decimal(value if type(value) is int else float(value))
    )
    found = float(value)
    _need(math.isfinite(found) and repr(found) != "-0.0")
    return float32(found) + 0.0 if kind.base == "float32" else found


def _kept_decimal(value: Any, kind: FieldType) -> Any:
    _need(type(value) in (Decimal, int, float, Number, str))
    if isinstance(value, str):
        digits = value.strip().lower().lstrip("+-")
        _need(value.isascii() and bool(digits) and set(digits) <= set("0123456789.e+-"))
        value = Decimal(value.strip())
    elif isinstance(value, float):
        value = Decimal(value.text if isinstance(value, Number) else repr(value))
    number = Decimal(value)
    _need(number.is_finite() and (not number or -100 < number.adjusted() < 100))
    step = Decimal(1).scaleb(-kind.scale)
    found = number.quantize(step, context=_DIGITS)
    _need(found == number and len(found.as_tuple().digits) <= max(kind.precision, 1))
    return found if found else step * 0


def _kept_date(value: Any, _: FieldType) -> Any:
    _need(type(value) in (str, date))
    return date.fromisoformat(value) if type(value) is str else value


def _kept_moment(value: Any, _: FieldType) -> Any:
    if type(value) is str:
        fraction = value.replace(",", ".").partition(".")[2]
        digits = fraction[: len(fraction) - len(fraction.lstrip("0123456789"))]
        _need(not digits[6:].strip("0"))
        value = datetime.fromisoformat(value)
    _need(type(value) is datetime)
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _kept_json(value: Any, _: FieldType) -> Any:
    found = plain(value)
    _need(found is not NOT_JSON)
    return found


def _kept_bytes(value: Any, _: FieldType) -> Any:
    _need(type(value) is bytes)
    return value


def _kept_uuid(value: Any, _: FieldType) -> Any:
    _need(type(value) in (str, UUID))
    return UUID(value) if type(value) is str else value


_DIGITS = Context(prec=200)
_KEPT: dict[str, Callable[[Any, FieldType], Any]] = {
    "string": _kept_text,
    "bool": _kept_bool,
    "int32": _kept_int,
    "int64": _kept_int,
    "float32": _kept_float,
    "float64": _kept_float,
    "decimal": _kept_decimal,
    "date": _kept_date,
    "timestamp": _kept_moment,
    "json": _kept_json,
    "bytes": _kept_bytes,
    "uuid": _kept_uuid,
}


def as_json(value: Any) -> Any:
    """A value as the service and the commands write it. Times are compared as times: see `same_json`."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, date) else str(value) if isinstance(value, Decimal | UUID) else value
