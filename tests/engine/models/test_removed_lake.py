"""Models in Delta and files that are not declared any more: `weft plan` finds and counts them, without Spark."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import weft
from weft.engine.models.inputs import Observer
from weft.engine.models.lake import WRITER
from weft.engine.models.planning import PlannedStep, drop, make_plan
from weft.engine.models.state import State
from weft.engine.models.survey import Survey
from weft.project import current
from weft.systems.delta.table import writer
from weft.systems.load import Load

STATE = msgspec.json.encode(State(build="b", fingerprint="f", materialise="incremental")).decode()
COLUMNS = json.dumps({"type": "struct", "fields": []})
KINDS = {"delta": "delta_local", "files": "object_store_local"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, project: Path) -> str:
    weft.connect(kind=KINDS[request.param], path=str(project / "lake"), name="lake")
    return str(request.param)


def write(file: Path, *lines: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))


def commit(table: Path, number: int, *actions: dict[str, Any]) -> None:
    """Write a commit of a Delta table."""
    write(table / "_delta_log" / f"{number:020}.json", *actions)


def added(name: str, rows: int | None, deleted: int = 0) -> dict[str, Any]:
    vector = {"deletionVector": {"pathOrInlineDv": f"v{deleted}", "offset": 1, "cardinality": deleted}}
    stats = {} if rows is None else {"stats": json.dumps({"numRecords": rows})}
    return {"add": {"path": name, **stats, **(vector if deleted else {})}}


def built(kind: str, root: Path, name: str, rows: int, *, by: str | None = None) -> None:
    """Write what the build of a model leaves."""
    table = root / name
    load = Load(table=table.name, pipeline=by or table.name, checkpoint_id=WRITER, moment=Any)  # type: ignore[arg-type]
    if kind == "delta":
        info = {"timestamp": 1_700_000_000_000, "userMetadata": json.dumps({"weft": "x", "state": STATE})}
        mark = {"txn": {"appId": writer(load), "version": 0}}
        commit(table, 0, {"commitInfo": info}, {"metaData": {"schemaString": COLUMNS}}, mark, added("a.parquet", rows))
        write(table / "a.parquet", "rows")
        return
    log = table.parent / "_weft" / table.name / "log"
    entry = {
        "version": 1,
        "mode": "append",
        "format": "parquet",
        "dialect": {},
        "schema": COLUMNS,
        "stored": STATE,
        "writer": json.dumps([load.pipeline, WRITER]),
        "batch": 0,
        "at": "2026-01-01T00:00:00+00:00",
        "files": {"0.parquet": "a.parquet"},
        "rows": rows,
        "removes": [],
        "staging": "s",
    }
    write(log / f"{1:020}.json", entry)
    write(log / f"{1:020}.done")
    write(table / "a.parquet", "rows")


def plan() -> list[PlannedStep]:
    with Observer() as observer:
        return make_plan(Survey(observer))


def dropped(step: PlannedStep) -> None:
    with Observer() as observer:
        drop(Survey(observer), step)


def seen(steps: list[PlannedStep]) -> list[tuple[Any, ...]]:
    return sorted((each.model, each.table, each.change, each.materialise, each.rows) for each in steps)


def test_removed_models_are_found_counted_and_dropped(kind: str, project: Path) -> None:
    root = project / "lake"
    built(kind, root, "sales", 7)
    built(kind, root, "sales/daily", 1_000)  # the table sales is a schema too
    built(kind, root, "others", 3, by="a_pipeline")
    steps = plan()
    assert seen(steps) == [
        ("daily", "sales.daily", "removed", "incremental", 1_000),
        ("sales", "sales", "removed", "incremental", 7),
    ]
    (sales,) = (each for each in steps if each.model == "sales")
    assert sales.question == "drop sales (7 rows)"
    dropped(sales)
    assert [each.table for each in plan()] == ["sales.daily"]
    assert not (root / "sales" / "a.parquet").exists()
    assert (root / "sales" / "daily" / "a.parquet").exists()
    dropped(sales)  # again, as after a crash
    dropped(plan()[0])
    assert plan() == []
    assert [each.name for each in root.rglob("a.parquet")] == ["a.parquet"]  # of others


def test_what_is_declared_is_not_removed(kind: str, project: Path) -> None:
    """Also where another connection leads to the folder above."""
    weft.connect(kind=KINDS[kind], path=str(project / "lake" / "inner"), name="inner")
    weft.stream(name="orders", fields={"id": "int64"})(lambda: None)

    @weft.model(connection="inner", dependencies=["orders"])
    def sales(orders: Any) -> Any:
        return orders

    built(kind, project / "lake", "inner/sales", 7)
    assert [(each.model, each.change, each.rows) for each in plan()] == [("sales", "changed", 7)]


def test_what_a_streaming_pipeline_writes_by_now_is_not_removed(kind: str, project: Path) -> None:
    lake = current().connection("lake")
    how = {"target_table": "sales"} if kind == "delta" else {"targets": [weft.Target(connection=lake, prefix="sales")]}
    if kind == "delta":
        how["target"] = lake
    broker = weft.KafkaConnection(name="broker", bootstrap_servers="nowhere:9092")
    weft.streaming_pipeline(name="orders", source=broker, source_query="orders", **how)(lambda: None)
    built(kind, project / "lake", "sales", 7)
    built(kind, project / "lake", "others", 3)
    assert [each.table for each in plan()] == ["others"]


def test_damaged_table_of_another_is_named(kind: str, project: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = project / "lake"
    built(kind, root, "sales", 7)
    built(kind, root, "torn", 1)
    for file in (*root.glob("torn/_delta_log/*.json"), *root.glob("_weft/torn/log/*.json")):
        file.write_text("{")
    with caplog.at_level(logging.WARNING, "weft.engine"):
        assert [each.model for each in plan()] == ["sales"]
    assert "Whether a model built torn in the connection 'lake' is not known" in caplog.text


@pytest.fixture
def delta(project: Path) -> Path:
    weft.connect(kind="delta_local", path=str(project / "lake"), name="lake")
    built("delta", project / "lake", "sales", 7)
    return project / "lake" / "sales"


def checkpoint(table: Path, name: str, adds: list[dict[str, Any]], **more: Any) -> None:
    vector = pa.struct({"pathOrInlineDv": pa.string(), "offset": pa.int32(), "cardinality": pa.int64()})
    add = pa.struct({"path": pa.string(), "stats": pa.string(), "deletionVector": vector})
    mark = pa.struct({"appId": pa.string(), "version": pa.int64()})
    load = Load(table="sales", pipeline="sales", checkpoint_id=WRITER, moment=Any)  # type: ignore[arg-type]
    columns = {
        "add": pa.array([*(each["add"] for each in adds), None], add),
        "txn": pa.array([*(None for _ in adds), {"appId": writer(load), "version": 0}], mark),
        "metaData": pa.array([{"schemaString": COLUMNS}] * (len(adds) + 1)),
        **{key: pa.nulls(len(adds) + 1, pa.string()) for key in more},
    }
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    (table / "_delta_log" / name).write_bytes(file.getvalue())


def rows_of(table: Path) -> int | None:
    return next(each.rows for each in plan() if each.table == table.name)


def test_rows_of_a_delta_table_are_those_of_its_files(delta: Path) -> None:
    gone = {"remove": {"path": "a.parquet"}}
    commit(delta, 1, gone, added("b.parquet", 5), added("c.parquet", 4))
    assert rows_of(delta) == 9
    # Some rows of a file are deleted, then more of them.
    commit(delta, 2, added("b.parquet", 5, deleted=2), {"remove": {"path": "b.parquet"}})
    assert rows_of(delta) == 7
    before = {"path": "b.parquet", "deletionVector": {"pathOrInlineDv": "v2", "offset": 1, "cardinality": 2}}
    commit(delta, 3, {"remove": before}, added("b.parquet", 5, deleted=3))
    assert rows_of(delta) == 6
    commit(delta, 4, added("unknown.parquet", None))
    assert rows_of(delta) is None


def test_rows_of_a_delta_table_with_a_checkpoint(delta: Path) -> None:
    log = delta / "_delta_log"
    commit(delta, 1, added("b.parquet", 5, deleted=2))
    commit(delta, 2, {"remove": {"path": "a.parquet"}}, added("c.parquet", 1))
    checkpoint(delta, f"{1:020}.checkpoint.parquet", [added("a.parquet", 7), added("b.parquet", 5, deleted=2)])
    assert rows_of(delta) == 4
    parts = [f"{2:020}.checkpoint.{number:010}.{2:010}.parquet" for number in (1, 2)]
    checkpoint(delta, parts[0], [added("b.parquet", 5, deleted=2)])
    assert rows_of(delta) is None  # the second part is missing
    checkpoint(delta, parts[1], [added("c.parquet", 1)])
    assert rows_of(delta) == 4
    commit(delta, 4, added("d.parquet", 1))
    assert rows_of(delta) is None  # a commit is missing
    (log / f"{4:020}.json").unlink()
    checkpoint(delta, parts[1], [added("c.parquet", 1)], sidecar=True)
    assert rows_of(delta) is None  # other files have what the table has
