"""Every type of field: stored exactly or refused with a reason, never altered, never in the way of the next event."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft
from weft import SchemaError
from weft.project import Project
from weft.types import FieldType, check_value, round_float32
from workers import declare, drain, plain, same

FIELDS = {
    "string": "string",
    "bool": "bool",
    "int32": "int32",
    "int64": "int64",
    "float32": "float32",
    "float64": "float64",
    "decimal": "decimal(20,4)",
    "wide": "decimal(38,0)",
    "fine": "decimal(38,38)",
    "date": "date",
    "timestamp": "timestamp",
    "json": "json",
    "bytes": "bytes",
    "uuid": "uuid",
}


def nested(depth: int) -> Any:
    value: Any = "bottom"
    for level in range(depth):
        value = [value] if level % 2 else {"in": value}
    return value


EXACT: dict[str, list[Any]] = {
    "string": [
        "",
        " ",
        "null",
        "None",
        "\\",
        "\\N",
        "\t\r\n\b\f\v",
        "'\"`;--",
        "%s %d ? :x $1 {}",
        "NUL \x00 inside",
        "\x00",
        "trailing spaces   ",
        "é is é",  # composed and not
        "Ω ≈ ç √ ∫",
        "𝔘𝔫𝔦 🦄 👩‍👩‍👧 \U0010ffff",
        "\ufeffmark",
        "￾￿",
        "\u2028\u2029",
        "ﷺ" * 100,
        "".join(map(chr, range(256))),
        "x" * 1_000_000,
        "é🦄" * 200_000,
    ],
    "bool": [True, False],
    "int32": [0, 1, -1, 2**31 - 1, -(2**31)],
    "int64": [0, -1, 2**53 + 1, 2**63 - 1, -(2**63)],
    "float32": [0.0, 1.5, -2.25, round_float32(3.4028234663852886e38), round_float32(1e-45), round_float32(0.1)],
    "float64": [
        0.0,
        0.1,
        1 / 3,
        1e16 + 2,
        123456789.123456789,
        1.7976931348623157e308,
        -1.7976931348623157e308,
        2.2250738585072014e-308,
        5e-324,
        9007199254740993.0,
        1e22,
        1e23,
    ],
    "decimal": [Decimal("0.0000"), Decimal("1.1000"), Decimal("-9999999999999999.9999"), Decimal("0.0001")],
    "wide": [Decimal("9" * 38), Decimal("-" + "9" * 38), Decimal("1" + "0" * 37)],
    "fine": [Decimal("0." + "9" * 38), Decimal("-0." + "0" * 37 + "1")],
    "date": [
        date(1970, 1, 1),
        date(2026, 2, 28),
        date(1000, 1, 1),
        date(1, 1, 1),
        date(9999, 12, 31),
        date(1582, 10, 10),
    ],
    "timestamp": [
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(2026, 1, 31, 23, 59, 59, 999999, tzinfo=UTC),
        datetime(2026, 3, 29, 2, 30, 0, 1, tzinfo=UTC),  # an hour that some zones skip
        datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        datetime(2038, 1, 19, 3, 14, 8, tzinfo=UTC),
        datetime(1000, 1, 1, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    ],
    "json": [
        {},
        [],
        "",
        "text",
        0,
        -1,
        True,
        False,
        1.5,
        -0.0,
        1e300,
        5e-324,
        2**70,
        -(2**200),
        10**400,
        {"a": None},
        {"": ""},
        [None, [None]],
        {"b": 1, "a": 2, "A": 3, "á": 4},
        {"NUL\x00": "\x00"},
        {"𝔘🦄": "\U0010ffff"},
        {"constructor": {"__proto__": []}},
        [0.1, 1 / 3, 1e22, 1e23, 9007199254740993, 1.0, 1],
        nested(200),
        ["x" * 1_000_000],
        list(range(50_000)),
        {f"key {n}": n for n in range(5_000)},
    ],
    "bytes": [b"", b"\x00", bytes(range(256)), b"\xff\xfe", b"'\\\"", b"x" * 1_000_000],
    "uuid": [UUID(int=0), UUID(int=2**128 - 1), UUID("a1b2c3d4-e5f6-7890-abcd-ef1234567890")],
}


@pytest.mark.parametrize("name", FIELDS)
def test_exact(streams: Project, name: str) -> None:
    declare(fields=FIELDS)
    weft.publish_sync("orders", [{name: value} for value in EXACT[name]])
    for value in EXACT[name]:
        weft.publish_sync("orders", {"beside": 1, name: value})
    events = drain("orders")
    assert len(events) == 2 * len(EXACT[name])
    for event, value in zip(events, EXACT[name] * 2, strict=True):
        assert same(event[name], value), (event[name], value)
        assert event.keys() >= FIELDS.keys()


def test_null_is_not_empty(streams: Project) -> None:
    declare(fields={"string": "string", "bytes": "bytes", "json": "json"})
    weft.publish_sync("orders", [{"string": "", "bytes": b"", "json": {}}, {"string": None, "bytes": None}, {}])
    found = [(event["string"], event["bytes"], event["json"]) for event in drain("orders")]
    assert found == [("", b"", {}), (None, None, None), (None, None, None)]


CONVERTED: list[tuple[str, Any, Any]] = [
    ("float64", 5, 5.0),
    ("float64", 2**53, float(2**53)),
    ("float32", 0.1, round_float32(0.1)),
    ("decimal", 5, Decimal("5.0000")),
    ("decimal", "5.1", Decimal("5.1000")),
    ("decimal", 0.1, Decimal("0.1000")),
    ("decimal", Decimal("1E+3"), Decimal("1000.0000")),
    ("decimal", Decimal("1.10000000"), Decimal("1.1000")),
    ("decimal", Decimal("-0"), Decimal("0.0000")),
    ("date", "2026-01-31", date(2026, 1, 31)),
    ("timestamp", "2026-01-31T12:00:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
    ("timestamp", "2026-01-31 12:00:00.5+02:00", datetime(2026, 1, 31, 10, 0, 0, 500000, tzinfo=UTC)),
    ("timestamp", datetime(2026, 1, 31, 12), datetime(2026, 1, 31, 12, tzinfo=UTC)),
    (
        "timestamp",
        datetime(2026, 1, 31, 12, tzinfo=timezone(timedelta(hours=-5, minutes=-30))),
        datetime(2026, 1, 31, 17, 30, tzinfo=UTC),
    ),
    ("uuid", "A1B2C3D4E5F67890ABCDEF1234567890", UUID("a1b2c3d4-e5f6-7890-abcd-ef1234567890")),
]


@pytest.mark.parametrize("validate", [False, True])
def test_other_spellings_of_the_same_value(streams: Project, validate: bool) -> None:
    declare(fields={name: f"{kind}?" for name, kind in FIELDS.items()}, validate_schema=validate)
    for name, value, _ in CONVERTED:
        weft.publish_sync("orders", {name: value})
    for event, (name, _, expected) in zip(drain("orders"), CONVERTED, strict=True):
        assert same(event[name], expected), (event[name], expected)


class Text(str):
    pass


LATE = datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-5)))
CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)

REFUSED: dict[str, list[Any]] = {
    "string": [5, b"bytes", True, 1.5, ["a"], {"a": 1}, "\ud800", "ok \udfff", "x" * 9_000_000],
    "bool": [0, 1, "true", "", 1.0, []],
    "int32": [2**31, -(2**31) - 1, 1.0, "1", True, Decimal(1)],
    "int64": [2**63, -(2**63) - 1, 2**70, 10**5000, 1.0, "1", True, math.nan],
    "float32": [math.nan, math.inf, -math.inf, 3.5e38, 1e300, 2**70 + 1, "1.5", True],
    "float64": [math.nan, math.inf, -math.inf, 2**53 + 1, 10**400, "1.5", True, Decimal("1.5"), 1j],
    "decimal": [
        Decimal("1.00001"),
        Decimal("1E+16"),
        Decimal("NaN"),
        Decimal("Infinity"),
        Decimal("sNaN"),
        "abc",
        "",
        True,
        math.nan,
        0.00001,
        10**20,
        Decimal("1E+999999"),
        Decimal("1E-999999"),
    ],
    "wide": [Decimal("1E+38"), Decimal("0.1"), 10**38],
    "fine": [1, Decimal("1"), Decimal("1E-39")],
    "date": ["2026-02-30", "today", 5, datetime(2026, 1, 31), "2026-01-31T00:00:00", "0000-00-00"],
    "timestamp": [
        "2026-13-01T00:00:00",
        "now",
        5,
        1.5,
        date(2026, 1, 31),
        "2026-01-31T12:00:00.1234567",
        LATE,
        "0001-01-01T00:00:00+05:00",
    ],
    "json": [
        math.nan,
        [math.inf],
        {"a": {"b": math.nan}},
        (1, 2),
        [(1, 2)],
        {1: "a"},
        {None: 1},
        {True: 1},
        {"a": {2: 3}},
        {1, 2},
        b"bytes",
        {"a": b"bytes"},
        "\ud800",
        {"\ud800": 1},
        ["\udfff"],
        Decimal("1.5"),
        datetime(2026, 1, 31),
        object(),
        1j,
        nested(201),
        nested(500),
        nested(100_000),
        CIRCLE,
        ["x" * 9_000_000],
    ],
    "bytes": ["text", bytearray(b"x"), memoryview(b"x"), 5, [1], b"x" * 9_000_000],
    "uuid": ["not a uuid", "", 5, b"\x00" * 16, "a1b2c3d4-e5f6-7890-abcd-ef123456789"],
}


@pytest.mark.brief(*(f"sqlite-{name}" for name in FIELDS))  # nothing of it comes to a database
@pytest.mark.parametrize("name", FIELDS)
def test_refused_with_a_reason(streams: Project, name: str) -> None:
    """By a stream that validates: the error names index, field and value, and the next event goes through."""
    declare(fields={name: f"{FIELDS[name]}?", "n": "int64"}, validate_schema=True)
    for number, value in enumerate(REFUSED[name]):
        with pytest.raises(SchemaError) as caught:
            weft.publish_sync("orders", [{"n": -1}, {"n": -2, name: value}, {"n": -3}])
        error = caught.value
        assert (error.index, error.field) == (1, name)
        assert error.value is value
        assert f"field {name!r}" in str(error)
        assert len(str(error)) < 400
        weft.publish_sync("orders", {"n": number, name: EXACT[name][0]})
    assert [event["n"] for event in drain("orders")] == list(range(len(REFUSED[name])))


@pytest.mark.brief(
    *(f"{('postgres', 'redis')[number % 2]}-{name}-declared" for number, name in enumerate(FIELDS)),
    *(f"{('sqlite', 'mysql')[number % 2]}-{name}-inferred" for number, name in enumerate(FIELDS)),
)
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "inferred"])
@pytest.mark.parametrize("name", FIELDS)
def test_kept_or_refused_where_the_schema_evolves(streams: Project, name: str, declared: bool) -> None:
    """A value that its column cannot hold is kept beside it, or refused; the next event goes through either way."""
    declare(fields={name: FIELDS[name]} if declared else None)
    expected: list[Any] = []
    for number, value in enumerate(REFUSED[name]):
        try:
            weft.publish_sync("orders", {"n": number, name: value})
        except SchemaError as error:
            assert (error.index, error.field) == (0, name)
            assert str(error)
        else:
            expected.append((number, value))
        good = EXACT[name][0] if declared else None  # what the column became decides what is good
        weft.publish_sync("orders", {"n": number, name: good})
        expected.append((number, good))
    events = drain("orders")
    assert [event["n"] for event in events] == [number for number, _ in expected]
    for event, (_, value) in zip(events, expected, strict=True):
        assert as_given(event[name], value), (event[name], value)


def test_a_whole_number_that_a_float32_cannot_hold() -> None:
    assert check_value(2**24, FieldType.parse("float32")) == 2**24
    with pytest.raises(ValueError, match="as a float32 it would be another number"):
        check_value(2**24 + 1, FieldType.parse("float32"))


def as_given(got: Any, value: Any) -> bool:
    """The same value, in the form that its column gives it."""
    if isinstance(got, Decimal):
        return got == Decimal(str(value))
    if isinstance(got, datetime) and isinstance(value, datetime):
        return got == (value if value.tzinfo else value.replace(tzinfo=UTC))
    if isinstance(value, Text):
        return got == value and type(got) is str
    return same(got, value)


@pytest.mark.parametrize("value", [Text("text"), type("Number", (int,), {})(5), type("Real", (float,), {})(1.5)])
def test_subclasses_come_back_equal_or_are_refused(streams: Project, value: Any) -> None:
    declare()
    try:
        weft.publish_sync("orders", {"v": value})
    except SchemaError:
        weft.publish_sync("orders", {"v": 1})
    else:
        assert drain("orders")[0]["v"] == value


def test_minus_zero(streams: Project) -> None:
    """Also the sign of zero is kept."""
    declare(fields={"f": "float64", "g": "float32", "j": "json"})
    weft.publish_sync("orders", {"f": -0.0, "g": -0.0, "j": [-0.0], "e": {"x": -0.0}})
    (event,) = drain("orders")
    assert same([event["f"], event["g"]], [-0.0, -0.0])
    assert same(event["j"], [-0.0])
    assert same(event["e"], {"x": -0.0})


# ----------------------------------------------------------------------------------------------------- any value at all

characters = st.characters(exclude_categories=())  # surrogates too
texts = st.text(characters, max_size=50)
numbers = st.integers() | st.integers(-(2**63), 2**63 - 1) | st.floats()
scalars = st.none() | st.booleans() | numbers | texts
documents = st.recursive(
    scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(texts, v, max_size=4), max_leaves=8
)
moments = st.datetimes(timezones=st.just(UTC)) | st.datetimes()
anything = (
    documents
    | st.binary(max_size=50)
    | st.decimals(allow_nan=True)
    | st.dates()
    | moments
    | st.uuids()
    | st.tuples(st.integers())
    | st.dictionaries(st.integers(), st.integers(), max_size=2)
)

by_hand = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def expected_of(value: Any) -> Any:
    """What a reader must get: the same, and a time without a zone in UTC."""
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value


def equal(got: Any, given: Any) -> bool:
    given = expected_of(given)
    if isinstance(given, (Decimal, int, float)) and not isinstance(given, bool):
        # A column of floats may hold a whole number, one of decimals an int: it must be the same number.
        return isinstance(got, (Decimal, int, float)) and not isinstance(got, bool) and got == given
    return same(got, given)


@pytest.fixture
def reader(streams: Project) -> Iterator[Any]:
    """Gives what was published since the last call."""
    declare()
    declare("typed", fields=FIELDS)
    yield lambda name: drain(name)


@by_hand
@given(events=st.lists(st.dictionaries(st.sampled_from("abcdef"), anything, max_size=4), min_size=1, max_size=5))
def test_any_value_under_any_key(reader: Any, events: list[dict[str, Any]]) -> None:
    try:
        weft.publish_sync("orders", events)
    except SchemaError as error:
        assert error.index is not None
        assert error.field in events[error.index]
        weft.publish_sync("orders", {"after": 1})
        (event,) = reader("orders")
        assert plain(event) == {"after": 1}
    else:
        found = reader("orders")
        assert len(found) == len(events)
        for got, event in zip(found, events, strict=True):
            wanted = {key: value for key, value in event.items() if value is not None}
            assert plain(got).keys() == wanted.keys()
            for key, value in wanted.items():
                assert equal(got[key], value), (key, got[key], value)


of_type = {
    "string": st.text(characters, max_size=200),
    "bool": st.booleans(),
    "int32": st.integers(-(2**31), 2**31 - 1) | st.integers(),
    "int64": st.integers(-(2**63), 2**63 - 1) | st.integers(),
    "float32": st.floats(width=32),
    "float64": st.floats(),
    "decimal": st.decimals(allow_nan=False, allow_infinity=False, places=4),
    "wide": st.decimals(allow_nan=False, allow_infinity=False, places=0),
    "fine": st.decimals(Decimal("-0.99"), Decimal("0.99"), places=38),
    "date": st.dates(),
    "timestamp": st.datetimes(timezones=st.just(UTC)),
    "json": documents,
    "bytes": st.binary(max_size=200),
    "uuid": st.uuids(),
}


@by_hand
@given(events=st.lists(st.fixed_dictionaries({}, optional=of_type), min_size=1, max_size=5))
def test_any_value_of_its_type(reader: Any, events: list[dict[str, Any]]) -> None:
    try:
        weft.publish_sync("typed", events)
    except SchemaError as error:
        assert error.index is not None
        assert error.field in events[error.index]
        weft.publish_sync("typed", {"after": 1})
        (event,) = reader("typed")
        assert plain(event) == {"after": 1}
    else:
        for got, event in zip(reader("typed"), events, strict=True):
            for key in FIELDS:
                wanted = event.get(key)
                if wanted is None:
                    assert got[key] is None
                elif isinstance(wanted, (float, Decimal)):
                    assert got[key] == wanted
                else:
                    assert same(got[key], wanted), (key, got[key], wanted)
