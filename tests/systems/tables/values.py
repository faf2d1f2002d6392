"""Values of every canonical type, for the tests of tables: their fields, strategies and edges."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from weft.columns import hint_of, hinted, is_nested, nested_to_json
from weft.systems.sql.tables import Slice, SqlTables

# Who would store them as null, or not at all.
WITHOUT_NAN = {"sqlite", "mysql"}
WITHOUT_INFINITY = {"mysql"}

FIRST, LAST = datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999_999)
LIST = pa.list_(pa.field("element", pa.int64()))
STRUCT = pa.struct([pa.field("a", pa.int64()), pa.field("b", pa.string())])

FIELDS: dict[str, pa.Field] = {
    field.name: field
    for field in (
        pa.field("bool", pa.bool_()),
        pa.field("int8", pa.int8()),
        pa.field("int16", pa.int16()),
        pa.field("int32", pa.int32()),
        pa.field("int64", pa.int64()),
        pa.field("float32", pa.float32()),
        pa.field("float64", pa.float64()),
        pa.field("decimal(38,0)", pa.decimal128(38, 0)),
        pa.field("decimal(38,18)", pa.decimal128(38, 18)),
        pa.field("decimal(38,38)", pa.decimal128(38, 38)),
        pa.field("decimal(10,2)", pa.decimal128(10, 2)),
        pa.field("decimal(7,3)", pa.decimal128(7, 3)),
        pa.field("date", pa.date32()),
        pa.field("timestamp", pa.timestamp("us", "UTC")),
        pa.field("local", pa.timestamp("us")),
        pa.field("string", pa.string()),
        pa.field("binary", pa.binary()),
        hinted("uuid", "uuid"),
        hinted("json", "json"),
        hinted("time", "time"),
        pa.field("list", LIST),
        pa.field("struct", STRUCT),
    )
}

# PostgreSQL has no character 0; half a character is no text anywhere.
_TEXT = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=30)
_INT64 = st.integers(-(2**63), 2**63 - 1)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=5,
)


def _decimals(kind: pa.DataType) -> st.SearchStrategy[Decimal]:
    most = 10**kind.precision - 1
    edges = st.sampled_from([0, 1, -1, most, -most, 10_000, 9_999, 10**kind.scale])
    whole = st.integers(-most, most) | edges.filter(lambda n: abs(n) <= most)
    return whole.map(lambda n: Decimal((int(n < 0), tuple(map(int, str(abs(n)))), -kind.scale)))


def strategy(field: pa.Field, dialect: str) -> st.SearchStrategy[Any]:
    """Values of a field that a dialect can store."""
    nan, infinity = dialect not in WITHOUT_NAN, dialect not in WITHOUT_INFINITY
    found: dict[str, st.SearchStrategy[Any]] = {
        "bool": st.booleans(),
        "int8": st.integers(-128, 127),
        "int16": st.integers(-(2**15), 2**15 - 1),
        "int32": st.integers(-(2**31), 2**31 - 1),
        "int64": _INT64,
        "float32": st.floats(width=32, allow_nan=nan, allow_infinity=infinity),
        "float64": st.floats(allow_nan=nan, allow_infinity=infinity),
        "date": st.dates(),
        "timestamp": st.datetimes(timezones=st.just(UTC)),
        "local": st.datetimes(),
        "string": _TEXT,
        "binary": st.binary(max_size=30),
        "uuid": st.uuids().map(str),
        "json": _JSON.map(lambda value: json.dumps(value, ensure_ascii=False)),
        "time": st.times().map(time.isoformat),
        "list": st.lists(st.none() | _INT64, max_size=4),
        "struct": st.fixed_dictionaries({"a": st.none() | _INT64, "b": st.none() | _TEXT}),
    }
    values = _decimals(field.type) if pa.types.is_decimal(field.type) else found[field.name]
    return st.none() | values


def edges(field: pa.Field, dialect: str) -> list[Any]:
    """The values of a field that are easy to get wrong."""
    kind, name = field.type, field.name
    if pa.types.is_integer(kind):
        top = 2 ** (kind.bit_width - 1)
        return [0, 1, -1, top - 1, -top]
    if pa.types.is_floating(kind):
        special = [] if dialect in WITHOUT_NAN else [math.nan]
        special += [] if dialect in WITHOUT_INFINITY else [math.inf, -math.inf]
        tiny, large = (5e-324, 1.7976931348623157e308) if name == "float64" else (2.0**-149, 3.4028234663852886e38)
        return [0.0, -0.0, 1.5, tiny, -large, large, *special]
    if pa.types.is_decimal(kind):
        most = Decimal((0, (9,) * kind.precision, -kind.scale))
        least = Decimal((0, (1,), -kind.scale))
        return [most, most.copy_negate(), least, least.copy_negate(), Decimal((0, (0,), -kind.scale))]
    return {
        "bool": [True, False],
        "date": [FIRST.date(), LAST.date(), date(1969, 12, 31), date(2000, 2, 29)],
        "timestamp": [FIRST.replace(tzinfo=UTC), LAST.replace(tzinfo=UTC), datetime(1969, 12, 31, 23, tzinfo=UTC)],
        "local": [FIRST, LAST, datetime(1999, 12, 31, 23, 59, 59, 1)],
        "string": ["", " ", "\\N", "NULL", "a\tb\nc\r", "quo\"te's", "\x1e\x1f\x01", "naïve 漢字 🦀", "x" * 100_000],
        "binary": [b"", b"\x00", b"\xff\xfe", b"\\x00", bytes(range(256)) * 100],
        "uuid": ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"],
        "json": ['{"a": [1, 2.5, null, "é"]}', "null", "[]", '"text"', "12345678901234567890"],
        "time": ["00:00:00", "23:59:59.999999", "12:30:00.000001"],
        "list": [[], [None], [1, 2**63 - 1]],
        "struct": [{"a": None, "b": None}, {"a": 1, "b": "é"}],
    }[name]


def plain(value: Any, field: pa.Field) -> Any:
    """A value in a form that can be compared: whatever JSON it is in, NaN equal to itself, zero without a sign."""
    if value is None:
        return None
    if is_nested(field.type):
        if not isinstance(value, str):
            value = nested_to_json(pa.array([value], field.type))[0].as_py()
        return json.loads(value)
    if hint_of(field) == "json":
        return ("json", json.loads(value))
    if hint_of(field) == "time":
        return time.fromisoformat(value)
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC).replace(tzinfo=None)
    return value


def create(tables: SqlTables, name: str, schema: pa.Schema) -> str:
    """A table of these columns; gives its quoted name."""
    table = tables.table(None, name)
    columns = ", ".join(f"{tables.quote(field.name)} {tables.sql_type(field)}" for field in schema)
    with tables.driver.session("publish") as session:
        session.run(f"CREATE TABLE {table} ({columns})")
    return table


def copy_in(tables: SqlTables, table: str, data: pa.Table, rows: int | None = None) -> int:
    """Append a table in batches of so many rows."""
    with tables.driver.session("publish") as session:
        return tables.copy_in(session, table, data.schema, data.to_batches(max_chunksize=rows))


def read_all(tables: SqlTables, sql: str, columns: list[str] | None = None) -> pa.Table:
    """All rows of a query."""
    schema = tables.describe(sql)
    batches = list(tables.read(Slice(sql), schema, columns))
    chosen = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    return pa.Table.from_batches(batches, chosen)
