"""Streams of ours as sources: each event once, whatever happens between batches."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Annotated, Any

import pytest

import weft
from conftest import System
from engine.streaming.conftest import declare, forget_last_commit, rows, run_once
from servers import wait_until
from weft.engine import frames
from weft.engine.streaming.activity import read_activity
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.query import Query
from weft.errors import BusyError, DeclarationError, LoadRefusedError, WeftError
from weft.normalize import lower, trim
from weft.pipelines.streaming.declare import make
from weft.project import current
from weft.spark_support.sessions import QUOTED_NAMES
from weft.types import BigInt, Text
from workers import drain

pytestmark = pytest.mark.usefixtures("plain_spark")

# A load into Delta takes ten times as long as one into a table.
WITH_LAKE = pytest.mark.parametrize("lakes", ["table", pytest.param("lake", marks=pytest.mark.delta)], indirect=True)


@pytest.fixture
def lakes(request: pytest.FixtureRequest, project: Path) -> list[Any]:
    """A lake with tables of Delta, beside the default connection, or none."""
    return [weft.DeltaLocalConnection(str(project / "lake"), name="lake")] if request.param == "lake" else []


# Each system and each way of the rows once: a batch of one system is loaded by the same code on both ways.


@pytest.mark.brief("mysql-driver")
@pytest.mark.usefixtures("streams")
def test_a_stream_becomes_a_table(system: System, way: str) -> None:
    events = declare(n="int64", name="string")
    weft.publish_sync(events, [{"n": n, "name": f"é{n}"} for n in range(5)])
    pipeline: dict[str, Any] = {"name": "copy", "source": events, "target_table": (None, "copies")}
    run_once(**pipeline)
    assert rows("copies", "n, name") == [(n, f"é{n}") for n in range(5)]
    # A column that appears meanwhile follows, and loses nothing.
    weft.publish_sync(events, [{"n": 5, "name": None, "more": 1.5}])
    run_once(**pipeline)
    run_once(**pipeline)
    assert rows("copies", "n, name, more") == [*((n, f"é{n}", None) for n in range(5)), (5, None, 1.5)]


@pytest.mark.brief("driver")
@pytest.mark.usefixtures("here")
def test_sql_runs_over_the_whole_batch(way: str) -> None:
    events = declare(kind="string", n="int64")
    weft.publish_sync(events, [{"kind": "ab"[n % 2], "n": n} for n in range(1000)])
    sql = "SELECT kind, count(*) AS events, max(n) AS highest FROM source GROUP BY kind"
    targets = [
        weft.Target(table=(None, "kinds"), mode="merge", primary_key=["kind"]),
        weft.Target(table=(None, "history")),
    ]
    run_once(name="kinds", source=events, targets=targets, transform_sql=sql)
    assert rows("kinds") == rows("history") == [("a", 500, 998), ("b", 500, 999)]
    weft.publish_sync(events, [{"kind": "a", "n": 2000}])
    run_once(name="kinds", source=events, targets=targets, transform_sql=sql)
    assert rows("kinds") == [("a", 1, 2000), ("b", 500, 999)]
    assert rows("history") == [("a", 1, 2000), ("a", 500, 998), ("b", 500, 999)]


@pytest.mark.full
@pytest.mark.usefixtures("spark", "here")
def test_rows_with_one_key_in_a_batch(way: str, project: Path) -> None:
    events = declare(id="int64", name="string")
    lake = weft.DeltaLocalConnection(str(project / "lake"), name="lake")
    targets = [weft.Target(table=(None, "last")), weft.Target(connection=lake, table=(None, "last"))]
    pipeline: dict[str, Any] = {"name": "last", "source": events, "targets": targets, "mode": "merge", "keys": ["id"]}
    weft.publish_sync(events, [{"id": n % 3, "name": f"v{n}"} for n in range(7)])
    with pytest.raises(WeftError, match=r"share a key.*\n.*deduplicate_by"):
        run_once(**pipeline)
    pipeline["transform_sql"] = "SELECT id, name, _weft_rowid AS version FROM source"
    run_once(**pipeline, deduplicate_by="version")
    wanted = [(0, "v6"), (1, "v4"), (2, "v5")]
    assert rows("last", "id, name") == wanted
    assert sorted(map(tuple, weft.read("last", source=lake).select("id", "name").collect())) == wanted


@pytest.mark.full
@WITH_LAKE
@pytest.mark.usefixtures("plain_spark", "streams")
def test_the_history_of_each_key(system: System, way: str, lakes: list[Any]) -> None:
    events = declare(id="int64", state="string")
    targets = [
        weft.Target(connection=each, table=(None, "states"), event_timestamp_column="_event_ts")
        for each in ("default", *lakes)
    ]
    pipeline: dict[str, Any] = {"name": "states", "source": events, "targets": targets, "mode": "scd2", "keys": ["id"]}
    for batch in (["a"], ["a", "b", "c"], [], ["c"]):
        for state in batch:
            weft.publish_sync(events, {"id": 1, "state": state})
        run_once(**pipeline, transform_sql="SELECT id, state, _event_ts FROM source")
    kept = rows("states", "state, valid_from, valid_to, is_current")
    assert [(state, bool(is_current)) for state, _, _, is_current in kept] == [("a", False), ("b", False), ("c", True)]
    # Each version ends when the next one begins.
    assert [until for _, _, until, _ in kept] == [*(began for _, began, _, _ in kept[1:]), None]
    for lake in lakes:
        history = weft.read("states", source=lake).orderBy("valid_from").collect()
        assert [(row.state, row.is_current) for row in history] == [("a", False), ("b", False), ("c", True)]


@pytest.mark.usefixtures("here")
def test_a_look_that_finds_nothing_is_no_commit(plain_spark: Any) -> None:
    """Spark reports it with the number of the batch that comes next; a stop must still wait for that batch's commit."""
    events = declare(n="int64")
    weft.publish_sync(events, {"n": 1})
    setting = "spark.sql.streaming.noDataProgressEventInterval"
    settings = plain_spark._jsparkSession.sharedState().conf()  # which the query's session takes over
    settings.set(setting, "100")
    query = Query(make(name="copy", source=events, target="default", target_table=(None, "copies")))
    try:
        query.start()
        wait_until(lambda: (query._query.lastProgress or {"batchId": 0})["batchId"] == 1, "a report of nothing")
        assert query._committed() == 0
    finally:
        settings.remove(setting)
        query.stop()
    query.wait()


@pytest.mark.brief("tasks-table")
@WITH_LAKE
@pytest.mark.usefixtures("plain_spark", "here")
def test_the_last_of_events_that_came_together(way: str, lakes: list[Any]) -> None:
    """Only their offsets tell: a table that has none gets them."""
    events = declare(id="int64", name="string")
    targets = [weft.Target(connection=each, table=(None, "last")) for each in ("default", *lakes)]
    pipeline: dict[str, Any] = {"name": "last", "source": events, "targets": targets, "mode": "merge", "keys": ["id"]}
    for names in (["z", "a"], ["b", "y", "c"]):
        weft.publish_sync(events, [{"id": 1, "name": name} for name in names])
        run_once(**pipeline, deduplicate_by="_weft_rowid")
        assert rows("last", "id, name") == [(1, names[-1])]
        for lake in lakes:
            assert weft.read("last", source=lake).select("name").collect()[0][0] == names[-1]


@pytest.mark.usefixtures("here")
def test_batches_are_bounded() -> None:
    events = declare(n="int64")
    weft.publish_sync(events, [{"n": n} for n in range(25)])
    source = weft.Source(query=events, max_rows=10)
    run_once(
        name="counts",
        source=source,
        target_table=(None, "counts"),
        transform_sql="SELECT count(*) AS n, max(n) AS highest FROM source",
    )
    assert rows("counts") == [(10, 19), (10, 9), (5, 24)]


@pytest.mark.brief("tasks")
@pytest.mark.usefixtures("here")
def test_several_sources_are_one_table(way: str) -> None:
    orders, refunds = declare("orders", id="int64", total="float64"), declare("refunds", id="int64", reason="string")
    weft.publish_sync(orders, [{"id": 1, "total": 2.5}, {"id": 2, "total": 3.5}])
    pipeline: dict[str, Any] = {"name": "all", "sources": [orders, refunds], "target_table": (None, "everything")}
    run_once(**pipeline)
    weft.publish_sync(refunds, {"id": 1, "reason": "late"})
    run_once(**pipeline)
    assert rows("everything", "id, total, reason") == [(1, 2.5, None), (1, None, "late"), (2, 3.5, None)]


@pytest.mark.brief("tasks")
@pytest.mark.usefixtures("here")
def test_a_batch_that_spark_forgot_is_not_applied_twice(way: str) -> None:
    """As after a crash between the target's commit and Spark's."""
    events = declare(n="int64")
    pipeline: dict[str, Any] = {
        "name": "copy",
        "source": events,
        "targets": [weft.Target(table=(None, "one")), weft.Target(table=(None, "two"))],
        "transform_sql": "SELECT n FROM source",
    }
    for number in range(2):
        weft.publish_sync(events, {"n": number})
        run_once(**pipeline)
        forget_last_commit("copy")
    run_once(**pipeline)
    assert rows("one") == rows("two") == [(0,), (1,)]


@pytest.mark.usefixtures("here")
def test_what_weft_adds_is_written_where_there_is_room() -> None:
    events = declare(n="int64")
    weft.publish_sync(events, {"n": 1})
    weft.load([{"n": 0, "_weft_rowid": 0}], target="offsets")
    run_once(name="offsets", source=events, target_table=(None, "offsets"))
    run_once(name="times", source=events, target_table=(None, "times"))
    assert rows("offsets") == [(0, 0), (1, 1)]
    assert set(_columns("times")) == {"n", "_event_ts"}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("policy", ["evolve", "ignore", "fail"])
def test_new_columns_follow_the_policy(policy: str) -> None:
    events = declare(n="int64")
    weft.load([{"n": 0}], target="table")
    weft.publish_sync(events, {"n": 1, "more": "x"})
    pipeline: dict[str, Any] = {"name": "drift", "source": events, "target_table": (None, "table")}
    if policy == "fail":
        with pytest.raises(LoadRefusedError, match="a column 'more' that the table does not have") as refused:
            run_once(**pipeline, on_drift=policy)
        assert refused.value.__notes__ == ["target table of drift, batch 0"]
        # Nothing is lost: once the table has it, the same batch goes in.
        run_once(**pipeline)
    else:
        run_once(**pipeline, on_drift=policy)
    assert rows("table") == ([(0,), (1,)] if policy == "ignore" else [(0, None), (1, "x")])


@pytest.mark.usefixtures("here")
def test_an_error_is_ours_and_the_batch_comes_again() -> None:
    events = declare(n="int64")
    weft.publish_sync(events, {"n": 1})
    pipeline: dict[str, Any] = {"name": "wrong", "source": events, "target_table": (None, "copies")}
    with pytest.raises(WeftError, match=r"understand transform_sql.*`m`"):
        run_once(**pipeline, transform_sql="SELECT m FROM source")
    failed = read_activity(Checkpoint("wrong"))
    assert failed is not None and "understand transform_sql" in failed["failure"]["error"]
    weft.publish_sync(events, {"n": 2})
    run_once(**pipeline, transform_sql="SELECT n FROM source")
    assert rows("copies") == [(1,), (2,)]
    done = read_activity(Checkpoint("wrong"))
    assert done is not None and done["failure"] is None


@pytest.mark.usefixtures("here")
def test_double_quotes_are_names_and_single_ones_texts() -> None:
    """As in the databases, and in the guide's SQL. To Spark by itself both are texts."""
    events = declare(strike="int64")
    weft.publish_sync(events, [{"strike": 4500}, {"strike": 4505}])
    pipeline: dict[str, Any] = {"name": "quotes", "source": events, "target_table": (None, "strikes")}
    with pytest.raises(DeclarationError, match='transform_sql has "call", which is not a column') as caught:
        run_once(**pipeline, transform_sql='SELECT strike, "call" AS side FROM source')
    assert str(caught.value.hint).endswith("a text is in single quotes: 'call'.")
    run_once(**pipeline, transform_sql="""SELECT "strike", "strike" + 1 AS "the next", 'strike' AS word FROM source""")
    assert rows("strikes") == [(4500, 4501, "strike"), (4505, 4506, "strike")]


@pytest.mark.full
def test_what_the_docs_say_of_the_sql(spark: Any) -> None:
    source = spark.createDataFrame([(2, "b"), (None, "c"), (1, "a")], "n int, Name string")
    (row,) = frames.transformed(
        source,
        r"""SELECT 7 / 2, 7 DIV 2, array(1, 2)[1], element_at(array(1, 2), 1), size(array_agg(n)),
            max(extract(dow FROM DATE'2026-11-15')), 'a\tb', r'a\tb', max("name"), approx_count_distinct(n),
            approx_percentile(n, 0.5), try_cast('x' AS INT), try_divide(1, 0) FROM source""",
    ).collect()
    assert list(row) == [3.5, 3, 2, 1, 2, 1, "a\tb", "a\\tb", "c", 2, 1, None, None]
    assert [each.n for each in frames.transformed(source, "SELECT n FROM source ORDER BY n").collect()] == [None, 1, 2]
    # A session of somebody else's is left as it was.
    assert spark.conf.get(QUOTED_NAMES) == "false"


@pytest.mark.timing
@pytest.mark.usefixtures("here")
def test_it_goes_on_until_it_is_stopped() -> None:
    events = declare(n="int64")
    pipeline = make(name="live", source=events, target="default", target_table=(None, "copies"))
    written = []
    query = Query(pipeline, written=written.append)
    query.start()
    try:
        with pytest.raises(BusyError, match="'live' runs already, as process"):
            Query(pipeline).start()
        for number in range(3):
            weft.publish_sync(events, {"n": number})
            wait_until(lambda number=number: len(written) > number, "the batch")
        assert not query.wait(0.01)
        publisher = threading.Thread(target=lambda: [weft.publish_sync(events, {"n": n}) for n in range(3, 100)])
        publisher.start()
    finally:
        query.stop()
    assert query.wait(60)
    publisher.join()
    done = len(rows("copies"))
    run_once(name="live", source=events, target_table=(None, "copies"))
    assert done <= 100 and rows("copies", "n") == sorted(((n,) for n in range(100)), key=repr)


@pytest.mark.full
@pytest.mark.usefixtures("here")
def test_where_a_new_checkpoint_begins() -> None:
    events = declare(n="int64")
    weft.publish_sync(events, [{"n": n} for n in range(3)])
    for start in ("latest", "earliest", "2"):
        run_once(name=f"from {start}", source=weft.Source(query=events, start=start), target_table=(None, f"t{start}"))
    weft.publish_sync(events, {"n": 3})
    for start, expected in (("latest", [3]), ("earliest", [0, 1, 2, 3]), ("2", [1, 2, 3])):
        run_once(name=f"from {start}", source=weft.Source(query=events, start=start), target_table=(None, f"t{start}"))
        assert rows(f"t{start}", "n") == [(n,) for n in expected]


@weft.table
class Users:
    id: Annotated[BigInt, weft.pk()]
    email: Annotated[Text | None, lower(), trim()]


@pytest.mark.brief("postgres-driver")
@pytest.mark.usefixtures("streams")
def test_a_declared_table(way: str) -> None:
    events = declare(id="int64", email="string", more="string")
    weft.publish_sync(events, [{"id": 1, "email": " A@B ", "more": "x"}, {"id": 2, "email": None, "more": None}])
    pipeline: dict[str, Any] = {"name": "users", "source": events, "target": Users, "mode": "merge"}
    run_once(**pipeline, on_drift="ignore")
    assert rows("users") == [(1, "a@b"), (2, None)]
    weft.publish_sync(events, {"id": 2, "email": "C"})
    with pytest.raises(LoadRefusedError, match="'more'"):
        run_once(**pipeline, on_drift="fail")
    run_once(**pipeline, on_drift="evolve")
    assert rows("users", "id, email") == [(1, "a@b"), (2, "c")]


@pytest.mark.usefixtures("here")
def test_a_stream_that_was_made_anew_is_told(project: Path) -> None:
    events = declare(n="int64")
    weft.publish_sync(events, [{"n": n} for n in range(5)])
    pipeline: dict[str, Any] = {"name": "copy", "source": events, "target_table": (None, "copies")}
    run_once(**pipeline)
    weft.streams.close()
    for each in (project / ".weft").glob("weft.db*"):
        each.unlink()
    weft.publish_sync(events, {"n": 1})
    with pytest.raises(WeftError, match="ends at offset 1, and was read up to 5"):
        run_once(**pipeline)


@pytest.mark.usefixtures("here")
def test_a_name_becomes_a_folder(project: Path) -> None:
    events = declare(n="int64")
    weft.publish_sync(events, {"n": 1})
    run_once(name="a b: é", source=events, target_table=(None, "copies"))
    (found,) = (each for each in (project / ".weft/checkpoints").iterdir() if each.is_dir())
    assert found.name == "a%20b%3A%20%C3%A9"
    assert json.loads((found / "metadata").read_text())["id"]


@pytest.mark.usefixtures("here")
def test_a_source_that_cannot_be_followed_is_refused() -> None:
    connection = weft.DuckDBConnection("other.duckdb", name="ducks")
    with pytest.raises(DeclarationError, match="cannot be the source of a streaming pipeline"):
        run_once(name="no", source=connection, source_query="ducks", target_table=(None, "copies"))


def _columns(table: str) -> list[str]:
    from weft.engine.load import open_tables
    from weft.project import current

    tables = open_tables(current().connection(None))
    try:
        return list(tables.describe(f"SELECT * FROM {tables.table(None, table)}").names)
    finally:
        tables.close()


@pytest.mark.brief("sqlite-0")
@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("kept", [0, 2])
def test_events_that_retention_removed_before_they_were_read(system: System, kept: int) -> None:
    """It ends with an error, whether some of them are left or none; begun anew, it reads what is there."""
    events = declare(n="int64")
    pipeline: dict[str, Any] = {"name": "copy", "source": events, "target_table": (None, "copies")}
    weft.publish_sync(events, {"n": 0})
    run_once(**pipeline)
    weft.publish_sync(events, [{"n": n} for n in range(1, 6)])
    weft.trim_sync(events, max_rows=kept)
    for _ in range(2):
        with pytest.raises(weft.EventsLostError, match=r"'events' lost up to .*\n.*weft checkpoints reset"):
            run_once(**pipeline)
    Checkpoint("copy").reset()
    run_once(**pipeline)
    assert rows("copies", "n") == [(n,) for n in (0, *range(6 - kept, 6))]


@pytest.mark.full
@pytest.mark.usefixtures("spark", "here")
def test_events_that_retention_removed_after_every_target_had_them(way: str, project: Path) -> None:
    """As after a crash between the targets' commits and Spark's: the batch needs them no more."""
    events = declare(n="int64")
    lake = weft.DeltaLocalConnection(str(project / "lake"), name="lake")
    folder = weft.ObjectStoreLocalConnection(str(project / "files"), name="folder", format="parquet")
    pipeline: dict[str, Any] = {
        "name": "copy",
        "source": events,
        "targets": [
            weft.Target(table=(None, "copies")),
            weft.Target(connection=lake, table=(None, "copies")),
            weft.Target(connection=folder, prefix="copies"),
        ],
        "transform_sql": "SELECT n FROM source",
    }
    for some in (range(1), range(1, 5)):
        weft.publish_sync(events, [{"n": n} for n in some])
        run_once(**pipeline)
    forget_last_commit("copy")
    weft.trim_sync(events, max_rows=2)
    weft.publish_sync(events, {"n": 5})
    run_once(**pipeline)
    wanted = [(n,) for n in range(6)]
    assert rows("copies") == wanted
    for connection in (lake, folder):
        assert sorted(map(tuple, weft.read("copies", source=connection).collect())) == wanted

    # Where one of them has not, they are lost; who begins anew shall know where rows would be twice.
    forget_last_commit("copy")
    weft.trim_sync(events, max_rows=0)
    targets = [*pipeline["targets"], weft.Target(table=(None, "others"))]
    with pytest.raises(WeftError, match="lost up to 1 events") as failure:
        run_once(**{**pipeline, "targets": targets})
    having = ", ".join(f"copies of {each.label}" for each in (current().connection(None), lake, folder))
    assert f"stored already in {having}: after a reset its rows would be there twice" in failure.value.__notes__


@pytest.mark.usefixtures("here")
def test_whoever_fails_to_hear_of_a_batch_does_not_fail_it(caplog: pytest.LogCaptureFixture) -> None:
    events, copies = declare(n="int64"), declare("copies", n="int64")
    weft.publish_sync(events, {"n": 0})

    def written(_: object) -> None:
        raise RuntimeError("It does not listen.")

    query = Query(make(name="copy", source=events, targets=[weft.Target(stream=copies)]), once=True, written=written)
    query.start()
    assert query.wait(120)
    assert [each["n"] for each in drain(copies)] == [0]
    assert "could not report batch 0" in caplog.text
