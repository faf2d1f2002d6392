"""A database computes of an Ibis expression what Spark computes of it, in columns of the same types; else Spark does.

The expressions are made by rules, of each operation over columns of each type: not of those that somebody thought of.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import ibis
import pyarrow as pa
import pytest
from ibis.common.exceptions import IbisError

import weft
from tests.conftest import System
from weft.columns import canonical_schema
from weft.engine.frame_projection import cast_to
from weft.engine.models import frame_kinds, pushdown
from weft.engine.models.build import _with_tables
from weft.engine.models.inputs import Observer
from weft.errors import WeftError
from weft.project import Project, use
from weft.systems.sql.tables import Slice

pytestmark = pytest.mark.spark

Computed = Callable[[Any], Any]
DATABASES = ("sqlite", "duckdb", "postgres", "mysql")

# ----------------------------------------------------------------------------------------------------------------- rows

KINDS: dict[str, pa.DataType] = {
    "k": pa.int64(),
    "i": pa.int64(),
    "j": pa.int64(),
    "h": pa.int32(),
    "sh": pa.int16(),
    "f": pa.float64(),
    "g": pa.float64(),
    "r": pa.float32(),
    "s": pa.string(),
    "t": pa.string(),
    "b": pa.bool_(),
    "c": pa.bool_(),
    "d": pa.date32(),
    "e": pa.date32(),
    "ts": pa.timestamp("us", "UTC"),
    "us": pa.timestamp("us", "UTC"),
    "nt": pa.timestamp("us"),
    "n": pa.decimal128(10, 2),
    "m": pa.decimal128(20, 6),
}
_WHOLE = [None, 0, 1, -1, 2, -2, 3, 7, -7, 10, 100, 29_999, -30_000]
_FLOATS = [None, 0.0, -0.0, 0.1, 0.5, -0.5, 1.5, 2.5, -2.5, 1e15 + 0.3, 1e-7, 123456.789, 1 / 3, -7.0, 1e20]
_TEXTS = [
    *(None, "", "a", "A", "b", "abc", "ABC", "a ", " a", "a  ", "aa", "Z", "z", "ä", "Ä", "ß", "ss", "é", "e\u0301"),
    *("😀b", "a😀", "a_b%", "a%b", "a\\b", "a'b", '"', "\n", "a\tb", "10", "9", "-1", "1.5", "i", "I", "İ", "ı", "ﬀ"),
    *("\u200b", "\u00a0a", "null", "true", "2026-01-01", "x" * 40, "ab,cd", "日本"),
]
_DAYS = [None, date(1969, 12, 31), date(1970, 1, 1), date(2024, 2, 29), date(2025, 12, 29), date(2026, 1, 1)]
_TIMES = [
    *(None, datetime(1969, 12, 31, 23, 59, 59, 999_999), datetime(2026, 1, 1), datetime(2026, 1, 1, 12)),
    *(datetime(2026, 3, 29, 1, 30, 0, 1), datetime(2025, 12, 31, 23, 59, 59, 500_000), datetime(2024, 2, 29, 6, 7, 8)),
]
_DECIMALS = [None, *map(Decimal, ("0.00", "0.01", "-0.01", "1.10", "1.15", "-2.50", "99999999.99", "10.00"))]
SAMPLES: dict[str, list[Any]] = {
    "i": [*_WHOLE, 2**31, -(2**31) - 1, 10**12 + 1],
    "j": _WHOLE,
    "h": _WHOLE,
    "sh": [*_WHOLE[:10], 120],
    "f": _FLOATS,
    "g": _FLOATS,
    "r": [None, 0.0, 0.5, -2.5, 0.25, 3.0],
    "s": _TEXTS,
    "t": _TEXTS,
    "b": [None, True, False],
    "c": [None, True, False],
    "d": _DAYS,
    "e": _DAYS,
    "nt": _TIMES,
    **{name: [each and each.replace(tzinfo=UTC) for each in _TIMES] for name in ("ts", "us")},
    "n": _DECIMALS,
    "m": _DECIMALS,
}
EDGES: dict[str, list[Any]] = {
    "i": [2**63 - 1, -(2**63), -(2**62) - 1, -(2**63)],
    "j": [1, -1, 4, 2**63 - 1],
    "h": [2**31 - 1, -(2**31), 2**31 - 1, -1],
    "sh": [2**15 - 1, -(2**15), 2**15 - 1, -1],
    "f": [2.0**63, None, 2.0**62, -(2.0**63)],
    "g": [2.0**63, -(2.0**63), 3.0, 2.0**53],
}


def rows_of(seed: int, number: int) -> pa.Table:
    """Rows of values that are chosen at random, of which each comes once at least."""
    choose = random.Random(seed)
    columns: dict[str, list[Any]] = {"k": list(range(number))}
    for name, samples in SAMPLES.items():
        values = [*samples, *choose.choices(samples, k=number)][:number]
        choose.shuffle(values)
        columns[name] = values
    return pa.table(columns, pa.schema(KINDS))


def edges() -> pa.Table:
    """Rows of numbers at the ends of their types; the other columns are null."""
    number = len(EDGES["i"])
    columns = {name: EDGES.get(name, [None] * number) for name in KINDS} | {"k": list(range(number))}
    return pa.table(columns, pa.schema(KINDS))


# ---------------------------------------------------------------------------------------------------------- expressions

NUMBERS, WHOLE = ("i", "j", "h", "sh", "f", "g", "r", "n", "m"), ("i", "j", "h", "sh")
TEXTS, BOOLS, DAYS, INSTANTS = ("s", "t"), ("b", "c"), ("d", "e"), ("ts", "us")
PAIRS = ("i j", "i h", "h h", "h sh", "sh sh", "f g", "i f", "f i", "r f", "r i", "n m", "n n", "n i", "i n", "n f")
ALIKE = ("s t", "s s", "b c", "d e", "ts us", "nt nt")
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b.nullif(0),
    "//": lambda a, b: a // b.nullif(0),
    "%": lambda a, b: a % b.nullif(0),
}
COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "==": lambda a, b: a == b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    "is": lambda a, b: a.identical_to(b),
    "least": lambda a, b: ibis.least(a, b),
    "greatest": lambda a, b: ibis.greatest(a, b),
    "coalesce": lambda a, b: ibis.coalesce(a, b),
    "nullif": lambda a, b: a.nullif(b),
    "ifelse": lambda a, b: (a > b).ifelse(a, b),
    "isin": lambda a, b: a.isin([b]),
    "between": lambda a, b: a.between(b, b),
}
OF_NUMBER: dict[str, Computed] = {
    "neg": lambda x: -x,
    "abs": lambda x: x.abs(),
    "sign": lambda x: x.sign(),
    "plus": lambda x: x + 1,
    "times": lambda x: x * 0.1,
    "tenth": lambda x: x / 10,
    "third": lambda x: x / 3,
    "half": lambda x: x // 2,
    "minus half": lambda x: x // -2,
    "rest": lambda x: x % 3,
    "minus rest": lambda x: x % -3,
    "zero": lambda x: x == 0,
    "tenths": lambda x: x == 0.1,
    "one half": lambda x: x > 1.5,
    "in": lambda x: x.isin([1, 2.5]),
    "case": lambda x: x.cases((1, "one"), (7, "seven"), else_="more"),
    "mixed": lambda x: (x > 1).ifelse(x, 0.5),
    "filled": lambda x: x.fill_null(0),
    "round": lambda x: x.round(),
    "floor": lambda x: x.floor(),
    "sqrt": lambda x: x.abs().sqrt(),
}
OF_TEXT: dict[str, Computed] = {
    "length": lambda x: x.length(),
    "lower": lambda x: x.lower(),
    "strip": lambda x: x.strip(),
    "reverse": lambda x: x.reverse(),
    "first": lambda x: x[0:1],
    "slice": lambda x: x[1:3],
    "from": lambda x: x[1:],
    "left": lambda x: x.left(2),
    "right": lambda x: x.right(2),
    "substr": lambda x: x.substr(1, 2),
    "none of it": lambda x: x[2:2],
    "find": lambda x: x.find("b"),
    "contains": lambda x: x.contains("a"),
    "contains nothing": lambda x: x.contains(""),
    "contains sign": lambda x: x.contains("%"),
    "contains accent": lambda x: x.contains("\u0301"),
    "starts": lambda x: x.startswith("a"),
    "starts umlaut": lambda x: x.startswith("ä"),
    "starts with nothing": lambda x: x.startswith(""),
    "ends": lambda x: x.endswith("b"),
    "ends blank": lambda x: x.endswith(" "),
    "like": lambda x: x.like("a%"),
    "like one": lambda x: x.like("_"),
    "like umlaut": lambda x: x.like("Ä%"),
    "ilike": lambda x: x.ilike("A%"),
    "replace": lambda x: x.replace("a", "xy"),
    "replace by nothing": lambda x: x.replace("a", ""),
    "replace case": lambda x: x.replace("A", "-"),
    "plus": lambda x: x + "-",
    "equal": lambda x: x == "a",
    "equal blank": lambda x: x == "a ",
    "in": lambda x: x.isin(["a", "Ä", "é"]),
    "above": lambda x: x > "a",
    "case": lambda x: x.cases(("a", 1), ("A", 2), else_=3),
    "number": lambda x: x.cast("int64"),
    "empty": lambda x: x.nullif(""),
}
OF_TIME: dict[str, Computed] = {
    **{name: lambda x, name=name: getattr(x, name)() for name in ("year", "month", "day", "quarter", "day_of_year")},
    **{f"to {unit}": lambda x, unit=unit: x.truncate(unit) for unit in ("Y", "Q", "M", "W", "D")},
    "week": lambda x: x.week_of_year(),
    "weekday": lambda x: x.day_of_week.index(),
    "later": lambda x: x + ibis.interval(days=1),
    "text": lambda x: x.strftime("%Y-%m-%d"),
    "this year": lambda x: x >= "2026-01-01",
}
OF_INSTANT: dict[str, Computed] = {
    **{name: lambda x, name=name: getattr(x, name)() for name in ("hour", "minute", "second", "millisecond", "date")},
    **{f"to {unit}": lambda x, unit=unit: x.truncate(unit) for unit in ("h", "m", "s", "ms")},
    "epoch": lambda x: x.epoch_seconds(),
    "time": lambda x: x.time(),
    "noon": lambda x: x == datetime(2026, 1, 1, 12),
    "fraction": lambda x: x < "2025-12-31T23:59:59.750000",
}
CASTS = ("int16", "int32", "int64", "float32", "float64", "string", "boolean", "date", "timestamp", "decimal(20, 4)")


def expressions() -> dict[str, Computed]:
    """Columns that are computed of columns."""
    found: dict[str, Computed] = {}
    for pair in (*PAIRS, *ALIKE):
        a, b = pair.split()
        for sign, of in (COMPARED | (ARITHMETIC if pair in PAIRS else {})).items():
            found[f"{a} {sign} {b}"] = lambda e, of=of, a=a, b=b: of(e[a], e[b])
    for names, operations in (
        *((NUMBERS, OF_NUMBER), (TEXTS[:1], OF_TEXT)),
        *(((*DAYS[:1], "ts", "nt"), OF_TIME), (("ts", "nt"), OF_INSTANT)),
    ):
        for a in names:
            for name, of in operations.items():
                found[f"{a} {name}"] = lambda e, of=of, a=a: of(e[a])
    for a in KINDS:
        found |= {f"{a} as {kind}": lambda e, a=a, kind=kind: e[a].cast(kind) for kind in CASTS}
        found[f"{a} isnull"] = lambda e, a=a: e[a].isnull()
    for sign, of in {
        "and": lambda x, y: x & y,
        "or": lambda x, y: x | y,
        "xor": lambda x, y: x ^ y,
        "and not": lambda x, y: x & ~y,
    }.items():
        found[f"b {sign} c"] = lambda e, of=of: of(e.b, e.c)
    found |= {
        "s + t": lambda e: e.s + e.t,
        "s contains t": lambda e: e.s.contains(e.t),
        "s starts with t": lambda e: e.s.startswith(e.t),
        "s ends with t": lambda e: e.s.endswith(e.t),
        "s replaced by t": lambda e: e.s.replace("a", e.t),
        "i text length": lambda e: e.i.cast("string").length(),
        "i text and s": lambda e: e.i.cast("string") + e.s,
        "ts beside d": lambda e: e.ts.date() == e.d,
        "ts beside nt": lambda e: e.ts == e.nt,
        "nt beside d": lambda e: e.nt > e.d.cast("timestamp"),
        "a date of parts": lambda e: e.ts.truncate("M").date(),
        "b as numbers": lambda e: e.b.cast("int32") + e.c.cast("int64"),
        "product of all": lambda e: e.j * e.h * e.sh,
        "quotient of quotients": lambda e: (e.i / 7) / (e.j / 3).nullif(0),
        "rest of a sum": lambda e: (e.j + e.h) % 7,
        "nested case": lambda e: ibis.cases((e.b, e.i), (e.c, e.j), else_=e.h),
        "null of nothing": lambda e: ibis.coalesce(ibis.null("int64"), e.i),
    }
    return found


def tables() -> dict[str, Computed]:
    """Tables that are computed of a table: in the order of their first columns, which tell rows apart."""
    found: dict[str, Computed] = {}
    for a in KINDS:
        found[f"{a} of all"] = lambda e, a=a: e.aggregate(
            rows=e[a].count(), different=e[a].nunique(), least=e[a].min(), most=e[a].max()
        )
        found[f"{a} grouped"] = lambda e, a=a: e.group_by(key=e[a]).aggregate(first=e.k.min(), rows=e.count())
        found[f"{a} distinct"] = lambda e, a=a: e.select(key=e[a]).distinct()
        found[f"{a} ranked"] = lambda e, a=a: e.select(
            "k", number=ibis.row_number().over(order_by=[e[a], e.k]), rank=ibis.rank().over(order_by=e[a])
        )
        found[f"{a} from the end"] = lambda e, a=a: e.select(
            "k", number=ibis.row_number().over(order_by=[e[a].desc(), e.k])
        )
        found[f"{a} before"] = lambda e, a=a: e.select("k", before=e[a].lag().over(group_by=e.b, order_by=e.k))
        found[f"{a} first"] = lambda e, a=a: e.order_by([e[a], e.k]).limit(7).select("k", e[a])
        found[f"{a} joined"] = lambda e, a=a: (
            e.join(e.view(), a).select(k=e.k, of=e[a]).group_by("k").aggregate(rows=lambda t: t.count())
        )
    for a in NUMBERS:
        for name in ("sum", "mean", "var", "std"):
            found[f"{name} of {a}"] = lambda e, a=a, name=name: e.group_by("c").aggregate(x=getattr(e[a], name)())
        found[f"sum of {a} of nothing"] = lambda e, a=a: e.filter(e.k < 0).aggregate(
            x=e[a].sum(), y=e[a].mean(), z=e[a].min(), n=e.count()
        )
        found[f"sum of {a} where"] = lambda e, a=a: e.aggregate(x=e[a].sum(where=e.b), n=e.count(where=e.b))
        found[f"running sum of {a}"] = lambda e, a=a: e.select("k", x=e[a].sum().over(order_by=e.k, rows=(None, 0)))
        found[f"mean of three of {a}"] = lambda e, a=a: e.select("k", x=e[a].mean().over(order_by=e.k, rows=(2, 0)))
    found |= {
        "sum of b": lambda e: e.aggregate(x=e.b.sum(), y=e.b.mean()),
        "any and all": lambda e: e.group_by("c").aggregate(x=e.b.any(), y=e.b.all()),
        "any of nothing": lambda e: e.filter(e.k < 0).aggregate(x=e.b.any(), y=e.b.all()),
        "sum of products": lambda e: e.aggregate(x=(e.n * e.h).sum(), y=(e.j * 1.5).sum()),
        "union": lambda e: e.select(x=e.i).union(e.select(x=e.j), distinct=True),
        "difference": lambda e: e.select(x=e.i).difference(e.select(x=e.j)),
        "intersection": lambda e: e.select(x=e.s).intersect(e.select(x=e.t)),
        "texts that are equal": lambda e: e.join(e.view(), [("s", "t")]).select(k=e.k, x=e.s).distinct(),
        "in a table": lambda e: e.filter(e.s.isin(e.view().t)).select("k"),
        "not in a table": lambda e: e.filter(~e.i.isin(e.filter(e.j.notnull()).select("j").j)).select("k"),
    }
    return found


# --------------------------------------------------------------------------------------------------------------- oracle

FAILED = "an error"


class Oracle:
    """Computes columns, many in one query: where that fails, less of them."""

    def answer(self, of: Computed) -> Any:
        """The table that an expression is, or that it failed."""
        raise NotImplementedError

    def columns(self, named: Mapping[str, Computed]) -> Iterator[tuple[str, Any]]:
        """Yield each column by its name, with those of `k`."""
        names = list(named)
        for first in range(0, len(names), 100):
            yield from self._columns({name: named[name] for name in names[first : first + 100]})

    def _columns(self, named: Mapping[str, Computed]) -> Iterator[tuple[str, Any]]:
        numbers = {f"x{number}": name for number, name in enumerate(named)}
        found = self.answer(lambda e: e.select("k", **{x: named[name](e) for x, name in numbers.items()}))
        if found is not FAILED:
            for x, name in numbers.items():
                values = sorted(([row["k"], row[x]] for row in found.to_pylist()), key=lambda each: each[0])
                yield name, [str(found.schema.field(x).type), *values]
        elif len(named) == 1:
            yield next(iter(named)), FAILED
        else:
            names = list(named)
            for part in (names[: len(names) // 2], names[len(names) // 2 :]):
                yield from self._columns({name: named[name] for name in part})


class Database(Oracle):
    """One that has the rows."""

    def __init__(self, name: str, given: pa.Table, table: str) -> None:
        weft.load(given, target=table, connection=name)
        self.name, self.opened = name, Observer()
        model = weft.model(name=f"of_{name}_{table}", connection=name, dependencies={"ev": f"{name}.{table}"})(
            lambda ev: ev
        )
        (source,) = self.opened.sources(model, None)
        self.tables = self.opened.tables(name)
        self.schema = source.schema()
        self.table = frame_kinds.ibis_table(self.schema, "ev")
        self._rows = {self.tables.quote("ev"): source.select(self.tables, by_letters=True)}

    def why_not(self, of: Computed) -> str | None:
        """Why it is left to Spark."""
        return pushdown.why_not(pushdown.cleared(of(self.table).as_table()), self.tables, {"ev": self.schema})

    def answer(self, of: Computed) -> Any:
        expression = pushdown.cleared(of(self.table).as_table())
        schema = canonical_schema(expression.schema().to_pyarrow())
        sql = _with_tables(pushdown.to_sql(expression, self.tables), self._rows)
        try:
            return pa.Table.from_batches(self.tables.read(Slice(sql), schema), schema)
        except WeftError:
            return FAILED


class Spark(Oracle):
    """The same rows in Spark."""

    def __init__(self, session: Any, rows: pa.Table) -> None:
        from pyspark.sql.pandas.types import from_arrow_schema

        self.session = session
        self.table = frame_kinds.ibis_table(rows.schema, "oracle_ev")
        columns = from_arrow_schema(rows.schema, prefer_timestamp_ntz=True)
        session.createDataFrame(rows, columns).createOrReplaceTempView("oracle_ev")

    def answer(self, of: Computed) -> Any:
        from pyspark.errors import PySparkException

        expression = pushdown.cleared(of(self.table).as_table())
        wanted = canonical_schema(expression.schema().to_pyarrow())
        try:
            found = cast_to(self.session.sql(pushdown.to_spark_sql(expression)), wanted).toArrow()
        except PySparkException:
            return FAILED
        return found.cast(canonical_schema(found.schema))


def rows(table: Any) -> Any:
    """The types, and the rows in an order of their own."""
    if isinstance(table, str):
        return table
    found = ([*row.values()] for row in table.to_pylist())
    return [str(table.schema.types), *sorted(found, key=lambda row: [_order(x) for x in row])]


def _order(value: Any) -> tuple[bool, str]:
    # Both zeros are equal, and may stand for each other.
    return value is None, str(value + 0.0 if isinstance(value, float) else value)


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same, of the same kind. Sums of floats depend on their order."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or math.isclose(one, other, rel_tol=1e-12) or (math.isnan(one) and math.isnan(other))
    return type(one) is type(other) and bool(one == other)


def differing(one: Any, other: Any) -> str:
    """The first values that differ."""
    if isinstance(one, str) or isinstance(other, str):
        return f"{str(one)[:60]} in place of {str(other)[:60]}"
    pairs = [(a, b) for a, b in zip(one, other, strict=False) if not is_same(a, b)]
    return f"{pairs[0][0]} in place of {pairs[0][1]}" if pairs else f"{len(one)} rows in place of {len(other)}"


@pytest.fixture
def here(project: Path, open_system: Callable[[str], AbstractContextManager[System]]) -> Iterator[Project]:
    with open_system("postgres") as postgres, open_system("mysql") as mysql, use(Project()) as fresh:
        weft.connect(url=f"sqlite:///{project}/oracle.db", name="sqlite")
        weft.connect(url=f"duckdb:///{project}/oracle.duckdb", name="duckdb")
        weft.connect(url=postgres.url, name="postgres")
        weft.connect(url=mysql.url, name="mysql")
        yield fresh
        weft.streams.close(fresh)


def compared(spark: Spark, found: Mapping[str, Database], columns: Mapping[str, Computed]) -> Iterator[str]:
    """Say where databases compute other columns than Spark does."""
    made = {name: partial(_selected, of) for name, of in columns.items()}
    pushed = _pushed(found, made)
    wanted = dict(spark.columns({name: columns[name] for name in set().union(*pushed.values())}))
    for database, names in pushed.items():
        for name, answer in found[database].columns({name: columns[name] for name in names}):
            if not is_same(answer, wanted[name]):
                yield f"{database}: {name}: {differing(answer, wanted[name])}"


def _selected(of: Computed, table: Any) -> Any:
    return table.select("k", x=of(table))


def compared_tables(spark: Spark, found: Mapping[str, Database], made: Mapping[str, Computed]) -> Iterator[str]:
    """Say where databases compute other tables than Spark does."""
    pushed = _pushed(found, made)
    wanted = {name: rows(spark.answer(made[name])) for name in set().union(*pushed.values())}
    for database, names in pushed.items():
        for name in names:
            answer = rows(found[database].answer(made[name]))
            if not is_same(answer, wanted[name]):
                yield f"{database}: {name}: {differing(answer, wanted[name])}"


def _pushed(found: Mapping[str, Database], made: Mapping[str, Computed]) -> dict[str, list[str]]:
    """Return, of each database, the names of what it computes itself."""
    table = frame_kinds.ibis_table(pa.schema(KINDS), "ev")
    known = {name: of for name, of in made.items() if _is_known(of, table)}
    return {
        each: [name for name, of in known.items() if database.why_not(of) is None] for each, database in found.items()
    }


def _is_known(of: Computed, table: Any) -> bool:
    try:
        of(table)
    except (TypeError, AttributeError, IbisError):
        return False  # Ibis has no such expression
    return True


@pytest.fixture
def databases(here: Project) -> Iterator[Callable[..., dict[str, Database]]]:
    opened: list[Database] = []

    def made(table: pa.Table, name: str, *some: str) -> dict[str, Database]:
        found = {each: Database(each, table, name) for each in some or DATABASES}
        opened.extend(found.values())
        return found

    yield made
    for each in opened:
        each.opened.close()


Databases = Callable[..., dict[str, Database]]


def refuse(wrong: list[str]) -> None:
    """Fail with all of them: pytest would show the first."""
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


SOME = (
    *(
        "i times",
        "i mixed",
        "i + h",
        "h + sh",
        "i nullif f",
        "sh rest",
        "n * m",
        "n times",
        "n mixed",
        "r + i",
        "d to M",
    ),
    *("ts to h", "nt to h", "ts second", "nt second", "d as timestamp", "ts as timestamp", "ts noon", "b as int64"),
)


@pytest.mark.brief("some")
@pytest.mark.parametrize("part", ["some", "columns", "tables"])
def test_expressions(databases: Databases, plain_spark: Any, part: str) -> None:
    given = rows_of(1, 80)
    found, spark = databases(given, "ev"), Spark(plain_spark, given)
    if part == "tables":
        refuse([*compared_tables(spark, found, tables())])
        return
    made = expressions()
    assert len(made) > 500
    refuse([*compared(spark, found, {name: made[name] for name in SOME} if part == "some" else made)])


SOME_AT_THE_ENDS = ("i // j", "i + j", "i == f", "i coalesce f", "f ifelse i", "i mixed")


@pytest.mark.brief("some")
@pytest.mark.parametrize("row", ["some", *range(len(EDGES["i"]))])
def test_numbers_at_the_ends_of_their_types(databases: Databases, plain_spark: Any, row: int | str) -> None:
    made = expressions()
    if isinstance(row, str):
        given, chosen, some = edges().slice(0, 1), [*SOME_AT_THE_ENDS], ("sqlite", "postgres")
    else:
        given, chosen, some = (
            edges().slice(row, 1),
            [name for name in made if set(name.split()) & set(WHOLE)],
            DATABASES,
        )
    found, spark = databases(given, "edges", *some), Spark(plain_spark, given)
    refuse([*compared(spark, found, {name: made[name] for name in chosen})])


@pytest.mark.full
def test_tables_of_numbers_at_the_ends_of_their_types(databases: Databases, plain_spark: Any) -> None:
    given = edges()
    found, spark = databases(given, "edges"), Spark(plain_spark, given)
    numbers = {name: of for name, of in tables().items() if set(name.split()) & set(WHOLE)}
    refuse([*compared_tables(spark, found, numbers)])
