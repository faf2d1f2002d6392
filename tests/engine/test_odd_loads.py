"""Odd rows of this process into every database: each load stores exactly what it was given, or is refused and leaves
no row."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import weft
from odd_values import BYTES, DAYS, DECIMALS, FIELDS, FLOATS, INTEGERS, MOMENTS, NOT_FINITE, TEXTS, UUIDS, Odd
from systems.tables.conftest import database_url  # noqa: F401 - fixture
from weft.columns import hinted
from weft.engine import inputs
from weft.engine.load import open_tables
from weft.systems.base import system_for
from weft.systems.sql.tables import Slice

FAMILIES: list[list[Any]] = [DECIMALS, DAYS, MOMENTS, BYTES, UUIDS, TEXTS, INTEGERS, FLOATS, [*FLOATS, *NOT_FINITE]]
Rows = list[dict[str, Any]]


@pytest.fixture
def connection(database_url: str) -> Any:  # noqa: F811
    return weft.connect(url=database_url)


def odd_rows(odd: Odd) -> Rows:
    """Rows of a few columns, each of one type, or of several where the dice say so."""
    dice = odd.dice
    columns: dict[str, Callable[[], Any]] = {}
    for name in "abc":
        family, kind = dice.choice(FAMILIES), dice.choice(list(FIELDS.values()))
        members = {odd.key(): dice.choice(["string", "int64", "bool", "float64"]) for _ in range(4)}
        columns[name] = dice.choice(
            [
                lambda family=family: dice.choice(family),
                lambda kind=kind: odd.of_type(kind),
                lambda members=members: some_of(odd, members),
                lambda members=members: [some_of(odd, members) for _ in range(dice.randrange(3))],
            ]
        )
    rows: Rows = [
        {name: make() for name, make in columns.items() if dice.random() < 0.9} for _ in range(dice.randrange(1, 6))
    ]
    if dice.random() < 0.3:
        dice.choice(rows)[dice.choice("abc")] = odd.value()
    return rows


def some_of(odd: Odd, members: dict[str, str]) -> dict[str, Any]:
    """An object with some of these keys."""
    return {key: odd.of_type(kind) for key, kind in members.items() if odd.dice.random() < 0.5}


def stored_rows(connection: Any, table: str) -> Rows:
    tables = open_tables(connection)
    try:
        sql = f"SELECT * FROM {tables.table(None, table)} ORDER BY n"
        return [row for each in tables.read(Slice(sql), tables.describe(sql)) for row in each.to_pylist()]
    finally:
        tables.close()


def is_same(stored: Any, given: Any, is_json: bool = False) -> bool:
    """Whether a table holds the value that it was given. Where it has no objects and arrays, they are the same JSON;
    objects of one type have the keys of all."""
    if given is None or given is True or given is False or stored is None:
        return stored is given
    if isinstance(given, float) and given != given:
        return isinstance(stored, float) and stored != stored
    if isinstance(given, int | float | Decimal):
        is_number = isinstance(stored, int | float | Decimal) and not isinstance(stored, bool)
        return is_number and (stored == given or (isinstance(given, float) and Decimal(stored) == Decimal(repr(given))))
    if isinstance(given, datetime):
        if not isinstance(stored, datetime):
            return False
        return stored == given if stored.tzinfo and given.tzinfo else stored.replace(tzinfo=None) == _in_utc(given)
    if isinstance(given, dict | list | tuple):
        is_json = is_json or isinstance(stored, str)
        found = json.loads(stored) if isinstance(stored, str) else stored
        if isinstance(given, dict):
            if not isinstance(found, dict) or (is_json and found.keys() != given.keys()):
                return False
            return all(is_same(found.get(each), given.get(each), is_json) for each in {*given, *found})
        is_list = isinstance(found, list) and len(found) == len(given)
        return is_list and all(is_same(*each, is_json) for each in zip(found, given, strict=True))
    if isinstance(given, UUID):
        return bool(stored == str(given))
    if isinstance(given, date):
        return type(stored) is date and stored == given
    return type(stored) is type(given) and bool(stored == given)


def _in_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is None else moment.astimezone(UTC).replace(tzinfo=None)


def test_what_was_loaded_is_what_was_given(connection: Any, count: Callable[..., int]) -> None:
    for seed in range(count(200, brief=4)):
        rows = [{"n": n, **row} for n, row in enumerate(odd_rows(Odd(seed)))]
        table = f"odd{seed}"
        try:
            weft.load(rows, target=table, connection=connection)
        except weft.WeftError:
            # The table may be there: some databases commit what creates one.
            weft.load([{"n": -1}], target=table, connection=connection)
            assert [row["n"] for row in stored_rows(connection, table)] == [-1], (seed, rows)
            continue
        found = stored_rows(connection, table)
        assert len(found) == len(rows), seed
        for stored, given in zip(found, rows, strict=True):
            for name in "abc":
                assert is_same(stored.get(name), given.get(name)), (seed, name, stored.get(name), given.get(name))


DOCUMENTS = [
    *({"b": 1, "a": [{"c": 2.5}, {"d": None}]}, None, {}, {"a": None}, {"x": 2**53 + 1, "é": -0.0, "A": "ß"}),
    {"at": datetime(2026, 1, 31, 12, tzinfo=timezone(timedelta(hours=2))), "raw": b"k", "n": Decimal("1E+3")},
]
TEXTS_OF = [
    *('{"b":1,"a":[{"c":2.5},{"d":null}]}', None, "{}", '{"a":null}', '{"x":9007199254740993,"é":-0.0,"A":"ß"}'),
    '{"at":"2026-01-31T10:00:00Z","raw":"6b","n":1000}',
]


@pytest.mark.parametrize("form", ["list", "iterator", "pieces", "pandas"])
def test_json_is_stored_as_it_was_given(connection: Any, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of one type would have the keys of all, and null for those that they lack. Without a table, DuckDB makes
    a column of such a type."""
    monkeypatch.setattr(inputs, "BATCH_ROWS", 2)
    rows = [{"n": n, "doc": doc, "docs": [doc]} for n, doc in enumerate(DOCUMENTS)]
    made: dict[str, Callable[[], Any]] = {
        "list": lambda: rows,
        "iterator": lambda: iter(rows),
        "pieces": lambda: iter([rows[:3], rows[3:]]),
        "pandas": lambda: pd.DataFrame(rows),
    }
    if system_for(connection.kind).kind == "duckdb":
        docs = [hinted("doc", "json"), pa.field("docs", pa.string())]
        weft.load(pa.schema([("n", pa.int64()), *docs]).empty_table(), target="t", connection=connection)
    weft.load(made[form](), target="t", connection=connection)
    found = stored_rows(connection, "t")
    assert [row["doc"] for row in found] == TEXTS_OF
    assert [row["docs"] for row in found] == [f"[{each or 'null'}]" for each in TEXTS_OF]


MIXED = [{"a": 2**70}, {"a": "x", "b": [1, "y", None]}, None, [{"a": 1}, True], {"a": b"k", "c": Decimal("1E+3")}]
MIXED_TEXTS = [
    *('{"a":1180591620717411303424}', '{"a":"x","b":[1,"y",null]}', None, '[{"a":1},true]'),
    '{"a":"6b","c":1000}',
]


@pytest.mark.parametrize("form", ["list", "iterator", "pieces", "pandas", "frames"])
def test_json_may_have_values_that_no_type_holds(connection: Any, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the column is one of JSON. One of structs takes none of them."""
    monkeypatch.setattr(inputs, "BATCH_ROWS", 2)
    rows = [{"n": n, "doc": doc} for n, doc in enumerate(MIXED)]
    made: dict[str, Callable[[], Any]] = {
        "list": lambda: rows,
        "iterator": lambda: iter(rows),
        "pieces": lambda: iter([rows[:1], rows[1:]]),
        "pandas": lambda: pd.DataFrame(rows),
        "frames": lambda: iter([pd.DataFrame(rows[:1]), pd.DataFrame(rows[1:])]),
    }
    if system_for(connection.kind).kind == "duckdb":
        with pytest.raises(weft.DeclarationError, match="of no one type"):
            weft.load(made[form](), target="t", connection=connection)
        columns = pa.schema([("n", pa.int64()), hinted("doc", "json")])
        weft.load(columns.empty_table(), target="t", connection=connection)
    weft.load(made[form](), target="t", connection=connection)
    assert [row["doc"] for row in stored_rows(connection, "t")] == MIXED_TEXTS
    for odd in ("\ud800", {1: 2}, object(), datetime.min.replace(tzinfo=timezone(timedelta(hours=2)))):
        with pytest.raises(weft.DeclarationError, match="doc"):
            weft.load([{"n": 1, "doc": {"a": 2**70}}, {"n": 2, "doc": {"a": odd}}], target="t", connection=connection)


def test_columns_of_pandas_stay_where_they_are(tmp_path: Path) -> None:
    """Beside objects of several types, in their order, also where a name is a number or a value is missing."""
    lake = weft.SQLiteConnection(str(tmp_path / "lake.db"), name="lake")
    docs = {"doc": [{"a": 1}, float("nan"), {"a": "x"}], 7: [4, 5, 6], "docs": [[1], [], None], "n": [1, 2, 3]}
    frame = pd.DataFrame(docs)
    weft.load(frame, target="t", connection=lake)
    with pytest.raises(weft.DeclarationError, match="column 'doc' are of no one type: dicts and texts"):
        weft.load(frame.assign(doc=[{"a": 1}, "x", None]), target="t", connection=lake)
    rows = stored_rows(lake, "t")
    assert [list(row.values()) for row in rows] == [
        ['{"a":1}', 4, "[1]", 1],
        [None, 5, "[]", 2],
        ['{"a":"x"}', 6, None, 3],
    ]
    assert list(rows[0]) == ["doc", "7", "docs", "n"]


NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("frame", "stored"),
    [
        (pl.DataFrame({"a": ["x", None]}, {"a": pl.Categorical}), ["x", None]),
        (pl.DataFrame({"a": ["x", None]}, {"a": pl.Enum(["x"])}), ["x", None]),
        (pl.DataFrame({"a": [2**100, None]}, {"a": pl.Int128}), [str(2**100), None]),
        (pl.DataFrame({"a": [2**127 - 1]}, {"a": pl.Int128}), "more than 38 digits"),
        (pl.DataFrame({"a": [object()]}, {"a": pl.Object}), "'a' has objects of Python's"),
        (pd.DataFrame({"a": [2**62 + 1, None]}, dtype="Int64"), [2**62 + 1, None]),
        (pd.DataFrame({"a": [date(2026, 1, 31), NOON]}), "'a' are of no one type: dates and times with a zone"),
        (pd.DataFrame({"a": [date(2026, 1, 31), pd.Timestamp(NOON)]}, dtype=object), "dates and times with a zone"),
        ([{"a": date(2026, 1, 31)}, {"a": pd.Timestamp(NOON)}], "dates and times with a zone"),
        (pd.DataFrame({"a": [1, "x"]}), "'a' are of no one type: numbers and texts"),
        (pd.DataFrame({"a": [True, 1]}, dtype=object), "'a' are of no one type: booleans and numbers"),
        (pd.DataFrame({"a": [1, 2**70]}), "'a' are of no one type: one is a whole number beyond 64 bits"),
        (pd.DataFrame({"a": ["x", float("nan"), None]}), ["x", None, None]),
        (pd.DataFrame({"a": pd.period_range("2026-01", periods=2, freq="M")}), "'a' is of type .*pandas.period"),
        (pd.DataFrame({"a": pd.interval_range(0, 2)}), "'a' is of type .*pandas.interval"),
        (pd.DataFrame({"a": [1j]}), "a type that no table can hold: .*complex128"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "Two columns of the frame have the name 'a'"),
        (pd.DataFrame({"n": [1, 1, 2], "a": "xyz"}).groupby("a").sum(), ["xyz"]),
        ([{"a": time(1, 2, tzinfo=UTC)}], "A time of day of column 'a' has a zone"),
    ],
)
def test_values_of_frames(frame: Any, stored: Any, tmp_path: Path) -> None:
    """They are stored as they are, or refused: Arrow would take a time for its day, and an object for its address."""
    connection = weft.SQLiteConnection(str(tmp_path / "t.db"), name="t")
    if isinstance(stored, str):
        with pytest.raises(weft.WeftError, match=stored):
            weft.load(frame, target="t", connection=connection)
    else:
        weft.load(frame, target="t", connection=connection)
        with closing(sqlite3.connect(tmp_path / "t.db")) as database:
            assert [value for (value,) in database.execute("SELECT a FROM t")] == stored


def test_a_key_that_came_too_late_for_the_type_of_objects_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "BATCH_ROWS", 1)
    duck = weft.DuckDBConnection(str(tmp_path / "duck.db"), name="duck")
    rows = [{"doc": [{"a": 1}]}, {"doc": [{"a": 1, "b": 2}]}]
    with pytest.raises(weft.DeclarationError, match="column 'doc' has a key 'b'"):
        weft.load(iter(rows), target="t", connection=duck)
    weft.load(rows, target="whole", connection=duck)


@pytest.mark.parametrize(
    "values",
    [
        [date(2026, 1, 31), datetime(2026, 1, 31, 12)],
        ["a", b"a"],
        [1.5, True],
        [datetime(2026, 1, 31, 12), datetime(2026, 1, 31, 12, tzinfo=UTC)],
        [{"a": [date(2026, 1, 31)]}, {"a": [datetime(2026, 1, 31, 12)]}],
        ["\ud800"],
    ],
)
@pytest.mark.parametrize("lazily", [False, True])
def test_values_of_several_types_are_refused(
    values: list[Any], lazily: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    duck = weft.DuckDBConnection(str(tmp_path / "duck.db"), name="duck")
    monkeypatch.setattr(inputs, "BATCH_ROWS", 1)
    rows = [{"n": n, "a": value} for n, value in enumerate(values)]
    with pytest.raises(weft.DeclarationError, match="column 'a"):
        weft.load(iter(rows) if lazily else rows, target="copies", connection=duck)


_DAY, _AT, _LATER = date(2026, 1, 31), datetime(2026, 1, 31, 12), datetime(2026, 2, 1, 1, 30)
TEXTS_AS: dict[pa.DataType, dict[str, Any]] = {
    pa.bool_(): dict.fromkeys(("true", "T", "TRUE", "1"), True) | dict.fromkeys(("false", "f", "F", "0"), False),
    pa.int32(): {"0": 0, "-7": -7, "+007": 7, " 1 ": 1},
    pa.int64(): {"9223372036854775807": 2**63 - 1, "-9223372036854775808": -(2**63)},
    pa.float64(): {"1": 1.0, "-.5": -0.5, "+5.": 5.0, "1e3": 1000.0, "2.5E-1": 0.25, " 1.5 ": 1.5},
    pa.decimal128(8, 2): {
        "1": Decimal(1),
        "-.5": Decimal("-.5"),
        "+5.": Decimal(5),
        "1.50000": Decimal("1.5"),
        "1e3": Decimal(1000),
        "2.5E-1": Decimal(".25"),
        " 1.5 ": Decimal("1.5"),
    },
    pa.date32(): dict.fromkeys(("2026-01-31", "2026-01-31T00:00:00", "2026-01-31T02:00:00+02:00"), _DAY),
    pa.timestamp("us"): {
        **dict.fromkeys(("2026-01-31T12:00:00", "2026-01-31 12:00", "2026-01-31 12:00:00.0000000"), _AT),
        **dict.fromkeys(("2026-01-31 12:00:00Z", "2026-01-31T14:00+02", "2026-01-31 17:30:00.0+0530"), _AT),
        "2026-01-31 23:30:00-02:00": _LATER,
    },
    pa.timestamp("us", "UTC"): {"2026-01-31 12:00:00": _AT.replace(tzinfo=UTC)},
    pa.json_(): {"[1]": "[1]"},
    pa.uuid(): {str(UUID(int=1)): str(UUID(int=1))},
}
NO_TIMES = [
    *("today", "now", "infinity", "-infinity", "epoch", "Jan 31, 2026", "2026-02-30", "12:00", ""),
    *("20260131", "2026-1-3", "26-01-31", "2026/01/31", "31.01.2026", "2026-031", "2026-W05-6", "1769817600"),
    *("2026-01-31T1:00", "2026-01-31 12", "2026-01-31t12:00:00", "2026-01-31 12:00:00z", "2026-01-31 12:00:00 UTC"),
    *("2026-01-31 12:00:00.1234567", "2026-01-31 12:00:00,5", "2026-01-31 ", " 2026-01-31", "2026-01-31\n"),
]
NO_NUMBERS = ["", "yes", "1_000", "1,5", "0x10", "1e", "e1", "٣", "1\n", "--1", "1 2", ".", "$1", "1f", "true"]
NO_VALUES: dict[pa.DataType, list[str]] = {
    pa.bool_(): ["2", "7", "5.", "1.0", "+1", "maybe", "", "yes", "no", "y", "n", "on", "off", "tr", " true", "1\n"],
    pa.int32(): [*NO_NUMBERS, "1.0", "1e3", "5.", "2147483648", "NaN"],
    pa.int64(): [*NO_NUMBERS, "1.0", "1e3", "9223372036854775808"],
    pa.float64(): [*NO_NUMBERS, "1e400"],
    pa.decimal128(8, 2): [*NO_NUMBERS, "1.005", "1e-3", "1000000", "NaN", "inf"],
    pa.date32(): [*NO_TIMES, "2026-01-31T23:30:00-02:00", "2026-01-31T12:00:00", "2026-01-31T00:00:00+02:00"],
    pa.timestamp("us"): NO_TIMES,
    pa.timestamp("us", "UTC"): NO_TIMES,
    pa.json_(): ["", " ", "{", "'a'"],
    pa.uuid(): ["", "1"],
}


@pytest.mark.every_system
def test_texts_are_read_alike(connection: Any) -> None:
    """Times in UTC. Others are bad rows: words such as `today` are another time each day, and databases differ in what
    else they read."""
    for number, (kind, values) in enumerate(TEXTS_AS.items()):
        made = pa.schema([("n", pa.int64()), ("value", kind)])
        weft.load(made.empty_table(), target=f"t{number}", connection=connection)
        texts = [*values, *NO_VALUES[kind]]
        rows = pa.table({"n": range(len(texts)), "value": texts})
        done = weft.load(rows, target=f"t{number}", connection=connection, on_bad_rows="quarantine")
        assert [row["value"] for row in stored_rows(connection, f"t{number}")] == list(values.values()), kind
        assert done.quarantined == len(NO_VALUES[kind]), kind
