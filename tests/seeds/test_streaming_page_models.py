"""The chapter "Streams as Model Dependencies" of the streaming page, as written there with our name for theirs."""

from __future__ import annotations

import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from served import start
from servers import wait_until

pytestmark = pytest.mark.timing

PAGE = """
    from weft import model, stream

    @stream(name="orders", schema="events", fields={"order_id": "string", "total": "float64"})
    def orders():
        pass

    @model(
        name="daily_revenue",
        materialise="table",
        dependencies=["orders"],
    )
    def daily_revenue(orders):
        return (
            orders.mutate(order_date=orders._weft_published_at.cast("date"))
            .group_by("order_date")
            .aggregate(revenue=orders.total.sum(), order_count=orders.order_id.count())
        )
"""


def test_post_builds_the_model(tmp_path: Path) -> None:
    served = start(tmp_path / "served", PAGE)
    try:
        assert served.url
        done = served.publish("orders", [{"order_id": "o_1", "total": 12.5}, {"order_id": "o_2", "total": 7.5}])
        assert done["triggered_models"] == ["daily_revenue"]
        wait_until(lambda: rows(tmp_path / "served") == [(20.0, 2)], "the table")
        served.publish("orders", {"order_id": "o_3", "total": 1.0})
        wait_until(lambda: rows(tmp_path / "served") == [(21.0, 3)], "the table")
    finally:
        code = served.stop()
    assert code == 0
    left = subprocess.run(["pgrep", "-f", f"weft worker.*{tmp_path}"], capture_output=True, text=True).stdout
    assert left == ""


def rows(folder: Path) -> list[tuple[float, int]]:
    """What the table has; nothing before it is there."""
    with closing(sqlite3.connect(folder / ".weft" / "weft.db")) as database:
        try:
            return database.execute("SELECT revenue, order_count FROM daily_revenue").fetchall()
        except sqlite3.OperationalError:
            return []


def test_without_a_worker_nothing_is_built(tmp_path: Path) -> None:
    served = start(tmp_path / "served", PAGE, "--no-worker")
    try:
        assert served.url
        assert served.publish("orders", {"order_id": "o_1", "total": 1.0})["triggered_models"] == ["daily_revenue"]
        assert len(served.workers()) == 1
    finally:
        assert served.stop() == 0
