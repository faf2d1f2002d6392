"""Models whose inputs are in several systems are built by Spark."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from datetime import datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import weft
from tests.conftest import System
from tests.engine.models.built import ORDERS, build, query, why
from weft.columns import hint_of
from weft.engine.readers import SqlReader, open_tables, read_all
from weft.engine.streaming.spark_engine import SparkEngine
from weft.operate.run_options import Running
from weft.operate.supervisor import supervise
from weft.project import Project, current

pytestmark = pytest.mark.spark


@pytest.mark.brief("sqlite")
def test_forced_to_spark_gives_the_same_rows(orders: object) -> None:
    @weft.model(engine="spark")
    def by_ibis(orders):  # type: ignore[no-untyped-def]
        day = orders.mutate(day=orders._weft_published_at.cast("date"))
        return day.group_by("day").aggregate(revenue=day.total.sum(), orders=day.order_id.count())

    @weft.model(engine="spark", materialise="incremental")
    def by_sql(orders):  # type: ignore[no-untyped-def]
        return 'SELECT "order_id", total * 2 AS twice FROM orders'

    weft.publish_sync("orders", ORDERS)
    assert build(by_ibis).engine == "spark"
    assert build(by_sql).engine == "spark"
    weft.publish_sync("orders", ORDERS[:1])
    second = build(by_sql)

    assert second.counts.rows_read == 1
    assert query("SELECT revenue, orders FROM by_ibis") == [(20.0, 2)]
    assert sorted(query("SELECT order_id, twice FROM by_sql")) == [("a", 25.0), ("a", 25.0), ("b", 15.0)]


@pytest.mark.brief("sqlite")
def test_stream_of_one_system_with_a_table_of_another(
    orders: object, open_system: Callable[[str], AbstractContextManager[System]], tmp_path: Path
) -> None:
    weft.connect(url=f"duckdb:///{tmp_path}/crm.duckdb", name="crm")
    weft.load([{"order_id": "a", "customer": "Ann"}], target="customers", connection="crm")

    @weft.model(dependencies=["orders", "crm.customers"])
    def named(orders, customers):  # type: ignore[no-untyped-def]
        return orders.inner_join(customers, "order_id").select("customer", "total")

    @weft.model(dependencies=["orders", "crm.customers"])
    def frames(orders: pyspark.sql.DataFrame, customers):  # type: ignore[no-untyped-def]  # noqa: F821
        return orders.select("order_id")

    weft.publish_sync("orders", ORDERS)
    assert build(named).engine == "spark"
    build(frames)

    assert query("SELECT customer, total FROM named") == [("Ann", 12.5)]
    assert sorted(query("SELECT order_id FROM frames")) == [("a",), ("b",)]
    assert why(named) is None


def test_decimals_of_sqlite_are_summed_exactly(project: Path) -> None:
    fresh = Project()
    with weft.project.use(fresh):
        weft.stream(name="payments", fields={"amount": "decimal(38,18)"})(lambda: None)

        @weft.model
        def total(payments):  # type: ignore[no-untyped-def]
            return payments.aggregate(total=payments.amount.sum())

        weft.publish_sync("payments", [{"amount": Decimal("0.100000000000000001")}] * 3)
        built = build(total)
        found: list[tuple[Any, ...]] = query("SELECT total FROM total")
        weft.streams.close(fresh)

    assert built.engine == "spark"
    assert [Decimal(str(value)) for (value,) in found] == [Decimal("0.300000000000000003")]


@pytest.mark.brief("sqlite")
def test_files_are_inputs(orders: object, tmp_path: Path, streams: Project) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"order_id": ["a"], "country": ["CH"]}), tmp_path / "countries.parquet")
    weft.connect(kind="object_store_local", path=str(tmp_path), name="lake")

    @weft.model(dependencies={"orders": "orders", "countries": 'lake."countries.parquet"'})
    def placed(orders, countries):  # type: ignore[no-untyped-def]
        return orders.left_join(countries, "order_id").select("order_id", "country")

    weft.publish_sync("orders", ORDERS)
    build(placed)
    assert sorted(query("SELECT order_id, country FROM placed")) == [("a", "CH"), ("b", None)]


@pytest.mark.brief("sqlite")
def test_stream_on_redis_is_an_input(
    open_system: Callable[[str], AbstractContextManager[System]], streams: Project
) -> None:
    with open_system("redis") as redis:
        weft.connect(url=redis.url, name="redis")
        weft.stream(name="clicks", connection="redis", fields={"user": "string", "n": "int64"})(lambda: None)

        @weft.model(materialise="incremental")
        def kept(clicks):  # type: ignore[no-untyped-def]
            return clicks.select("user", "n")

        for number in (1, 2):
            weft.publish_sync("clicks", [{"user": "a", "n": number}])
            assert why(kept) is not None
            assert build(kept).counts.inserted == 1
            assert why(kept) is None
        assert sorted(query("SELECT n FROM kept")) == [(1,), (2,)]
        weft.streams.close(streams)


@pytest.mark.brief("sqlite")
def test_load_of_a_streaming_pipeline_makes_a_model_stale(orders: object) -> None:
    copies = weft.streaming_pipeline(name="copies", source=orders, target="default", target_table="copies")(
        lambda: None
    )

    @weft.model(dependencies=["copies"])
    def counted(copies):  # type: ignore[no-untyped-def]
        return copies.aggregate(rows=copies.count())

    for number in (2, 4):
        weft.publish_sync("orders", ORDERS)
        supervise(SparkEngine(copies), Running(once=True))
        assert why(counted) is not None
        build(counted)
        assert why(counted) is None
        assert query("SELECT rows FROM counted") == [(number,)]


@pytest.mark.brief("postgres")
def test_uuids_and_json_stay_so_where_nothing_changes_them(streams: Project) -> None:
    weft.stream(name="things", fields={"u": "uuid", "j": "json", "s": "string"})(lambda: None)

    @weft.model(engine="spark")
    def by_ibis(things):  # type: ignore[no-untyped-def]
        return things.select("u", "j", "s", upper=things.u.upper())

    @weft.model(engine="spark")
    def by_sql(things):  # type: ignore[no-untyped-def]
        return "SELECT u, j, s, upper(u) AS upper FROM things UNION ALL SELECT u, j, s, s FROM things WHERE s = ''"

    @weft.model(engine="spark")
    def of_both(things):  # type: ignore[no-untyped-def]
        return "SELECT u, j, s, '' AS upper FROM things UNION ALL SELECT s, s, s, s FROM things"

    @weft.model
    def by_frame(things: pyspark.sql.DataFrame):  # type: ignore[no-untyped-def]  # noqa: F821
        return things.selectExpr("u", "j", "s", "upper(u) AS upper")

    weft.publish_sync("things", [{"u": UUID(int=5), "j": {"a": 1}, "s": "x"}])
    for model in (by_ibis, by_sql, by_frame, of_both):
        build(model)
        with closing(open_tables(current().connection())) as tables:
            found = [hint_of(field) for field in tables.describe(f"SELECT u, j, s, upper FROM {model.name}")]
        assert found == ([None] * 4 if model is of_both else ["uuid", "json", None, None]), model.name


@pytest.mark.brief("sqlite")
def test_times_are_those_of_the_database(orders: object) -> None:
    """Spark has none."""
    moments = [datetime(2026, 1, 1, 9, 30), datetime(2026, 1, 1, 23, 59, 59, 250_000), None]
    weft.load(pa.table({"id": [1, 2, 3], "at": pa.array(moments, pa.timestamp("us"))}), target="moments")

    @weft.model(engine="spark")
    def by_spark(moments):  # type: ignore[no-untyped-def]
        return moments.select("id", time=moments["at"].time())

    build(by_spark)
    with closing(open_tables(current().connection())) as tables:
        sql = "SELECT time FROM by_spark ORDER BY id"
        reader = SqlReader(tables, sql, tables.describe(sql))
        times = [each for batch in read_all(reader) for each in batch.column("time").to_pylist()]
    assert hint_of(reader.schema.field("time")) == "time"
    assert [each and time.fromisoformat(each) for each in times] == [time(9, 30), time(23, 59, 59, 250_000), None]
