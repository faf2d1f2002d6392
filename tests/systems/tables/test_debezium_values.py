"""What Debezium really sent for each type (debezium_samples.json), in tables of every database."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pytest

from systems.tables.test_changes import mirror
from weft.columns import LOCAL_TIME, UTC_TIME, hinted
from weft.engine.streaming.cdc import debezium_types
from weft.engine.streaming.cdc.applying import ChangeBatch
from weft.engine.streaming.cdc.debezium_types import Meaning, misfits, typed
from weft.engine.streaming.cdc.envelopes import StoredTable, opened
from weft.engine.streaming.cdc.newest import newest
from weft.engine.streaming.cdc.row_sql import selected
from weft.pipelines.streaming.cdc import CDC
from weft.systems.changes import ORDER
from weft.systems.codecs.avro_schema import arrow_type, parse
from weft.systems.codecs.json import JsonDecoder
from weft.systems.load import Load
from weft.systems.sql import commit as sql_commit
from weft.systems.sql.tables import SqlTables

SAMPLES = json.loads(Path(__file__).with_name("debezium_samples.json").read_text())
CUSTOMERS = CDC(envelope="debezium", key_field="after.id")
MOMENT = datetime(2024, 2, 29, 12, 34, 56, 789012)
UUID = "123e4567-e89b-12d3-a456-426614174000"
EXPECTED: list[tuple[pa.Field, Any]] = [
    (pa.field("small", pa.int16()), -2),
    (pa.field("big", pa.int64()), 9007199254740993),
    (pa.field("d", pa.float64()), 0.1),
    (pa.field("b", pa.bool_()), True),
    (pa.field("n", pa.decimal128(12, 3)), Decimal("1234.567")),
    (pa.field("whole", pa.decimal128(20, 0)), Decimal("12345678901234567890")),
    (pa.field("free", pa.decimal128(30, 10)), Decimal("-0.00012")),
    (pa.field("cash", pa.decimal128(12, 2)), Decimal("12.34")),
    (pa.field("v", pa.string()), "vé"),
    (pa.field("raw", pa.binary()), b"\x00\xff\x10"),
    (pa.field("day", pa.date32()), date(2024, 2, 29)),
    (hinted("t6", "time"), "12:34:56.789012"),
    (pa.field("tz", pa.string()), "10:34:56.789Z"),
    (pa.field("ts0", LOCAL_TIME), MOMENT.replace(microsecond=0)),
    (pa.field("ts3", LOCAL_TIME), MOMENT.replace(microsecond=789000)),
    (pa.field("ts", LOCAL_TIME), MOMENT),
    (pa.field("tstz", UTC_TIME), MOMENT.replace(hour=10, tzinfo=UTC)),
    (hinted("u", "uuid"), UUID),
    (hinted("j", "json"), '{"a": [1, null]}'),
    (pa.field("e", pa.string()), "ok"),
    (pa.field("one", pa.bool_()), True),
    (pa.field("five", pa.int64()), 19),
    (pa.field("ip", pa.string()), "10.0.0.0/8"),
    (pa.field("p", pa.string()), "(1.5,-2.0)"),
]


def messages_of(
    sample: str, upto: int | None = None, *, known: Mapping[str, pa.DataType] = MappingProxyType({})
) -> pa.Table:
    """The messages of a sample."""
    schema, payloads = SAMPLES[sample]["schema"], [each for each in SAMPLES[sample]["messages"] if each is not None]
    messages = [{"schema": schema, "payload": each} if schema else each for each in payloads[:upto]]
    parsed = JsonDecoder(known).parse(pa.array([json.dumps(each).encode() for each in messages], pa.binary()))
    assert not parsed.bad
    return pa.table(parsed.columns)


def batch_of(sample: str, cdc: CDC = CUSTOMERS, *, upto: int | None = None) -> ChangeBatch:
    """The messages of a sample as a batch has them."""
    found = opened(messages_of(sample, upto), cdc)
    assert not found.bad
    return ChangeBatch(cdc, found, newest(found), [], found.skipped)


def apply(tables: SqlTables, batch: ChangeBatch) -> None:
    """Apply a batch to those columns that the mirror has."""
    with tables.driver.session("read") as session:
        columns = tables.columns(session, None, "mirror")
    present = None if columns is None else {each.name: each for each in columns}
    load = Load.declare(target="mirror", mode="merge", keys=batch.cdc.keys, commit_key="batch 1")
    rows, load = batch.planned(load, present)
    assert load.changes is not None
    names = [name for name in rows.schema.names if present is None or name in (*present, *load.changes.own)]
    written = pa.Table.from_batches(rows.batches, rows.schema).select(names)
    sql_commit.prepare(tables, load, written.schema)
    sql_commit.commit(tables, load, sql_commit.BatchedRows(written.schema, written.to_batches()))


@pytest.mark.parametrize("sample", ["postgres", "postgres_no_schema_string", "postgres_isostring"])
def test_values_become_those_of_the_table(tables: SqlTables, sample: str) -> None:
    expected = [(each, value) for each, value in EXPECTED if (sample, each.name) != ("postgres_isostring", "raw")]
    fields = [pa.field("id", pa.int64()), *(each for each, _ in expected)]
    columns = ", ".join(f"{tables.quote(each.name)} {tables.sql_type(each)}" for each in fields)
    with tables.driver.session("publish") as session:
        session.run(f"CREATE TABLE {tables.table(None, 'mirror')} ({columns})")
    apply(tables, batch_of(sample, upto=2))
    first, second = mirror(tables)
    assert {name: value for name, value in first.items() if name != "id"} == {
        each.name: value for each, value in expected
    }
    assert second == {"id": 2, **{each.name: None for each, _ in expected}}


def test_a_new_table_gets_the_types_of_the_source(tables: SqlTables) -> None:
    apply(tables, batch_of("postgres", upto=2))
    first, _ = mirror(tables)
    for each, value in EXPECTED:
        if each.name not in ("free", "p", "cash"):
            assert first[each.name] == value, each.name
    assert first["free"] == Decimal("-0.00012") and first["cash"] == Decimal("12.34")


def test_values_that_an_update_did_not_send_are_known_as_such() -> None:
    batch = batch_of("postgres")
    assert [each.name for each in batch.set.kept] == ["t", "raw", "jb", "ints", "texts"]
    row = batch.set.rows.slice(batch.set.rows.num_rows - 1).to_pylist()[0]
    assert (row["id"], row["small"], row["t"], row["ints"]) == (5, 7, None, None)


def test_a_changed_key_and_changes_of_one_transaction(tables: SqlTables) -> None:
    apply(tables, batch_of("postgres_changes"))
    assert mirror(tables) == [
        {"id": 1, "name": "a", "wide": "xxx"},
        {"id": 3, "name": "two", "wide": None},
        {"id": 20, "name": "moved", "wide": None},
    ]


def test_bytes_that_an_update_did_not_send() -> None:
    row = {"id": 1, "raw": b"__debezium_unavailable_value"}
    found = opened(pa.table({"op": ["u"], "after": [row]}), CUSTOMERS)
    assert newest(found).kept[0][0] == "raw"


def test_sql_over_rows_gets_values_and_what_it_returns_stays() -> None:
    found = batch_of("postgres", upto=2).opened
    given = []

    def run(sql: str, rows: pa.Table) -> pa.Table:
        given.append(rows.schema)
        return pa.table({"id": rows["id"], "day": ["first", "second"], ORDER: rows[ORDER]})

    made = selected(found, "SELECT day FROM source", run)
    assert given[0].field("day").type == pa.date32()
    rows = ChangeBatch(CUSTOMERS, made, newest(made), [], 0).rows_for(None, MOMENT)
    assert rows.batches[0].column("day").to_pylist() == ["first", "second"]


# ------------------------------------------------------------------------------------------------------- without tables

CASES = [
    ("Date", "int32", [19782, -719162], [date(2024, 2, 29), date(1, 1, 1)]),
    ("Timestamp", "int64", [1709210096789], [MOMENT.replace(microsecond=789000)]),
    ("MicroTimestamp", "int64", [-1], [datetime(1969, 12, 31, 23, 59, 59, 999999)]),
    ("NanoTimestamp", "int64", [1709210096789012345, -1], [MOMENT, datetime(1969, 12, 31, 23, 59, 59, 999999)]),
    ("ZonedTimestamp", "string", ["2024-02-29T12:34:56+02:00"], [datetime(2024, 2, 29, 10, 34, 56, tzinfo=UTC)]),
    ("ZonedTimestamp", "string", ["2024-02-29T12:34:56.789012345Z"], [MOMENT.replace(tzinfo=UTC)]),
    ("Time", "int32", [45296789], ["12:34:56.789000"]),
    ("MicroTime", "int64", [86_400_000_000, -1], ["24:00:00.000000", "-00:00:00.000001"]),
    ("NanoTime", "int64", [45296789012345], ["12:34:56.789012"]),
    ("Year", "int32", [2024], [2024]),
    ("Bits", "bytes", ["Ew==", "AQE="], [19, 257]),
    ("VariableScaleDecimal", "struct", [{"scale": 5, "value": "9A=="}], [Decimal("-0.00012")]),
    ("", "bytes", ["AP8Q", ""], [b"\x00\xff\x10", b""]),
    ("", "string", ["19782"], ["19782"]),
]


@pytest.mark.parametrize(("name", "kind", "given", "wanted"), CASES)
def test_values_by_their_names(name: str, kind: str, given: list[Any], wanted: list[Any]) -> None:
    parameters = {"length": "16"} if name == "Bits" else {}
    meaning = Meaning(kind, f"io.debezium.some.{name}" if name else "", parameters)
    rows = typed(
        pa.table({"x": [None, *given], "xs": [[None, *given], *([None] * len(given))]}),
        {"x": meaning, "xs": Meaning("array", items=meaning)},
    )
    assert rows["x"].to_pylist() == [None, *wanted]
    assert rows["xs"].to_pylist() == [[None, *wanted], *([None] * len(given))]


def test_decimals_of_bytes() -> None:
    numbers = [0, 1, -1, 127, 128, -128, -129, 10**38 - 1, 1 - 10**38]
    lengths = [(each.bit_length() + 8) // 8 for each in numbers]
    given = [
        b64encode(each.to_bytes(size, "big", signed=True)).decode() for each, size in zip(numbers, lengths, strict=True)
    ]
    meaning = Meaning("bytes", "org.apache.kafka.connect.data.Decimal", {"scale": "2"})
    rows = typed(pa.table({"x": [None, *given]}), {"x": meaning})
    assert rows["x"][0].as_py() is None
    assert [int(str(each).replace(".", "")) for each in rows["x"].to_pylist()[1:]] == numbers


@pytest.mark.parametrize("known", [{}, dict.fromkeys(("payload", "schema", "before", "after"), pa.json_())])
@pytest.mark.parametrize("sample", SAMPLES)
def test_no_value_is_refused_before_its_table_sees_it(sample: str, known: dict[str, pa.DataType]) -> None:
    fields = [pa.field("id", pa.int64()), *(each for each, _ in EXPECTED)]
    stored = StoredTable({each.name: each for each in fields})
    found = opened(messages_of(sample, known=known), CUSTOMERS, lambda: [stored])
    assert found.bad == {}
    if sample in ("postgres", "postgres_no_schema_precise"):
        rows = typed(pa.table({**found.keys, **found.columns}), found.meanings, fields)
        assert rows["free"][0].as_py() == Decimal("-0.00012")


def test_an_object_that_is_no_decimal_is_refused() -> None:
    given = pa.array([{"scale": 2, "value": "MDk="}, {"scale": 2, "value": "!"}, None])
    for wanted in (pa.decimal128(20, 5), pa.float64()):
        found = misfits(given, pa.field("n", wanted), Meaning("struct", "io.debezium.data.VariableScaleDecimal"))
        assert list(found) == [1]
    assert list(misfits(pa.array([{"a": 1}]), pa.field("n", pa.decimal128(20, 5)), None)) == [0]


@pytest.mark.parametrize(
    ("wanted", "given", "read"),
    [
        (pa.field("x", pa.date32()), ["20240131", "19782"], ["20240131", "2024-02-29"]),
        (pa.field("x", LOCAL_TIME), ["20240131", "1709210096000"], ["20240131", "2024-02-29 12:34:56.000000"]),
        (pa.field("x", LOCAL_TIME), ["20240131120000"], ["20240131120000"]),
        (hinted("x", "time"), ["235959", None], ["235959", None]),
        (hinted("x", "time"), ["12:34:56", "45296000000"], ["12:34:56", "12:34:56.000000"]),
    ],
)
def test_dates_and_times_of_digits_alone_are_left_to_the_table(wanted: pa.Field, given: Any, read: Any) -> None:
    assert typed(pa.table({"x": given}), {}, [wanted])["x"].cast(pa.string()).to_pylist() == read


def test_a_bad_value_among_many_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    convert = debezium_types._numbers_of_text
    monkeypatch.setattr(debezium_types, "_numbers_of_text", lambda *given: asked.append(1) or convert(*given))
    given = pa.array([*map(str, range(3000)), "a lot", None, "-", *map(str, range(3000))])
    found = misfits(given, pa.field("n", pa.int32()), None, has_bits=False)
    assert list(found) == [3000, 3002]
    assert "a lot" in found[3000]
    assert len(asked) < 100


@pytest.mark.parametrize(
    ("unit", "number", "year"),
    [
        (None, 1709210096789, 2024),
        (None, 1709210096789012, 2024),
        (None, 1709210096789012345, 2024),
        ("us", 10**13, 1970),
    ],
)
def test_times_without_a_schema(unit: str | None, number: int, year: int) -> None:
    rows = typed(pa.table({"x": [number]}), {}, [pa.field("X", UTC_TIME)], unit)
    assert rows["x"][0].as_py().year == year


def test_a_value_that_cannot_be_read_is_a_text(caplog: pytest.LogCaptureFixture) -> None:
    rows = typed(pa.table({"n": ["1.50", "EtaH", None]}), {}, [pa.field("n", pa.decimal128(10, 2))])
    assert rows["n"].to_pylist() == ["1.50", "EtaH", None]
    assert "decimal.handling.mode=string" in caplog.text


def test_a_column_of_nulls_gets_its_type() -> None:
    known = {"free": Meaning("struct", "io.debezium.data.VariableScaleDecimal")}
    for kind in (pa.null(), pa.string(), pa.struct([("scale", pa.int64())])):
        rows = typed(pa.table({"free": pa.nulls(2, kind)}), known)
        assert (rows["free"].type, rows["free"].null_count) == (pa.decimal128(38, 18), 2)


def test_a_schema_without_a_name_leaves_the_rest_to_the_table() -> None:
    rows = pa.table({"n": ["1.50"], "empty": [None]})
    known = {"n": Meaning("string"), "empty": Meaning("int32")}
    assert typed(rows, known, [pa.field("n", pa.decimal128(10, 2))])["n"].to_pylist() == [Decimal("1.50")]
    assert typed(rows, known)["empty"].type == pa.int32()


@pytest.mark.parametrize(("known", "has_bits"), [({}, True), ({}, False), ({"n": Meaning("string")}, True)])
def test_numbers_as_texts_are_no_bits(known: dict[str, Meaning], has_bits: bool) -> None:
    target = [pa.field("n", pa.int64()), pa.field("b", pa.bool_())]
    given = pa.table({"n": ["1234", "-5", None], "b": ["true", "f", "1"]})
    rows = typed(given, known, target, has_bits=has_bits)
    assert (rows["n"].to_pylist(), rows["b"].to_pylist()) == ([1234, -5, None], [True, False, True])
    text = typed(pa.table({"n": ["Ew=="]}), known, target, has_bits=has_bits)["n"].to_pylist()
    assert text == ([19] if has_bits and not known else ["Ew=="])


def test_a_table_of_numbers_keeps_the_numbers() -> None:
    rows = typed(
        pa.table({"day": [19782]}), {"day": Meaning("int32", "io.debezium.time.Date")}, [pa.field("day", pa.int32())]
    )
    assert rows["day"].to_pylist() == [19782]


def test_avro_of_debezium_has_the_types_itself() -> None:
    def field(kind: str, name: str, **more: Any) -> pa.DataType:
        return arrow_type(parse(json.dumps({"type": kind, "connect.version": 1, "connect.name": name, **more})))

    decimal = {"logicalType": "decimal", "scale": 2, "connect.parameters": {"scale": "2"}}
    assert field("int", "io.debezium.time.Date") == pa.date32()
    assert field("long", "io.debezium.time.MicroTimestamp") == LOCAL_TIME
    assert field("long", "io.debezium.time.Timestamp") == LOCAL_TIME
    assert field("long", "io.debezium.time.MicroTime") == pa.string()
    assert field("long", "io.debezium.time.MicroDuration") == pa.int64()
    assert field("bytes", "org.apache.kafka.connect.data.Decimal", precision=64, **decimal) == pa.decimal128(38, 2)
    bits = typed(pa.table({"x": [b"\x13"]}), {}, [pa.field("x", pa.int64())])
    assert bits["x"].to_pylist() == [19]
