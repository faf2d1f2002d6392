"""Functions of the user's in SQL: declared, called by Spark in batches, and told of by name when they fail."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import weft
from weft import udaf, udf
from weft.engine.streaming import functions
from weft.spark_support import outcome
from weft.udfs import ARROW_TYPES, arrow_type, declared_udaf

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@udf(args=("Float64", "Float64", "Float64", "Float64", "Float64"), returns="Float64")
def bs_call_delta(strike, spot, vol, rate, expiry):  # type: ignore[no-untyped-def]
    k = strike.to_numpy(zero_copy_only=False)
    s = spot.to_numpy(zero_copy_only=False)
    v = vol.to_numpy(zero_copy_only=False)
    r = rate.to_numpy(zero_copy_only=False)
    t = expiry.to_numpy(zero_copy_only=False)
    d1 = (np.log(s / k) + (r + 0.5 * v * v) * t) / (v * np.sqrt(t))
    cdf = 0.5 * (1.0 + np.vectorize(math.erf)(d1 / np.sqrt(2)))
    return pa.array(cdf, type=pa.float64())


@udaf(args=("Float64", "Float64"), state=("Float64", "Float64"), returns="Float64", name="vwap")
class Vwap:
    def __init__(self) -> None:
        self.num = 0.0
        self.den = 0.0

    def update_batch(self, prices: Any, qtys: Any) -> None:
        self.num += pc.sum(pc.multiply(prices, qtys)).as_py() or 0.0
        self.den += pc.sum(qtys).as_py() or 0.0

    def merge_batch(self, num_states: Any, den_states: Any) -> None:
        self.num += pc.sum(num_states).as_py() or 0.0
        self.den += pc.sum(den_states).as_py() or 0.0

    def evaluate(self) -> Any:
        if self.den == 0:
            return pa.array([None], type=pa.float64())
        return pa.array([self.num / self.den], type=pa.float64())

    def state(self) -> Any:
        return (
            pa.array([self.num], type=pa.float64()),
            pa.array([self.den], type=pa.float64()),
        )


@udaf(args=("Utf8",), state=("UInt64", "Utf8"), returns="Utf8", name="ways")
class Ways:
    """How often which method was called, over how many rows, and the longest text."""

    def __init__(self) -> None:
        self.rows, self.longest, self.calls = 0, "", [0, 0]

    def take(self, texts: Iterable[str | None]) -> None:
        self.longest = max([self.longest, *(each or "" for each in texts)], key=lambda text: (len(text), text))

    def update_batch(self, texts: Any) -> None:
        self.calls[0] += 1
        self.rows += len(texts)
        self.take(texts.to_pylist())

    def merge_batch(self, rows: Any, longest: Any) -> None:
        assert rows.type == pa.uint64()
        self.calls[1] += len(rows)
        self.rows += sum(rows.to_pylist())
        self.take(longest.to_pylist())

    def evaluate(self) -> Any:
        updated, merged = self.calls
        return pa.array([f"{updated} updates, {merged > 1} merges: {self.rows} {self.longest}"])

    def state(self) -> Any:
        return pa.array([self.rows], pa.uint64()), pa.array([self.longest])


def run(
    spark: SparkSession, table: pa.Table, sql: str, udfs: Sequence[Any] = (), aggregate_udfs: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    session = spark.newSession()
    functions.register(session, udfs, aggregate_udfs)
    frame = session.createDataFrame(table).repartition(3)
    # Small batches, so that there are several.
    session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "7")
    with outcome.explained("run the batch"):
        return list(functions.transformed(frame, sql, aggregate_udfs).toArrow().to_pylist())


# -------------------------------------------------------------------------------------------------------- declarations


def test_what_is_decorated_stays_what_it_was() -> None:
    one = pa.array([100.0])
    assert bs_call_delta(one, one, pa.array([0.2]), pa.array([0.05]), pa.array([1.0]))[0].as_py() == pytest.approx(
        0.6368, abs=1e-4
    )
    assert (bs_call_delta.sql_name, bs_call_delta.args, bs_call_delta.returns) == (
        "bs_call_delta",
        ("Float64",) * 5,
        "Float64",
    )
    assert bs_call_delta.__name__ == "bs_call_delta"
    own = Vwap()
    own.update_batch(pa.array([1.0, 3.0]), pa.array([1.0, 1.0]))
    assert own.evaluate().to_pylist() == [2.0]
    told = declared_udaf(Vwap)
    assert (told.sql_name, told.args, told.state, told.returns) == ("vwap", *(("Float64",) * 2,) * 2, "Float64")


def test_the_public_name_is_the_decorator_whatever_was_imported() -> None:
    assert weft.udf is udf
    assert weft.udaf is udaf


def same(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"args": ("float64",), "returns": "Int8"}, "args has the unknown type 'float64'.*Did you mean 'Float64'"),
        ({"args": ("Int8",), "returns": "Decimal"}, "returns has the unknown type 'Decimal'.*Known: Int8, "),
        ({"args": ("Int8",), "returns": pa.int8()}, "returns has the unknown type DataType"),
        ({"args": "Int8", "returns": "Int8"}, r'args is \'Int8\'.*args=\("Float64",\)'),
        ({"args": (), "returns": "Int8"}, r"args is \(\)"),
        ({"args": ("Int8", "Int8"), "returns": "Int8"}, r"same\(x: 'Any'\) -> 'Any' does not take .*\(Int8, Int8\)"),
        ({"args": ("Int8",), "returns": "Int8", "name": "a b"}, "'a b' cannot be the name"),
    ],
)
def test_a_function_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)^udf (same|a b): {says}") as caught:
        udf(**options)(same)
    assert isinstance(caught.value, weft.DeclarationError)


def test_a_class_that_cannot_be() -> None:
    class Half:
        def update_batch(self, x: Any) -> None: ...
        def evaluate(self) -> None: ...

    types: dict[str, Any] = {"args": ("Int8",), "state": ("Int8",), "returns": "Int8"}
    with pytest.raises(weft.DeclarationError, match=r"^udaf Half: the class Half has no merge_batch, state\."):
        udaf(**types)(Half)
    with pytest.raises(weft.DeclarationError, match=r"^udaf two: .*Vwap.update_batch.* does not take .*\(self, Int8\)"):
        udaf(**types, name="two")(Vwap)
    with pytest.raises(weft.DeclarationError, match="state has the unknown type 'Int9'"):
        udaf(**{**types, "state": ("Int9",)})(Vwap)
    with pytest.raises(weft.DeclarationError, match="@udaf is for classes"):
        udaf(**types)(same)  # type: ignore[type-var]
    with pytest.raises(weft.DeclarationError, match="@udf is for functions"):
        udf(args=("Int8",), returns="Int8")(Half)


def test_names_are_of_one_function_only(plain_spark: SparkSession) -> None:
    def named(name: str) -> Any:
        return udf(args=("Int8",), returns="Int8", name=name)(same)

    cases: list[tuple[list[Any], list[Any], str]] = [
        ([named("f"), named("F")], [], "'F' has the name of another UDF"),
        ([named("VWAP")], [Vwap], "'vwap' has the name of another UDF"),
        ([named("upper")], [], "(?s)'upper' has the name of a function that Spark has.*name=\"my_upper\""),
        ([same], [], "same.* is not decorated with @udf"),
        ([Vwap], [], "(?s)not decorated with @udf.*aggregate_udfs"),
        ([], [bs_call_delta], "(?s)not a class decorated with @udaf.*to udfs"),
        ([], [type("Heir", (Vwap,), {})], "Heir.* is not a class decorated with @udaf"),
    ]
    for udfs, aggregates, says in cases:
        with pytest.raises(weft.DeclarationError, match=says):
            functions.register(plain_spark.newSession(), udfs, aggregates)
    session = plain_spark.newSession()
    for _ in range(2):  # a first batch that failed is tried again
        functions.register(session, [bs_call_delta], [Vwap])


# ------------------------------------------------------------------------------------------------------------ functions


def test_the_option_chain_of_the_guide(plain_spark: SparkSession) -> None:
    rows = [
        {"minute": n % 3, "strike": 90.0 + n, "spot": 100.0, "vol": 0.1 + n / 100, "rate": 0.05, "expiry": 0.5 + n}
        for n in range(40)
    ]
    made = run(
        plain_spark,
        pa.Table.from_pylist(rows),
        """SELECT minute, array_agg(named_struct(
               'strike', strike, 'delta', bs_call_delta(strike, spot, vol, rate, expiry))) AS strikes
           FROM source GROUP BY 1""",
        [bs_call_delta],
    )

    def delta(strike: float, spot: float, vol: float, rate: float, expiry: float) -> float:
        d1 = (math.log(spot / strike) + (rate + 0.5 * vol * vol) * expiry) / (vol * math.sqrt(expiry))
        return 0.5 * (1.0 + math.erf(d1 / math.sqrt(2)))

    expected: dict[int, dict[float, Any]] = defaultdict(dict)
    for row in rows:
        minute = int(row["minute"])
        expected[minute][row["strike"]] = pytest.approx(delta(*list(row.values())[1:]))
    assert {row["minute"]: {each["strike"]: each["delta"] for each in row["strikes"]} for row in made} == expected


EXTREMES: dict[str, list[Any]] = {
    **{f"Int{bits}": [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] for bits in (8, 16, 32, 64)},
    **{f"UInt{bits}": [0, 2**bits - 1] for bits in (8, 16, 32, 64)},
    "Float32": [1.5, math.inf],
    "Float64": [0.1, -math.inf],
    "Boolean": [True, False],
    "Utf8": ["", "größer 🧵"],
    "Binary": [b"", b"\x00\xff"],
}


@pytest.mark.full
def test_every_type_goes_there_and_back(plain_spark: SparkSession) -> None:
    """All of them in one query, which takes as long as one."""

    def there(kind: str) -> Any:
        wanted = arrow_type(kind)

        @udf(args=(kind,), returns=kind, name=f"there_{kind}")
        def same_type(x: Any) -> Any:
            assert x.type == wanted, x.type
            return x

        return same_type

    values = {f"x_{kind}": [*EXTREMES[kind], None] for kind in ARROW_TYPES}
    columns: dict[str, Any] = {"n": range(3)}
    for kind in ARROW_TYPES:
        stored = functions._STORED_UNSIGNED.get(kind, arrow_type(kind))
        columns[f"x_{kind}"] = pa.array(values[f"x_{kind}"], arrow_type(kind)).cast(stored)
    calls = ", ".join(f"there_{kind}(there_{kind}(x_{kind})) AS x_{kind}" for kind in ARROW_TYPES)
    made = run(plain_spark, pa.table(columns), f"SELECT {calls} FROM source ORDER BY n", list(map(there, ARROW_TYPES)))
    assert {name: [row[name] for row in made] for name in values} == values


def test_numbers_fit_where_nothing_is_lost(plain_spark: SparkSession) -> None:
    @udf(args=("Float64", "Float64", "UInt8", "Int8", "Utf8"), returns="Float64")
    def total(a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        assert [each.type for each in (c, d, e)] == [pa.uint8(), pa.int8(), pa.string()]
        return pc.add(pc.add(a, b), pc.add(c.cast("float64"), d.cast("float64")))

    table = pa.table({"n": pa.array([1, 2], pa.int64())})
    made = run(plain_spark, table, "SELECT total(n, 0.5, 255, n, NULL) AS x FROM source ORDER BY n", [total])
    assert [row["x"] for row in made] == [257.5, 259.5]


def identity(kind: str, function: Any = same) -> Any:
    return udf(args=(kind,), returns=kind, name="f")(function)


def broken(x: Any) -> Any:
    raise ZeroDivisionError("of\nmine")


def garbled(x: Any) -> Any:
    raise ValueError("no emoji: \ud83d") from KeyError("\ud83d")


class Silent(Exception):
    def __str__(self) -> str:
        raise TypeError


def silent(x: Any) -> Any:
    raise Silent


BROKEN = rf"failed in line {broken.__code__.co_firstlineno + 1} of test_udf.py: ZeroDivisionError: of mine"


@pytest.mark.parametrize(
    ("function", "call", "says"),
    [
        (identity("UInt8"), "f(-1)", "Argument 1 of the UDF 'f' does not fit UInt8: Integer value -1 not in range"),
        (identity("Float32"), "f(1.5D)", "Argument 1 of the UDF 'f' is double in SQL, and Float32 is declared: CAST"),
        (identity("Float64"), "f('1')", "Argument 1 of the UDF 'f' is string in SQL, and Float64 is declared: CAST"),
        (identity("Int64"), "f(1.5)", r"is decimal128\(2, 1\) in SQL, and Int64 is declared"),
        (identity("Utf8"), "f(n)", "is int64 in SQL, and Utf8 is declared"),
        (identity("Int64"), "f(n, n)", r"The UDF 'f' takes 1 arguments \(Int64\), and SQL gives 2"),
        (identity("Int64", lambda x: x.cast("int32")), "f(n)", "The UDF 'f' gave Int32Array of int32, and an array of"),
        (identity("Int64", lambda x: x[:0]), "f(n)", "The UDF 'f' gave 0 values, and 1 are wanted"),
        (identity("Int64", lambda x: x.to_numpy()), "f(n)", "The UDF 'f' gave numpy.ndarray, and an array of Int64"),
        (identity("Int64", lambda x: None), "f(n)", "The UDF 'f' gave NoneType, and"),
        (identity("Int64", broken), "f(n)", f"The UDF 'f' {BROKEN}"),
        (identity("Int64", garbled), "f(n)", "ValueError: no emoji: \ufffd"),
        (
            identity("Int64", lambda x: sys.exit(3)),
            "f(n)",
            r"The UDF 'f' failed in line \d+ of test_udf.py: SystemExit: 3",
        ),
        (identity("Int64", silent), "f(n)", "Silent: its text cannot be read, by TypeError"),
    ],
)
@pytest.mark.timeout(60)  # a worker of Spark's may wait for good
def test_what_goes_wrong_is_told_in_a_line(plain_spark: SparkSession, function: Any, call: str, says: str) -> None:
    with pytest.raises(weft.WeftError, match=says) as caught:
        run(plain_spark, pa.table({"n": [5]}), f"SELECT {call} FROM source", [function])
    assert len(str(caught.value).splitlines()) == 2, "what failed, and where more is"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", [lambda x: os._exit(3), lambda x: ctypes.string_at(0)], ids=["exit", "crash"])
def test_a_function_that_ends_its_process(plain_spark: SparkSession, end: Any) -> None:
    rows, sql, functions = pa.table({"n": [5]}), "SELECT f(n) FROM source", [identity("Int64", end)]
    with (
        pytest.raises(weft.WeftError, match="the Python process ended that ran the UDFs f, g") as caught,
        outcome.calling(["f", "g"]),
    ):
        run(plain_spark, rows, sql, functions)
    assert "too little memory" in str(caught.value.hint)
    with pytest.raises(weft.WeftError, match="Spark could not run the batch: a Python process ended"):
        run(plain_spark, rows, sql, functions)


def test_workers_need_not_have_the_users_module(
    plain_spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "only_here.py"
    path.write_text(
        "import pyarrow.compute as pc\n"
        "from weft import udf\n"
        "def helper(x):\n    return pc.add(x, 1)\n"
        "@udf(args=('Int64',), returns='Int64')\n"
        "def following(x):\n    return helper(x)\n"
    )
    spec = importlib.util.spec_from_file_location("only_here", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "only_here", module)
    spec.loader.exec_module(module)
    made = run(plain_spark, pa.table({"n": [5]}), "SELECT following(n) AS n FROM source", [module.following])
    assert made == [{"n": 6}]


# ----------------------------------------------------------------------------------------------------------- aggregates

ROWS: list[dict[str, Any]] = [
    {"minute": n % 4, "symbol": "abc"[n % 3], "price": 10.0 + n, "qty": None if n % 11 == 0 else float(n % 5)}
    for n in range(100)
]
TABLE = pa.Table.from_pylist(ROWS)


def vwap(rows: Iterable[dict[str, Any]]) -> Any:
    kept = [row for row in rows if row["qty"] is not None]
    total = math.fsum(row["qty"] for row in kept)
    return pytest.approx(math.fsum(row["price"] * row["qty"] for row in kept) / total) if total else None


def grouped(rows: Iterable[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[tuple(row[key] for key in keys)].append(row)
    return found


def aggregated(spark: SparkSession, sql: str, table: pa.Table = TABLE) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in run(spark, table, sql, [bs_call_delta], [Vwap, Ways])]


def test_the_vwap_of_the_guide(plain_spark: SparkSession) -> None:
    rows = [{"ts": n * 7_000_000, "price": 1.0 + n, "qty": float(n % 3)} for n in range(50)]
    table = pa.Table.from_pylist(rows).cast(
        pa.schema({"ts": pa.timestamp("us", "UTC"), "price": pa.float64(), "qty": pa.float64()})
    )
    made = run(
        plain_spark,
        table,
        "SELECT date_trunc('minute', ts) AS minute, vwap(price, qty) AS vwap FROM source GROUP BY 1",
        aggregate_udfs=[Vwap],
    )
    by_minute = grouped(({**row, "minute": row["ts"] // 60_000_000} for row in rows), "minute")
    assert {(row["minute"].timestamp() // 60,): row["vwap"] for row in made} == {
        minute: vwap(group) for minute, group in by_minute.items()
    }


@pytest.mark.full
def test_beside_other_aggregates_and_conditions(plain_spark: SparkSession) -> None:
    made = aggregated(
        plain_spark,
        """
        SELECT minute, symbol, count(*), VWAP(price, qty) AS vwap, sum(price), `vwap`(qty, qty), count(DISTINCT qty),
               ways(symbol) -- vwap(price)
        FROM source WHERE price < 90 AND symbol <> 'vwap(c)' GROUP BY minute, symbol HAVING vwap(price, qty) > 46
        ORDER BY vwap DESC
        """,
    )
    expected = []
    for (minute, symbol), rows in grouped((row for row in ROWS if row["price"] < 90), "minute", "symbol").items():
        mean = vwap(rows)
        if mean.expected > 46:
            of_qty = vwap({**row, "price": row["qty"]} for row in rows)
            prices = pytest.approx(sum(row["price"] for row in rows))
            qtys = len({row["qty"] for row in rows} - {None})
            ways = f"1 updates, False merges: {len(rows)} {symbol}"
            expected.append((minute, symbol, len(rows), mean, prices, of_qty, qtys, ways))
    assert 0 < len(expected) < 12
    assert made == sorted(expected, key=lambda row: -row[3].expected)


@pytest.mark.full
def test_everything_is_one_group(plain_spark: SparkSession) -> None:
    sql = "SELECT vwap(price, qty), count(*), count(DISTINCT minute), count(DISTINCT symbol), ways(symbol) FROM source"
    made = aggregated(plain_spark, sql)
    assert made == [(vwap(ROWS), 100, 4, 3, "0 updates, True merges: 100 c")]
    assert aggregated(plain_spark, f"{sql} WHERE price < 0") == [(None, 0, 0, 0, "0 updates, False merges: 0 ")]
    assert aggregated(plain_spark, sql, TABLE[:0]) == [(None, 0, 0, 0, "0 updates, False merges: 0 ")]
    assert aggregated(plain_spark, f"{sql} HAVING vwap(price, qty) < 0") == []


def test_one_group_of_what_joins_and_functions_leave(plain_spark: SparkSession) -> None:
    @udf(args=("Float64",), returns="Float64")
    def twice(x: Any) -> Any:
        return pc.multiply(x, 2.0)

    (made,) = run(
        plain_spark,
        TABLE,
        """
        SELECT vwap(twice(s.price), s.qty) AS a, twice(vwap(s.price, s.qty)) AS b
        FROM source s JOIN VALUES (0), (1), (1), (5) AS u(minute) ON s.minute = u.minute
        WHERE twice(s.price) < 150
        """,
        [twice],
        [Vwap],
    )
    left = [row for row in ROWS for minute in (0, 1, 1, 5) if row["minute"] == minute and row["price"] < 75]
    assert made == dict.fromkeys("ab", pytest.approx(2 * vwap(left).expected))


def test_no_rows_are_no_groups(plain_spark: SparkSession) -> None:
    assert aggregated(plain_spark, "SELECT minute, vwap(price, qty) FROM source GROUP BY 1", TABLE[:0]) == []


def test_nulls_alone_are_a_group(plain_spark: SparkSession) -> None:
    table = pa.table({"k": [None, None, "a"], "price": [1.0, 3.0, None], "qty": [1.0, 1.0, None]})
    table = table.cast(pa.schema({"k": pa.string(), "price": pa.float64(), "qty": pa.float64()}))
    made = aggregated(plain_spark, "SELECT k, vwap(price, qty) FROM source GROUP BY k", table)
    assert dict(made) == {None: 2.0, "a": None}


def test_filter_distinct_and_windows(plain_spark: SparkSession) -> None:
    rows = [*ROWS, *ROWS[:30]]
    made = aggregated(
        plain_spark,
        """
        SELECT symbol, vwap(price, qty) FILTER (WHERE minute = 1), vwap(DISTINCT price, qty), vwap(price, qty) / 2
        FROM source GROUP BY symbol
        """,
        pa.Table.from_pylist(rows),
    )
    assert {row[0]: row[1:] for row in made} == {
        symbol: (
            vwap(row for row in group if row["minute"] == 1),
            vwap(row for row in ROWS if row["symbol"] == symbol),
            pytest.approx(vwap(group).expected / 2),
        )
        for (symbol,), group in grouped(rows, "symbol").items()
    }
    by_minute = {minute: vwap(group) for (minute,), group in grouped(ROWS, "minute").items()}
    for over in ("OVER (PARTITION BY minute) FROM source", "OVER w FROM source WINDOW w AS (PARTITION BY minute)"):
        seen = aggregated(plain_spark, f"SELECT minute, vwap(price, qty) {over}")
        assert len(seen) == 100
        assert dict(seen) == by_minute


@pytest.mark.full
def test_subqueries_and_grouping_sets(plain_spark: SparkSession) -> None:
    by_symbol = {symbol: vwap(group) for (symbol,), group in grouped(ROWS, "symbol").items()}
    sql = """
        WITH kept AS (SELECT *, price * 2 AS twice FROM source)
        SELECT DISTINCT s.symbol, (SELECT vwap(k.price, k.qty) FROM kept k WHERE k.symbol = s.symbol) FROM source s
    """
    assert dict(aggregated(plain_spark, sql)) == by_symbol
    made = aggregated(plain_spark, "SELECT symbol, vwap(price, qty) FROM source GROUP BY ROLLUP (symbol)")
    assert dict(made) == {**by_symbol, None: vwap(ROWS)}
    made = aggregated(plain_spark, "SELECT symbol, vwap(price, qty) FROM source GROUP /* by what? */ BY symbol")
    assert dict(made) == by_symbol
    sql = "SELECT max(v) FROM (SELECT symbol, vwap(price, qty) AS v FROM source GROUP BY ALL)"
    assert aggregated(plain_spark, sql) == [(max(by_symbol.values(), key=lambda mean: mean.expected),)]


def test_sql_that_cannot_be(plain_spark: SparkSession) -> None:
    for sql, says in [
        ("SELECT 1,\n vwap(price) FROM source", r"line 2: vwap takes 2 arguments \(Float64, Float64\), not 1"),
        ("SELECT vwap() FROM source", "takes 2 arguments .* not 0"),
        ("SELECT vwap(price, qty FROM source", "a parenthesis in line 1 is never closed"),
        ("SELECT vwap('price FROM source", "transform_sql cannot be read"),
    ]:
        with pytest.raises(weft.DeclarationError, match=says):
            aggregated(plain_spark, sql)


@pytest.mark.brief("type-all", "values-groups", "number-all", "broken-groups", "init-all", "update-groups")
@pytest.mark.parametrize(
    "sql", ["SELECT a(n) FROM source", "SELECT n, a(n) FROM source GROUP BY n"], ids=["all", "groups"]
)
@pytest.mark.parametrize(
    ("method", "gives", "says"),
    [
        ("evaluate", lambda self: pa.array([1]), r"Odd.evaluate\(\) gave Int64Array of int64, and an array of Float64"),
        ("evaluate", lambda self: pa.array([1.0, 2.0]), r"Odd.evaluate\(\) gave 2 values, and 1 are wanted"),
        ("evaluate", lambda self: 1.0, r"Odd.evaluate\(\) gave float, and"),
        ("evaluate", broken, f"UDF 'a' {BROKEN}"),
        ("__init__", broken, r"UDF 'a' failed in line \d+ of test_udf.py: Zero"),
        ("update_batch", lambda self, x: broken(x), r"UDF 'a' failed in line \d+ of test_udf.py: Zero"),
    ],
    ids=["type", "values", "number", "broken", "init", "update"],
)
def test_what_goes_wrong_in_a_class(plain_spark: SparkSession, method: str, gives: Any, says: str, sql: str) -> None:
    with pytest.raises(weft.WeftError, match=says) as caught:
        run(plain_spark, pa.table({"n": [5.0]}), sql, aggregate_udfs=[odd(method, gives)])
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("gives", "says"),
    [
        (lambda self: pa.array([1.0]), r"Odd.state\(\) gave DoubleArray of double, and a tuple of 1 arrays"),
        (lambda self: (), r"Odd.state\(\) gave tuple, and a tuple of 1 arrays"),
        (lambda self: (pa.array([1]),), r"Odd.state\(\) gave Int64Array of int64, and an array of Float64"),
        (lambda self: (pa.array([], pa.float64()),), r"Odd.state\(\) gave 0 values, and 1 are wanted"),
    ],
)
def test_a_state_that_is_none(plain_spark: SparkSession, gives: Any, says: str) -> None:
    with pytest.raises(weft.WeftError, match=says):
        run(plain_spark, pa.table({"n": [5.0]}), "SELECT a(n) FROM source", aggregate_udfs=[odd("state", gives)])


def odd(method: str, gives: Any) -> type[Any]:
    class Odd:
        def update_batch(self, x: Any) -> None: ...
        def merge_batch(self, x: Any) -> None: ...
        def evaluate(self) -> Any:
            return pa.array([1.0])

        def state(self) -> Any:
            return (pa.array([1.0]),)

    if method == "__init__":
        Odd.__init__ = lambda self: gives(self)  # type: ignore[method-assign]
    else:
        setattr(Odd, method, gives)
    return udaf(args=("Float64",), state=("Float64",), returns="Float64", name="a")(Odd)
