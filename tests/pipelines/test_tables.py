"""`@table`: what a class says about its table, and how the stored table follows it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import pytest

import weft
from pipelines.conftest import Database
from weft import DeclarationError, LoadRefusedError, natural_key, pk
from weft.normalize import default, lower, parse_int, trim
from weft.pipelines.table import snake_case, table_of
from weft.types import JSON as Json
from weft.types import (
    JSONB,
    UUID,
    BigInt,
    Boolean,
    Bytes,
    Date,
    Double,
    Float,
    Integer,
    Numeric,
    SmallInt,
    String,
    Text,
    Timestamp,
    TimestampTZ,
)


@weft.table(schema="analytics")
class CustomerDim:
    customer_id: Annotated[BigInt, pk()]
    email: String[256] | None
    name: Annotated[Text, natural_key()] | None
    updated_at: TimestampTZ


@weft.table(connection="warehouse")
class customers:
    schema = "public"
    name = "customers"
    primary_key = ["id"]  # noqa: RUF012 - as users write it


def test_what_a_class_says() -> None:
    found = table_of(CustomerDim)
    assert found is not None
    assert (found.full_name, found.primary_key, found.names) == (
        "analytics.customer_dim",
        ("customer_id",),
        ["customer_id", "email", "name", "updated_at"],
    )
    assert [column.nullable for column in found.columns] == [False, True, True, False]


def test_the_form_without_columns() -> None:
    found = table_of(customers)
    assert found is not None
    assert (found.full_name, found.connection, found.keys) == ("public.customers", "warehouse", ("id",))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Events", "events"), ("CustomerDim", "customer_dim"), ("HTTPLog", "http_log"), ("A1B", "a1_b"), ("_x", "_x")],
)
def test_names(name: str, expected: str) -> None:
    assert snake_case(name) == expected


def test_keys_in_their_order() -> None:
    @weft.table
    class Plain:
        id: Annotated[BigInt, pk()]
        email: Annotated[Text, natural_key()]

    @weft.table
    class Chosen:
        __merge_keys__ = ("a", "b")
        id: Annotated[BigInt, pk()]
        a: Annotated[Text, natural_key("both")]
        b: Annotated[Text, natural_key("both")]

    assert table_of(Plain).keys == ("email",)  # type: ignore[union-attr]
    assert table_of(Chosen).keys == ("a", "b")  # type: ignore[union-attr]
    assert table_of(Chosen).natural_keys == (("a", "b"),)  # type: ignore[union-attr]
    made = weft.pipeline(target=Plain, mode="merge", keys=["id"], name="p")(lambda: "SELECT 1")
    assert made.targets[0].options["keys"] == ["id"]


def declare(**annotations: Any) -> type:
    return weft.table(type("Wrong", (), {"__annotations__": annotations}))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: declare(id=int), r"column 'id': int is not a column type\.\n  Did you mean BigInt"),
        (lambda: declare(id=Annotated[BigInt, pk]), r"Call it: pk\(\)"),
        (
            lambda: declare(n=Annotated[BigInt, lower()]),
            r"lower\(\) of the column 'n' gives text.*BigInt.\n.*parse_int",
        ),
        (lambda: declare(n=Annotated[Numeric[5, 2] | None, trim(), default("1")]), r"trim\(\).*\n.*parse_numeric\(\)"),
        (lambda: declare(n=Annotated[TimestampTZ, parse_int(), trim()]), r"trim\(\).*\n.*parse_timestamp\(\)"),
        (lambda: declare(id=Annotated[BigInt, "x"]), "which means nothing here"),
        (lambda: declare(id=Annotated[BigInt | None, pk()]), "cannot be nullable"),
        (lambda: declare(valid_from=TimestampTZ), "scd2 keeps itself"),
        (lambda: declare(_batch_id=Text), "load_columns=True adds itself"),
        (lambda: declare(**{"x" * 64: Text}), "longer than 63 bytes"),
        (lambda: weft.table(shema="a"), r"no option 'shema'\.\n  Did you mean 'schema'"),
        (lambda: weft.table(schema="")(type("A", (), {})), "schema must be a name"),
        (lambda: weft.table()(5), "decorates a class"),
        (lambda: weft.pipeline(target=CustomerDim, column_map={"emial": "e"})(lambda: ""), "Did you mean 'email'"),
        (
            lambda: weft.pipeline(target=CustomerDim, mode="scd2", compare_columns=["emial"], name="p")(lambda: ""),
            r"no column 'emial' \(compare_columns\)",
        ),
    ],
)
@pytest.mark.usefixtures("local")
def test_refused_where_declared(make: Any, said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        make()


# ---------------------------------------------------------------------------------------------------------------- types


def test_every_type(database: Database) -> None:
    """A table is made as declared, and takes and gives back values of every type."""

    @weft.table(name="everything")
    class Everything:
        id: Annotated[BigInt, pk()]
        small: SmallInt
        whole: Integer | None
        single: Float | None
        double: Double | None
        flag: Boolean | None
        text: Text | None
        short: String[10] | None
        amount: Numeric[10, 2] | None
        day: Date | None
        local: Timestamp | None
        instant: TimestampTZ | None
        data: Json | None
        more: JSONB | None
        code: UUID | None
        raw: Bytes | None

    from datetime import date
    from decimal import Decimal
    from uuid import uuid4

    code = uuid4()
    row = {
        "id": 1,
        "small": 2,
        "whole": 3,
        "single": 0.5,
        "double": 0.25,
        "flag": True,
        "text": "ü" * 300,
        "short": "0123456789",
        "amount": Decimal("12.34"),
        "day": date(2026, 1, 2),
        "local": datetime(2026, 1, 2, 3, 4, 5, 6),
        "instant": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
        "data": '{"a": 1}',
        "more": '{"b": [1]}',
        "code": code,
        "raw": b"\x00\xff",
    }

    @weft.pipeline(target=Everything, mode="merge")
    def load() -> list[dict[str, Any]]:
        return [row]

    database.execute(load)
    (found,) = database.rows("everything")
    assert found == {**row, "code": str(code)}
    assert database.execute(load)[0].counts.unchanged == 1
    if database.tables.dialect == "postgres":
        kinds = database.columns("everything")
        assert (kinds["short"], kinds["more"], kinds["data"]) == ("character varying(10)", "jsonb", "json")
        assert (kinds["small"], kinds["amount"]) == ("smallint", "numeric(10,2)")


@pytest.mark.brief("sqlite", "mysql", "duckdb")
def test_numbers_in_columns_of_other_types(database: Database) -> None:
    """Those that the column cannot have are put aside, and they alone."""

    @weft.table
    class Numbers:
        number: Integer | None
        text: String[3] | None

    rows = [{"number": 1.0, "text": 300}, {"number": 1e300, "text": 1}, {"number": 2.0, "text": 1000}]
    made = weft.pipeline(target=Numbers, name="numbers", on_bad_rows="quarantine")(lambda: rows)
    counts = database.execute(made)[0].counts
    assert (counts.inserted, counts.quarantined) == (1, 2)
    assert database.rows("numbers") == [{"number": 1, "text": "300"}]


@pytest.mark.every_system
def test_texts_that_are_no_json_and_no_uuid(database: Database) -> None:
    @weft.table
    class Notes:
        note: Json | None
        code: UUID | None

    code = "12345678-1234-5678-1234-567812345678"
    rows = [{"note": '{"a": 1}', "code": code}, {"note": "x", "code": code}, {"note": "null", "code": "x"}]
    made = weft.pipeline(target=Notes, name="notes", on_bad_rows="quarantine")(lambda: [*rows, {"note": None}])
    counts = database.execute(made)[0].counts
    assert (counts.inserted, counts.quarantined) == (2, 2)
    assert {row["code"] for row in database.rows("notes")} == {code, None}


@pytest.mark.every_system
@pytest.mark.parametrize("mode", ["append", "merge", "scd2"])
def test_texts_of_instants_with_a_zone(database: Database, mode: str) -> None:
    @weft.table
    class Instants:
        id: BigInt
        at: TimestampTZ

    def moment(hour: int, minute: int = 0, microsecond: int = 0, year: int = 2026) -> datetime:
        return datetime(year, 1, 31, hour, minute, 0, microsecond, tzinfo=UTC)

    texts = {
        "2026-01-31T10:00:00": moment(10),
        "2026-01-31T10:00:00Z": moment(10),
        "2026-01-31T10:00:00+02:00": moment(8),
        "2026-01-31 10:00:00-03:30": moment(13, 30),
        "2026-01-31 10:00:00.000001+00": moment(10, 0, 1),
        "1931-01-31T10:00:00+02:00": moment(8, year=1931),
        "2131-01-31T10:00:00.25Z": moment(10, 0, 250_000, 2131),
    }
    rows = [{"id": number, "at": text} for number, text in enumerate([*texts, "2026-02-30T10:00:00Z", "soonZ"])]
    keys: dict[str, Any] = {} if mode == "append" else {"keys": ["id"]}
    instants = weft.pipeline(target=Instants, name="instants", mode=mode, on_bad_rows="quarantine", **keys)(
        lambda: rows
    )
    counts = database.execute(instants)[0].counts
    assert (counts.inserted, counts.quarantined) == (len(texts), 2)
    assert [row["at"] for row in sorted(database.rows("instants"), key=lambda row: row["id"])] == [*texts.values()]
    if mode != "append":
        assert database.execute(instants)[0].counts.unchanged == len(texts)


@pytest.mark.every_system
def test_texts_of_other_types(database: Database) -> None:
    """As files have them; what a column cannot hold is a bad row, and never null."""

    @weft.table
    class Values:
        id: BigInt
        ok: Boolean | None
        at: Timestamp | None
        ratio: Double | None

    good: list[dict[str, Any]] = [
        {"id": 1, "ok": "true", "at": "2026-01-31T10:00:00Z", "ratio": "0.5"},
        {"id": 2, "ok": "F", "at": "2026-01-31 10:00:00", "ratio": "-1e300"},
        {"id": 3, "ok": "1", "at": None, "ratio": None},
        {"id": 4, "ok": "f", "at": "2026-01-31T12:00:00+02:00", "ratio": "1e-3"},
        {"id": 5, "ok": "0", "at": "2026-01-31 06:30:00.000000-03:30", "ratio": "007"},
    ]
    bad = [{**good[0], "id": 6, "ok": "maybe"}, {**good[0], "id": 7, "at": "soon"}, {**good[0], "id": 8, "ratio": "x"}]
    bad.append({**good[0], "id": 9, "ratio": "1e400"})
    if database.tables.dialect in ("sqlite", "mysql"):  # the others store NaN
        bad.append({**good[0], "id": 10, "ratio": "NaN"})
    values = weft.pipeline(target=Values, name="values", on_bad_rows="quarantine")(lambda: [*good, *bad])
    counts = database.execute(values)[0].counts
    assert (counts.inserted, counts.quarantined) == (len(good), len(bad))
    rows = sorted(database.rows("values"), key=lambda row: row["id"])
    assert [row["ok"] for row in rows] == [True, False, True, False, False]
    moment = datetime(2026, 1, 31, 10)
    assert [row["at"] for row in rows] == [moment, moment, None, moment, moment]
    assert [row["ratio"] for row in rows] == [0.5, -1e300, None, 0.001, 7]


@pytest.mark.parametrize("mode", ["append", "truncate", "merge", "scd2"])
def test_what_a_query_computes_of_no_rows(database: Database, mode: str) -> None:
    """On SQLite its values alone show the type."""
    database.run("CREATE TABLE raw (id BIGINT, name VARCHAR(20), price DOUBLE PRECISION)")
    options: dict[str, Any] = {"keys": ["number"]} if mode in ("merge", "scd2") else {}
    if mode == "truncate":
        options = {"allow_empty": True}
    query = "SELECT id * 2 AS number, upper(name) AS name, count(*) AS n, max(price * 2) AS price, max(NULL) AS missing"
    totals = weft.pipeline(target="totals", name="totals", mode=mode, **options)(
        lambda: f"{query} FROM raw GROUP BY id * 2, upper(name)"
    )
    database.execute(totals)
    database.run("INSERT INTO raw VALUES (1, '007', 0.25)")
    database.execute(totals)
    (row,) = database.rows("totals")
    found = [row[name] for name in ("number", "name", "n", "price", "missing")]
    assert (found, [*map(type, found)]) == ([2, "007", 1, 0.5, None], [int, str, int, float, type(None)])


@pytest.mark.every_system
def test_texts_in_a_column_of_uuids(database: Database) -> None:
    """As files, messages and SQLite have them."""

    @weft.table
    class Codes:
        code: UUID | None

    made = weft.pipeline(target=Codes, name="codes", on_bad_rows="quarantine")(lambda: rows)
    rows: list[dict[str, Any]] = [{"code": "12345678-1234-5678-1234-567812345678"}, {"code": None}]
    loaded = [database.execute(made)[0].counts for _ in range(2)]
    assert [(each.inserted, each.quarantined) for each in loaded] == [(2, 0)] * 2
    assert {row["code"] for row in database.rows("codes")} == {None, rows[0]["code"]}


@pytest.mark.parametrize("mode", ["append", "merge"])
def test_too_long_a_text(database: Database, mode: str) -> None:
    """Also where the database itself would take it."""

    @weft.table
    class Short:
        code: Annotated[String[3], pk()]
        note: String[4] | None

    rows = [{"code": "äbc", "note": None}, {"code": "abcd", "note": "x"}]

    def load(**options: Any) -> Any:
        database.project.pipelines.clear()
        return weft.pipeline(target=Short, mode=mode, name="load", **options)(lambda: rows)

    with pytest.raises(weft.WeftError, match="code=abcd"):
        database.execute(load())
    assert database.rows("short") == []
    (loaded,) = database.execute(load(on_bad_rows="quarantine"))
    assert (loaded.counts.inserted, loaded.counts.quarantined) == (1, 1)
    assert [row["code"] for row in database.rows("short")] == ["äbc"]


def test_texts_that_are_read() -> None:
    @weft.table
    class Read:
        n: Annotated[BigInt, trim(), parse_int()]
        code: Annotated[UUID, lower()]

    assert table_of(Read) is not None


# ---------------------------------------------------------------------------------------------------------------- drift


@pytest.fixture
def raw(database: Database) -> Database:
    database.run("CREATE TABLE raw (id BIGINT, name VARCHAR(20))", "INSERT INTO raw VALUES (1, 'a')")
    return database


def people(**options: Any) -> Any:
    @weft.table
    class People:
        id: Annotated[BigInt, pk()]
        name: Text | None

    @weft.pipeline(target=People, mode="merge", name="people", **options)
    def load() -> str:
        return "SELECT * FROM raw"

    return load


def test_a_column_that_somebody_added(raw: Database) -> None:
    """Hole 11 of the reference: the table follows."""
    raw.execute(people())
    raw.run("ALTER TABLE raw ADD COLUMN city VARCHAR(20)", "INSERT INTO raw VALUES (2, 'b', 'Rome')")
    raw.project.pipelines.clear()
    raw.execute(people(on_drift="evolve"))
    assert raw.rows("people") == [{"id": 1, "name": "a", "city": None}, {"id": 2, "name": "b", "city": "Rome"}]


def test_or_is_left_out(raw: Database, caplog: pytest.LogCaptureFixture) -> None:
    raw.run("ALTER TABLE raw ADD COLUMN city VARCHAR(20)")
    with pytest.raises(LoadRefusedError, match=r"columns that the table does not declare: 'city'[\s\S]*on_drift"):
        raw.execute(people(on_drift="error"))
    raw.project.pipelines.clear()
    raw.execute(people(on_drift="warn"))
    assert "which are left out: 'city'" in caplog.text
    raw.project.pipelines.clear()
    raw.execute(people(on_drift="ignore"))
    assert raw.rows("people") == [{"id": 1, "name": "a"}]


def test_a_table_by_name_alone_follows_too(raw: Database) -> None:
    @weft.pipeline(target="copies")
    def copy() -> str:
        return "SELECT * FROM raw"

    raw.execute(copy)
    raw.run("ALTER TABLE raw ADD COLUMN city VARCHAR(20)")
    raw.execute(copy)
    assert list(raw.rows("copies")[0]) == ["id", "name", "city"]


def test_a_declared_column_that_is_new(raw: Database) -> None:
    raw.execute(people())
    raw.project.pipelines.clear()

    @weft.table
    class People:
        id: Annotated[BigInt, pk()]
        name: Text | None
        note: Text | None

    @weft.pipeline(target=People, mode="merge")
    def load() -> str:
        return "SELECT id, name FROM raw"

    raw.execute(load)
    assert raw.rows("people") == [{"id": 1, "name": "a", "note": None}]


def test_a_declared_column_that_is_wider(raw: Database) -> None:
    if raw.tables.dialect == "sqlite":
        pytest.skip("sqlite cannot change a type, and needs not")

    def declare(number: Any, text: Any, price: Any) -> Any:
        raw.project.pipelines.clear()

        kinds = {"id": Annotated[Integer, pk()], "number": number, "text": text, "price": price}
        things = weft.table(type("Things", (), {"__annotations__": kinds}))
        return weft.pipeline(target=things, mode="merge", name="things")(
            lambda: "SELECT 1 AS id, 100000 AS number, 'abcdef' AS text, 12345.678 AS price"
        )

    with pytest.raises(weft.WeftError):
        raw.execute(declare(SmallInt, String[3], Numeric[5, 2]))
    raw.execute(declare(Integer, String[10], Numeric[8, 3]))
    (row,) = raw.rows("things")
    assert (row["number"], row["text"], str(row["price"])) == (100000, "abcdef", "12345.678")


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_a_wider_text_keeps_its_collation(database: Database) -> None:
    database.run("""CREATE TABLE names (id BIGINT PRIMARY KEY, "Text" VARCHAR(3) COLLATE "C" NOT NULL DEFAULT 'x')""")
    kinds = {"id": Annotated[BigInt, pk()], "Text": String[9]}
    names = weft.table(name="names")(type("Names", (), {"__annotations__": kinds}))
    database.execute(
        weft.pipeline(target=names, name="names")(lambda: """SELECT 1 AS id, 'abcdef' AS "Text" """),
    )
    with database.tables.driver.session("read") as session:
        found = session.rows(
            "SELECT character_maximum_length, collation_name, column_default, is_nullable "
            "FROM information_schema.columns WHERE table_name = 'names' AND column_name = 'Text'"
        )
    assert found == [(9, "C", "'x'::character varying", "NO")]


def test_a_column_that_is_missing(raw: Database) -> None:
    @weft.table
    class People:
        id: Annotated[BigInt, pk()]
        nane: Text

    @weft.pipeline(target=People)
    def load() -> str:
        return "SELECT id, name FROM raw"

    with pytest.raises(LoadRefusedError, match=r"has no column 'nane'[\s\S]*Did you mean 'name'"):
        raw.execute(load)


def test_load_columns(raw: Database) -> None:
    """When a row was written, and by which run. They alone are no change."""

    @weft.table(load_columns=True)
    class People:
        id: Annotated[BigInt, pk()]
        name: Text | None

    @weft.pipeline(target=People, mode="merge")
    def load() -> str:
        return "SELECT id, name FROM raw"

    raw.execute(load, "first")
    raw.run("INSERT INTO raw VALUES (2, 'b')")
    assert raw.execute(load, "second")[0].counts.unchanged == 1
    found = raw.rows("people")
    assert [row["_batch_id"] for row in found] == ["first people", "second people"]
    assert found[0]["_loaded_at"] < found[1]["_loaded_at"]


def test_a_null_is_no_key(database: Database) -> None:
    """SQLite would make one up."""

    @weft.table
    class Keyed:
        id: Annotated[BigInt, pk()]
        name: Text

    @weft.pipeline(target=Keyed)
    def load() -> list[dict[str, Any]]:
        return [{"id": 1, "name": "a"}, {"id": None, "name": "b"}]

    with pytest.raises(weft.WeftError):
        database.execute(load)
    assert database.rows("keyed") == []


@pytest.mark.parametrize("text", ["TIMESTAMP", "VARCHAR(40)"])
def test_event_times_of_another_type(database: Database, text: str) -> None:
    """What the source calls them does not matter: the declared type does."""

    @weft.table
    class Prices:
        sku: Annotated[String[10], pk()]
        price: Integer
        since: TimestampTZ

    database.run(
        f"CREATE TABLE raw_prices (sku VARCHAR(10), price INTEGER, since {text})",
        "INSERT INTO raw_prices VALUES ('a', 1, '2026-01-01 00:00:00'), ('a', 2, '2026-01-02 00:00:00')",
    )

    @weft.pipeline(target=Prices, mode="scd2", event_timestamp_column="since")
    def load() -> str:
        return "SELECT sku, price, since FROM raw_prices"

    database.execute(load)
    first, second = database.rows("prices")
    assert (first["valid_from"], first["valid_to"]) == (
        datetime(2026, 1, 1, tzinfo=UTC),
        datetime(2026, 1, 2, tzinfo=UTC),
    )
    assert (second["valid_from"], second["valid_to"]) == (datetime(2026, 1, 2, tzinfo=UTC), None)
    assert database.execute(load)[0].counts.inserted == 0
