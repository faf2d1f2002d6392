"""A pipeline's TOML file: what it declares, and the way back to text."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies

import weft
from weft import (
    DeclarationError,
    DeltaLocalConnection,
    DeltaS3Connection,
    Lookup,
    NotFoundError,
    ObjectStoreLocalConnection,
    PostgresConnection,
    PubSubConnection,
    RedisConnection,
    SettingsError,
    Source,
    SQLiteConnection,
    Target,
)
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.spec import DeadLetters, StreamingPipeline
from weft.pipelines.streaming.toml import parse, read, to_toml
from weft.systems.objects.connection import FileFields

pytestmark = pytest.mark.usefixtures("local")

SOURCE = """
pipeline_name = "p"
source_query = "clicks"
[source]
kind = "sqlite"
path = "events.db"
"""
TARGET = """
[target]
kind = "postgres"
url = "postgres://localhost/wh"
[target.table]
schema = "public"
name = "events"
"""
LEAST = SOURCE + TARGET


def at_top(line: str) -> str:
    return f"{line}\n{LEAST}"


# ------------------------------------------------------------------------------------------------------------- the file


def test_the_least() -> None:
    made = parse("idle_pause_ms = 500" + LEAST, "dir/pipeline.toml")
    assert made.sources == (Source(connection=SQLiteConnection("events.db"), query="clicks"),)
    warehouse = PostgresConnection("postgres://localhost/wh")
    assert made.targets == (Target(connection=warehouse, table=("public", "events")),)
    assert (made.name, made.idle_pause_seconds, made.declared_at) == ("p", 0.5, "dir/pipeline.toml")


@pytest.mark.parametrize(("said", "table"), [("events", (None, "events")), ("public.events", ("public", "events"))])
def test_a_table_by_its_name_alone(said: str, table: tuple[str | None, str]) -> None:
    (target,) = parse(f"{SOURCE}[target]\nconnection = 'wh'\ntable = '{said}'").targets
    assert target.table == table


def test_everything() -> None:
    made = parse(
        """
        pipeline_name = "p"
        description = "what for"
        mode = "merge"
        keys = ["id"]
        on_drift = "ignore"
        every = "10s"
        checkpoint = "s3a://bucket/checkpoints"
        delivery = "at_least_once"
        profile = "throughput"
        dead_letter_table = "ops.failed"

        [source]
        connection = "events_db"
        query = "clicks"
        start = "latest"
        max_rows = 1000

        [target]
        connection = "warehouse"
        update_columns = ["amount"]
        [target.table]
        name = "events"

        [transform]
        sql = "SELECT * FROM source JOIN users USING (id)"
        on_error = "dlq"

        [lookups.users]
        kind = "postgres"
        url = "${REFDATA}"
        table = "users"
        schema = "public"
        refresh_interval_ms = 300000
        """
    )
    assert (made.description, made.on_drift, made.every_seconds) == ("what for", "ignore", 10)
    assert (made.checkpoint, made.delivery, made.profile) == ("s3a://bucket/checkpoints", "at_least_once", "throughput")
    assert made.dead_letters == DeadLetters(table=("ops", "failed"), connection="warehouse")
    assert made.sources == (Source(connection="events_db", query="clicks", start="latest", max_rows=1000),)
    (target,) = made.targets
    assert (target.connection, target.table, target.mode) == ("warehouse", (None, "events"), "merge")
    assert (target.primary_key, target.options) == (("id",), {"update_columns": ("amount",)})
    assert (made.transform_sql, made.transform_on_error) == ("SELECT * FROM source JOIN users USING (id)", "dlq")
    refdata = PostgresConnection("${REFDATA}")
    users = Lookup(connection=refdata, table="users", schema="public", refresh_interval_ms=300_000)
    assert made.lookups == {"users": users}


def test_the_default_connection() -> None:
    made = parse('pipeline_name = "p"\n[source]\nquery = "a"\n[target]\nstream = "b"')
    assert (made.sources[0].connection, made.targets[0].connection, made.targets[0].name) == (None, None, "b")


def test_references_are_resolved_at_use(monkeypatch: pytest.MonkeyPatch) -> None:
    made = parse(LEAST.replace("postgres://localhost/wh", "postgres://${USER_OF_WH}:${PASSWORD_OF_WH}@h/wh"))
    connection = made.targets[0].connection
    assert isinstance(connection, PostgresConnection)
    with pytest.raises(SettingsError, match="USER_OF_WH is not set"):
        connection.resolved()
    monkeypatch.setenv("USER_OF_WH", "me")
    monkeypatch.setenv("PASSWORD_OF_WH", "hidden")
    assert connection.resolved().url == "postgres://me:hidden@h/wh"


def test_several_sources_and_targets() -> None:
    made = parse(
        """
        pipeline_name = "fan"
        [[sources]]
        query = "orders"
        kind = "sqlite"
        path = "a.db"
        [[sources]]
        query = "payments"
        connection = "b"
        [[targets]]
        kind = "postgres"
        url = "postgres://localhost/wh"
        [[targets.table]]
        schema = "public"
        name = "one"
        [[targets.table]]
        name = "two"
        primary_key = ["id"]
        [[targets]]
        kind = "delta_local"
        path = "/data"
        [targets.table]
        name = "three"
        """
    )
    assert [(each.name, each.connection) for each in made.sources] == [
        ("orders", SQLiteConnection("a.db")),
        ("payments", "b"),
    ]
    assert [(each.name, each.primary_key) for each in made.targets] == [
        ("public.one", ()),
        ("two", ("id",)),
        ("three", ()),
    ]


def test_a_prefix_is_where_rows_go_or_where_tables_are() -> None:
    def target(text: str) -> Target:
        return parse(f"{SOURCE}[target]\nkind = 'delta_s3'\nbucket = 'lake'\nprefix = 'events'\n{text}").targets[0]

    assert target("") == Target(connection=DeltaS3Connection("lake"), table=(None, "events"))
    named = target("[target.table]\nname = 'clicks'")
    assert named == Target(connection=DeltaS3Connection("lake", prefix="events"), table=(None, "clicks"))


def test_how_files_of_a_named_connection_are_written() -> None:
    weft.register_connection(ObjectStoreLocalConnection("/data", name="lake", format="csv"))
    made = parse(f"{SOURCE}[target]\nconnection = 'lake'\nprefix = 'a'\ncsv_delimiter = 59")
    assert made.targets == (Target(connection="lake", prefix="a", csv_delimiter=";"),)


def test_read_options_of_csv_files() -> None:
    text = """
    pipeline_name = "p"
    [source]
    kind = "object_store_local"
    path = "/data"
    format = "csv"
    query = "raw/"
    [source.read_options.csv]
    delimiter = 59
    null_regex = "^NA$"
    [target]
    connection = "warehouse"
    table = {name = "t"}
    """
    (source,) = parse(text).sources
    assert source.options == {"csv_read_options": {"delimiter": ";", "null_regex": "^NA$"}}
    assert isinstance(source.connection, FileFields)
    assert source.connection_with_options(source.connection).options.read["delimiter"] == ";"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('dead_letter_stream = "failed"', DeadLetters(stream="failed")),
        (
            'dead_letter_stream = "failed"\ndead_letter_connection = "x"',
            DeadLetters(stream="failed", connection="x"),
        ),
        (
            'dead_letter_stream = "failed"\ndead_letter_connection = {kind = "redis", url = "redis://h"}',
            DeadLetters(stream="failed", connection=RedisConnection("redis://h")),
        ),
        (
            'dead_letter_table = {schema = "a.b", name = "c"}\ndead_letter_connection = "x"',
            DeadLetters(table=("a.b", "c"), connection="x"),
        ),
        ('dead_letter_path = "/data/failed"', DeadLetters(path="/data/failed")),
    ],
)
def test_dead_letters(text: str, expected: DeadLetters) -> None:
    assert parse(at_top(text)).dead_letters == expected


def test_a_file(project: Path) -> None:
    (project / "events.toml").write_text(LEAST)
    assert read("events.toml").declared_at == "events.toml"
    assert read(project / "events.toml").declared_at == "events.toml"
    with pytest.raises(NotFoundError, match=r"no file 'event\.toml'\.\n  Did you mean 'events\.toml'"):
        read("event.toml")
    (project / "latin.toml").write_bytes(b'pipeline_name = "\xe9"')
    with pytest.raises(SettingsError, match=r"latin\.toml is not UTF-8"):
        read("latin.toml")
    with pytest.raises(SettingsError, match="cannot be read"):
        read(project)


# ------------------------------------------------------------------------------------------------------------ the guide

KAFKA = '[source]\nkind = "kafka"\nbootstrap_servers = "localhost:9092"\ngroup_id = "weft"\n'


def test_the_guide_minimal() -> None:
    made = parse(f'pipeline_name = "events-to-pg"\nsource_query = "events"\nidle_pause_ms = 500\n{KAFKA}{TARGET}')
    assert isinstance(made.sources[0].connection, weft.systems.base.Connection)
    assert (made.sources[0].name, made.sources[0].connection.kind) == ("events", "kafka")


def test_the_guide_dead_letters() -> None:
    text = f'pipeline_name = "p"\nsource_query = "events"\n{KAFKA}dead_letter_topic = "events-failed"\n{TARGET}'
    made = parse(text)
    assert made.dead_letters == DeadLetters(topic="events-failed", connection=made.sources[0].connection)
    assert parse(f'dead_letter_topic = "events-failed"\n{text}').dead_letters == made.dead_letters
    with pytest.raises(DeclarationError, match="dead_letter_topic is said more than once, and differently"):
        parse(f'dead_letter_topic = "other"\n{text}')


def test_the_guide_fan_in() -> None:
    one = 'kind = "kafka"\nbootstrap_servers = "localhost:9092"\n'
    made = parse(
        f'pipeline_name = "fanin"\n[[sources]]\nquery = "orders"\n{one}[[sources]]\nquery = "payments"\n{one}{TARGET}'
    )
    assert [each.name for each in made.sources] == ["orders", "payments"]


def test_the_guide_fan_out() -> None:
    made = parse(
        SOURCE
        + """
        [[targets]]
        kind = "postgres"
        url = "postgres://localhost/wh"
        [[targets.table]]
        schema = "public"
        name = "events_pg"

        [[targets]]
        kind = "delta_s3"
        bucket = "archive"
        prefix = "events"
        """
    )
    assert [(each.name, each.place) for each in made.targets] == [("public.events_pg", "table"), ("events", "table")]


def test_the_guide_files() -> None:
    made = parse(
        SOURCE
        + """
        [target]
        kind = "object_store_local"
        path = "/data/lake"
        format = "parquet"
        prefix = "events/raw"
        parquet_compression = "zstd"

        [target.read_options.csv]
        has_header = true
        delimiter = 44              # ord(',')
        null_regex = "^(NA|NULL)$"
        schema_infer_max_records = 4096
        """
    )
    lake = ObjectStoreLocalConnection("/data/lake", format="parquet", parquet_compression="zstd")
    assert made.targets == (Target(connection=lake, prefix="events/raw"),)


def test_the_guide_pubsub() -> None:
    made = parse(
        """
        pipeline_name = "p"
        [source]
        kind = "pubsub"
        project_id = "my-project"
        subscription = "events-sub"
        dead_letter_policy = { topic = "events-dlq", max_delivery_attempts = 5 }
        """
        + TARGET
    )
    policy = {"topic": "events-dlq", "max_delivery_attempts": 5}
    connection = PubSubConnection(project_id="my-project", subscription="events-sub", dead_letter_policy=policy)
    assert made.sources == (Source(connection=connection, query="events-sub"),)


# -------------------------------------------------------------------------------------------------------------- to text


def meaning(made: StreamingPipeline) -> dict[str, Any]:
    """A pipeline without where it is declared, and with options of files where they count."""
    found = {each.name: getattr(made, each.name) for each in dataclasses.fields(made)}
    for name in ("sources", "targets"):
        found[name] = [_part(each) for each in found[name]]
    return {**found, "declared_at": "", "origin": ""}


def _part(part: Source | Target) -> Any:
    connection = part.connection
    if not isinstance(connection, FileFields):
        return part
    files = part.connection_with_options(connection).options
    bare = dataclasses.replace(connection, **dict.fromkeys(files.__dataclass_fields__))
    return bare, files, dataclasses.replace(part, connection="x", options={})


WAREHOUSE = PostgresConnection(name="warehouse", url="postgres://me:${PASSWORD}@localhost/wh")
CSV = ObjectStoreLocalConnection("/data", format="csv", csv_delimiter=";", csv_read_options={"comment": "#"})
DELTA = DeltaLocalConnection("/delta")
SQL = """
SELECT "a\\b", 'say ""\"hello""\"'\t, 'ümläut 🎉' AS "x"
FROM source"""
SECRETIVE = DeltaS3Connection(
    "lake", prefix="deep/down", endpoint="http://h:1", access_key_id="k", secret_access_key="${SECRET}"
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"source": "registered", "target": "warehouse"},
        {"idle_pause_ms": 7, "every": "9ms", "checkpoint": "/x", "profile": "low_latency", "description": 'a "b"\\'},
        {"every": "1.5s", "on_drift": "fail", "delivery": "at_least_once"},
        {"mode": "merge", "keys": ["id", "day"]},
        {"transform_sql": SQL, "transform_on_error": "drop"},
        {"transform_sql": 'SELECT "x"\nFROM "source"'},
        {"transform_sql": "SELECT '\x7f\r\n\x00'"},
        {
            "transform_sql": "SELECT 1",
            "lookups": {
                "users": Lookup(connection=WAREHOUSE, table="users", schema="public", refresh_interval_ms=5),
                "rates": Lookup(query="SELECT 1 AS rate"),
            },
        },
        {"dead_letter_table": "a.b"},
        {"dead_letter_table": ("a.b", "c.d"), "dead_letter_connection": SQLiteConnection("d.db")},
        {"dead_letter_stream": "failed", "dead_letter_connection": "other"},
        {"dead_letter_path": "/data/failed"},
        {
            "source": None,
            "sources": [
                Source(query="a", start=5),
                Source(query="b", connection=CSV, max_files=2, columns={"Id 1": "int64?"}),
            ],
        },
        {"source": None, "sources": [Source(query="b", connection=CSV, csv_read_options={"delimiter": "|"})]},
        {"source": None, "sources": [Source(query="b", connection=CSV, format="json_lines")]},
        {"target": Target(connection=CSV, prefix="events/raw", csv_delimiter="|")},
        {"target": Target(connection=SECRETIVE, table=("s", "t"), mode="merge", primary_key="id")},
        {
            "targets": [
                Target(connection=DELTA, prefix="a"),
                Target(connection="lake", prefix="b", parquet_compression="zstd"),
                Target(connection=RedisConnection("redis://h", name="cache"), stream="c", primary_key="id"),
                Target(table="t", mode="merge", primary_key="id", deduplicate_by=["at"], update_columns=["x"]),
            ]
        },
    ],
)
def test_round_trip(options: dict[str, Any]) -> None:
    common = {"name": "p", "source_query": "clicks", "source": SQLiteConnection("events.db"), "target": WAREHOUSE}
    if "sources" in options:
        del common["source_query"]
    if isinstance(options.get("target"), Target) or "targets" in options:
        del common["target"]
    else:
        common["target_table"] = ("public", "events")
    made = make(**{**common, **options})
    text = to_toml(made)
    again = parse(text)
    assert meaning(again) == meaning(made), text
    assert to_toml(again) == text


@given(text=strategies.text(alphabet=strategies.one_of(strategies.characters(), strategies.sampled_from('"\\\n\t'))))
@example(text="://")
def test_any_text_survives(text: str) -> None:
    common = {"name": "p", "source": "a", "source_query": "b", "target": "c", "target_table": "t"}
    path = f"/{text}".replace(":", "")  # one with :// is refused, as a URL
    made = make(**common, transform_sql=f"SELECT {text}", description=f"{text}x", dead_letter_path=path)
    again = parse(to_toml(made))
    assert (again.transform_sql, again.description) == (made.transform_sql, made.description)
    assert again.dead_letters == made.dead_letters


def test_the_guide_rabbitmq() -> None:
    source = (
        'source_query = "orders"\n[source]\nkind = "rabbitmq"\namqp_url = "amqp://guest:guest@localhost:5672"\n'
        'queue_args = { "x-dead-letter-exchange" = "ematix.dlx" }\n'
    )
    (declared,) = parse(f'pipeline_name = "p"\n{source}{TARGET}').sources
    assert isinstance(declared.connection, weft.RabbitMQConnection)
    assert declared.connection.rejects_bad and declared.name == "orders"


def test_a_connection_of_a_connection() -> None:
    def written(**fields: Any) -> str:
        connection = weft.RabbitMQConnection("amqp://localhost", **fields)
        source = weft.Source(connection=connection, query="orders")
        return to_toml(make(name="p", source=source, target="default", target_table="t"))

    log = weft.SQLiteConnection("log.db")
    assert 'received_log = "log"' in written(received_log=dataclasses.replace(log, name="log"))
    with pytest.raises(DeclarationError, match="the received_log of a rabbitmq connection has no name"):
        written(received_log=log)


def test_a_stream_of_kinesis() -> None:
    table = 'kind = "kinesis"\nregion = "eu-west-1"\nstream = "%s"\n'
    made = parse(f'pipeline_name = "p"\nsource_query = "a"\n[source]\n{table % "a"}[target]\n{table % "b"}')
    assert (made.sources[0].query, made.targets[0].stream) == ("a", "b")
    assert meaning(parse(to_toml(made))) == meaning(made)


def test_what_it_looks_like() -> None:
    made = make(
        name="p",
        source=SQLiteConnection("events.db"),
        source_query="clicks",
        target=WAREHOUSE,
        target_table="public.t",
        transform_sql="SELECT *\nFROM source",
    )
    assert to_toml(made) == (
        'pipeline_name = "p"\n\n[source]\nkind = "sqlite"\npath = "events.db"\nquery = "clicks"\n\n'
        '[target]\nkind = "postgres"\nname = "warehouse"\nurl = "postgres://me:${PASSWORD}@localhost/wh"\n\n'
        '[target.table]\nschema = "public"\nname = "t"\n\n[transform]\nsql = """\nSELECT *\nFROM source"""\n'
    )


def test_round_trip_of_kafka() -> None:
    made = make(
        name="p",
        source_kind="kafka",
        bootstrap_servers="h:1",
        sasl_plain_username="me",
        sasl_plain_password="${PASSWORD}",
        source_query="events",
        target=WAREHOUSE,
        target_table="t",
        dead_letter_topic="failed",
    )
    text = to_toml(made)
    assert meaning(parse(text)) == meaning(made), text
    assert "dead_letter_connection" not in tomllib.loads(text)


def test_declared_streams_become_their_names() -> None:
    @weft.stream(connection="events_db")
    def orders() -> None: ...

    made = parse(to_toml(make(name="p", source=orders, target=orders.dead_letters)))
    assert (made.sources[0].connection, made.sources[0].query) == ("events_db", "orders")
    assert made.targets[0].stream == "orders__dead_letter"


@weft.table
class Typed:
    id: weft.types.BigInt


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": PostgresConnection("postgres://u:hidden@h/d")}, r"the url of a postgres connection holds a secret"),
        (
            {"target": DeltaS3Connection("lake", access_key_id="k", secret_access_key="hidden")},
            r"secret_access_key.*\n.*\$\{SECRET_ACCESS_KEY\}",
        ),
        ({"transform_sql": "SELECT 1", "udfs": [len]}, "has UDFs"),
        ({"target": Typed, "target_table": None}, "is a declared table with columns"),
        (
            {
                "target": Target(connection=ObjectStoreLocalConnection("/d", prefix="a"), prefix="b"),
                "target_table": None,
            },
            "has one prefix",
        ),
    ],
)
def test_what_no_file_can_hold(options: dict[str, Any], said: str) -> None:
    common = {"name": "p", "source": "a", "source_query": "b", "target": "c", "target_table": "t"}
    made = make(**{**common, **options})
    with pytest.raises(DeclarationError, match=said) as caught:
        to_toml(made)
    assert "hidden" not in str(caught.value)


def test_a_stream_of_another_schema() -> None:
    @weft.stream(schema="other")
    def orders() -> None: ...

    with pytest.raises(DeclarationError, match="the schema 'other'"):
        to_toml(make(name="p", source=orders, target="a", target_table="t"))
