"""What a streaming pipeline is, and what is refused where it is written, with the nearest name."""

from __future__ import annotations

import importlib
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import pytest

import weft
from weft import (
    DeclarationError,
    DeltaLocalConnection,
    DuckDBConnection,
    Lookup,
    NotFoundError,
    ObjectStoreLocalConnection,
    PostgresConnection,
    RedisConnection,
    Source,
    SQLiteConnection,
    Target,
    pk,
)
from weft.pipelines.streaming.declare import find, make
from weft.pipelines.streaming.endpoints import delivery_to
from weft.pipelines.streaming.options import OPTIONS
from weft.pipelines.streaming.spec import DeadLetters
from weft.project import Project
from weft.types import BigInt, Text

pytestmark = pytest.mark.usefixtures("local")

WAREHOUSE = PostgresConnection(name="warehouse", url="postgres://localhost/wh")
EVENTS = SQLiteConnection("events.db", name="events_db")
LAKE = ObjectStoreLocalConnection("/data/lake", name="lake", format="parquet")
CSV = ObjectStoreLocalConnection("/data/lake", name="csv_lake", format="csv")
DELTA = DeltaLocalConnection("/data/delta", name="delta")
REDIS = RedisConnection("redis://localhost", name="cache")


@weft.table(connection="warehouse")
class customers:
    schema = "public"
    name = "customers"
    primary_key = ["id"]  # noqa: RUF012


def least(**more: Any) -> dict[str, Any]:
    given = {"name": "p", "source": EVENTS, "source_query": "clicks", "target": WAREHOUSE, "target_table": "public.t"}
    return {**given, **more}


# ------------------------------------------------------------------------------------------------------------- the ways


def test_connections_and_a_query() -> None:
    made = make(**least(target_table=("public", "events")))
    assert made.sources == (Source(connection=EVENTS, query="clicks"),)
    assert made.targets == (Target(connection=WAREHOUSE, table=("public", "events")),)
    assert (made.sources[0].name, made.targets[0].name, made.targets[0].mode) == ("clicks", "public.events", "append")
    assert (made.transform_sql, made.lookups, made.dead_letters, made.checkpoint) == (None, {}, None, None)
    assert (made.every_seconds, made.idle_pause_seconds, made.delivery) == (None, 0.1, "exactly_once")


def test_names_of_connections_that_are_registered_later() -> None:
    made = make(**least(source="later", target="warehouse"))
    assert (made.sources[0].connection, made.targets[0].connection) == ("later", "warehouse")


def test_a_declared_stream_is_a_source_and_a_target() -> None:
    @weft.stream(connection="events_db")
    def orders() -> None: ...

    @weft.stream
    def cleaned() -> None: ...

    made = make(name="p", source=orders, target=cleaned)
    assert (made.sources[0].connection, made.sources[0].query, made.sources[0].name) == ("events_db", orders, "orders")
    assert (made.targets[0].stream, made.targets[0].name, made.targets[0].place) == (cleaned, "cleaned", "stream")
    assert delivery_to(made, made.targets[0]) == "at_least_once"


def test_a_list_of_streams() -> None:
    @weft.stream
    def orders() -> None: ...

    @weft.stream
    def payments() -> None: ...

    for option in ("source", "sources"):
        made = make(name="p", target=WAREHOUSE, target_table="t", **{option: [orders, payments]})
        assert [each.name for each in made.sources] == ["orders", "payments"]


def test_a_declared_table_gives_table_connection_and_key() -> None:
    (target,) = make(name="p", source=EVENTS, source_query="x", target=customers, mode="merge").targets
    assert (target.table, target.connection, target.primary_key) == (("public", "customers"), "warehouse", ("id",))
    assert target.declared is not None and target.declared.full_name == "public.customers"


def test_keys_of_a_merge_are_those_of_the_pipeline_then_of_the_table() -> None:
    @weft.table
    class Orders:
        __merge_keys__ = ("number",)
        id: Annotated[BigInt, pk()]
        number: Text

    common = {"name": "p", "source": EVENTS, "source_query": "x", "target": Orders}
    assert make(**common, mode="merge").targets[0].primary_key == ("number",)
    assert make(**common, mode="merge", keys="id").targets[0].primary_key == ("id",)
    assert make(**common).targets[0].primary_key == ("id",)


def test_what_counts_among_rows_with_one_key() -> None:
    own = Target(connection=WAREHOUSE, table="b", deduplicate_by="version")
    added = Target(connection=WAREHOUSE, table="c", mode="append")
    common = {"name": "p", "source": EVENTS, "source_query": "x", "mode": "merge", "keys": "id", "deduplicate_by": "at"}
    made = make(**common, targets=[Target(connection=WAREHOUSE, table="a"), own, added])
    assert [each.options.get("deduplicate_by") for each in made.targets] == [("at",), ("version",), None]


def test_a_kind_and_its_fields_inline() -> None:
    made = make(name="p", source_kind="sqlite", path="a.db", source_query="clicks", target=WAREHOUSE, target_table="t")
    assert made.sources == (Source(connection=SQLiteConnection("a.db"), query="clicks"),)


def test_several_targets_each_in_its_way() -> None:
    made = make(
        name="p",
        source=EVENTS,
        source_query="clicks",
        mode="merge",
        keys=["id"],
        targets=[
            Target(connection=WAREHOUSE, table=("public", "events")),
            Target(connection=DELTA, table="events", primary_key=["number"]),
            Target(connection=LAKE, prefix="events/raw", mode="append", parquet_compression="zstd"),
        ],
    )
    assert [(each.mode, each.primary_key) for each in made.targets] == [
        ("merge", ("id",)),
        ("merge", ("number",)),
        ("append", ()),
    ]
    assert made.targets[2].options == {"parquet_compression": "zstd"}


def test_the_decorator_registers_and_never_calls(local: Project) -> None:
    @weft.streaming_pipeline(source=EVENTS, source_query="clicks", target=WAREHOUSE, target_table="t")
    def clicks_to_wh() -> None:
        """What it is for."""
        raise AssertionError

    assert local.streaming_pipelines == {"clicks_to_wh": clicks_to_wh}
    assert find("clicks_to_wh") is clicks_to_wh
    assert (clicks_to_wh.name, clicks_to_wh.description) == ("clicks_to_wh", "What it is for.")
    assert "test_declare.py, line" in clicks_to_wh.declared_at
    assert clicks_to_wh.__name__ == "clicks_to_wh"


def test_a_table_may_be_called_as_the_stream_that_is_read() -> None:
    made = make(
        **least(target=EVENTS, target_table="clicks", dead_letter_stream="clicks", dead_letter_connection=REDIS)
    )
    assert made.targets[0].name == made.sources[0].name


def test_nothing_is_said_by_none() -> None:
    assert make(**least(window=None, lookups=None, mode=None)).targets[0].mode == "append"


def test_make_registers_nothing(local: Project) -> None:
    make(**least())
    assert local.streaming_pipelines == {}


def test_one_that_is_not_declared() -> None:
    weft.streaming_pipeline(**least(name="clicks"))(lambda: None)
    with pytest.raises(NotFoundError, match=r"no streaming pipeline named 'click'\.\n  Did you mean 'clicks'"):
        find("click")


def test_two_with_one_checkpoint() -> None:
    weft.streaming_pipeline(**least(name="one", checkpoint="place"))(lambda: None)
    with pytest.raises(DeclarationError, match=r"'one' and 'two' have one checkpoint, place: .*\n  Give each its own"):
        weft.streaming_pipeline(**least(name="two", checkpoint="place"))(lambda: None)


def test_two_of_one_name() -> None:
    @weft.streaming_pipeline(**least(name="copy"))
    def one() -> None: ...

    with pytest.raises(DeclarationError, match=r"'copy' is declared twice: .*line \d+ and .*line \d+"):

        @weft.streaming_pipeline(**least(name="copy"))
        def two() -> None: ...


MODULE = """
import weft

@weft.streaming_pipeline(source="events_db", source_query="clicks", target="warehouse", target_table="{table}")
def copy():
    pass
"""


def test_a_module_may_be_loaded_again(local: Project, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(project)
    file = project / "reloaded.py"
    file.write_text(MODULE.format(table="one"))
    module = importlib.import_module("reloaded")
    try:
        file.write_text(MODULE.format(table="another"))
        importlib.reload(module)
        assert local.streaming_pipelines["copy"].targets[0].name == "another"
    finally:
        del sys.modules["reloaded"]


def test_a_module_with_two_of_one_name(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(project)
    (project / "twice.py").write_text(MODULE.format(table="one") + MODULE.format(table="two"))
    with pytest.raises(DeclarationError, match=r"'copy' is declared twice: twice\.py, line 4 and twice\.py, line 10"):
        importlib.import_module("twice")


# ----------------------------------------------------------------------------------------------------------- transforms


def test_sql_lookups_and_functions() -> None:
    def clean(value: Any) -> Any: ...

    class Vwap:
        sql_name = "vwap"

    users = Lookup(connection=WAREHOUSE, table="users", schema="public", refresh_interval_ms=300_000)
    made = make(
        **least(
            transform_sql="SELECT * FROM source s JOIN users u ON s.id = u.id",
            lookups={"users": users},
            udfs=[clean],
            aggregate_udfs=[Vwap],
            transform_on_error="drop",
        )
    )
    assert made.lookups == {"users": users}
    assert (made.udfs, made.aggregate_udfs, made.transform_on_error) == ((clean,), (Vwap,), "drop")


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("500ms", 0.5), ("10s", 10), ("1m", 60), ("2h", 7200), ("1.5s", 1.5), (timedelta(seconds=3), 3)],
)
def test_every(given: Any, seconds: float) -> None:
    assert make(**least(every=given)).every_seconds == seconds


def test_the_rest() -> None:
    made = make(
        **least(
            idle_pause_ms=500,
            checkpoint=Path("/data/checkpoint"),
            delivery="at_least_once",
            profile="low_latency",
            on_drift="fail",
            description="d",
        )
    )
    assert (made.idle_pause_seconds, made.checkpoint, made.delivery) == (0.5, "/data/checkpoint", "at_least_once")
    assert (made.profile, made.on_drift, made.description) == ("low_latency", "fail", "d")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"dead_letter_stream": "failed"}, DeadLetters(stream="failed")),
        ({"dead_letter_stream": "failed", "dead_letter_connection": "x"}, DeadLetters(stream="failed", connection="x")),
        ({"dead_letter_table": "a.failed"}, DeadLetters(table=("a", "failed"), connection=WAREHOUSE)),
        ({"dead_letter_path": "/data/failed"}, DeadLetters(path="/data/failed")),
        (
            {"dead_letter_topic": "failed", "dead_letter_connection": "kafka"},
            DeadLetters(topic="failed", connection="kafka"),
        ),
        # What its name leads to is not known yet, so it may be Kafka.
        ({"dead_letter_topic": "failed", "source": "kafka"}, DeadLetters(topic="failed", connection="kafka")),
    ],
)
def test_dead_letters(given: dict[str, Any], expected: DeadLetters) -> None:
    assert make(**least(**given)).dead_letters == expected


def test_dead_letters_in_a_declared_stream() -> None:
    @weft.stream(connection="events_db")
    def failed() -> None: ...

    assert make(**least(dead_letter_stream=failed)).dead_letters == DeadLetters(stream=failed, connection="events_db")


# -------------------------------------------------------------------------------------------------------------- refused


def plus_one(x: int) -> int:
    return x + 1


def another() -> None: ...


another.__name__ = "PLUS_ONE"

SQL = {"transform_sql": "SELECT * FROM source"}
LOOKUP = Lookup(connection=WAREHOUSE, table="users")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sorce": 1}, r"no option 'sorce'\.\n  Did you mean 'source'"),
        ({"bootstrap_servers": "h:1"}, "no option 'bootstrap_servers'"),
        ({"name": None}, "name has 1 to 200"),
        ({"name": "a/b"}, "cannot hold a slash"),
        ({"name": " "}, "1 to 200 printable characters, not blanks alone"),
        ({"name": ".."}, "begin with a dot"),
        ({"source": None}, "needs source, sources or source_kind, not none"),
        ({"sources": [Source(query="a")]}, "not source and sources"),
        ({"source": []}, "source is empty"),
        ({"source_query": None}, "needs source_query"),
        ({"source": "postgres://u:hidden@h/d"}, r"(?!.*hidden).*where a name is needed"),
        ({"source": 5}, "source must be a connection or its name, not int"),
        ({"source": Source(query="a")}, "Leave source_query out"),
        ({"source": None, "sources": Source(query="a")}, "sources must be a list"),
        ({"source": [EVENTS, REDIS]}, "two sources are called 'clicks'"),
        ({"source": DuckDBConnection("x.db")}, "a duckdb connection cannot be the source"),
        ({"source": None, "source_kind": "sqlte"}, r"no kind of connection named 'sqlte'\.\n  Did you mean 'sqlite'"),
        ({"source": None, "source_kind": 5}, "a kind is a text"),
        ({"source": None, "source_kind": "sqlite", "pth": "a"}, r"no option 'pth'\.\n  Did you mean 'path'"),
        ({"source": None, "source_kind": "sqlite"}, "Either path or url is needed"),
        ({"target": None}, "needs target or targets, not neither"),
        ({"targets": [Target(table="t")]}, "needs target or targets, not both"),
        ({"target": None, "targets": []}, "at least one target"),
        ({"target": None, "targets": [Target(table="t")]}, r"target_table goes with a connection[\s\S]*Target\(table="),
        ({"target_table": None}, r"names no place, and a postgres connection is written by table or stream"),
        ({"target_table": 5}, r'table is \("schema", "table"\)'),
        ({"target": LAKE}, r"a table, and an object_store_local connection is written by prefix[\s\S]*prefix="),
        ({"target": REDIS}, r"a redis connection is written by stream\.\n.*stream="),
        ({"target": int}, "the class int is not a table"),
        ({"target": customers}, "target_table is that of a connection"),
        ({"mode": "scd2"}, r"the mode 'scd2' needs keys\.\n.*keys=\[\"id\"\]"),
        ({"mode": "truncate"}, "no mode 'truncate'"),
        ({"mode": "scd1"}, "no mode 'scd1'.*\n.*'merge'"),
        ({"mode": "merge"}, r"the mode 'merge' needs keys\.\n.*keys=\[\"id\"\]"),
        ({"keys": ["id"]}, "'append' takes no keys"),
        ({"deduplicate_by": ["at"]}, "'append' takes no deduplicate_by"),
        ({"mode": "merge", "keys": ["id", "id"]}, "names a column twice"),
        ({"mode": "merge", "keys": ["id"], "target_primary_key": ["id"]}, "say the same"),
        ({"transform_sql": " "}, "transform_sql is empty"),
        ({"transform_sql": 5}, "transform_sql must be a text"),
        ({**SQL, "transform_on_error": "dlqq"}, r"'dlqq'\.\n  Did you mean 'dlq'"),
        ({**SQL, "transform_on_error": "dlq"}, "no place for dead letters.\n.*dead_letter_stream"),
        ({"transform_on_error": "drop"}, "transform_on_error is for transform_sql"),
        ({"lookups": {"users": LOOKUP}}, "lookups is for transform_sql, and there is none"),
        ({"udfs": [plus_one]}, "udfs is for transform_sql"),
        ({**SQL, "lookups": {"source": LOOKUP}}, "cannot be called 'source'"),
        ({**SQL, "lookups": {"Source": LOOKUP}}, "cannot be called 'Source'"),
        ({**SQL, "lookups": {"a b": LOOKUP}}, "cannot be called 'a b'"),
        ({**SQL, "lookups": {"users": LOOKUP, "Users": LOOKUP}}, "two lookups are called 'Users'"),
        ({**SQL, "lookups": {"users": WAREHOUSE}}, r"is a PostgresConnection[\s\S]*weft\.Lookup"),
        ({**SQL, "lookups": [LOOKUP]}, "must be a dict"),
        ({**SQL, "lookups": {"a": Lookup(connection=REDIS, table="a")}}, "a redis connection, which holds no tables"),
        ({**SQL, "lookups": {"a": Lookup(connection=LAKE, query="a")}}, "has no SQL of its own"),
        ({**SQL, "udfs": ["f"]}, "udfs takes functions"),
        ({**SQL, "udfs": [plus_one], "aggregate_udfs": [another]}, "two UDFs are called 'PLUS_ONE' in SQL"),
        ({"dead_letter_topic": "a", "dead_letter_path": "b"}, "one place: dead_letter_topic or dead_letter_path"),
        ({"dead_letter_topic": "a"}, "no source has topics"),
        ({"dead_letter_topic": "a", "sources": ["x", "y"], "source": None}, "two sources|several"),
        ({"dead_letter_connection": "a"}, "dead_letter_connection needs"),
        ({"dead_letter_stream": "clicks", "dead_letter_connection": EVENTS}, "cannot go to clicks, which it reads"),
        ({"dead_letter_table": "public.t"}, r"cannot go to public\.t, which it writes"),
        (
            {"dead_letter_topic": "a", "dead_letter_connection": EVENTS},
            "a sqlite connection holds no dead_letter_topic",
        ),
        ({"dead_letter_stream": "a", "dead_letter_connection": LAKE}, "holds no dead_letter_stream"),
        ({"dead_letter_table": "a", "dead_letter_connection": REDIS}, "a redis connection holds no dead_letter_table"),
        ({"dead_letter_path": "a", "dead_letter_connection": EVENTS}, "a sqlite connection holds no dead_letter_path"),
        ({"dead_letter_table": 7}, "dead_letter_table is"),
        ({"on_drift": "evolves"}, r"on_drift is 'evolves'\.\n  Did you mean 'evolve'"),
        ({"every": "10 parsecs"}, 'such as "500ms"'),
        ({"every": 10}, 'such as "500ms"'),
        ({"every": "0s"}, "every is '0s'"),
        ({"every": timedelta(0)}, "every is"),
        ({"idle_pause_ms": 0}, "idle_pause_ms must be"),
        ({"idle_pause_ms": True}, "idle_pause_ms must be"),
        ({"checkpoint": 5}, "checkpoint must be a text"),
        ({"delivery": "exactly"}, "Did you mean 'exactly_once'"),
        ({"profile": "fast"}, "'throughput', 'low_latency'"),
        (
            {"delivery": "exactly_once", "target": Target(connection=REDIS, stream="x"), "target_table": None},
            "may come twice",
        ),
        ({"target": Target(connection=EVENTS, stream="clicks"), "target_table": None}, "read what it writes"),
        ({"source": LAKE, "target": Target(connection=LAKE, prefix="clicks/"), "target_table": None}, "read what it"),
        ({"source": DELTA, "target": DELTA, "target_table": "clicks"}, "read what it writes"),
        ({"target_table": ("weft", "streams")}, r"weft\.streams cannot be written: the schema weft has the tables"),
        ({"target": EVENTS, "target_table": (None, "Weft.commits")}, r"Weft\.commits cannot be written"),
        ({"dead_letter_table": "weft.keys"}, r"dead_letter_table: weft\.keys cannot be written"),
    ],
)
def test_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError, match=said) as caught:
        make(**least(**given))
    assert caught.value.what.startswith("Streaming pipeline ")


def test_a_stream_by_its_name() -> None:
    @weft.stream
    def orders() -> None: ...

    with pytest.raises(DeclarationError, match="pass the stream itself, not its name"):
        make(name="p", source="orders", target=WAREHOUSE, target_table="t")


def test_the_table_of_a_stream_that_is_read() -> None:
    weft.stream(name="clicks", connection=EVENTS)(lambda: None)
    own = {"target": EVENTS, "target_table": ("events", "clicks")}
    with pytest.raises(DeclarationError, match=r"it would read what it writes to events\.clicks, without end"):
        make(**least(**own))
    letters = {"dead_letter_table": "events.clicks", "dead_letter_connection": EVENTS}
    with pytest.raises(DeclarationError, match=r"dead letters cannot go to events\.clicks, which it reads"):
        make(**least(**letters))
    make(**least(target_table=("events", "clicks")))
    make(**least(target=DELTA, target_table=("weft", "streams")))


def test_a_target_twice() -> None:
    twice = [Target(connection=WAREHOUSE, table="a.b"), Target(connection="warehouse", table=("a", "b"))]
    with pytest.raises(DeclarationError, match=r"the target a\.b is listed twice"):
        make(name="p", source=EVENTS, source_query="x", targets=twice)


def test_without_options() -> None:
    with pytest.raises(DeclarationError, match="needs a source and a target"):
        weft.streaming_pipeline(plus_one)


def test_no_option_hides_a_field_of_a_connection() -> None:
    """Fields of a connection are given beside the options: one of the same name could not be said."""
    from dataclasses import fields

    from weft.systems.base import systems

    for system in systems().values():
        names = {each.name for each in fields(system.load_connection())} - {"name"}
        assert names.isdisjoint(OPTIONS), system.kind


# -------------------------------------------------------------------------------------------- sources, targets, lookups


def test_parts_travel_between_processes() -> None:
    target = Target(connection=CSV, prefix="a", csv_read_options={"delimiter": ";"})
    source = Source(connection=EVENTS, query="a", max_rows=5)
    assert pickle.loads(pickle.dumps((source, target, LOOKUP))) == (source, target, LOOKUP)
    declared = weft.streaming_pipeline(**least())(plus_one)
    assert pickle.loads(pickle.dumps(declared)).targets == declared.targets


def test_no_secret_is_shown() -> None:
    secret = PostgresConnection(url="postgres://u:hidden@h/d")
    made = make(**least(source=secret, target=Target(connection=secret, table="t"), target_table=None))
    assert "hidden" not in repr(made)
