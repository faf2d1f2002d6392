"""Expressions of Ibis mean the same on each database: what a database would answer otherwise, Spark computes."""

# ruff: noqa: E501 (a table has a line each)

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import ibis
import pyarrow as pa
import pytest

import weft
from tests.engine.models.built import build, run
from weft.columns import hinted
from weft.engine.models import pushdown
from weft.engine.models.frame_kinds import ibis_table
from weft.engine.readers import open_tables
from weft.errors import DeclarationError, WeftError
from weft.pipelines.models import Model
from weft.project import Project, current
from weft.systems.sql.tables import Slice
from weft.types import FieldType

pytestmark = pytest.mark.every_system

FIELDS = {
    "k": "int64",
    "i": "int64?",
    "j": "int64?",
    "f": "float64?",
    "s": "string?",
    "b": "bool?",
    "ts": "timestamp?",
    "d": "date?",
    "u": "uuid?",
    "by": "bytes?",
    "n": "decimal(10,2)?",
    "o": "json?",
}
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
U = UUID("0b0e0a7c-6a52-4d0b-9d1e-0f0000000001")
ROWS: list[dict[str, Any]] = [
    {"k": 1, "i": 7, "j": 2, "f": 0.5, "s": "abc", "b": True, "ts": NOON, "d": date(2026, 1, 1), "u": U, "by": b"\0\1"},
    {"k": 2, "i": -7, "j": 2, "f": -1.25, "s": "a_b%", "b": False, "ts": datetime(2026, 1, 1, tzinfo=UTC)},
    {"k": 3, "i": 1, "j": 3, "f": 1e20, "s": "ABC", "b": True, "ts": datetime(2025, 12, 31, 23, 59, 59, 999_999, UTC)},
    {"k": 4, "i": 29_999_999, "j": 30_000_000, "f": 0.1, "s": "ä'\\b", "ts": datetime(1969, 12, 31, 23, 59, 58, tzinfo=UTC)},
    {"k": 5},
    {"k": 6, "i": 3, "j": 7, "s": "a ", "b": False, "ts": datetime(2026, 3, 29, 22, 30, tzinfo=UTC), "d": date(2025, 12, 31)},
]  # fmt: skip
ROWS = [{**dict.fromkeys(FIELDS), "n": Decimal("1.10"), "o": {"a": 1}, **row} for row in ROWS]


class Row:
    """A row whose missing values make what is computed of them null."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        if self.values[name] is None:
            raise LookupError
        return self.values[name]


def of_row(compute: Callable[[Any], Any], row: dict[str, Any]) -> Any:
    try:
        return compute(Row(row))
    except LookupError:
        return None


SQLITE, MYSQL, EVERY = {"sqlite"}, {"mysql"}, {"sqlite", "mysql", "postgres", "duckdb"}
NAIVE = NOON.replace(tzinfo=None)
Computed = Callable[[Any], Any]
# Of each: the expression, what it is in Python, and the databases that leave it to Spark.
OF_ROWS: dict[str, tuple[Computed, Computed, set[str]]] = {
    "ts_ge": (lambda e: e.ts >= NOON, lambda r: r.ts >= NOON, set()),
    "ts_naive": (lambda e: e.ts >= NAIVE, lambda r: r.ts >= NOON, set()),
    "ts_zone": (lambda e: e.ts == ibis.timestamp("2026-01-01 13:00", timezone="Europe/Zurich"), lambda r: r.ts == NOON, set()),
    "ts_text": (lambda e: e.ts < "2026-01-01", lambda r: r.ts < datetime(2026, 1, 1, tzinfo=UTC), set()),
    "ts_day": (lambda e: e.ts < date(2026, 1, 1), lambda r: r.ts < datetime(2026, 1, 1, tzinfo=UTC), set()),
    "ts_between": (lambda e: e.ts.between(datetime(2026, 1, 1), NAIVE), lambda r: NOON - timedelta(hours=12) <= r.ts <= NOON, set()),
    "ts_in": (lambda e: e.ts.isin([NAIVE]), lambda r: r.ts == NOON, set()),
    "ts_case": (lambda e: ibis.cases((e.ts == NAIVE, "noon"), else_="other"), lambda r: "noon" if r.values["ts"] == NOON else "other", set()),
    "ts_filled": (lambda e: e.ts.fill_null(NAIVE), lambda r: r.values["ts"] or NOON, set()),
    "ts_or": (lambda e: (e.k > 2).ifelse(e.ts, NOON), lambda r: r.ts if r.k > 2 else NOON, set()),
    "ts_literal": (lambda e: ibis.literal(NOON), lambda r: NOON, set()),
    "ts_of_d": (lambda e: e.d.cast("timestamp"), lambda r: datetime(r.d.year, r.d.month, r.d.day), set()),
    "ts_date": (lambda e: e.ts.date(), lambda r: r.ts.date(), set()),
    "ts_cast_date": (lambda e: e.ts.cast("date"), lambda r: r.ts.date(), set()),
    "ts_to_day": (lambda e: e.ts.truncate("D"), lambda r: r.ts.replace(hour=0, minute=0, second=0, microsecond=0), set()),
    "ts_to_hour": (lambda e: e.ts.truncate("h"), lambda r: r.ts.replace(minute=0, second=0, microsecond=0), set()),
    "ts_to_year": (lambda e: e.ts.truncate("Y"), lambda r: datetime(r.ts.year, 1, 1, tzinfo=UTC), set()),
    "ts_year": (lambda e: e.ts.year(), lambda r: r.ts.year, set()),
    "ts_hour": (lambda e: e.ts.hour(), lambda r: r.ts.hour, set()),
    "ts_second": (lambda e: e.ts.second(), lambda r: r.ts.second, set()),
    "ts_int": (lambda e: e.ts.cast("int64"), lambda r: int((r.ts - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)), EVERY),
    "ts_epoch": (lambda e: e.ts.epoch_seconds(), lambda r: int((r.ts - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)), EVERY),
    "d_ge": (lambda e: e.d >= date(2026, 1, 1), lambda r: r.d >= date(2026, 1, 1), set()),
    "d_text": (lambda e: e.d >= "2026-01-01", lambda r: r.d >= date(2026, 1, 1), set()),
    "d_to_month": (lambda e: e.d.truncate("M"), lambda r: r.d.replace(day=1), set()),
    "d_month": (lambda e: e.d.month(), lambda r: r.d.month, set()),
    "contains": (lambda e: e.s.contains("b"), lambda r: "b" in r.s, set()),
    "starts": (lambda e: e.s.startswith("a_"), lambda r: r.s.startswith("a_"), set()),
    "starts_case": (lambda e: e.s.startswith("A"), lambda r: r.s.startswith("A"), set()),
    "starts_umlaut": (lambda e: e.s.startswith("ä'\\"), lambda r: r.s.startswith("ä'\\"), set()),
    "ends": (lambda e: e.s.endswith("%"), lambda r: r.s.endswith("%"), set()),
    "ends_long": (lambda e: e.s.endswith("xxabc"), lambda r: False if r.s else None, set()),
    "ends_empty": (lambda e: e.s.endswith(""), lambda r: r.s is not None, set()),
    "like": (lambda e: e.s.like("a%"), lambda r: r.s.startswith("a"), SQLITE),
    "equal": (lambda e: e.s == "a", lambda r: r.s == "a", set()),
    "unequal": (lambda e: e.s != "abc", lambda r: r.s != "abc", set()),
    "quoted": (lambda e: e.s == "ä'\\b", lambda r: r.s == "ä'\\b", set()),
    "in": (lambda e: e.s.isin(["abc", "A"]), lambda r: r.s in ("abc", "A"), set()),
    "label": (lambda e: ibis.cases((e.k > 2, "x"), else_="X") != "X", lambda r: r.k > 2, set()),
    "lower": (lambda e: e.s.lower(), lambda r: r.s.lower(), EVERY),
    "joined": (lambda e: e.s + "-" + e.s, lambda r: f"{r.s}-{r.s}", set()),
    "sliced": (lambda e: e.s[1:3], lambda r: r.s[1:3], set()),
    "length": (lambda e: e.s.length(), lambda r: len(r.s), set()),
    "replaced": (lambda e: e.s.replace("b", "cc"), lambda r: r.s.replace("b", "cc"), set()),
    "quotient": (lambda e: e.i / e.j.nullif(0), lambda r: r.i / r.j, set()),
    "floored": (lambda e: e.i // e.j.nullif(0), lambda r: r.i // r.j, SQLITE),
    "tenths": (lambda e: e.f / 10, lambda r: r.f / 10, set()),
    "by_any": (lambda e: e.i / e.j, lambda r: r.i / r.j, EVERY - {"postgres"}),
    "floored_by_any": (lambda e: e.i // e.j, lambda r: r.i // r.j, EVERY - {"postgres"}),
    "null_for_2": (lambda e: e.i / e.j.nullif(2), lambda r: None if r.j == 2 else r.i / r.j, EVERY - {"postgres"}),
    "rest_of_any": (lambda e: e.i % e.j, lambda r: abs(r.i) % r.j * (1 if r.i > 0 else -1), EVERY - {"postgres"}),
    "rest": (lambda e: e.i % e.j.nullif(0), lambda r: abs(r.i) % r.j * (1 if r.i > 0 else -1), set()),
    "times": (lambda e: e.i * e.j - 1, lambda r: r.i * r.j - 1, set()),
    "tenth": (lambda e: e.i * 0.1, lambda r: r.i * 0.1, set()),
    "negative": (lambda e: (-e.i).abs(), lambda r: abs(r.i), set()),
    "floor": (lambda e: e.f.floor(), lambda r: None, EVERY),
    "number": (lambda e: e.s.cast("float64"), lambda r: None, EVERY),
    "rounded": (lambda e: e.f.cast("int64"), lambda r: None, EVERY),
    "text": (lambda e: e.i.cast("string"), lambda r: str(r.i), {"only alone"}),
    "float": (lambda e: e.i.cast("float64"), lambda r: float(r.i), set()),
    "bool_int": (lambda e: e.b.cast("int64"), lambda r: int(r.b), set()),
    "both": (lambda e: e.b & (e.i > 0), lambda r: False if r.values["b"] is False or (r.values["i"] or 1) < 0 else r.b and r.i > 0, set()),
    "neither": (lambda e: ~e.b, lambda r: not r.b, set()),
    "coalesced": (lambda e: ibis.coalesce(e.i, 0), lambda r: r.values["i"] or 0, set()),
    "nullif": (lambda e: e.i.nullif(7), lambda r: None if r.i == 7 else r.i, set()),
    "least": (lambda e: ibis.least(e.i, e.j), lambda r: min(r.i, r.j), SQLITE | MYSQL),
    "uuid": (lambda e: e.u == U, lambda r: r.u == U, set()),
    "uuids": (lambda e: e.u == e.u, lambda r: r.u == U, set()),
    "uuid_text": (lambda e: e.u == e.s, lambda r: False, EVERY),
    "uuid_upper": (lambda e: e.u.upper(), lambda r: str(r.u).upper(), EVERY),
    "bytes": (lambda e: e.by == b"\x00\x01", lambda r: r.by == b"\0\1", EVERY),
    "json": (lambda e: e.o.length() > 1, lambda r: True, EVERY),
    "decimal": (lambda e: e.n > Decimal("1.05"), lambda r: r.n > Decimal("1.05"), SQLITE),
    "decimals": (lambda e: e.n * e.n, lambda r: r.n * r.n, EVERY),
    "number_of": (lambda e: ibis.row_number().over(group_by=e.b, order_by=e.k), lambda r: [each["k"] for each in ROWS if each["b"] == r.values["b"]].index(r.k), set()),
    "before": (lambda e: e.i.lag().over(order_by=e.k), lambda r: ROWS[r.k - 2]["i"] if r.k > 1 else None, set()),
}  # fmt: skip


def some(name: str, wanted: Callable[[dict[str, Any]], bool] = lambda row: True) -> list[Any]:
    return [row[name] for row in ROWS if row[name] is not None and wanted(row)]


OF_ALL: dict[str, tuple[Computed, Any, set[str]]] = {
    "events": (lambda e: e.count(), len(ROWS), set()),
    "trues": (lambda e: e.count(where=e.b), 2, set()),
    "nothing": (lambda e: e.count(where=e.k > 100), 0, set()),
    "bs": (lambda e: e.s.contains("b").sum(), 3, set()),
    "sum": (lambda e: e.i.sum(where=e.b), 8, set()),
    "mean": (lambda e: e.j.mean(), sum(some("j")) / len(some("j")), set()),
    "ratio": (lambda e: e.i.sum() / e.j.sum().nullif(0), sum(some("i")) / sum(some("j")), set()),
    "first": (lambda e: e.ts.min(), min(some("ts")), set()),
    "last": (lambda e: e.d.max(), max(some("d")), set()),
    "texts": (lambda e: e.s.nunique(), 5, set()),
    "uuids": (lambda e: e.u.nunique(), 1, set()),
    "any": (lambda e: e.b.any(), True, set()),
    "all": (lambda e: e.b.all(), False, set()),
    "money": (lambda e: (e.n * e.k).sum(), Decimal("1.10") * sum(some("k")), SQLITE),
    "median": (lambda e: e.i.median(), 3, EVERY),
}


def stored(sql: str, connection: str | None = None) -> list[dict[str, Any]]:
    with closing(open_tables(current().connection(connection))) as tables:
        return [row for batch in tables.read(Slice(sql), tables.describe(sql)) for row in batch.to_pylist()]


def check_all(
    schema: pa.Schema, kind: str, model: Callable[..., Callable[[Any], Model]], connection: str | None
) -> None:
    with closing(open_tables(current().connection(connection))) as tables:

        def is_pushed(of: Callable[[Any], Any]) -> bool:
            expression = of(ibis.table(ibis.Schema.from_pyarrow(schema), name="ev")).as_table()
            return pushdown.why_not(pushdown.cleared(expression), tables, {"ev": schema}) is None

        pushed = {name: is_pushed(lambda ev, of=of: ev.select(x=of(ev))) for name, (of, _, _) in OF_ROWS.items()}
        pushed_sums = {name: is_pushed(lambda ev, of=of: ev.aggregate(x=of(ev))) for name, (of, _, _) in OF_ALL.items()}
    assert {name for name, is_so in pushed.items() if not is_so} == {
        n for n, each in OF_ROWS.items() if kind in each[2]
    }
    assert {name for name, is_so in pushed_sums.items() if not is_so} == {
        n for n, each in OF_ALL.items() if kind in each[2]
    }
    # In SQLite no text is made of numbers, and no rest, where others may have overflowed.
    together = [name for name, is_so in pushed.items() if is_so and not (kind == "sqlite" and name in ("text", "rest"))]

    @model(name="of_rows")
    def of_rows(ev: Any) -> Any:
        return ev.select("k", **{name: OF_ROWS[name][0](ev) for name in together})

    @model(name="of_all")
    def of_all(ev: Any) -> Any:
        return ev.aggregate(**{name: of(ev) for name, (of, _, _) in OF_ALL.items() if pushed_sums[name]})

    @model(name="alone")
    def alone(ev: Any) -> Any:
        return ev.select("k", text=ev.i.cast("string"), rest=ev.i % ev.j.nullif(0))

    for each in (of_rows, of_all, alone):
        assert build(each).engine == "pushdown"
    table = {row["k"]: row for row in stored("SELECT * FROM of_rows", connection)}
    texts = {row["k"]: row for row in stored("SELECT * FROM alone", connection)}
    for row in ROWS:
        found = {**texts[row["k"]], **table[row["k"]]}
        wanted = {name: of_row(OF_ROWS[name][1], row) for name in (*together, "text", "rest")}
        assert {name: found[name] for name in wanted} == wanted
        assert {name: type(found[name]) for name in wanted} == {name: type(each) for name, each in wanted.items()}
    (found,) = stored("SELECT * FROM of_all", connection)
    assert found == {name: OF_ALL[name][1] for name in found}


@pytest.fixture
def ev(streams: Project) -> pa.Schema:
    from weft.engine.readers import stream_reader
    from weft.systems.log import EXTRA

    weft.stream(name="ev", fields=FIELDS)(lambda: None)
    weft.publish_sync("ev", ROWS)
    reader = stream_reader("ev")
    return reader.selecting([name for name in reader.schema.names if name != EXTRA]).schema


def test_expressions(ev: pa.Schema) -> None:
    check_all(ev, weft.get_connection("default").kind, weft.model, None)


@pytest.mark.full
def test_expressions_of_duckdb(project: Path, tmp_path: Path) -> None:
    weft.connect(url=f"duckdb:///{tmp_path}/t.duckdb", name="duck")
    kinds = {name: FieldType.parse(kind) for name, kind in FIELDS.items()}
    hints = {"json": json.dumps, "uuid": lambda value: value and str(value)}
    fields = [
        hinted(name, kind.base) if kind.base in hints else pa.field(name, kind.arrow) for name, kind in kinds.items()
    ]
    rows = [{name: hints.get(kind.base, lambda x: x)(row[name]) for name, kind in kinds.items()} for row in ROWS]
    table = pa.Table.from_pylist(rows, pa.schema(fields))
    weft.load(table, target="ev", connection="duck")
    with closing(open_tables(current().connection("duck"))) as tables:
        schema = tables.describe("SELECT * FROM ev")

    def model(**options: Any) -> Any:
        return weft.model(connection="duck", dependencies=["duck.main.ev"], **options)

    check_all(schema, "duckdb", model, "duck")


OTHER_KINDS = pa.schema(
    {
        "i": pa.int64(),
        "h": pa.int32(),
        "f": pa.float64(),
        "r": pa.float32(),
        "n": pa.decimal128(10, 2),
        "s": pa.string(),
        "t": pa.string(),
    }
)
# Each was compared with Spark, value by value.
UNLIKE_SPARK: dict[str, Computed] = {
    "sum of a float32": lambda e: e.r + e.i,
    "quotient of a float32": lambda e: e.r / 3,
    "float32 or integer": lambda e: ibis.coalesce(e.r, e.i),
    "case of a float32": lambda e: (e.i > 0).ifelse(e.r, e.i),
    "decimal or integer": lambda e: ibis.coalesce(e.n, e.i),
    "case of a decimal": lambda e: (e.i > 0).ifelse(e.n, e.f),
    "replaced by a column": lambda e: e.s.replace("a", e.t),
}
LIKE_SPARK: dict[str, Computed] = {
    "sum": lambda e: e.f + e.i,
    "integer or float": lambda e: ibis.coalesce(e.i, e.f),
    "float32 or 0": lambda e: e.r.fill_null(0),
    "unless it is 0": lambda e: e.i.nullif(0),
    "integer unless it is a float": lambda e: e.i.nullif(e.f),
    "float unless it is 0": lambda e: e.f.nullif(0),
    "replaced": lambda e: e.s.replace("a", "b"),
}


def test_numbers_of_several_kinds(streams: Project) -> None:
    table = ibis.table(ibis.Schema.from_pyarrow(OTHER_KINDS), name="ev")
    with closing(open_tables(current().connection())) as tables:

        def is_pushed(of: Computed) -> bool:
            expression = pushdown.cleared(table.select(x=of(table)))
            return pushdown.why_not(expression, tables, {"ev": OTHER_KINDS}) is None

        assert [name for name, of in UNLIKE_SPARK.items() if is_pushed(of)] == []
        assert [name for name, of in LIKE_SPARK.items() if not is_pushed(of)] == []


def test_a_view_has_the_numbers_of_a_table(streams: Project) -> None:
    kind = weft.get_connection("default").kind
    weft.stream(name="ev", fields={"i": "int64", "h": "int32", "n": "decimal(10,2)", "s": "string"})(lambda: None)

    def numbers(ev: Any) -> Any:
        computed = {"i": ev.i.sum(), "h": ev.h.max() + 1, "mean": ev.i.mean(), "rows": ev.count()}
        if kind != "sqlite":  # which has no decimals
            computed["n"] = ev.n.sum()
        return ev.group_by("s").aggregate(**computed)

    stays = weft.model(name="stays", engine="pushdown")(numbers)
    looks = weft.model(name="looks", materialise="view")(numbers)
    weft.publish_sync("ev", [{"i": 2**60, "h": 3, "n": "1.10", "s": "a"}, {"i": 1, "h": 4, "n": "2.20", "s": "a"}])
    build(stays)
    build(looks)
    with closing(open_tables(current().connection())) as tables:
        table, view = (tables.describe(f"SELECT * FROM {name}") for name in ("stays", "looks"))
    assert view.field("i").type == pa.int64()
    assert dict(zip(view.names, view.types, strict=True)) == dict(zip(table.names, table.types, strict=True))
    assert stored("SELECT * FROM looks") == stored("SELECT * FROM stays")


def test_a_view_refuses_a_sum_that_is_too_great(streams: Project) -> None:
    weft.stream(name="ev", fields={"i": "int64"})(lambda: None)
    sums = weft.model(name="sums", materialise="view")(lambda ev: ev.aggregate(i=ev.i.sum()))
    weft.publish_sync("ev", [{"i": -(2**62)}, {"i": 2**62 - 1}])
    build(sums)
    assert stored("SELECT * FROM sums") == [{"i": -1}]
    weft.publish_sync("ev", [{"i": 2**62}, {"i": 2**62}])
    assert stored("SELECT * FROM sums") == [{"i": 2**63 - 1}]
    weft.publish_sync("ev", [{"i": 1}])
    with pytest.raises(Exception, match=r"(?i)out of range|overflow"):
        stored("SELECT * FROM sums")


TYPED: dict[str, tuple[Computed, str]] = {
    "a float beside an integer": (lambda e: e.i * 0.1, "`i` * CAST('0.1' AS DOUBLE)"),
    "a decimal beside a decimal": (lambda e: e.n * 0.1, "`n` * 0.1 AS"),
    "a quotient of a decimal": (lambda e: e.n / 3.0, "CAST(`t0`.`n` AS DOUBLE) / 3.0"),
    "a quotient by a decimal": (lambda e: 1.5 / e.n, "CAST(1.5 AS DOUBLE) / `t0`.`n`"),
    "one of some": (lambda e: ibis.coalesce(e.n, 12.5), "COALESCE(`t0`.`n`, 12.5)"),
    "an integer beside a decimal": (lambda e: e.n.fill_null(0), "COALESCE(`t0`.`n`, CAST('0.00' AS DECIMAL(10, 2)))"),
    "an integer beside a float32": (lambda e: e.r.fill_null(0), "COALESCE(`t0`.`r`, CAST('0.0' AS FLOAT))"),
    "a sum that is wider": (lambda e: e.h * e.h, "CAST(`t0`.`h` AS BIGINT) * `t0`.`h`"),
    "a great number": (lambda e: e.n > 1e20, "`n` > 100000000000000000000 AS"),
    "a number of more digits": (lambda e: e.n < -0.12345, "`n` < (\n    -0.12345\n  )"),
    "too small a number": (lambda e: e.n > 1e-50, "CAST('1e-50' AS DOUBLE)"),
    "a count of no rows": (lambda e: e.count(where=e.i > 0), "COUNT(IF(`t0`.`i` > 0, 1, NULL))"),
    "NaN is a number": (lambda e: e.f.isnull(), "`f` IS NULL AS"),
}


@pytest.mark.parametrize("name", TYPED)
def test_sql_of_spark_has_the_types_of_ibis(name: str) -> None:
    of, sql = TYPED[name]
    table = ibis_table(OTHER_KINDS, "ev")
    assert sql in pushdown.to_spark_sql(pushdown.cleared(of(table).as_table()))


COLLATED = {
    "sqlite": "text COLLATE NOCASE",
    "postgres": 'text COLLATE "en-x-icu"',
    "mysql": "varchar(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci",
}


def test_texts_are_compared_by_letters(streams: Project) -> None:
    kind = weft.get_connection("default").kind
    run(f"CREATE TABLE words (s {COLLATED[kind]}, k integer)")
    run("INSERT INTO words VALUES ('b', 1), ('B', 2), ('a', 3), ('Z', 4)")

    @weft.model(dependencies=["words"], engine="pushdown")
    def grouped(words: Any) -> Any:
        return words.group_by("s").agg(rows=words.count())

    @weft.model(dependencies=["words"], engine="pushdown")
    def ordered(words: Any) -> Any:
        rank = ibis.row_number().over(order_by=words.s)
        return words.select("s", rank=rank, below=words.s < "a", between=words.s.between("B", "a"))

    @weft.model(dependencies=["words"], engine="pushdown")
    def ends(words: Any) -> Any:
        last = words.select("s").distinct().order_by(words.s.desc()).limit(1)
        return words.aggregate(least=words.s.min(), most=words.s.max()).cross_join(last)

    for model in (grouped, ordered, ends):
        build(model)
    assert {row["s"]: row["rows"] for row in stored("SELECT * FROM grouped")} == dict.fromkeys("aBbZ", 1)
    found = {row["s"]: (row["rank"], row["below"], row["between"]) for row in stored("SELECT * FROM ordered")}
    assert found == {"B": (0, 1, 1), "Z": (1, 1, 1), "a": (2, 0, 1), "b": (3, 0, 0)}
    assert stored("SELECT * FROM ends") == [{"least": "B", "most": "b", "s": "b"}]


def test_texts_of_duckdb_are_compared_by_letters(project: Path, tmp_path: Path) -> None:
    weft.connect(url=f"duckdb:///{tmp_path}/t.duckdb", name="duck")
    with closing(open_tables(current().connection("duck"))) as tables, tables.driver.session("publish") as session:
        session.run("CREATE TABLE words (s varchar COLLATE nocase)")
        session.run("INSERT INTO words VALUES ('b'), ('B')")

    @weft.model(connection="duck", dependencies=["duck.main.words"], engine="pushdown")
    def grouped(words: Any) -> Any:
        return words.distinct()

    build(grouped)
    assert sorted(row["s"] for row in stored("SELECT * FROM grouped", "duck")) == ["B", "b"]


@pytest.mark.parametrize("system", ["postgres"], indirect=True)
def test_texts_that_ignore_case(streams: Project) -> None:
    run("CREATE COLLATION no_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    run("CREATE TABLE words (s text COLLATE no_case, u uuid)")
    run(f"INSERT INTO words VALUES ('b', '{U}'), ('B', '{U}')")

    @weft.model(dependencies=["words"], engine="pushdown")
    def grouped(words: Any) -> Any:
        first = ibis.row_number().over(group_by=words.s, order_by=words.u)
        return words.mutate(first=first).distinct()

    build(grouped)
    assert [row["first"] for row in stored("SELECT * FROM grouped")] == [0, 0]


@pytest.mark.parametrize("system", ["sqlite"], indirect=True)
def test_numbers_that_overflow(ev: pa.Schema) -> None:
    @weft.model
    def large(ev: Any) -> Any:
        return ev.aggregate(total=(ev.i * 2**40 * 2**20).sum())

    with pytest.raises(WeftError, match="integer overflow"):
        build(large)


@pytest.mark.parametrize("system", ["sqlite"], indirect=True)
def test_view_says_why_it_cannot_be_one(ev: pa.Schema) -> None:
    @weft.model(materialise="view")
    def summed(ev: Any) -> Any:
        return ev.aggregate(total=ev.n.sum())

    @weft.model(materialise="view")
    def small(ev: Any) -> Any:
        return ev.select(small=ev.s.lower())

    @weft.model(materialise="view")
    def in_sql(ev: Any) -> Any:
        return "SELECT k FROM ev"

    @weft.model(engine="pushdown")
    def forced(ev: Any) -> Any:
        return ev.select(small=ev.s.lower())

    @weft.model(materialise="view")
    def whole(ev: Any) -> Any:
        return ev

    for model, why in (
        (summed, "decimals.*Sum"),
        (small, "Lowercase"),
        (in_sql, r"decimals \(n\)"),
        (forced, "Lowercase"),
    ):
        with pytest.raises(DeclarationError, match=why):
            build(model)
    build(whole)
    assert [row["n"] for row in stored("SELECT n FROM whole")] == [Decimal("1.10")] * len(ROWS)
