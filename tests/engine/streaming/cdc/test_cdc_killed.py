"""The driver of a pipeline of changes killed (-9) at each step of a batch, with every target: the mirror is what the
source has in the end, and the history has each version once."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weft
from engine.streaming.conftest import declare, run_killed

pytestmark = pytest.mark.timing

BEGAN = 1_770_000_000_000
CHANGES, KEYS = 40, 7
PROGRAM = """
import json

import weft
from weft.engine.streaming.spark_engine import SparkEngine
from weft.operate.run_options import Running
from weft.operate.supervisor import supervise
from weft.pipelines.streaming.declare import make

fields = {"op": "string", "before": "json?", "after": "json?", "source": "json?"}
events = weft.stream(name="events", fields=fields)(lambda: None)
place = json.loads(sys.argv[1])
connection = weft.connect(name="place", **place)
mirrors = [weft.Target(connection=connection, table=(place.get("path") and "default", "mirror"), primary_key=["id"])]
if "path" not in place:
    mirrors.append(weft.Target(connection=connection, table=(None, "history"), mode="scd2", primary_key=["id"]))
pipeline = make(
    name="mirror",
    source=weft.Source(query=events, max_rows=20),
    targets=mirrors,
    cdc=weft.CDC(envelope="debezium", key_field="after.id"),
)
supervise(SparkEngine(pipeline), Running(once=True))
"""
# The steps of the loads of two batches, of two targets each; Delta has one target, and steps of its own.
POINTS = [("begun", 2), ("staged", 2), ("moved", 3), ("recorded", 1), ("loaded", 1), ("done", 1)]
OF_DELTA = [("begun", 2), ("created", 1), ("checked", 2), ("committed", 1), ("loaded", 1), ("done", 1)]


def changes(first: int) -> list[dict[str, Any]]:
    """Changes of a few keys, several of a millisecond; each fifth comes again a little later."""
    made: list[dict[str, Any]] = []
    for number in range(first, first + CHANGES):
        key = number % KEYS
        row = {"id": key, "name": f"{number}"}
        is_delete = number // KEYS % 3 == 2
        source = {"lsn": number + 1, "ts_ms": BEGAN + number // 3}
        made.append(
            {
                "op": "d" if is_delete else "u",
                "before": {"id": key} if is_delete else None,
                "after": None if is_delete else row,
                "source": source,
            }
        )
        if number % 5 == 4:
            made.append(made[-4])
    return made


@pytest.mark.parametrize(
    "kind", ["sqlite", "postgres", "mysql", "duckdb", pytest.param("delta", marks=pytest.mark.delta)]
)
@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "here")
def test_the_mirror_after_a_crash(kind: str, shared_server: Any, project: Path, count: Callable[..., int]) -> None:
    if kind == "delta":
        check(kind, {"kind": "delta_local", "path": str(project / "lake")}, count)
    elif kind in ("sqlite", "duckdb"):
        check(kind, {"url": f"{kind}:///{project / 'mirror.db'}"}, count)
    else:
        with shared_server(kind).database() as url:
            check(kind, {"url": url}, count)


def check(kind: str, place: dict[str, str], count: Callable[..., int]) -> None:
    events = declare(op="string", before="json?", after="json?", source="json?")
    points = OF_DELTA if kind == "delta" else POINTS
    rounds = count(10, 1)
    published = 0
    for step, times in points * rounds if rounds > 1 else points[2:3]:
        weft.publish_sync(events, changes(published))
        published += CHANGES
        ended = run_killed(PROGRAM, step, times, json.dumps(place))
        assert ended.returncode == -signal.SIGKILL, (step, ended.stderr)
    ended = run_killed(PROGRAM, "none", 0, json.dumps(place))
    assert ended.returncode == 0, ended.stderr
    stored: dict[int, str] = {}
    versions = []
    for number in range(published):
        if number // KEYS % 3 == 2:
            stored.pop(number % KEYS, None)
        else:
            stored[number % KEYS] = f"{number}"
            versions.append(number + 1)
    connection: Any = weft.connect(name="again", **place)
    table = "default/mirror" if kind == "delta" else "SELECT id, name FROM mirror"
    found = weft.read(table, source=connection).select("id", "name").collect()
    assert sorted(map(tuple, found)) == sorted(stored.items())
    if kind != "delta":
        sql = "SELECT _weft_position AS place, is_current FROM history"
        history = weft.read(sql, source=connection).collect()
        assert sorted(int(each.place) for each in history) == versions
        assert sum(bool(each.is_current) for each in history) == len(stored)
