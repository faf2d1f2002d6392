"""Every normalizer gives what its description says, in every database and in Spark: against a plain Python oracle."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.normalize import oracle
from tests.normalize.conftest import Column, Runner
from weft.columns import LOCAL_TIME, UTC_TIME
from weft.normalize import (
    Normalizer,
    clamp,
    date_trunc,
    default,
    email_normalize,
    empty_to_null,
    lower,
    not_null_or,
    nullif,
    parse_bool,
    parse_date,
    parse_int,
    parse_numeric,
    parse_timestamp,
    phone_normalize,
    regex_replace,
    replace,
    round,
    supports,
    to_timezone,
    trim,
    truncate,
    upper,
    whitespace_to_null,
)

pytestmark = pytest.mark.every_system

# Letters with odd cases, all white space, marks that mean something to SQL and to patterns.
ODD = "aAzZéÉßẞİıiIΣσςǅŉﬁΐᾳჀაԱև𐐀𐐨😀e\u0301'\"`\\%_?$&[](){}|^.*+-/:;,<>@#~!=0123456789\x1f\x7f" + oracle.SPACE
# No database stores NUL in texts, and no encoding lone surrogates. What Python does not know, Java may know as a
# letter; and Unicode 16 gave two old letters a capital.
_LEFT_OUT = "\0ƛɤ"
CHARACTERS = st.one_of(
    st.sampled_from(ODD), st.characters(exclude_categories=["Cs", "Cn"], exclude_characters=_LEFT_OUT)
)
# What Python, ICU, MariaDB and DuckDB know of letters differs by a version of Unicode: only old ones are drawn.
LETTERS = st.one_of(
    st.sampled_from(ODD), st.characters(max_codepoint=0x24F), st.characters(min_codepoint=0x370, max_codepoint=0x52F)
)
TEXTS = st.text(CHARACTERS.filter(lambda c: c.lower() == c == c.upper() or ord(c) < 0x530), max_size=12) | st.text(
    LETTERS.filter(lambda c: c not in _LEFT_OUT), max_size=12
)


def mostly(good: st.SearchStrategy[str], characters: str) -> st.SearchStrategy[str]:
    """Good texts, and ones that are almost good."""
    spoiled = st.tuples(good, st.integers(0, 30), st.text(characters + " \n٣x", max_size=2)).map(
        lambda each: each[0][: each[1]] + each[2] + each[0][each[1] + 1 :]
    )
    return st.one_of(good, good, spoiled, st.text(characters, max_size=30))


MOMENTS = st.datetimes(min_value=datetime(1, 1, 1), max_value=datetime(9999, 12, 31, 23, 59, 59, 999999))
RECENT = st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(2037, 12, 30))
ZONES = st.sampled_from(
    ["+14:", "", "Z", "+00:00", "+02:00", "-0530", "+14", "-12:00", "+14:59", "+15:00", "+1:00", "z", "-00:60"]
)
DAY_TEXTS = st.one_of(
    st.dates().map(str),
    st.builds(lambda y, m, d: f"{y:04}-{m:02}-{d:02}", st.integers(0, 9999), st.integers(0, 13), st.integers(0, 32)),
    st.builds(lambda y: f"{y:04}-02-29", st.integers(0, 9999)),
    st.sampled_from(["0001-01-01", "9999-12-31", "0000-01-01", "1900-02-29", "2000-02-29", "2100-02-29", "2024-02-29"]),
)
CLOCK_TEXTS = st.builds(
    lambda h, m, s, f: f"{h:02}:{m:02}" + ("" if s is None else f":{s:02}" + (f".{f}" if f else "")),
    st.integers(0, 24),
    st.integers(0, 60),
    st.none() | st.integers(0, 60),
    st.sampled_from(["", "", "0", "5", "123", "123456", "1234567", "999999999", "1234567890"]),
)
ISO_TEXTS = mostly(
    st.builds(
        lambda day, t, clock, zone: day + (t + clock + zone if t else ""),
        DAY_TEXTS,
        st.sampled_from(["T", " ", "T", "", "t"]),
        CLOCK_TEXTS,
        ZONES,
    ),
    "0123456789-:.TZ+ ",
)
FORMATS = (
    "%Y-%m-%d %H:%M:%S.%f",
    "%Y-%m-%dT%H:%M:%S.%f%z",
    "%d/%m/%Y",
    "%m-%d-%y %I:%M %p",
    "%d %b %Y %H:%M:%S.%f",
    "%B %d, %Y",
    "%Y%m%d%H%M%S",
    "%Y-%m-%dT%H:%M:%S%z",
    "%Y.%m.%d",
)


def shown(format: str) -> st.SearchStrategy[str]:
    """Times in a format, some of them without leading zeros and in other cases."""

    def show(moment: datetime, zone: str, plain: bool, cased: Callable[[str], str]) -> str:
        text = moment.strftime(format.replace("%z", "#").replace("%Y", f"{moment.year:04}")).replace("#", zone)
        # Where numbers do not touch, a leading zero may be missing.
        return cased(re.sub(r"(?<![0-9.])0(?=[0-9](?![0-9]))", "", text) if plain and "%Y%m" not in format else text)

    cases = st.sampled_from([str, str, str.upper, str.lower])
    return mostly(st.builds(show, st.one_of(MOMENTS, RECENT), ZONES, st.booleans(), cases), "0123456789/-: APMapm")


INTEGER_TEXTS = mostly(
    st.one_of(
        st.integers(-(1 << 64), 1 << 64).map(str),
        st.integers(-99, 99).map(lambda n: f"{n:+05}"),
        st.sampled_from(["9223372036854775807", "-9223372036854775808", "9223372036854775808", "-9223372036854775809"]),
        st.sampled_from(
            ["", "+", "-", "0", "-0", "+0", "00000000000000000000000000000000000000000000007", "1e3", "0x1", "1_0"]
        ),
        st.sampled_from(["99999999999999999999999999999999999999999999", " 1", "1 ", "1\n", "٣", "1.0"]),
    ),
    "0123456789+-",
)
NUMERIC_TEXTS = mostly(
    st.one_of(
        st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9).map(str),
        st.decimals(allow_nan=False, allow_infinity=False, places=5, min_value=-10, max_value=10).map(
            lambda d: f"{d:f}"
        ),
        st.sampled_from(
            ["", ".", "-.5", "5.", "+5.10", "007.100000", ".0", "0", "-0.00", "1e3", "NaN", "Infinity", "12345678.9"]
        ),
        st.sampled_from(
            ["99999999.99", "100000000.00", "99999999.990", "99999999.999", "0.001", "0.010", ".000", "1,5"]
        ),
    ),
    "0123456789.+-",
)
BOOLEAN_TEXTS = st.one_of(
    st.sampled_from(
        [*oracle.TRUE, *oracle.FALSE, "TRUE", "False", "YeS", " true", "true ", "", "2", "tru", "ÿes", "Oﬀ"]
    ),
    TEXTS,
)
FLOATS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, min_value=-1e18, max_value=1e18).map(lambda x: x + 0.0),
    st.integers(-2000, 2000).map(lambda n: n / 200),
    st.sampled_from(
        [0.145, 2.5, -2.5, 0.5, 1.005, 2.675, 1e-7, 9007199254740991.5, 1e15 + 0.5, 0.1 + 0.2, 1e300, -1e300]
    ),
)
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**6) + 1, max_value=10**6 - 1)
INTS = st.integers(-(1 << 63), (1 << 63) - 1)
DECIMAL = pa.decimal128(10, 4)
IN_UTC = MOMENTS.map(lambda moment: moment.replace(tzinfo=UTC))
TEXT = pa.string()
Oracle = Callable[[Any], Any]


@dataclass(frozen=True)
class Case:
    """Normalizers, what they do to a value that is not null, and the values to try."""

    chain: list[Normalizer]
    oracle: Oracle
    values: st.SearchStrategy[Any]
    kind: pa.DataType = TEXT
    null: Any = None


CASES: dict[str, Case] = {
    "trim": Case([trim()], oracle.trim, TEXTS),
    "lower": Case([lower()], oracle.lower, TEXTS),
    "upper": Case([upper()], str.upper, TEXTS),
    "empty_to_null": Case([empty_to_null()], lambda t: t or None, TEXTS | st.sampled_from(["", " "])),
    "whitespace_to_null": Case(
        [whitespace_to_null()], lambda t: t if oracle.trim(t) else None, TEXTS | st.text(oracle.SPACE, max_size=3)
    ),
    "replace": Case([replace("aa", "'\\$1%")], lambda t: t.replace("aa", "'\\$1%"), TEXTS | st.text("aA'", max_size=9)),
    "replace mark": Case([replace("\\", "")], lambda t: t.replace("\\", ""), TEXTS),
    "regex_replace": Case(
        [regex_replace(r"(\d+)[-./\s](\w)", r"\2<\\\1$>")],
        lambda t: re.sub(r"(\d+)[-./ \t\n\r\f\v](\w)", r"\2<\\\1$>", t, flags=re.A),
        TEXTS | st.text("01a-. \n_é", max_size=12),
    ),
    "regex_replace not": Case(
        [regex_replace(r"[^a-c\]\\^.$*+-]+", "")], lambda t: re.sub(r"[^a-c\]\\^.$*+-]+", "", t), TEXTS
    ),
    "regex_replace ends": Case(
        [regex_replace(r"^a.", "<"), regex_replace(r".b$", ">")],
        lambda t: re.sub(r"[^\n]b\Z", ">", re.sub(r"\Aa[^\n]", "<", t)),
        st.text("ab\n\r\u2028", max_size=5),
    ),
    "regex_replace lazy": Case(
        [regex_replace(r"(a|ab)(c|bcd)*?d", r"[\1|\2]")],
        lambda t: re.sub(r"(a|ab)(c|bcd)*?d", r"[\1|\2]", t),
        st.text("abcd", max_size=12),
    ),
    "truncate": Case([truncate(3)], lambda t: t[:3], TEXTS),
    "email_normalize": Case([email_normalize()], lambda t: oracle.lower(oracle.trim(t)) or None, TEXTS),
    "phone_normalize": Case([phone_normalize()], oracle.phone, TEXTS | st.text("+0159 ()-\n٣", max_size=20)),
    "parse_timestamp": Case([parse_timestamp()], oracle.iso_instant, ISO_TEXTS),
    "parse_timestamp default": Case(
        [parse_timestamp(on_failure="default", default=datetime(1999, 1, 1, 2, tzinfo=UTC))],
        lambda t: oracle.iso_instant(t) or datetime(1999, 1, 1, 2, tzinfo=UTC),
        ISO_TEXTS,
    ),
    "parse_timestamp trimmed": Case(
        [trim(), lower(), upper(), parse_timestamp()],
        lambda t: oracle.iso_instant(oracle.lower(oracle.trim(t)).upper()),
        ISO_TEXTS.map(lambda t: f" {t}\n"),
    ),
    "parse_timestamp formats": Case(
        [parse_timestamp(formats=["%Y-%m-%d %H:%M:%S", "%Y/%m/%d"])],
        oracle.by_format("%Y-%m-%d %H:%M:%S", "%Y/%m/%d"),
        st.one_of(shown("%Y-%m-%d %H:%M:%S"), shown("%Y/%m/%d"), ISO_TEXTS),
    ),
    "parse_timestamp passed": Case([parse_timestamp()], lambda m: m, IN_UTC, UTC_TIME),
    "parse_timestamp local": Case([parse_timestamp()], lambda m: m.replace(tzinfo=UTC), MOMENTS, LOCAL_TIME),
    "parse_timestamp date": Case(
        [parse_timestamp()], lambda d: datetime(d.year, d.month, d.day, tzinfo=UTC), st.dates(), pa.date32()
    ),
    "parse_date": Case([parse_date()], oracle.iso_day, mostly(DAY_TEXTS, "0123456789-") | ISO_TEXTS),
    "parse_date default": Case(
        [parse_date(on_failure="default", default=date(1, 1, 1))],
        lambda t: oracle.iso_day(t) or date(1, 1, 1),
        mostly(DAY_TEXTS, "0123456789-"),
    ),
    "parse_date passed": Case([parse_date()], lambda d: d, st.dates(), pa.date32()),
    "parse_date of time": Case([parse_date()], lambda m: m.date(), IN_UTC, UTC_TIME),
    "to_timezone": Case(
        [to_timezone("Europe/Berlin")],
        oracle.in_zone("Europe/Berlin"),
        st.one_of(
            RECENT.map(lambda m: m.replace(tzinfo=UTC)),
            # Around both changes of the clock.
            st.builds(
                lambda day, minute, second: datetime(*day, minute // 60, minute % 60, second, tzinfo=UTC),
                st.sampled_from([(2026, 3, 29), (2026, 10, 25), (2099, 3, 29), (9998, 10, 25), (1980, 4, 6)]),
                st.integers(0, 3 * 60),
                st.integers(0, 59),
            ),
        ),
        UTC_TIME,
    ),
    "to_timezone local": Case(
        [to_timezone("America/New_York")], oracle.in_zone("America/New_York"), RECENT, LOCAL_TIME
    ),
    "to_timezone UTC": Case([to_timezone("UTC")], lambda m: m.replace(tzinfo=None), IN_UTC, UTC_TIME),
    "parse_int": Case([parse_int()], oracle.integer, INTEGER_TEXTS),
    "parse_int default": Case(
        [parse_int(on_failure="default", default=-5)],
        lambda t: -5 if oracle.integer(t) is None else oracle.integer(t),
        INTEGER_TEXTS,
    ),
    "parse_numeric": Case([parse_numeric(10, 2)], oracle.numeric(10, 2), NUMERIC_TEXTS),
    "parse_numeric wide": Case([parse_numeric()], oracle.numeric(38, 18), NUMERIC_TEXTS),
    "parse_numeric fraction": Case([parse_numeric(3, 3)], oracle.numeric(3, 3), NUMERIC_TEXTS),
    "parse_numeric whole": Case([parse_numeric(3, 0)], oracle.numeric(3, 0), NUMERIC_TEXTS),
    "parse_numeric int": Case([parse_numeric(10, 2)], Decimal, INTS, pa.int64()),
    "round": Case([round(2)], oracle.rounded(2), DECIMALS, DECIMAL),
    "round whole": Case([round()], oracle.rounded(0), DECIMALS, DECIMAL),
    "round float": Case([round(2)], oracle.rounded(2), FLOATS, pa.float64()),
    "round float whole": Case([round()], oracle.rounded(0), FLOATS, pa.float64()),
    "round int": Case([round(2)], lambda n: n, INTS, pa.int64()),
    "clamp": Case([clamp(-5, 100)], oracle.clamped(-5, 100), INTS | st.integers(-200, 200), pa.int64()),
    "clamp decimal": Case(
        [clamp(Decimal("-9.5"), Decimal("100.25"))],
        oracle.clamped(Decimal("-9.5"), Decimal("100.25")),
        DECIMALS | st.decimals(-11, 11, places=4),
        DECIMAL,
    ),
    "clamp float": Case([clamp(low=-0.5)], oracle.clamped(-0.5, None), FLOATS, pa.float64()),
    "clamp date": Case(
        [clamp(date(1970, 1, 1), date(2037, 1, 1))],
        oracle.clamped(date(1970, 1, 1), date(2037, 1, 1)),
        st.dates(),
        pa.date32(),
    ),
    "clamp time": Case(
        [clamp(high=datetime(2026, 1, 1, tzinfo=UTC))],
        oracle.clamped(None, datetime(2026, 1, 1, tzinfo=UTC)),
        IN_UTC,
        UTC_TIME,
    ),
    "parse_bool": Case([parse_bool()], oracle.boolean, BOOLEAN_TEXTS),
    "parse_bool words": Case(
        [parse_bool(["Ja"], ["ÑO"], on_failure="default", default=True)],
        lambda t: oracle.lower(t) != "ño",
        st.sampled_from(["ja", "JA", "ño", "ÑO", "no", "x"]),
    ),
    "parse_bool int": Case([parse_bool()], lambda n: {1: True, 0: False}.get(n), st.integers(-1, 2), pa.int64()),
    "default": Case([default("'\\ é")], lambda t: t, TEXTS, null="'\\ é"),
    "default int": Case([default(-7)], lambda n: n, INTS, pa.int64(), null=-7),
    "default time": Case(
        [default(datetime(1, 1, 1, tzinfo=UTC))], lambda m: m, IN_UTC, UTC_TIME, null=datetime(1, 1, 1, tzinfo=UTC)
    ),
    "default bool": Case([default(False)], lambda b: b, st.booleans(), pa.bool_(), null=False),
    "default bytes": Case([default(b"\0'\xff")], lambda b: b, st.binary(max_size=4), pa.binary(), null=b"\0'\xff"),
    "not_null_or": Case([not_null_or(Decimal("1.5"))], lambda d: d, DECIMALS, DECIMAL, null=Decimal("1.5")),
    "nullif": Case(
        [nullif("a", "", "É ")],
        lambda t: None if t in ("a", "", "É ") else t,
        TEXTS | st.sampled_from(["a", "A", "a ", " a", "", " ", "É ", "é ", "E ", "É"]),
    ),
    "nullif number": Case(
        [nullif(Decimal("1.5"), 0)],
        lambda d: None if d in (0, Decimal("1.5")) else d,
        DECIMALS | st.sampled_from([Decimal("1.5"), Decimal(0)]),
        DECIMAL,
    ),
    "chain": Case(
        [
            trim(),
            replace(",", ""),
            empty_to_null(),
            parse_numeric(12, 4),
            round(1),
            clamp(Decimal(0), Decimal(500)),
            default(Decimal(1)),
        ],
        lambda t: (
            oracle.clamped(0, 500)(oracle.rounded(1)(found))
            if (found := oracle.numeric(12, 4)(oracle.trim(t).replace(",", ""))) is not None
            else 1
        ),
        NUMERIC_TEXTS.map(lambda t: f" {t},"),
        null=1,
    ),
}
for each_format in FORMATS:
    CASES[f"parse_timestamp {each_format}"] = Case(
        [parse_timestamp(each_format)], oracle.by_format(each_format), shown(each_format)
    )
CASES["parse_date %d %B %y"] = Case(
    [parse_date("%d %B %y")],
    lambda t: (found := oracle.by_format("%d %B %y")(t)) and found.date(),
    shown("%d %B %y"),
)
for each_unit in ("year", "quarter", "month", "week", "day", "hour", "minute", "second"):
    CASES[f"date_trunc {each_unit}"] = Case([date_trunc(each_unit)], oracle.truncated(each_unit), IN_UTC, UTC_TIME)
    CASES[f"date_trunc {each_unit} local"] = Case(
        [date_trunc(each_unit)], oracle.truncated(each_unit), MOMENTS, LOCAL_TIME
    )
for each_unit in ("year", "quarter", "month", "week", "day"):
    CASES[f"date_trunc {each_unit} date"] = Case(
        [date_trunc(each_unit)], oracle.truncated(each_unit), st.dates(), pa.date32()
    )


def wanted(case: Case, values: Sequence[Any]) -> list[Any]:
    return [case.null if value is None else case.oracle(value) for value in values]


def test_as_described(runner: Runner) -> None:
    """All cases in one statement: a statement takes longer than the values."""
    cases = {name: case for name, case in CASES.items() if supports(case.chain, runner.dialect)}
    assert {(name, runner.dialect) for name in CASES.keys() - cases} == {
        each for each in NOT_THERE if each[1] == runner.dialect
    }
    columns = {name: Column(case.chain, drawn(name), case.kind) for name, case in cases.items()}
    results = runner.together(columns)
    wrong = [
        (name, *each)
        for name, column in columns.items()
        for each in zip(column.values, results[name], wanted(cases[name], column.values), strict=True)
        if each[1] != each[2]
    ]
    assert not wrong


@functools.cache
def drawn(name: str) -> list[Any]:
    """Some values for a case, nulls among them: the same for all dialects, because to draw them takes longest."""
    values: list[Any] = []

    @settings(suppress_health_check=list(HealthCheck), max_examples=2, database=None, phases=[Phase.generate])
    @given(some=st.lists(st.none() | CASES[name].values, min_size=30, max_size=60))
    def draw(some: list[Any]) -> None:
        values.extend(some)

    draw()
    return values


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_each_as_described(runner: Runner, name: str) -> None:
    """Each case by itself, which Hypothesis shrinks to the value that fails."""
    case = CASES[name]
    if not supports(case.chain, runner.dialect):
        return
    # A query of Spark's takes as long as a hundred of a database.
    profile = settings.get_profile("weft").max_examples
    examples = max(2, profile // 50) if runner.dialect == "spark" else max(4, profile // 20)

    @settings(suppress_health_check=list(HealthCheck), max_examples=examples)
    @given(values=st.lists(st.none() | case.values, min_size=15, max_size=60))
    def check(values: list[Any]) -> None:
        results = runner(case.chain, values, case.kind)
        wrong = [each for each in zip(values, results, wanted(case, values), strict=True) if each[1] != each[2]]
        assert not wrong

    check()


# Both are run by Spark instead: see their descriptions.
NOT_THERE = {("regex_replace lazy", "postgres"), ("to_timezone", "mysql"), ("to_timezone local", "mysql")}
