"""Files and Delta tables as sources and targets: each file once, whatever its name."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import weft
from engine.streaming.conftest import declare, open_lake, rows, run_once
from weft.engine.frames import transformed
from weft.engine.streaming.spark_engine import SparkEngine
from weft.engine.streaming.transform import Transform
from weft.errors import NotFoundError
from weft.operate.listener import RunListener
from weft.operate.run_options import Running
from weft.operate.supervisor import supervise
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.execution import Report
from weft.spark_support.sessions import FILE_METADATA, moved_to, references
from weft.systems.objects.file_stream import read_files
from weft.systems.objects.stream_source import FileSource

pytestmark = pytest.mark.usefixtures("spark", "here")

# How files are found differs between a folder and a bucket. How they are read and written does not.


@pytest.fixture(params=["local", "s3"])
def lake(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`lake(**options)` is a connection to one folder or bucket."""
    return open_lake(request, request.param)


def put(connection: Any, name: str, text: str | bytes) -> None:
    """Write a file with another hand than ours."""
    data = text.encode() if isinstance(text, str) else text
    if isinstance(connection, weft.ObjectStoreLocalConnection):
        path = Path(connection.path) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return
    from pyarrow import fs

    at = connection.endpoint.partition("://")[2]
    files = fs.S3FileSystem(
        endpoint_override=at,
        scheme="http",
        access_key=connection.access_key_id,
        secret_key=connection.secret_access_key,
        region="us-east-1",
    )
    with files.open_output_stream(f"{connection.bucket}/{name}", compression=None) as file:
        file.write(data)


def run_files(source: Any, **declared: Any) -> None:
    """Read what has come under `raw` into the table `rows`."""
    run_once(**{"name": "files", "source": source, "source_query": "raw", "target_table": (None, "rows"), **declared})


@pytest.mark.parametrize("on_error", ["fail", "dlq"])
@pytest.mark.parametrize("target", ["table", "two tables", "stream", "files"])
@pytest.mark.parametrize("source", ["json", "parquet", "delta"])
@pytest.mark.brief("json-two tables-fail")
def test_rows_are_counted_before_the_sql(source: str, target: str, on_error: str, project: Path) -> None:
    lake = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake")
    out = weft.ObjectStoreLocalConnection(str(project / "out"), name="out", format="parquet")
    inbox: Any = lake
    table = pa.table({"n": list(range(10)), "text": [*map(str, range(9)), "bad"]})
    if source == "delta":
        inbox = weft.DeltaLocalConnection(str(project / "delta"), name="delta")
        weft.load(table, target="raw", connection=inbox, mode="append")
    elif source == "parquet":
        Path("lake/raw").mkdir(parents=True)
        pq.write_table(table, "lake/raw/a.parquet")
    else:
        put(lake, "raw/a.jsonl", "".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    number = "CAST(source.text AS INT)" if on_error == "dlq" else "source.n"
    one = weft.Target(table=(None, "rows"))
    targets = {
        "table": [one],
        "two tables": [one, weft.Target(table=(None, "more"))],
        "stream": [weft.Target(stream=weft.stream(name="out")(lambda: None))],
        "files": [weft.Target(connection=out, prefix="rows")],
    }
    # A table that is named twice is read twice, and counted once.
    joined = " JOIN source AS other ON source.n = other.n" if target == "two tables" else ""
    reports: list[Report] = []
    listener = RunListener()
    listener.batch = reports.append  # type: ignore[method-assign]
    pipeline = make(
        name="files",
        source=inbox,
        source_query="raw",
        targets=targets[target],
        transform_sql=f"SELECT {number} AS n FROM source{joined} WHERE source.n > 6",
        transform_on_error=on_error,
        **({"dead_letter_path": "failed"} if on_error == "dlq" else {}),
    )
    supervise(SparkEngine(pipeline), Running(once=True), [listener])
    (report,) = reports
    assert report.consumed == 10
    assert set(report.written.values()) == {2 if on_error == "dlq" else 3}


@pytest.mark.full
def test_each_file_is_read_once_whatever_its_name(lake: Callable[..., Any]) -> None:
    source = lake()
    put(source, "raw/2026/m.csv", "id,v\n1,1.5\n2,2.5\n")
    put(source, "raw/n.jsonl", '{"id": 3, "w": "x"}\n')
    run_files(source, source_query="raw/")
    assert rows("rows", "id, v, w") == [(1, 1.5, None), (2, 2.5, None), (3, None, "x")]
    # Later, and with a name before the others.
    put(source, "raw/2026/a.csv", "id,v\n0,0.5\n")
    run_files(source, source_query="raw/")
    run_files(source, source_query="raw/")
    assert rows("rows", "id") == [(0,), (1,), (2,), (3,)]
    assert all(moment is not None for (moment,) in rows("rows", "_event_ts"))


def test_few_files_a_batch(project: Path) -> None:
    source = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake")
    for number in range(5):
        put(source, f"raw/{number}.csv", f"id\n{number}\n")
    run_once(
        name="files",
        source=weft.Source(connection=source, query="raw", max_files=2),
        target_table=(None, "counts"),
        transform_sql="SELECT count(*) AS n FROM source",
    )
    assert rows("counts", "n") == [(1,), (2,), (2,)]


@pytest.mark.full
def test_files_are_dated_where_the_sql_asks_for_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's readers of texts are a third faster without. What SQL asks for may change with the columns."""
    plans = []

    def carried(self: Transform, made: Any, *arguments: Any, **options: Any) -> Any:
        plans.append(made._jdf.queryExecution().executedPlan().toString())
        return carry(self, made, *arguments, **options)

    carry = Transform._materialized
    monkeypatch.setattr(Transform, "_materialized", carried)
    source = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake")
    heads = {"0": "id,a", "1": "id,a", "2": "id,a", "3": "id,a,b", "4": "id,a,b"}
    for name, head in heads.items():
        put(source, f"raw/{name}.csv", f"{head}\n{','.join(['1'] * len(head.split(',')))}\n")
        os.utime(project / "lake" / "raw" / f"{name}.csv", (int(name), int(name)))

    def run(name: str, sql: str) -> list[bool]:
        plans.clear()
        run_once(
            name=name,
            source=weft.Source(connection=source, query="raw", max_files=1),
            target_table=(None, name),
            transform_sql=sql,
        )
        return ["file_modification_time" in plan for plan in plans]

    # It is seen of the first batch, and again where there are other columns.
    assert run("ids", "SELECT id FROM source") == [True, False, False, True, False]
    assert rows("ids") == [(1,)] * 5
    assert run("dated", "SELECT id, _event_ts FROM source") == [True] * 5
    assert sorted(moment.timestamp() for (moment,) in rows("dated", "_event_ts")) == [0, 1, 2, 3, 4]


@pytest.mark.brief(
    "SELECT id, name FROM source NATURAL JOIN names-False",
    "SELECT * FROM source-True",
    "SELECT id FROM source WHERE EXISTS (SELECT 1 FROM names WHERE name < source._event_ts)-True",
    "SELECT id, `1` FROM source PIVOT (count(*) FOR a IN (1))-True",
)
@pytest.mark.parametrize(
    ("sql", "is_asked"),
    [
        ("SELECT id FROM source", False),
        ("SELECT count(*) AS n FROM source", False),
        ("SELECT id FROM (SELECT *, year(_event_ts) AS y FROM source) WHERE a > 0", False),
        ("SELECT source.id, l.name FROM source JOIN names AS l ON l.id = source.id", False),
        ("SELECT id, name FROM source NATURAL JOIN names", False),
        ("SELECT id, name FROM source NATURAL JOIN moments", True),
        ("SELECT * FROM source", True),
        ("TABLE source", True),
        ("FROM source |> WHERE a > 0", True),
        ("SELECT id, `_EVENT_TS` FROM source", True),
        ("SELECT id FROM source WHERE _event_ts > '2026-01-01'", True),
        ("SELECT id FROM source WHERE a = (SELECT count(DISTINCT _event_ts) FROM source)", True),
        ("SELECT id FROM source WHERE EXISTS (SELECT 1 FROM names WHERE name < source._event_ts)", True),
        ("WITH s AS (SELECT max(_event_ts) AS t FROM source) SELECT id FROM names, s WHERE name < t", True),
        ("SELECT id, row_number() OVER (PARTITION BY id ORDER BY _event_ts) AS n FROM source", True),
        ("SELECT id, `1` FROM source PIVOT (count(*) FOR a IN (1))", True),
        ("SELECT struct(*).id AS id, to_json(struct(*)) AS j FROM source", True),
    ],
)
def test_what_sql_asks_for(sql: str, is_asked: bool, project: Path, spark: Any) -> None:
    """Also where it does not name the column, or names it and does not need it."""
    source = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake")
    put(source, "raw/a.csv", "id,a\n1,1\n")
    path = (project / "lake/raw/a.csv").as_uri()
    dated = read_files(spark, source, "raw", [path], {})
    assert dated is not None
    session = spark.newSession()
    names = "SELECT 1 AS id, timestamp '2026-01-01' AS name"
    session.sql(names).createOrReplaceTempView("names")
    session.sql(f"SELECT *, name AS _event_ts FROM ({names})").createOrReplaceTempView("moments")
    made = transformed(moved_to(dated(True), session), sql)
    assert references(made, FILE_METADATA) is is_asked


@pytest.mark.brief("local")
def test_files_of_one_batch_need_not_be_alike(lake: Callable[..., Any]) -> None:
    """Other columns, in another order, packed otherwise: each is read by its own header, and none loses a column."""
    source = lake()
    put(source, "raw/a.csv", "id,name\n1,x\n")
    put(source, "raw/b.csv.gz", gzip.compress(b"name,id\ny,2\n"))
    put(source, "raw/c.csv.bz2", bz2.compress(b"id,name,more\n3,z,m\n"))
    put(
        source,
        "raw/d.jsonl.zst",
        pa.compress(b'{"id": 4}\n' * 2000 + b'{"id": 5, "late": true}\n', "zstd", asbytes=True),
    )
    for number, columns in enumerate([{"id": [6]}, {"id": [2**40], "more": ["n"]}]):
        types = pa.schema([("id", pa.int64() if number else pa.int32()), *([("more", pa.string())] if number else [])])
        sink = io.BytesIO()
        pq.write_table(pa.table(columns, types), sink)
        put(source, f"raw/{number}.parquet", sink.getvalue())
    run_files(source, transform_sql="SELECT DISTINCT id, name, more, late FROM source")
    assert rows("rows", "id, name, more, late") == [
        (1, "x", None, None),
        (1099511627776, None, "n", None),
        (2, "y", None, None),
        (3, "z", "m", None),
        (4, None, None, None),
        (5, None, None, True),
        (6, None, None, None),
    ]


@pytest.mark.brief("local")
def test_folders_of_partitions_are_columns(lake: Callable[..., Any]) -> None:
    source = lake()
    put(source, "raw/year=2025/month=12/a.csv", "id\n1\n")
    put(source, "raw/year=2026/month=1/b.jsonl", '{"id": 2}\n')
    put(source, "raw/c.csv", "id\n3\n")
    run_files(source)
    assert rows("rows", "id, year, month") == [(1, 2025, 12), (2, 2026, 1), (3, None, None)]


@pytest.mark.full
def test_types_last(project: Path) -> None:
    """What was a text remains one, whatever it looks like later, and a column of nulls has no type before its first
    value."""
    source = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake")
    sql = "SELECT id, code, n FROM source"
    for name, text in {"a": "id,code,n\n1,A1,\n", "b": "id,code,n\n2,007,5\n", "c": "id,code,n\n3,,\n"}.items():
        put(source, f"raw/{name}.csv", text)
        run_files(source, transform_sql=sql)
    put(source, "raw/d.csv", "id,code,n\n")  # a header and no row
    run_files(source, transform_sql=sql)
    assert rows("rows", "id, code, n") == [(1, "A1", None), (2, "007", 5), (3, None, None)]


@pytest.mark.full
def test_a_column_in_capitals_is_the_same_one(project: Path) -> None:
    source = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake")
    for name, text in {"a": "id,V\n1,2\n", "b": "ID,v\n2,3\n", "c": "id\n3\n", "d": "Id,V\n4,\n"}.items():
        put(source, f"raw/{name}.csv", text)
        run_files(source, transform_sql="SELECT id, v FROM source")
    assert rows("rows", "id, v") == [(1, 2), (2, 3), (3, None), (4, None)]


def test_what_is_not_there_yet_or_any_more(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Hidden names and those of files that are being written are passed by, and read once they have their own. So are
    empty files, those that are gone when they are read, and those that were read before, whatever is in them now."""
    source = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake")
    hidden = ["_a.csv", ".b.csv", "_folder/c.csv", "d.csv.tmp", "e.csv._COPYING_"]
    for number, name in enumerate([*hidden, "ok 100%25.csv", "gone 100%25.csv"]):
        put(source, f"raw/{name}", f"id\n{number}\n")
    for name in ("empty.csv", "empty.json", "empty.parquet"):
        put(source, f"raw/{name}", "")
    take = FileSource.take

    def take_late(origin: FileSource, frame: Any) -> Any:
        """As if the process had been down between the plan of the batch and the batch."""
        (project / "lake/raw/gone 100%25.csv").unlink(missing_ok=True)
        return take(origin, frame)

    monkeypatch.setattr(FileSource, "take", take_late)
    run_files(source)
    assert rows("rows", "id") == [(5,)]
    told = [each.getMessage() for each in caplog.records if "was gone" in each.getMessage()]
    assert told == [f"{project}/lake/raw/gone 100%25.csv was gone when it was to be read: it is skipped"]
    for name in hidden:
        (project / "lake/raw" / name).rename(project / "lake/raw" / f"{hidden.index(name)}.csv")
    put(source, "raw/ok 100%25.csv", "id\n50\n")
    run_files(source)
    assert rows("rows", "id") == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert sum("was gone" in each.getMessage() for each in caplog.records) == 1


def test_a_folder_that_is_not_there(lake: Callable[..., Any]) -> None:
    with pytest.raises(NotFoundError, match=r"There is nothing at .*/raw\.\n.*Make the folder"):
        run_files(lake())


@pytest.mark.full
def test_how_files_of_a_target_are_written(lake: Callable[..., Any]) -> None:
    """Each option of the guide, as the bytes of the files show it."""
    events = declare(n="int64", text="string")
    plain, csv = lake(format="parquet"), lake(format="csv")
    compressions = ["snappy", "gzip", "zstd", "uncompressed"]
    dialect: dict[str, Any] = {
        "csv_delimiter": ";",
        "csv_header": False,
        "csv_quote": "'",
        "csv_escape": "\\",
        "csv_null_value": "\\N",
    }
    weft.publish_sync(events, [{"n": 1, "text": "it's; so"}, {"n": 2, "text": None}, {"n": 3, "text": ""}])
    run_once(
        name="files",
        source=events,
        targets=[
            *(weft.Target(connection=plain, prefix=each, parquet_compression=each) for each in compressions),
            weft.Target(connection=csv, prefix="default"),
            weft.Target(connection=csv, prefix="dialect", **dialect),
        ],
        transform_sql="SELECT n, text FROM source",
    )
    for each in compressions:
        (data,) = contents(plain, each)
        found = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(0).compression
        assert found.lower() == each
    assert set(b"".join(contents(csv, "default")).splitlines()) == {b"n,text", b"1,it's; so", b"2,", b'3,""'}
    lines = sorted(b"".join(contents(csv, "dialect")).splitlines())
    assert lines == [b"1;'it\\'s; so'", b"2;\\N", b"3;''"]
    read = lake(format="csv", **dialect)
    found = weft.read("dialect", source=read)
    assert sorted(map(tuple, found.collect())) == [(1, "it's; so"), (2, None), (3, "")]


@pytest.mark.full
def test_keys_that_begin_as_ours(project: Path) -> None:
    source = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake", format="json_lines")
    put(source, "raw/a", '{"n": 1, "_weft_bad": "x"}\n')
    run_files(source, transform_sql="SELECT n, _weft_bad AS bad FROM source")
    assert rows("rows", "n, bad") == [(1, "x")]


@pytest.mark.full
def test_how_files_of_a_source_are_read(lake: Callable[..., Any]) -> None:
    source = lake(format="csv")
    put(source, "raw/a", "# said by hand\n1;'x;y';NA\n2;'it\\'s';5\n3;NULL\n")
    options = {
        "has_header": False,
        "delimiter": ";",
        "quote": "'",
        "escape": "\\",
        "comment": "#",
        "null_regex": "^(NA|NULL)$",
        "truncated_rows_ok": True,
        "schema_infer_max_records": 2,
    }
    run_once(
        name="files",
        source=weft.Source(connection=source, query="raw", csv_read_options=options),
        target_table=(None, "rows"),
    )
    assert rows("rows", "_c0, _c1, _c2") == [(1, "x;y", None), (2, "it's", 5), (3, None, None)]


def contents(connection: Any, folder: str) -> list[bytes]:
    """What is in the files of a folder, seen by another hand than ours."""
    if isinstance(connection, weft.ObjectStoreLocalConnection):
        found = sorted((Path(connection.path) / folder).iterdir())
        return [each.read_bytes() for each in found if each.name[0] not in "._"]
    from pyarrow import fs

    store = connection.filesystem()
    infos = store.get_file_info(fs.FileSelector(f"{connection.bucket}/{folder}"))
    return [store.open_input_stream(each.path).read() for each in sorted(infos, key=lambda each: each.path)]


@pytest.mark.full
def test_a_stream_becomes_files_and_a_delta_table(lake: Callable[..., Any], project: Path) -> None:
    events = declare(n="int64", name="string")
    archive = lake(format="parquet")
    delta = weft.DeltaLocalConnection(str(project / "delta"), name="delta")
    pipeline: dict[str, Any] = {
        "name": "archive",
        "source": events,
        "targets": [
            weft.Target(connection=archive, prefix="events/raw", parquet_compression="zstd"),
            weft.Target(connection=delta, table=(None, "events"), mode="merge", primary_key=["n"]),
        ],
    }
    weft.publish_sync(events, [{"n": n, "name": "a"} for n in range(3)])
    run_once(**pipeline)
    weft.publish_sync(events, [{"n": 2, "name": "b"}])
    run_once(**pipeline)
    files = weft.read("events/raw", source=archive)
    assert sorted(map(tuple, files.select("n", "name").collect())) == [(0, "a"), (1, "a"), (2, "a"), (2, "b")]
    table = weft.read("events", source=delta)
    assert sorted(map(tuple, table.select("n", "name").collect())) == [(0, "a"), (1, "a"), (2, "b")]


@pytest.mark.brief("files")
@pytest.mark.parametrize("kind", ["delta", "files"])
def test_what_weft_adds_is_left_out_where_there_is_no_column_for_it(kind: str, project: Path) -> None:
    events = declare(n="int64")
    lake: Any = weft.DeltaLocalConnection(str(project / "lake"), name="lake")
    target = weft.Target(connection=lake, table=(None, "copies"))
    if kind == "files":
        lake = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake", format="parquet")
        target = weft.Target(connection=lake, prefix="copies")
    weft.load([{"n": 0}], target="copies", connection=lake)
    weft.publish_sync(events, {"n": 1})
    run_once(name="copies", source=events, targets=[target])
    found = weft.read("copies", source=lake)
    assert found.columns == ["n"]
    assert sorted(map(tuple, found.collect())) == [(0,), (1,)]


@pytest.mark.full
def test_a_delta_table_is_followed(project: Path) -> None:
    delta = weft.DeltaLocalConnection(str(project / "delta"), name="delta")
    weft.load([{"id": 1}, {"id": 2}], target="orders", connection=delta)
    pipeline: dict[str, Any] = {
        "name": "orders",
        "source": delta,
        "source_query": "orders",
        "target_table": (None, "copies"),
    }
    run_once(**pipeline)
    weft.load([{"id": 3}], target="orders", connection=delta)
    run_once(**pipeline)
    assert rows("copies", "id") == [(1,), (2,), (3,)]


@pytest.mark.parametrize("is_windowed", [False, True])
def test_lines_with_a_key_twice_are_bad_by_themselves(is_windowed: bool) -> None:
    lake = weft.ObjectStoreLocalConnection("lake", name="lake", format="json_lines")
    twice = [
        '{"id": 3, "v": 1, "v": 2}',
        '{"id": 3, "v": 1, "v": "x"}',
        '{"id": 3, "new": {"a": 1}, "new": 2}',
        '{"id": 3, "v": 1, "\\u0076": 2}',
        '{"id": 3, "v": 1, "V": 2}',
        '{"id": 3, "o": {"x": 1, "x": {"y": 2}}}',
        '{"id": 3, "l": [{"x": [[{"y": 1, "y": 1}]]}]}',
        '[{"id": 3, "id": 4}]',
    ]
    good = ['{"id": 1, "v": 5, "o": {"x": 1}, "l": []}', '{"id": 2, "v": 6}']
    put(lake, "in/a.jsonl", "\n".join([good[0], *twice[:4]]))
    put(lake, "in/b.jsonl", "\n".join([*twice[4:], good[1]]))
    declared: dict[str, Any] = {"target": "default", "target_table": "copies"}
    if is_windowed:
        declared["window"] = weft.Window(
            kind="tumbling", duration_ms=1000, aggregations=[weft.Aggregation(agg="count", as_="n")], group_by=("id",)
        )
        declared["watermark"] = weft.Watermark(lateness_ms=0)
    run_once(name="copies", source=lake, source_query="in", dead_letter_table="letters", **declared)
    if not is_windowed:
        assert rows("copies", "id, v") == [(1, 5), (2, 6)]
    assert sorted(payload for (payload,) in rows("letters", "payload")) == sorted(twice)
