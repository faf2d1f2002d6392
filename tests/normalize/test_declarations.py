"""What is refused when a normalizer is declared, or when a chain is written for a dialect."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from weft import normalize
from weft.columns import LOCAL_TIME, UTC_TIME
from weft.errors import DeclarationError
from weft.normalize import (
    Normalizer,
    clamp,
    date_trunc,
    default,
    derive,
    expression,
    lower,
    needs_no_input,
    nullif,
    parse_bool,
    parse_date,
    parse_int,
    parse_numeric,
    parse_timestamp,
    regex_replace,
    replace,
    round,
    sql,
    supports,
    to_timezone,
    trim,
    truncate,
    upper,
)
from weft.normalize.dialects import DIALECTS
from weft.types import BigInt, Text

pytestmark = pytest.mark.every_system

FUNCTIONS = [
    name for name in normalize.__all__ if name not in ("Normalizer", "expression", "needs_no_input", "supports")
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unknown_argument(name: str) -> None:
    with pytest.raises(DeclarationError, match=f"{name}\\(\\) has no argument 'nonsense'"):
        getattr(normalize, name)(nonsense=1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_described(name: str) -> None:
    assert len(getattr(normalize, name).__doc__) > 50


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: parse_timestamp(on_fail="null"), "Did you mean 'on_failure'"),
        (lambda: parse_timestamp(on_failure="nul"), "Did you mean 'null'"),
        (lambda: parse_timestamp(on_failure="default"), "together"),
        (lambda: parse_timestamp(default=datetime(2026, 1, 1)), "together"),
        (lambda: parse_timestamp(on_failure="default", default="2026-01-01"), "is a datetime"),
        (lambda: parse_date(on_failure="default", default=datetime(2026, 1, 1)), "is a date"),
        (lambda: parse_timestamp("%Y-%m-%d", formats=["%Y"]), "not both"),
        (lambda: parse_timestamp(formats="%Y-%m-%d"), "list of texts"),
        (lambda: parse_timestamp(formats=[]), "list of texts"),
        (lambda: parse_timestamp(3), "is a text"),
        (lambda: parse_timestamp("%Y-%m"), "has no day"),
        (lambda: parse_timestamp("%Y-%m-%d %T"), "Write %H:%M:%S"),
        (lambda: parse_timestamp("%Y-%m-%d %Q"), "Known: %Y"),
        (lambda: parse_timestamp("%Y-%m-%d %"), "'%'"),
        (lambda: parse_timestamp("%Y-%m-%d %I:%M"), "%p"),
        (lambda: parse_timestamp("%Y-%m-%d %H:%M %p"), "%I"),
        (lambda: parse_timestamp("%Y-%m-%d %m"), "twice"),
        (lambda: parse_date("%Y %b %m %d"), "twice"),
        (lambda: to_timezone("Europe/Berlim"), "Did you mean 'Europe/Berlin'"),
        (lambda: to_timezone(1), "knows no time zone"),
        (lambda: date_trunc("mnth"), "Did you mean 'month'"),
        (lambda: truncate(0), "from 1"),
        (lambda: truncate("3"), "whole number"),
        (lambda: truncate(True), "whole number"),
        (lambda: truncate(), "Write truncate"),
        (lambda: trim(1), "too many positional"),
        (lambda: replace("", "x"), "not empty"),
        (lambda: replace("a", None), "must be a text"),
        (lambda: replace("a", "\0"), "no database stores"),
        (lambda: round(-1), "from 0"),
        (lambda: clamp(), "low or a high"),
        (lambda: parse_numeric(50, 2), "from 1 to 38"),
        (lambda: parse_numeric(2, 3), "from 0 to 2"),
        (lambda: parse_numeric(on_failure="default", default=1.5), "Decimal or int"),
        (lambda: parse_int(on_failure="default", default=1 << 63), "default of parse_int"),
        (lambda: parse_bool("yes"), "list of texts"),
        (lambda: parse_bool(["x"], ["X"]), "both true and false"),
        (lambda: parse_bool(on_failure="default", default="yes"), "True or False"),
        (lambda: default(None), "takes a value"),
        (lambda: default([1]), "takes a value"),
        (lambda: nullif(), "needs a value"),
        (lambda: regex_replace("a*", ""), "matches nothing"),
        (lambda: regex_replace("(", ""), "not a regular expression"),
        (lambda: regex_replace("(?i)a", ""), "flags"),
        (lambda: regex_replace("(?i:a)", ""), "not every database"),
        (lambda: regex_replace("a(?=b)", ""), "looking ahead"),
        (lambda: regex_replace(r"(a)\1", ""), "reference to a group"),
        (lambda: regex_replace(r"\ba", ""), "not every database"),
        (lambda: regex_replace(r"[\Da]", ""), "inside a set"),
        (lambda: regex_replace(r"a++", ""), "possessive"),
        (lambda: regex_replace(r"a{300}", ""), "255"),
        (lambda: regex_replace("a", r"\1"), "the pattern has 0"),
        (lambda: regex_replace("a", r"\n"), "backslash"),
        (lambda: regex_replace("a", "b\\"), "backslash"),
        (lambda: sql(""), "takes an expression"),
        (lambda: sql("a +"), "cannot be read"),
        (lambda: sql("SELECT 1"), "not one expression"),
        (lambda: sql("1; DROP TABLE x"), "not one expression"),
        (lambda: sql("(SELECT max(a) FROM t)"), "a query"),
        (lambda: sql("max(value)"), "an aggregate"),
        (lambda: sql("row_number() OVER ()"), "a window|an aggregate"),
        (lambda: sql("t.name"), "Columns of the source have no table here: name"),
        (lambda: sql("value", str), "Did you mean Text"),
        (lambda: derive("a", "bigint"), "Did you mean BigInt"),
    ],
)
def test_refused_when_declared(make: Any, said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        make()


@pytest.mark.parametrize(
    ("chain", "kind", "said"),
    [
        ([lower()], pa.int64(), r"lower\(\) takes text, and the column 'c' is int64"),
        ([date_trunc("day")], pa.string(), r"Put parse_timestamp\(\) before it"),
        ([round(2)], pa.string(), r"parse_int\(\) or parse_numeric\(\)"),
        ([clamp(0, 1)], pa.string(), "clamp"),
        ([parse_int()], pa.float64(), "parse_int"),
        ([parse_int(), lower()], pa.string(), "is int64 there"),
        ([date_trunc("hour")], pa.date32(), "has no hour"),
        ([default("x")], pa.int64(), "does not fit"),
        ([default(1.5)], pa.int64(), "does not fit"),
        ([default(True)], pa.int64(), "does not fit"),
        ([default(300)], pa.int8(), "does not fit"),
        ([default(1)], pa.bool_(), "does not fit"),
        ([default(Decimal("1.234"))], pa.decimal128(5, 2), "does not fit"),
        ([default(datetime(2026, 1, 1, tzinfo=UTC))], LOCAL_TIME, "does not fit"),
        ([nullif(float("nan"))], pa.float64(), "does not fit"),
        ([clamp(date(2026, 1, 1), "x")], pa.date32(), "does not fit"),
        ([clamp(5, 1)], pa.int64(), "is more than"),
        ([trim(), derive("a")], pa.string(), "must come first"),
        ([derive("value || 'a'")], pa.string(), "nothing comes before it"),
        ([lower()], pa.list_(pa.string()), "takes text"),
    ],
)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_refused_for_a_type(chain: list[Normalizer], kind: pa.DataType, said: str, dialect: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        expression(chain, "c", dialect, kind=kind)


def test_what_a_dialect_cannot_do() -> None:
    branching = regex_replace("a|ab", "x")
    assert [dialect for dialect in DIALECTS if not supports([trim(), branching], dialect)] == ["postgres"]
    with pytest.raises(DeclarationError, match="postgres: PostgreSQL would take another match") as caught:
        expression([branching], "c", "postgres", kind=pa.string())
    assert caught.value.hint == "It can by duckdb, mysql, spark, sqlite."
    assert supports([regex_replace(r"(\d+)-[a-c]*", r"\1")], "postgres")

    zoned = to_timezone("Europe/Berlin")
    assert [dialect for dialect in DIALECTS if not supports([zoned], dialect)] == ["mysql"]
    with pytest.raises(DeclarationError, match="CONVERT_TZ"):
        expression([zoned], "c", "mysql", kind=UTC_TIME)
    assert supports([to_timezone("UTC")], "mysql")


def test_unknown_dialect() -> None:
    with pytest.raises(DeclarationError, match="Did you mean 'postgres'"):
        expression([lower()], "c", "postgre", kind=pa.string())


def test_without_steps() -> None:
    assert expression([], 'a"b', "postgres", kind=pa.int64()) == ('"a""b"', pa.int64())
    assert expression([], "a`b", "mysql", kind=pa.int64()) == ("`a``b`", pa.int64())


def test_columns_are_spelled_as_asked() -> None:
    written, _ = expression([sql("value || b")], "a", "duckdb", kind=pa.string(), quote=lambda name: f"q.<{name}>")
    assert "q.<a>" in written and "q.<b>" in written


def test_derived() -> None:
    assert needs_no_input([derive("a")]) and needs_no_input([derive("a"), lower()])
    assert not needs_no_input([]) and not needs_no_input([sql("a")])
    assert expression([derive("a + b", BigInt)], "c", "duckdb", kind=pa.null())[1] == pa.int64()
    assert expression([derive("a")], "c", "duckdb", kind=pa.null(), target=pa.date32())[1] == pa.date32()
    assert expression([derive("a")], "c", "duckdb", kind=pa.null())[1] == pa.string()


def test_equal_ones_are_equal() -> None:
    assert parse_timestamp("%Y-%m-%d") == parse_timestamp("%Y-%m-%d")
    assert len({upper(), upper(), sql("value", Text), sql("value", Text)}) == 2
    with pytest.raises(AttributeError):
        truncate(3).length = 4  # type: ignore[attr-defined]


def test_declarations_import_nothing_heavy() -> None:
    program = (
        "import sys; from weft.normalize import *; lower(), parse_timestamp('%Y-%m-%d'), regex_replace('a', 'b'); "
        "assert not {'pyarrow', 'numpy', 'sqlglot'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
