"""Where the state of windows and joins is goes away or is full: the pipeline says so, and loses nothing."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import servers
import weft
from engine.streaming.conftest import declare, here, rows, run_once  # noqa: F401 - fixture
from faults.test_disk_full import mounted
from operate.test_supervisor import PATIENCE, QUICK, Witness, running, server  # noqa: F401 - fixture
from servers import wait_until
from weft.engine.streaming.spark_engine import SparkEngine
from weft.operate.supervisor import Supervisor
from weft.pipelines.streaming.declare import make

pytestmark = pytest.mark.usefixtures("plain_spark", "here")
START = datetime(2026, 11, 1, 12, tzinfo=UTC)
WINDOW: dict[str, Any] = {
    "window": weft.Window(
        kind="tumbling",
        duration_ms=60_000,
        event_time_column="at",
        group_by="id",
        aggregations=[weft.Aggregation(agg="count", as_="n")],
    ),
}
JOIN: dict[str, Any] = {
    "join": weft.Join(
        left_source="left",
        right_source="right",
        left_keys="id",
        right_keys="id",
        kind="full_outer",
        left_event_time_column="at",
        right_event_time_column="at",
        time_window_ms=10_000,
    )
}


def publish(*ids: int, second: float, text: str = "") -> None:
    """Publish one event of each id to both streams."""
    at = START + timedelta(seconds=second)
    for name in ("left", "right"):
        weft.publish_sync(name, [{"id": each, "at": at, "text": text} for each in ids])


def pipeline(step: dict[str, Any], store: Any) -> dict[str, Any]:
    for name in ("left", "right"):
        declare(name, id="int64", at="timestamp", text="string")
    sources = [weft.Source(query=name) for name in ("left", "right")]
    return {"name": "p", "sources": sources, "target_table": "results", "state_store": store, **step}


def results(step: dict[str, Any]) -> list[tuple[Any, ...]]:
    return rows("results", "id, n" if "window" in step else "left_id, right_id")


EXPECTED = {"window": [(1, 2), (2, 2), (3, 2)], "join": [(1, 1), (2, 2), (3, 3), (9, 9)]}


@pytest.mark.full
@pytest.mark.parametrize("step", [WINDOW, JOIN], ids=["window", "join"])
def test_the_database_of_the_state_is_down(step: dict[str, Any], server: servers.Server) -> None:  # noqa: F811
    store = weft.StateStore(connection=weft.PostgresConnection(server.create_database("state"), name="state"))
    options = pipeline(step, store)
    publish(1, 2, second=0)
    run_once(**options)
    server.stop()
    publish(3, second=1)
    publish(9, second=100)
    for _ in range(2):
        with pytest.raises(weft.ConnectionFailedError):
            run_once(**options)
    server.start()
    run_once(**options)
    assert results(step) == EXPECTED[next(iter(step))]


@pytest.mark.timing
@pytest.mark.parametrize("step", [WINDOW, JOIN], ids=["window", "join"])
@pytest.mark.full
def test_the_database_of_the_state_is_killed_for_a_while(step: dict[str, Any], server: servers.Server) -> None:  # noqa: F811
    """A pipeline that runs goes on by itself: what the process remembers of its rows may not be what is stored."""
    store = weft.StateStore(connection=weft.PostgresConnection(server.create_database("state"), name="state"))
    witness, options = Witness(), pipeline(step, store)
    publish(1, 2, second=0)
    supervisor = Supervisor(SparkEngine(make(target="default", **options)), QUICK, [witness])
    with running(supervisor):
        wait_until(lambda: consumed(witness) == 4, "the first rows", PATIENCE)
        server.kill()
        publish(3, second=1)
        wait_until(lambda: len(witness.failures) >= 2, "failures", PATIENCE)
        server.start()
        wait_until(lambda: consumed(witness) == 6, "the rows of then", PATIENCE)
        publish(9, second=100)
        wait_until(lambda: consumed(witness) == 8, "the last rows", PATIENCE)
    assert results(step) == EXPECTED[next(iter(step))]


def consumed(witness: Witness) -> int:
    return sum(each.consumed for each in witness.batches)


@pytest.mark.parametrize("kind", ["sqlite", "files"])
@pytest.mark.parametrize("step", [WINDOW, JOIN], ids=["window", "join"])
@pytest.mark.full
def test_the_disk_of_the_state_is_full(step: dict[str, Any], kind: str, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 4) as disk:
        if kind == "files":
            options = {**pipeline(step, weft.StateStore(kind="files")), "checkpoint": str(disk.folder / "cp")}
        else:
            options = pipeline(step, weft.StateStore(connection=weft.SQLiteConnection(str(disk.folder / "s.db"))))
        publish(1, 2, second=0)
        run_once(**options)
        disk.fill(leave=40_000 if (kind, step) == ("files", JOIN) else 0)
        publish(3, second=1, text=secrets.token_hex(200_000))  # nothing can compress it
        publish(9, second=100)
        for _ in range(2):
            with pytest.raises(weft.WeftError) as raised:
                run_once(**options)
            assert "full" in str(raised.value) or "space" in str(raised.value)
        disk.free()
        run_once(**options)
        assert results(step) == EXPECTED[next(iter(step))]
