"""What the property tests do not reach: failures that name the column, users' SQL, whole alphabets, odd numbers."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.normalize.conftest import COLUMN, DatabaseRunner, Runner
from weft.columns import UTC_TIME
from weft.normalize import (
    Normalizer,
    clamp,
    derive,
    lower,
    parse_bool,
    parse_date,
    parse_int,
    parse_numeric,
    parse_timestamp,
    patterns,
    regex_replace,
    round,
    sql,
    trim,
    upper,
)
from weft.types import BigInt, Boolean, Date, Double, Numeric, Text, TimestampTZ

pytestmark = pytest.mark.every_system

ERRORS: list[Normalizer] = [
    parse_timestamp(on_failure="error"),
    parse_timestamp("%d/%m/%Y", on_failure="error"),
    parse_date(on_failure="error"),
    parse_int(on_failure="error"),
    parse_numeric(on_failure="error"),
    parse_bool(on_failure="error"),
]


@pytest.mark.parametrize("step", ERRORS, ids=lambda step: step.name)
def test_failure_names_the_column(runner: Runner, step: Normalizer) -> None:
    assert runner([step], [None], pa.string()) == [None]
    with pytest.raises(Exception, match=r"a .{0,2}Column.{1,3}s: parse_\w+\(\) cannot read"):
        runner([step], [None, "no such thing"], pa.string())
    # In a load, such a row alone may be put aside.
    assert not isinstance(runner, DatabaseRunner) or runner.rejects([step], ["no such thing"], pa.string())


@pytest.mark.brief("sqlite", "duckdb", "postgres", "mysql")
def test_all_letters(runner: Runner) -> None:
    """Each with its neighbours: what stands beside a letter must not count."""
    cased_letters = [
        chr(c)
        for c in range(1, sys.maxunicode + 1)
        if not 0xD800 <= c < 0xE000 and chr(c).lower() + chr(c).upper() != chr(c) * 2
    ]
    texts = ["".join(cased_letters[start : start + 20]) for start in range(0, len(cased_letters), 20)] + cased_letters
    for step, cased in ((lower(), str.lower), (upper(), str.upper)):
        found = runner([step], texts, pa.string())
        wanted = ["".join(cased(c) for c in text) for text in texts]
        assert [each for each in zip(texts, found, wanted, strict=True) if each[1] != each[2]] == []


@pytest.mark.brief("sqlite", "duckdb", "postgres", "mysql")
def test_long_texts(runner: Runner) -> None:
    """None of the patterns takes forever, or more stack than there is."""
    long = [
        " " * 100_000 + "x" + " " * 100_000 + "y" + " " * 100_000,
        "0" * 100_000,
        "é" * 100_000,
        "2026-01-01T" * 9_000,
    ]
    found = runner([trim()], long, pa.string())
    assert found[0] == "x" + " " * 100_000 + "y" and found[1:] == long[1:]
    assert runner([upper(), lower()], long, pa.string()) == [text.lower() for text in long]
    for step in (parse_timestamp(), parse_int(), parse_numeric(), parse_bool(), parse_timestamp("%d %b %y %I:%M %p")):
        wanted = [
            None if (step != parse_int() and step != parse_numeric()) or "0" * 9 not in text else 0 for text in long
        ]
        assert runner([step], long, pa.string()) == wanted, step.name


PIECES = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", "c", r"\d", "(a)", "(b[ac])"])
QUANTIFIED = st.tuples(
    st.sampled_from(["a", "b", "[ab]", "[^a]", ".", "c"]), st.sampled_from(["", "+", "*", "?", "{1,2}"])
).map("".join)
PATTERNS = st.lists(st.one_of(PIECES, QUANTIFIED), min_size=1, max_size=5).map("".join)


def test_plain_patterns(runner: Runner) -> None:
    """PostgreSQL takes the longest match, others the first: for what we call plain, these are the same."""

    def is_usable(pattern: str) -> bool:
        try:
            return patterns.check(pattern) >= 0 and patterns.is_plain(pattern)
        except Exception:
            return False

    examples = 5 if runner.dialect == "spark" else max(20, settings.get_profile("weft").max_examples // 10)

    @settings(suppress_health_check=list(HealthCheck), max_examples=examples)
    @given(pattern=PATTERNS.filter(is_usable), texts=st.lists(st.text("abc1\n", max_size=8), min_size=10, max_size=60))
    def check(pattern: str, texts: list[str]) -> None:
        found = runner([regex_replace(pattern, "<>")], texts, pa.string())
        wanted = [re.sub(pattern, "<>", text, flags=re.ASCII) for text in texts]
        assert [each for each in zip(texts, found, wanted, strict=True) if each[1] != each[2]] == []

    check()


def test_odd_floats(runner: Runner) -> None:
    if runner.dialect in ("sqlite", "mysql"):
        pytest.skip("it has no NaN")
    values = [math.nan, math.inf, -math.inf]
    rounded = runner([round(1)], values, pa.float64())
    assert math.isnan(rounded[0]) and rounded[1:] == values[1:]
    assert runner([clamp(high=5.0)], values, pa.float64()) == [5.0, 5.0, -math.inf]


def test_small_types(runner: Runner) -> None:
    assert runner([round(1)], [0.25, 0.35, -0.25, None], pa.float32()) == [
        pytest.approx(value, abs=1e-6) if value is not None else None for value in (0.3, 0.3, -0.3, None)
    ]
    assert runner([clamp(0, 9)], [-5, 5, 50, None], pa.int16()) == [0, 5, 9, None]
    assert runner([parse_int()], [-5, None], pa.int16()) == [-5, None]


@pytest.mark.parametrize(
    ("step", "kind", "values", "wanted"),
    [
        (sql("value || '-' || UPPER(value)"), pa.string(), ["a'b", None], ["a'b-A'B", None]),
        (
            sql(f"COALESCE(\"{COLUMN.replace(chr(34), chr(34) * 2)}\", value, '?%')"),
            pa.string(),
            ["a", None],
            ["a", "?%"],
        ),
        (sql("LENGTH(value)", BigInt), pa.string(), ["aé😀", None], [3, None]),
        (sql("value * 2 + 1"), pa.int64(), [20, None], [41, None]),
        (sql("CASE WHEN value > 10 THEN 'big' ELSE 'small' END", Text), pa.int64(), [20, 2], ["big", "small"]),
        (sql("value > 10", Boolean), pa.int64(), [20, 2, None], [True, False, None]),
        (sql("CAST(value AS DOUBLE PRECISION) / 2", Double), pa.int64(), [5, None], [2.5, None]),
        (sql("SUBSTRING(value FROM 2 FOR 2)"), pa.string(), ["abcd"], ["bc"]),
        (sql("value IN ('a', 'b') AND value IS NOT NULL", Boolean), pa.string(), ["a", "c"], [True, False]),
        (derive("n + 1", BigInt), pa.int64(), [7, 7], [1, 2]),
        (derive("'x' || CAST(n AS TEXT)", Text), pa.int64(), [7, 7], ["x0", "x1"]),
    ],
    ids=lambda each: getattr(each, "expression", ""),
)
def test_users_sql(runner: Runner, step: Normalizer, kind: pa.DataType, values: list[Any], wanted: list[Any]) -> None:
    assert runner([step], values, kind) == wanted


def test_types_that_users_sql_gives(runner: Runner) -> None:
    from datetime import UTC, date, datetime
    from decimal import Decimal

    texts = ["2026-01-31"]
    assert runner([sql("value", Date)], texts, pa.string()) == [date(2026, 1, 31)]
    assert runner([sql("value", TimestampTZ)], texts, pa.string()) == [datetime(2026, 1, 31, tzinfo=UTC)]
    assert runner([sql("value", Numeric[5, 2])], ["1.5"], pa.string()) == [Decimal("1.50")]
    assert runner([sql("value"), parse_timestamp()], [datetime(2026, 1, 1, tzinfo=UTC)], UTC_TIME)[0].year == 2026
