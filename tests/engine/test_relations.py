"""Names of tables: what each stands for, in which order it is looked for, and what an unknown one is answered with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import weft
from weft.engine import inputs, relations
from weft.errors import DeclarationError, NotFoundError

pytestmark = pytest.mark.usefixtures("shop_and_lake")


def declare(name: str = "orders", **options: Any) -> weft.Stream:
    @weft.stream(name=name, fields={"id": "int64", "city": "string"}, **options)
    def declared() -> None:
        pass

    return declared


def test_what_a_name_stands_for() -> None:
    orders = declare(connection="shop")

    @weft.table(schema="mart", connection="lake")
    class Daily:
        day: weft.types.Date

    @weft.pipeline(target=Daily)
    def daily() -> str:
        return "SELECT 1"

    for name in ("orders", "events.orders", '"events"."orders"', "shop.events.orders", "`shop`.events . orders"):
        found = relations.find(name)
        assert (found.stream, found.connection.name, found.table) == (orders, "shop", ("events", "orders")), name
    for name in ("daily", "mart.daily"):
        assert relations.find(name).data == inputs.Files("mart/daily")
        assert relations.find(name).connection.name == "lake"
    assert relations.find("lake.raw.events").data == inputs.Files("raw/events")
    assert relations.find('lake."2024/*.parquet"').data == inputs.Files("2024/*.parquet")
    plain = relations.find('shop."a "" b"')
    assert (plain.data, plain.table) == (inputs.SourceSql('SELECT * FROM "a "" b"'), (None, 'a " b'))
    # A schema, unless a connection has the name.
    assert relations.find("public.cities").connection.name == "default"
    assert relations.find("public.cities").table == ("public", "cities")
    assert relations.find("raw.events", "lake").data == inputs.Files("raw/events")
    assert relations.find("cities", "shop").connection.name == "shop"


def test_names_of_nothing() -> None:
    with pytest.raises(NotFoundError, match=r"'shpo'.*\n.*Did you mean 'shop'"):
        relations.find("shpo.public.orders")
    with pytest.raises(NotFoundError, match=r"no table shpo.cities in the connection 'default'.*\n.*shop.cities\?"):
        relations.schema_of(relations.find("shpo.cities"))
    with pytest.raises(weft.ConnectionFailedError, match="there is no file"):
        relations.schema_of(relations.find("shop.cities"))
    with pytest.raises(DeclarationError, match="has 4 parts"):
        relations.find("a.b.c.d")
    for name in ("", "a.", ".a", 'a"b', "a..b"):
        with pytest.raises(DeclarationError, match="is not the name of a table"):
            relations.find(name)
    weft.connect(url="redis://localhost:1", name="cache")
    declare("clicks", connection="cache")
    with pytest.raises(NotFoundError, match=r"no stream on the connection 'cache' named 'click'"):
        relations.find("cache.click")
    assert relations.find("cache.clicks").stream is not None
    weft.connect(kind="kafka", name="broker", bootstrap_servers="localhost:1")
    with pytest.raises(DeclarationError, match=r"broker.orders cannot be read: .* has no tables"):
        relations.find("broker.orders")


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql", "duckdb"])
def test_columns_of_a_table(
    kind: str, open_system: Callable[[str], AbstractContextManager[Any]], tmp_path: Path
) -> None:
    with nullcontext() if kind == "duckdb" else open_system(kind) as system:
        weft.connect(url=system.url if system else f"duckdb:///{tmp_path / 'd.db'}", name="warehouse")
        weft.load([{"id": 1, "city": "Oslo"}], target=("sales", "orders"), connection="warehouse")
        weft.load([{"id": 1, "city": "Oslo"}], target="cities", connection="warehouse")
        for name in ("warehouse.sales.orders", "warehouse.cities"):
            assert relations.schema_of(relations.find(name)).names == ["id", "city"]
        with pytest.raises(NotFoundError, match=r"no table warehouse.sales.order in .*\n.*warehouse.sales.orders\?"):
            relations.schema_of(relations.find("warehouse.sales.order"))
        with pytest.raises(NotFoundError, match=r"Tables there: .*cities"):
            relations.schema_of(relations.find("warehouse.xyz"))


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_columns_of_a_stream(kind: str, open_system: Callable[[str], AbstractContextManager[Any]]) -> None:
    with open_system(kind) as system:
        weft.connect(url=system.url, name="log")
        orders = declare(connection="log")
        weft.publish_sync(orders, [{"id": 1, "city": "Oslo"}])
        found = relations.find("events.orders")
        assert (found.table is None) == (kind == "redis")
        assert relations.schema_of(found).names[:2] == ["id", "city"]
        reader = relations.reader_of(found, ["city"])
        assert [row for part in reader.parts(1)[0] for batch in reader.read(part) for row in batch.to_pylist()] == [
            {"city": "Oslo"}
        ]
        weft.streams.close()


def test_frames(plain_spark: Any) -> None:
    orders = declare(connection="shop")
    weft.publish_sync(orders, [{"id": 1, "city": "Oslo"}])
    weft.load([{"id": 2, "na`me": "Bergen"}], target="cities", connection="shop")
    Path("lake/2024").mkdir(parents=True)
    pq.write_table(pa.table({"id": [3], "city": ["Tromsø"]}), "lake/2024/a.parquet")
    for name, columns, rows in (
        ("orders", ["city"], [("Oslo",)]),
        ("shop.cities", ["na`me"], [("Bergen",)]),
        ("shop.cities", None, [(2, "Bergen")]),
        ('lake."2024/*.parquet"', ["city"], [("Tromsø",)]),
    ):
        frame = relations.frame_of(plain_spark, relations.find(name), columns)
        assert [tuple(row) for row in frame.collect()] == rows, name
    assert relations.schema_of(relations.find("lake.2024")).names == ["id", "city"]
