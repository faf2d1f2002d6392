"""Columns that come to a source later, under each policy, in every target that Spark writes itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import weft
from engine.streaming.conftest import declare, open_lake, run_once
from weft.errors import BusyError, LoadRefusedError
from weft.systems.load import Declared, Load
from weft.systems.objects.target import FileTarget

pytestmark = pytest.mark.usefixtures("spark", "here")

Place = Callable[[str], tuple[Any, Any]]

# Columnar formats take the same way, and so do folders and buckets.


@pytest.fixture(params=["local"])
def place(request: pytest.FixtureRequest) -> Place:
    """`place(kind)` is a connection and a target in it: of Delta, or of files of a format."""
    lake = open_lake(request, request.param)

    def make(kind: str) -> tuple[Any, Any]:
        if kind == "delta":
            tables = lake("delta")
            return tables, weft.Target(connection=tables, table=(None, "copies"))
        files = lake(format=kind)
        return files, weft.Target(connection=files, prefix="copies")

    return make


def stored(lake: Any, *columns: str) -> list[tuple[Any, ...]]:
    found = weft.read("copies", source=lake)
    return sorted(map(tuple, found.select(*columns).collect()), key=repr)


@pytest.mark.brief("local-parquet")
@pytest.mark.parametrize(
    ("place", "kind"),
    [
        *(("local", kind) for kind in ("delta", "parquet", "csv", "json_lines", "orc")),
        *(("s3", kind) for kind in ("delta", "parquet", "csv")),
    ],
    indirect=["place"],
)
def test_a_new_column_is_added(kind: str, place: Place) -> None:
    """Rows before it have a null there, and so have rows that come without it later."""
    events = declare(n="int64")
    lake, target = place(kind)
    pipeline: dict[str, Any] = {"name": "copies", "source": events, "targets": [target]}
    weft.publish_sync(events, {"n": 1})
    run_once(**pipeline)
    before = weft.read("copies", source=lake).columns
    weft.publish_sync(events, [{"n": 2, "more": "x"}, {"n": 3}])
    run_once(**pipeline)
    weft.publish_sync(events, {"n": 4, "most": 4.5})
    run_once(**pipeline)
    assert weft.read("copies", source=lake).columns == [*before, "more", "most"]
    assert stored(lake, "n", "more", "most") == [
        (1, None, None),
        (2, "x", None),
        (3, None, None),
        (4, None, 4.5),
    ]
    run_once(**pipeline)
    assert len(stored(lake, "n")) == 4


@pytest.mark.full
@pytest.mark.parametrize("kind", ["delta", "csv"])
def test_a_new_column_that_is_not_wanted(kind: str, place: Place) -> None:
    """What fails loses nothing: under another policy the same batch is written."""
    events = declare(n="int64")
    lake, target = place(kind)
    pipeline: dict[str, Any] = {"name": "copies", "source": events, "targets": [target]}
    weft.publish_sync(events, {"n": 1})
    run_once(**pipeline)
    weft.publish_sync(events, [{"n": 2, "more": "x"}])
    with pytest.raises(LoadRefusedError, match="has a column 'more' that the table does not have"):
        run_once(**pipeline, on_drift="fail")
    run_once(**pipeline, on_drift="ignore")
    assert "more" not in weft.read("copies", source=lake).columns
    assert stored(lake, "n") == [(1,), (2,)]
    weft.publish_sync(events, [{"n": 3, "more": "y"}])
    run_once(**pipeline, on_drift="evolve")
    assert stored(lake, "n", "more") == [(1, None), (2, None), (3, "y")]


@pytest.mark.full
def test_a_merge_into_delta_with_new_columns(place: Place) -> None:
    events = declare(id="int64", name="string")
    lake, _ = place("delta")
    target = weft.Target(connection=lake, table=(None, "copies"), mode="merge", primary_key=["id"])
    pipeline: dict[str, Any] = {"name": "copies", "source": events, "targets": [target]}
    weft.publish_sync(events, [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}])
    run_once(**pipeline)
    weft.publish_sync(events, [{"id": 2, "name": "b", "city": "Ulm"}, {"id": 3, "name": "c", "city": None}])
    run_once(**pipeline)
    assert stored(lake, "id", "name", "city") == [(1, "a", None), (2, "b", "Ulm"), (3, "c", None)]


@pytest.mark.full
def test_many_loads_with_narrow_files(project: Path) -> None:
    """The log of a table of CSV knows which files came before a column, also where only its last entries are kept."""
    lake = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake", format="csv", csv_header=False)
    events = declare(n="int64")
    target = weft.Target(connection=lake, prefix="copies")
    pipeline: dict[str, Any] = {
        "name": "copies",
        "source": weft.Source(query=events, max_rows=1),
        "targets": [target],
        "transform_sql": "SELECT n FROM source",
    }
    weft.publish_sync(events, [{"n": n} for n in range(5)])
    run_once(**pipeline)
    pipeline["transform_sql"] = "SELECT n, concat('x', n) AS more FROM source"
    weft.publish_sync(events, [{"n": n} for n in range(5, 30)])
    run_once(**pipeline)
    found = stored(lake, "n", "more")
    assert sorted(found) == [(n, None if n < 5 else f"x{n}") for n in range(30)]


@pytest.mark.brief("local-parquet")
@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_what_is_refused(kind: str, place: Place) -> None:
    """A type that the table cannot hold, and a name that differs in capitals alone. Neither loses the batch."""
    events = declare(n="int64", v="float64")
    lake, target = place(kind)
    pipeline: dict[str, Any] = {"name": "copies", "source": events, "targets": [target]}
    sql = "SELECT n, CAST(v AS {}) AS {} FROM source"
    weft.publish_sync(events, {"n": 1, "v": 1.0})
    run_once(**pipeline, transform_sql=sql.format("INT", "v"))
    weft.publish_sync(events, {"n": 2, "v": 2.5})
    with pytest.raises(LoadRefusedError, match="The column 'v' of copies is int, and double in the source"):
        run_once(**pipeline, transform_sql=sql.format("DOUBLE", "v"))
    with pytest.raises(LoadRefusedError, match=r"no column 'V'.*\n.*Did you mean 'v'"):
        run_once(**pipeline, transform_sql=sql.format("INT", "V"))
    # Whatever the types are called: a value that fits is stored.
    run_once(**pipeline, transform_sql=sql.format("BIGINT", "v"))
    assert stored(lake, "n", "v") == [(1, 1), (2, 2)]


@contextmanager
def at(step: str, action: Callable[[], None]) -> Iterator[None]:
    """Do something once, when a load has come to this step."""
    log, done = logging.getLogger("weft.commit"), []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == step and not done:
                done.append(step)
                action()

    handler, level = Handler(), log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert done


@pytest.mark.full
def test_a_crash_between_a_column_and_its_rows(place: Place) -> None:
    events = declare(n="int64")
    lake, target = place("delta")
    pipeline: dict[str, Any] = {"name": "copies", "source": events, "targets": [target]}
    weft.publish_sync(events, {"n": 1})
    run_once(**pipeline)
    weft.publish_sync(events, {"n": 2, "more": "x"})

    def crash() -> None:
        raise RuntimeError("as if killed")

    with at("altered", crash), pytest.raises(RuntimeError, match="as if killed"):
        run_once(**pipeline)
    assert stored(lake, "n", "more") == [(1, None)]
    run_once(**pipeline)
    assert stored(lake, "n", "more") == [(1, None), (2, "x")]


def test_another_load_gave_the_table_a_column_meanwhile(spark: Any, place: Place) -> None:
    """Its column is not forgotten by what began before."""
    lake, _ = place("parquet")

    def write(sql: str) -> None:
        load = replace(Load.declare(target="copies"), declared=Declared(on_drift="evolve"))
        FileTarget(lake).write(spark.sql(sql), load, spark)

    write("SELECT 1 AS n")
    with at("staged", lambda: write("SELECT 2 AS n, 'x' AS more")), pytest.raises(BusyError, match="got other columns"):
        write("SELECT 3 AS n")
    assert stored(lake, "n", "more") == [(1, None), (2, "x")]
    write("SELECT 3 AS n")
    assert stored(lake, "n", "more") == [(1, None), (2, "x"), (3, None)]
