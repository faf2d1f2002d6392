"""A load into files or a Delta table that is killed (-9) at any step: afterwards nothing or all of it is there, a
re-run is right, and nothing is left staged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import weft
from conftest import FEW_ROWS, write_spark_conf
from engine import oracle
from weft.systems.load import Load

pytestmark = pytest.mark.timing

MOMENT = datetime(2026, 3, 1, tzinfo=UTC)
FIRST = [{"id": number, "name": "a"} for number in range(4)]
SECOND = [{"id": number, "name": "b"} for number in range(2, 6)]
FILES = [
    *(("append", step) for step in ("begun", "begun+0.5", "staged", "recorded", "moved", "committed")),
    *(("truncate", step) for step in ("begun", "staged", "recorded", "moved", "published", "committed")),
]
DELTA = [
    *(("append", step) for step in ("begun", "begun+1", "staged", "staged+0.3", "committed")),
    *(("truncate", step) for step in ("begun", "staged", "committed")),
    *((mode, step) for mode in ("merge", "scd2") for step in ("checked", "created", "created+2", "committed")),
]
# The same rows as what Spark writes, and from a database in a task of Spark's.
BY_SPARK = [
    *(("object_store_local", "append", step) for step in ("begun", "begun+0.5", "staged", "recorded")),
    *(("delta_local", "append", step) for step in ("begun", "begun+1", "committed")),
    *(("delta_local", "truncate", step) for step in ("checked", "checked+1", "committed")),
]
BY_TASK = [
    ("object_store_local", "append", "begun+0.2"),
    ("object_store_local", "append", "staged"),
    ("delta_local", "append", "begun+0.2"),
    ("delta_local", "truncate", "staged"),
]
CASES = [
    *(("object_store_local", *each, "here") for each in FILES),
    *(("delta_local", *each, "here") for each in DELTA),
    *((*each, "spark") for each in BY_SPARK),
    *((*each, "task") for each in BY_TASK),
]


def rows_of(connection: Any) -> list[tuple[Any, ...]]:
    rows = [row.asDict() for row in weft.read("orders", source=connection).collect()]
    return in_order([{key: value for key, value in row.items() if key != "row_hash"} for row in rows])


def in_order(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    def text(value: object) -> str:
        return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)

    return sorted(tuple(sorted((key, text(value)) for key, value in row.items())) for row in rows)


# Each is a start of Spark.
@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_killed(spark: Any, case: tuple[str, str, str, str], pytestconfig: pytest.Config, tmp_path: Path) -> None:
    kind, mode, step, way = case
    fields = {"path": str(tmp_path / "lake")}
    connection = weft.connect(kind=kind, **fields)
    keys = ["id"] if mode in ("merge", "scd2") else []

    def options(number: int) -> dict[str, Any]:
        key = {"commit_key": f"load {number}", "moment": MOMENT + timedelta(number)}
        return {"target": "orders", "mode": mode, "keys": keys, **key}

    weft.load(FIRST, connection=connection, **options(0))
    states, expected = [], []
    for number, rows in enumerate((FIRST, SECOND)):
        expected, _ = oracle.apply(expected, rows, Load.declare(**options(number)))
        states.append(in_order(expected))
    job = {"kind": kind, "fields": fields, "rows": SECOND, "load": options(1), "step": step, "way": way}
    cache = {"WEFT_CACHE": str(pytestconfig.rootpath / ".cache" / "weft"), "WEFT_SPARK_MASTER": "local[2]"}
    write_spark_conf(tmp_path, FEW_ROWS)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("file_load_process.py")), json.dumps(job, default=str)],
        env={**os.environ, **cache},
        check=False,
    )
    assert done.returncode == -9
    assert rows_of(connection) in states
    weft.load(SECOND, connection=connection, **options(1))
    assert rows_of(connection) == states[1]
    # Another load sweeps what a JVM wrote that outlived its process for a moment.
    weft.load(SECOND, connection=connection, **options(1))
    left = [path for path in (tmp_path / "lake").rglob("*") if path.is_file() and "staging" in path.parts]
    assert left == []
    if kind == "object_store_local":
        log = tmp_path / "lake" / "_weft" / "orders" / "log"
        files = {path.name for path in (tmp_path / "lake" / "orders").iterdir()}
        assert len(files) == len(weft.read("orders", source=connection).inputFiles())
        assert list(log.glob("*.json"))
