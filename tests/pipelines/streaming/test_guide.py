"""What the guide of the reference shows in Python declares the same here, with its own names in place of ours."""

from __future__ import annotations

import re
from typing import Any

import pytest

import weft
from weft import (
    DeclarationError,
    DeltaLocalConnection,
    Lookup,
    ObjectStoreLocalConnection,
    ObjectStoreS3Connection,
    PostgresConnection,
    Source,
    Target,
)
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.toml import parse, to_toml
from weft.project import Project

pytestmark = pytest.mark.usefixtures("local")

WAREHOUSE = PostgresConnection(name="warehouse", url="postgres://localhost/mydb")
LAKE = ObjectStoreLocalConnection(name="lake", path="/data/lake", format="parquet")
S3 = ObjectStoreS3Connection(
    name="raw",
    endpoint="https://files.example.com",
    bucket="market-data",
    region="us-east-1",
    access_key_id="${S3_KEY}",
    secret_access_key="${S3_SECRET}",
    format="csv",
)


def kafka(**more: Any) -> Any:
    from weft import KafkaConnection

    return KafkaConnection(**{"name": "src", "bootstrap_servers": "localhost:9092", "group_id": "weft", **more})


def test_events_to_pg() -> None:
    made = make(
        name="events-to-pg",
        source=kafka(),
        source_query="events",
        target=WAREHOUSE,
        target_table=("public", "events"),
    )
    assert (made.sources[0].connection, made.sources[0].name) == (kafka(), "events")
    assert made.targets == (Target(connection=WAREHOUSE, table=("public", "events")),)


def test_connections_as_classes_and_the_decorator(local: Project) -> None:
    @weft.connection
    class kafka_prod:
        kind = "kafka"
        bootstrap_servers = "${KAFKA_BOOTSTRAP}"
        group_id = "weft"

    @weft.connection
    class warehouse:
        kind = "postgres"
        url = "${WAREHOUSE_DSN}"

    @weft.streaming_pipeline(
        name="events_to_pg",
        source=kafka_prod,
        source_query="events",
        target=warehouse,
        target_table=("public", "events"),
    )
    def events_to_pg() -> None:
        pass

    assert local.streaming_pipelines["events_to_pg"].sources[0].connection is kafka_prod


def test_archive_in_files() -> None:
    made = make(
        name="events_archive",
        source=kafka(),
        source_query="events",
        targets=[Target(connection=LAKE, prefix="events/raw", parquet_compression="zstd")],
    )
    assert made.targets[0].connection_with_options(LAKE).options.parquet_compression == "zstd"


def test_events_clean() -> None:
    users = Lookup(
        connection=PostgresConnection(name="lookups", url="postgres://localhost/refdata"),
        table="users",
        schema="public",
        refresh_interval_ms=300_000,
    )
    made = make(
        name="events-clean",
        source=kafka(),
        source_query="events",
        target=WAREHOUSE,
        target_table=("public", "events_enriched"),
        transform_sql="SELECT s.user_id, u.country FROM source s LEFT JOIN users u ON s.user_id = u.id",
        lookups={"users": users},
        transform_on_error="dlq",
        dead_letter_topic="events-failed",
    )
    assert made.dead_letters is not None
    assert (made.dead_letters.topic, made.dead_letters.connection) == ("events-failed", kafka())
    assert made.lookups == {"users": users}


def test_option_chain_snapshots() -> None:
    class Delta:
        sql_name = "bs_call_delta"

        def __call__(self) -> None: ...

    made = make(
        name="option-chain-snapshots",
        source=S3,
        source_query="raw/options/",
        target=WAREHOUSE,
        target_table=("marketdata", "option_chain_snapshots"),
        transform_sql="""
            SELECT date_trunc('minute', ts) AS minute,
                   array_agg(named_struct('strike', strike, 'delta', bs_call_delta(strike))) AS strikes_json
            FROM source GROUP BY 1
        """,
        udfs=[Delta()],
    )
    assert made.sources == (Source(connection=S3, query="raw/options/"),)
    assert made.targets[0].name == "marketdata.option_chain_snapshots"


def test_the_secrets_of_s3_stay_references() -> None:
    made = make(name="p", source=S3, source_query="raw/", target=WAREHOUSE, target_table="t")
    text = to_toml(made)
    assert 'secret_access_key = "${S3_SECRET}"' in text
    assert parse(text).sources == made.sources


def test_two_sources() -> None:
    orders, payments = kafka(name="orders_kafka"), kafka(name="payments_kafka")
    common: dict[str, Any] = {
        "name": "orders-payments",
        "sources": [Source(connection=orders, query="orders"), Source(connection=payments, query="payments")],
        "target": WAREHOUSE,
        "target_table": ("public", "orders_with_payments"),
    }
    assert [each.name for each in make(**common).sources] == ["orders", "payments"]
    with pytest.raises(DeclarationError, match="join is a object"):
        make(**common, join=object())
    with pytest.raises(DeclarationError, match="the sources have several"):
        make(**common, dead_letter_topic="failed")


def test_primary_keys_of_delta() -> None:
    delta = DeltaLocalConnection("/data/delta", name="delta")
    target = Target(connection=delta, table=("default", "customers"), primary_key=["id"], mode="merge")
    one = make(name="p", source=S3, source_query="raw/", targets=[target])
    other = make(
        name="p",
        source=S3,
        source_query="raw/",
        target=delta,
        target_table=("default", "customers"),
        target_primary_key=["id"],
        mode="merge",
    )
    assert one.targets == other.targets


CDC_MIRROR = """
pipeline_name = "cdc-mirror-customers"
source_query = "dbz.public.customers"
[source]
kind = "kafka"
bootstrap_servers = "localhost:9094"
group_id = "weft-cdc"
[target]
kind = "postgres"
url = "postgres://postgres:postgres@localhost:5434/target"
[target.table]
schema = "public"
name = "customers"
[transform.cdc]
envelope = "debezium"
key_field = "after.id"
"""


def test_a_source_inline_and_a_declared_table() -> None:
    @weft.table(connection="warehouse")
    class customers:
        schema = "public"
        name = "customers"
        primary_key = ["id"]  # noqa: RUF012

    inline: dict[str, Any] = {
        "name": "cdc-mirror-customers",
        "source_kind": "kafka",
        "source_query": "dbz.public.customers",
        "bootstrap_servers": "localhost:9094",
        "group_id": "weft-cdc",
        "target": customers,
    }
    made = make(**inline, cdc=weft.CDC(envelope="debezium", key_field="after.id"))
    (target,) = made.targets
    assert (target.connection, target.name, target.primary_key) == ("warehouse", "public.customers", ("id",))
    assert made.cdc == parse(CDC_MIRROR).cdc
    assert target.mode == parse(CDC_MIRROR).targets[0].mode == "merge"


JOIN = """
pipeline_name = "orders-payments"
[[sources]]
query = "orders"
kind = "kafka"
bootstrap_servers = "localhost:9092"
group_id = "weft"
[[sources]]
query = "payments"
kind = "kafka"
bootstrap_servers = "localhost:9092"
group_id = "weft"
[target]
kind = "postgres"
url = "postgres://localhost/wh"
[target.table]
schema = "public"
name = "orders_with_payments"
[transform]
[transform.join]
kind = "inner" # or "left_outer" / "right_outer" / "full_outer"
left_source = "orders"
right_source = "payments"
left_keys = ["order_id"]
right_keys = ["order_id"]
time_window_ms = 300000
# late_data = "drop" # default; "reopen" extends retention by allowed_lateness_ms
[state_store]
kind = "postgres"
url = "postgres://localhost/weft_state"
"""
SESSION = """
pipeline_name = "user-sessions"
[source]
query = "events"
kind = "kafka"
bootstrap_servers = "localhost:9092"
[target]
kind = "postgres"
url = "postgres://localhost/wh"
[target.table]
name = "user_sessions"
[transform.window]
kind = "session"
gap_ms = 300000
max_session_duration_ms = 86400000
group_by = ["user_id"]
max_groups_per_window = 1000000
[[transform.window.aggregations]]
agg = "count"
as = "events"
"""
ORDERS = JOIN[JOIN.index("[[sources]]") : JOIN.rindex("[[sources]]")]
WINDOW = '[transform.window]\nkind = "tumbling"\nduration_ms = 1\naggregations = [{agg = "count"}]\n[state_store]'


@pytest.mark.parametrize(
    ("text", "old", "new", "message"),
    [
        (
            JOIN,
            JOIN[JOIN.index("[[sources]]") : JOIN.rindex("[[sources]]")],
            "",
            "[transform.join] requires two sources",
        ),
        (JOIN, 'left_source = "orders"', 'left_source = "order"', "left_source is 'order', which is no source"),
        (JOIN, "[state_store]", WINDOW, "[transform.window] and [transform.join] are mutually exclusive"),
        (JOIN, "# late_data", 'late_data = "reopen" #', 'late_data = "reopen" requires allowed_lateness_ms'),
        (SESSION, "gap_ms = 300000", "", '[transform.window]: Window: kind = "session" requires gap_ms'),
        (SESSION, "max_session_duration_ms = 86400000", "", 'kind = "session" requires max_session_duration_ms'),
        (SESSION, 'group_by = ["user_id"]', "", 'kind = "session" requires group_by'),
        (
            SESSION,
            "max_groups_per_window = 1000000",
            "max_groups_per_window = 0",
            "a whole number of at least 1, not 0",
        ),
        (SESSION, "gap_ms =", 'late_data = "reopen"\ngap_ms =', 'late_data = "reopen" requires allowed_lateness_ms'),
    ],
)
def test_files_of_the_troubleshooting(text: str, old: str, new: str, message: str) -> None:
    made = parse(text)
    assert (made.join or made.window) is not None
    with pytest.raises(DeclarationError, match=re.escape(message)):
        parse(text.replace(old, new, 1))


def test_windows_and_joins_by_the_decorator(local: Project) -> None:
    @weft.streaming_pipeline(
        name="orders-payments",
        sources=[Source(connection=kafka(), query="orders"), Source(connection=kafka(), query="payments")],
        target=WAREHOUSE,
        target_table=("public", "orders_with_payments"),
        join=weft.Join(
            left_source="orders",
            right_source="payments",
            left_keys=("order_id",),
            right_keys=("order_id",),
            min_delta_ms=0,
            max_delta_ms=300_000,  # right MUST arrive after left
        ),
        state_store=weft.StateStore(kind="postgres", url="postgres://localhost/weft_state"),
    )
    def joined() -> None:
        pass

    @weft.streaming_pipeline(
        name="events-per-min",
        source=kafka(),
        source_query="events",
        target=WAREHOUSE,
        target_table=("public", "events_per_min"),
        transform_sql="SELECT user_id, _event_ts FROM source WHERE valid",
        transform_on_error="dlq",
        dead_letter_topic="events-failed",
        window=weft.Window(kind="tumbling", duration_ms=60_000, aggregations=[weft.Aggregation(agg="count", as_="n")]),
        watermark=weft.Watermark(lateness_ms=5_000),
    )
    def counted() -> None:
        pass

    known = local.streaming_pipelines
    assert known["orders-payments"].join is not None
    assert known["events-per-min"].watermark == weft.Watermark(lateness_ms=5_000, source_idleness_ms=60_000)
    for made in known.values():
        again = parse(to_toml(made))
        assert (again.window, again.join, again.watermark) == (made.window, made.join, made.watermark)
