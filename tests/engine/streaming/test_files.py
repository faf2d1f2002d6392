"""Files and Delta tables as sources and targets: each file once, whatever its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weft
from conftest import S3
from engine.streaming.conftest import declare, rows, run_once
from weft.errors import LoadRefusedError

pytestmark = pytest.mark.usefixtures("spark", "here")


@pytest.fixture(params=["local", "s3"])
def lake(request: pytest.FixtureRequest, project: Path) -> Callable[..., Any]:
    """`lake(**options)` is a connection to one folder or bucket."""
    if request.param == "local":
        return lambda **options: weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake", **options)
    s3: S3 = request.getfixturevalue("s3")
    fields = s3.fields()
    return lambda **options: weft.ObjectStoreS3Connection(name="lake", **fields, **options)


def put(connection: Any, name: str, text: str) -> None:
    """Write a file with another hand than ours."""
    if isinstance(connection, weft.ObjectStoreLocalConnection):
        path = Path(connection.path) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
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
    with files.open_output_stream(f"{connection.bucket}/{name}") as file:
        file.write(text.encode())


def test_each_file_is_read_once_whatever_its_name(lake: Callable[..., Any]) -> None:
    source = lake()
    put(source, "raw/2026/m.csv", "id,v\n1,1.5\n2,2.5\n")
    put(source, "raw/n.jsonl", '{"id": 3, "w": "x"}\n')
    pipeline: dict[str, Any] = {
        "name": "files",
        "source": source,
        "source_query": "raw/",
        "target_table": (None, "rows"),
    }
    run_once(**pipeline)
    assert rows("rows", "id, v, w") == [(1, 1.5, None), (2, 2.5, None), (3, None, "x")]
    # Later, and with a name before the others.
    put(source, "raw/2026/a.csv", "id,v\n0,0.5\n")
    run_once(**pipeline)
    run_once(**pipeline)
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


@pytest.mark.parametrize("kind", ["delta", "files"])
def test_columns_that_are_not_there(kind: str, project: Path) -> None:
    """What Weft adds is left out; what is new is an error, which loses nothing."""
    events = declare(n="int64")
    lake: Any = weft.DeltaLocalConnection(str(project / "lake"), name="lake")
    target = weft.Target(connection=lake, table=(None, "copies"))
    if kind == "files":
        lake = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake", format="parquet")
        target = weft.Target(connection=lake, prefix="copies")
    weft.load([{"n": 0}], target="copies", connection=lake)
    pipeline: dict[str, Any] = {"name": "copies", "source": events, "targets": [target]}
    weft.publish_sync(events, {"n": 1})
    run_once(**pipeline)
    weft.publish_sync(events, {"n": 2, "more": "x"})
    with pytest.raises(LoadRefusedError, match="no column 'more'"):
        run_once(**pipeline)
    run_once(**pipeline, on_drift="ignore")
    found = weft.read("copies", source=lake)
    assert found.columns == ["n"]
    assert sorted(map(tuple, found.collect())) == [(0,), (1,), (2,)]


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
