"""The guide's "Surface 2" and the stateless half of "Surface 3", its examples as written there with our name in place
of theirs, against real servers. Each runs over what is there, and then ends."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import servers
import weft
from conftest import S3
from weft import (
    Aggregation,
    Join,
    KafkaConnection,
    Lookup,
    ObjectStoreLocalConnection,
    ObjectStoreS3Connection,
    PostgresConnection,
    Source,
    StateStore,
    Target,
    Watermark,
    Window,
    run_pipeline,
    udaf,
    udf,
)
from weft.errors import DeclarationError
from weft.project import Project, use

pytestmark = pytest.mark.usefixtures("spark", "here")
run_streaming_pipeline = functools.partial(weft.run_streaming_pipeline, once=True)


@pytest.fixture
def here(project: Path) -> Iterator[Project]:
    import weft.streams

    fresh = Project()
    with use(fresh):
        yield fresh
        weft.streams.close(fresh)


@pytest.fixture
def postgres(shared_server: Any) -> Iterator[str]:
    server: servers.Server = shared_server("postgres")
    with server.database() as url:
        yield url


@pytest.fixture
def src(kafka: Any) -> KafkaConnection:
    return KafkaConnection(name="src", bootstrap_servers=kafka.bootstrap, group_id="weft")


def send(kafka: Any, topic: str, *messages: dict[str, Any]) -> None:
    kafka.produce(topic, [json.dumps(message).encode() for message in messages])


def query(url: str, sql: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        found = connection.execute(sql)
        return found.fetchall() if found.description else []


def test_the_minimal_file(kafka: Any, postgres: str, project: Path) -> None:
    topic = kafka.create_topic()
    send(kafka, topic, {"id": 1, "name": "a"}, {"id": 2, "name": "b"})
    (project / "pipeline.toml").write_text(
        f"""
pipeline_name = "events-to-pg"
source_query = "{topic}"
idle_pause_ms = 500

[source]
kind = "kafka"
bootstrap_servers = "{kafka.bootstrap}"
group_id = "weft"

[target]
kind = "postgres"
url = "{postgres}"

[target.table]
schema = "public"
name = "events"
"""
    )
    run_pipeline(config="pipeline.toml", once=True)
    assert query(postgres, "SELECT id, name FROM public.events ORDER BY id") == [(1, "a"), (2, "b")]


def test_typed_connections(kafka: Any, src: KafkaConnection, postgres: str) -> None:
    topic = kafka.create_topic()
    send(kafka, topic, {"id": 1})
    run_streaming_pipeline(
        name="events-to-pg",
        source=src,
        source_query=topic,
        target=PostgresConnection(name="warehouse", url=postgres),
        target_table=("public", "events"),
    )
    assert query(postgres, "SELECT id FROM public.events") == [(1,)]


def test_lookups(kafka: Any, src: KafkaConnection, postgres: str) -> None:
    topic = kafka.create_topic()
    events = [("u1", "click", 5), ("u2", "view", 1), ("u1", "scroll", 3), ("u9", "purchase", 7), ("u1", "click", 0)]
    send(kafka, topic, *({"user_id": user, "event_type": kind, "amount": amount} for user, kind, amount in events))
    query(postgres, "CREATE TABLE public.users (id TEXT, country TEXT)")
    query(postgres, "INSERT INTO public.users VALUES ('u1', 'NL'), ('u2', 'BE')")
    run_streaming_pipeline(
        name="events-clean",
        source=src,
        source_query=topic,
        target=PostgresConnection(name="warehouse", url=postgres),
        target_table=("public", "events_enriched"),
        transform_sql="""
            SELECT
              s.user_id,
              s.event_type,
              s.amount,
              u.country,
              s._event_ts
            FROM source s
            LEFT JOIN users u ON s.user_id = u.id
            WHERE s.event_type IN ('click', 'view', 'purchase')
              AND s.amount > 0
        """,
        lookups={
            "users": Lookup(
                connection=PostgresConnection(name="lookups", url=postgres),
                table="users",
                schema="public",
                refresh_interval_ms=300_000,
            ),
        },
    )
    found = query(postgres, "SELECT user_id, event_type, amount, country FROM events_enriched ORDER BY user_id")
    assert found == [("u1", "click", 5, "NL"), ("u2", "view", 1, "BE"), ("u9", "purchase", 7, None)]


@udf(args=("Float64", "Float64", "Float64", "Float64", "Float64"), returns="Float64")
def bs_call_delta(strike: Any, spot: Any, vol: Any, rate: Any, expiry: Any) -> pa.Array:
    k = strike.to_numpy(zero_copy_only=False)
    s = spot.to_numpy(zero_copy_only=False)
    v = vol.to_numpy(zero_copy_only=False)
    r = rate.to_numpy(zero_copy_only=False)
    t = expiry.to_numpy(zero_copy_only=False)
    d1 = (np.log(s / k) + (r + 0.5 * v * v) * t) / (v * np.sqrt(t))
    cdf = 0.5 * (1.0 + np.vectorize(math.erf)(d1 / np.sqrt(2)))
    return pa.array(cdf, type=pa.float64())


CHAIN = """ts,underlying,days_to_expiry,strike,bid,ask,spot,vol,rate,expiry
2026-03-02T14:30:05Z,SPXW,0,4500,1.25,1.30,4510.0,0.2,0.05,0.5
2026-03-02T14:30:45Z,SPXW,0,4505,0.75,0.85,4510.0,0.2,0.05,0.5
2026-03-02T14:31:05Z,SPXW,0,4500,1.50,1.55,4512.0,0.2,0.05,0.5
2026-03-02T14:31:05Z,AAPL,0,150,1.50,1.55,151.0,0.2,0.05,0.5
2026-03-02T14:31:05Z,SPXW,7,4500,9.50,9.55,4512.0,0.2,0.05,0.5
"""


@pytest.fixture
def chain(s3: S3) -> ObjectStoreS3Connection:
    """The bucket of the guide, with a file of contracts in it."""
    fields = s3.fields()
    with s3.files.open_output_stream(f"{fields['bucket']}/raw/options/1430.csv") as file:
        file.write(CHAIN.encode())
    return ObjectStoreS3Connection(name="raw", region="us-east-1", format="csv", **fields)


@pytest.fixture
def snapshots(postgres: str) -> str:
    query(postgres, "CREATE SCHEMA marketdata")
    query(
        postgres,
        "CREATE TABLE marketdata.option_chain_snapshots (minute TIMESTAMPTZ NOT NULL, strikes_json JSONB NOT NULL)",
    )
    return postgres


def test_many_rows_become_one_of_json(chain: ObjectStoreS3Connection, snapshots: str) -> None:
    run_streaming_pipeline(
        name="option-chain-snapshots",
        source=chain,
        source_query="raw/options/",
        target=PostgresConnection(name="warehouse", url=snapshots),
        target_table=("marketdata", "option_chain_snapshots"),
        transform_sql="""
            SELECT
              date_trunc('minute', ts) AS minute,
              array_agg(named_struct(
                'strike', strike,
                'bid',    bid,
                'ask',    ask
              )) AS strikes_json
            FROM source
            WHERE underlying = 'SPXW' AND days_to_expiry = 0
            GROUP BY 1
        """,
    )
    found = query(snapshots, "SELECT minute, strikes_json FROM marketdata.option_chain_snapshots ORDER BY minute")
    assert [(minute, sorted(strikes, key=lambda each: each["strike"])) for minute, strikes in found] == [
        (
            datetime(2026, 3, 2, 14, 30, tzinfo=UTC),
            [{"strike": 4500, "bid": 1.25, "ask": 1.3}, {"strike": 4505, "bid": 0.75, "ask": 0.85}],
        ),
        (datetime(2026, 3, 2, 14, 31, tzinfo=UTC), [{"strike": 4500, "bid": 1.5, "ask": 1.55}]),
    ]


def test_a_scalar_function(chain: ObjectStoreS3Connection, snapshots: str) -> None:
    run_streaming_pipeline(
        name="option-chain-with-greeks",
        source=chain,
        source_query="raw/options/",
        target=PostgresConnection(name="warehouse", url=snapshots),
        target_table=("marketdata", "option_chain_snapshots"),
        transform_sql="""
            SELECT
              date_trunc('minute', ts) AS minute,
              array_agg(named_struct(
                'strike', strike,
                'bid',    bid,
                'ask',    ask,
                'delta',  bs_call_delta(strike, spot, vol, rate, expiry)
              )) AS strikes_json
            FROM source
            GROUP BY 1
        """,
        udfs=[bs_call_delta],
    )
    found = query(snapshots, "SELECT jsonb_array_elements(strikes_json) FROM marketdata.option_chain_snapshots")
    expected = {}
    for line in CHAIN.splitlines()[1:]:
        bid, spot = float(line.split(",")[4]), float(line.split(",")[6])
        strike, vol, rate, expiry = float(line.split(",")[3]), 0.2, 0.05, 0.5
        d1 = (math.log(spot / strike) + (rate + 0.5 * vol * vol) * expiry) / (vol * math.sqrt(expiry))
        expected[strike, bid] = 0.5 * (1 + math.erf(d1 / math.sqrt(2)))
    assert {(each["strike"], each["bid"]): each["delta"] for (each,) in found} == pytest.approx(expected)


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

    def evaluate(self) -> pa.Array:
        if self.den == 0:
            return pa.array([None], type=pa.float64())
        return pa.array([self.num / self.den], type=pa.float64())

    def state(self) -> tuple[pa.Array, ...]:
        return (
            pa.array([self.num], type=pa.float64()),
            pa.array([self.den], type=pa.float64()),
        )


def test_an_aggregate_function(kafka: Any, src: KafkaConnection, postgres: str) -> None:
    topic = kafka.create_topic()
    quotes = [("14:30:01", 10.0, 1.0), ("14:30:59", 20.0, 3.0), ("14:31:00", 5.0, 2.0), ("14:31:30", 5.0, 0.0)]
    send(kafka, topic, *({"ts": f"2026-03-02T{at}Z", "price": price, "qty": qty} for at, price, qty in quotes))
    run_streaming_pipeline(
        name="vwap-per-minute",
        source=src,
        source_query=topic,
        target=PostgresConnection(name="warehouse", url=postgres),
        target_table=("marketdata", "vwap_per_minute"),
        transform_sql="""
            SELECT
              date_trunc('minute', ts) AS minute,
              vwap(price, qty)         AS vwap
            FROM source
            GROUP BY 1
        """,
        aggregate_udfs=[Vwap],
    )
    found = query(postgres, "SELECT minute::text, vwap FROM marketdata.vwap_per_minute ORDER BY minute")
    assert [(minute[11:16], vwap) for minute, vwap in found] == [("14:30", 17.5), ("14:31", 5.0)]


def test_object_store_targets(kafka: Any, src: KafkaConnection, project: Path) -> None:
    topic = kafka.create_topic()
    send(kafka, topic, {"id": 1, "name": None}, {"id": 2, "name": "b;c"})
    lake = ObjectStoreLocalConnection(name="lake", path=str(project / "lake"), format="parquet")
    dialect: dict[str, Any] = {
        "csv_delimiter": ";",
        "csv_header": False,
        "csv_quote": "'",
        "csv_escape": "\\",
        "csv_null_value": "\\N",
    }
    run_streaming_pipeline(
        name="events_archive",
        source=src,
        source_query=topic,
        targets=[
            Target(connection=lake, prefix="events/raw", parquet_compression="zstd"),
            Target(connection=lake, prefix="events/csv", format="csv", **dialect),
        ],
        transform_sql="SELECT id, name FROM source",
    )
    read = weft.read("events/raw", source=lake).toArrow().to_pylist()
    assert sorted(read, key=lambda row: row["id"]) == [{"id": 1, "name": None}, {"id": 2, "name": "b;c"}]
    text = "".join(path.read_text() for path in (project / "lake/events/csv").glob("part-*.csv"))
    assert sorted(text.split()) == ["1;\\N", "2;'b;c'"]


def test_bad_rows_go_to_a_topic(kafka: Any, src: KafkaConnection, postgres: str) -> None:
    topic, failed = kafka.create_topic(), kafka.create_topic()
    kafka.produce(topic, [b'{"user_id": 1, "valid": true}', b"no JSON", b'{"user_id": 2, "valid": false}'])
    run_streaming_pipeline(
        name="events-clean",
        source=src,
        source_query=topic,
        target=PostgresConnection(name="warehouse", url=postgres),
        target_table=("public", "events_clean"),
        transform_sql="SELECT user_id, _event_ts FROM source WHERE valid",
        transform_on_error="dlq",
        dead_letter_topic=failed,
    )
    assert query(postgres, "SELECT user_id FROM public.events_clean") == [(1,)]
    (letter,) = (json.loads(message.value()) for message in kafka.messages(failed))
    assert (letter["payload"], letter["source"], letter["offset"]) == ("no JSON", topic, "0:1")


def at_second(second: int) -> dict[str, int]:
    """Return the time of a message."""
    return {"timestamp": 1_790_000_000_000 + second * 1000 - 1_790_000_000_000 % 300_000}


def test_a_tumbling_window(kafka: Any, src: KafkaConnection, postgres: str) -> None:
    events = kafka.create_topic()
    for second, user, amount, kind in [(1, 7, 5, "view"), (2, 7, 6, "buy"), (3, 8, 1, "view"), (61, 7, 9, "view")]:
        message = {"user_id": user, "amount": amount, "event_type": kind}
        kafka.produce(events, [json.dumps(message).encode()], **at_second(second))
    run = functools.partial(
        run_streaming_pipeline,
        name="events-per-min",
        source=src,
        source_query=events,
        target=PostgresConnection(name="warehouse", url=postgres),
        target_table=("public", "events_per_min"),
        window=Window(
            kind="tumbling",
            duration_ms=60_000,
            group_by=("user_id",),
            max_groups_per_window=1_000_000,  # fail-loud cap
            aggregations=[
                Aggregation(agg="count", as_="n"),
                Aggregation(agg="sum", column="amount", as_="amount_sum"),
                Aggregation(agg="avg", column="amount", as_="amount_avg"),
                Aggregation(
                    agg="count_distinct",
                    column="event_type",
                    as_="distinct_event_types",
                    # mode="approximate" (HLL+) is the default;
                    # mode="exact" requires max_distinct_values_per_group.
                ),
            ],
        ),
    )
    # As written: the SQL leaves out what is counted.
    with pytest.raises(DeclarationError, match="'event_type'"):
        run(transform_sql="SELECT user_id, amount, _event_ts FROM source")
    run(
        transform_sql="SELECT user_id, amount, event_type, _event_ts FROM source",
        watermark=Watermark(
            lateness_ms=1_000,  # per-source slack (default 0)
            source_idleness_ms=120_000,  # min-watermark drops idle sources after this (default 60s)
        ),
    )
    columns = "SELECT column_name, data_type FROM information_schema.columns WHERE table_name = 'events_per_min'"
    assert query(postgres, f"{columns} ORDER BY ordinal_position") == [
        ("window_start", "timestamp with time zone"),
        ("window_end", "timestamp with time zone"),
        ("user_id", "bigint"),
        ("n", "bigint"),
        ("amount_sum", "bigint"),
        ("amount_avg", "double precision"),
        ("distinct_event_types", "bigint"),
    ]
    wanted = "SELECT extract(epoch FROM window_end - window_start)::int, user_id, n, amount_sum, amount_avg, "
    wanted += "distinct_event_types FROM public.events_per_min ORDER BY user_id"
    assert query(postgres, wanted) == [(60, 7, 2, 11, 5.5, 2), (60, 8, 1, 1, 1.0, 1)]


def test_hopping_windows_that_are_reopened(kafka: Any, src: KafkaConnection, postgres: str) -> None:
    events = kafka.create_topic()

    def run(*seconds: int) -> list[tuple[Any, ...]]:
        for second in seconds:
            kafka.produce(events, [b'{"user_id": 7}'], **at_second(second))
        run_streaming_pipeline(
            name="events-per-5-min",
            source=src,
            source_query=events,
            target=PostgresConnection(name="warehouse", url=postgres),
            target_table=("public", "events_per_5_min"),
            mode="merge",
            keys=["user_id", "window_start"],
            window=Window(
                kind="hopping",
                duration_ms=300_000,  # 5-min window
                hop_ms=60_000,  # advances every 1 min
                group_by=("user_id",),
                aggregations=[Aggregation(agg="count", as_="n")],
                late_data="reopen",
                allowed_lateness_ms=30_000,  # retain state for 30s past window end
            ),
        )
        return query(postgres, "SELECT n FROM public.events_per_5_min ORDER BY window_start")

    assert run(1, 61, 70) == [(1,)]
    assert run(2) == [(2,)]
    assert run(300, 3) == [(3,), (5,), (5,), (5,), (5,)]


def test_sessions(kafka: Any, src: KafkaConnection, postgres: str) -> None:
    events = kafka.create_topic()
    for second, user, page in [
        (1, 7, "/"),
        (200, 7, "/a"),
        (3, 8, "/"),
        (700, 9, "/"),
        (501, 7, "/b"),
        (1100, 9, "/c"),
    ]:
        kafka.produce(events, [json.dumps({"user_id": user, "page": page}).encode()], **at_second(second))
    run_streaming_pipeline(
        name="user-sessions",
        source=src,
        source_query=events,
        target=PostgresConnection(name="warehouse", url=postgres),
        target_table=("public", "user_sessions"),
        transform_sql="SELECT user_id, page, _event_ts FROM source",
        window=Window(
            kind="session",
            gap_ms=300_000,  # 5-min idle = session boundary
            max_session_duration_ms=86_400_000,  # 24h hard cap (mandatory)
            group_by=("user_id",),  # required non-empty
            max_groups_per_window=1_000_000,
            aggregations=[
                Aggregation(agg="count", as_="events"),
                Aggregation(agg="first", column="page", as_="entry_page"),
                Aggregation(agg="last", column="page", as_="exit_page"),
            ],
        ),
        state_store=StateStore(
            kind="postgres",
            url=postgres,
        ),
    )
    start = at_second(0)["timestamp"] // 1000
    bounds = ", ".join(f"(extract(epoch FROM window_{each}) - {start})::int" for each in ("start", "end"))
    wanted = f"SELECT {bounds}, user_id, events, entry_page, exit_page FROM public.user_sessions ORDER BY user_id, 1"
    assert query(postgres, wanted) == [
        (1, 500, 7, 2, "/", "/a"),
        (501, 801, 7, 1, "/b", "/b"),
        (3, 303, 8, 1, "/", "/"),
        (700, 1000, 9, 1, "/", "/"),
    ]
    ids = query(postgres, "SELECT DISTINCT session_id FROM public.user_sessions")
    assert len(ids) == 4


@pytest.mark.full
def test_a_partition_that_is_behind_the_others(kafka: Any, src: KafkaConnection, postgres: str) -> None:
    """Batches take a part of each: what one partition has of an hour ago is on time, however far the other is."""
    events = kafka.create_topic(partitions=2)
    for partition, first in enumerate((0, 3600)):
        for second in range(0, 200, 10):
            kafka.produce(events, [b'{"user_id": 7}'], partition, **at_second(first + second))
    run_streaming_pipeline(
        name="events-per-min",
        sources=[weft.Source(connection=src, query=events, max_rows=10)],
        target=PostgresConnection(name="warehouse", url=postgres),
        target_table=("public", "events_per_min"),
        window=Window(kind="tumbling", duration_ms=60_000, aggregations=[Aggregation(agg="count", as_="n")]),
    )
    assert query(postgres, "SELECT n FROM public.events_per_min ORDER BY window_start") == [(6,), (6,), (6,)]


@pytest.mark.brief("delta1-before1")
@pytest.mark.parametrize(
    ("delta", "before"),
    [
        ({"time_window_ms": 300_000}, [(4, "i4", 4, 9.5)]),  # ±5 min symmetric window
        ({"min_delta_ms": 0, "max_delta_ms": 300_000}, []),  # right MUST arrive after left
    ],
)
def test_a_join_of_two_topics(
    kafka: Any, src: KafkaConnection, postgres: str, delta: dict[str, int], before: list[tuple[Any, ...]]
) -> None:
    orders, payments = kafka.create_topic(), kafka.create_topic()
    for second, order in [(0, 1), (10, 2), (20, 3), (30, 4), (900, 5)]:
        kafka.produce(orders, [json.dumps({"order_id": order, "item": f"i{order}"}).encode()], **at_second(second))
    for second, order in [(5, 1), (310, 2), (319, 3), (29, 4), (900, 6)]:
        kafka.produce(payments, [json.dumps({"order_id": order, "paid": 9.5}).encode()], **at_second(second))
    orders_kafka = KafkaConnection(name="orders_kafka", bootstrap_servers=src.bootstrap_servers, group_id="ematix-flow")
    payments_kafka = KafkaConnection(
        name="payments_kafka", bootstrap_servers=src.bootstrap_servers, group_id="ematix-flow"
    )
    run_streaming_pipeline(
        name="orders-payments",
        sources=[
            Source(connection=orders_kafka, query=orders),
            Source(connection=payments_kafka, query=payments),
        ],
        target=PostgresConnection(name="warehouse", url=postgres),
        target_table=("public", "orders_with_payments"),
        join=Join(
            left_source=orders,  # matches sources[0].query
            right_source=payments,
            left_keys=("order_id",),
            right_keys=("order_id",),
            **delta,
        ),
        state_store=StateStore(kind="postgres", url=postgres),
    )
    joined = "SELECT left_order_id, left_item, right_order_id, right_paid FROM public.orders_with_payments ORDER BY 1"
    assert query(postgres, joined) == [(1, "i1", 1, 9.5), (2, "i2", 2, 9.5), (3, "i3", 3, 9.5), *before]


@pytest.mark.brief("left_outer-alone1")
@pytest.mark.parametrize(("kind", "alone"), [("inner", []), ("left_outer", [(2, None)])])
def test_a_join_in_a_file(
    kafka: Any, src: KafkaConnection, postgres: str, project: Path, kind: str, alone: list[tuple[Any, ...]]
) -> None:
    orders, payments = kafka.create_topic(), kafka.create_topic()
    for topic, messages in {orders: [(0, 1), (1, 2), (700, 3)], payments: [(5, 1), (700, 9)]}.items():
        for second, order in messages:
            kafka.produce(topic, [json.dumps({"order_id": order}).encode()], **at_second(second))
    (project / "orders.toml").write_text(f"""
pipeline_name = "orders-payments"
[[sources]]
query = "{orders}"
kind = "kafka"
bootstrap_servers = "{src.bootstrap_servers}"
group_id = "ematix-flow"
[[sources]]
query = "{payments}"
kind = "kafka"
bootstrap_servers = "{src.bootstrap_servers}"
group_id = "ematix-flow"
[target]
kind = "postgres"
url = "{postgres}"
[target.table]
schema = "public"
name = "orders_with_payments"
[transform]
[transform.join]
kind = "{kind}" # or "left_outer" / "right_outer" / "full_outer"
left_source = "{orders}"
right_source = "{payments}"
left_keys = ["order_id"]
right_keys = ["order_id"]
time_window_ms = 300000
# late_data = "drop" # default; "reopen" extends retention by allowed_lateness_ms
[state_store]
kind = "postgres"
url = "{postgres}"
""")
    run_pipeline(project / "orders.toml", once=True)
    joined = "SELECT left_order_id, right_order_id FROM public.orders_with_payments ORDER BY 1"
    assert query(postgres, joined) == [(1, 1), *alone]
