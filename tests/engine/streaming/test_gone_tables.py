"""A target table that is gone is not made again in silence: it would have the rows from now on alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import weft
from conftest import System
from engine.streaming.conftest import declare, rows, run_once
from weft.engine.readers import open_tables
from weft.engine.streaming.checkpoint import Checkpoint
from weft.project import current
from weft.types import BigInt

pytestmark = pytest.mark.spark


@weft.table
class Copies:
    n: BigInt


def execute(statement: str) -> None:
    tables = open_tables(current().connection(None))
    try:
        with tables.driver.session("publish") as session:
            session.run(statement)
    finally:
        tables.close()


@pytest.mark.parametrize("target", ["named", "declared"])
@pytest.mark.full
@pytest.mark.usefixtures("streams")
def test_sql(system: System, target: str) -> None:
    events = declare(n="int64")
    where = {"target": Copies} if target == "declared" else {"target_table": (None, "copies")}
    pipeline: dict[str, Any] = {"name": "copy", "source": events, **where}
    weft.publish_sync(events, {"n": 1})
    run_once(**pipeline)
    weft.publish_sync(events, {"n": 2})
    execute("DROP TABLE copies")
    for _ in range(2):
        with pytest.raises(
            weft.LoadRefusedError, match=r"The table copies of .* is gone. Earlier batches of copy were"
        ):
            run_once(**pipeline)
    # As it was asked for: made by its owner, or filled with all rows.
    execute("CREATE TABLE copies (n BIGINT)")
    run_once(**pipeline)
    assert rows("copies", "n") == [(2,)]
    execute("DROP TABLE copies")
    Checkpoint("copy").reset()
    run_once(**pipeline)
    assert rows("copies", "n") == [(1,), (2,)]


@pytest.mark.usefixtures("here", "spark")
def test_delta(project: Path) -> None:
    lake = weft.DeltaLocalConnection(str(project / "lake"), name="lake")
    events = declare(n="int64")
    pipeline: dict[str, Any] = {"name": "copy", "source": events, "target": lake, "target_table": "copies"}
    weft.publish_sync(events, {"n": 1})
    run_once(**pipeline)
    weft.publish_sync(events, {"n": 2})
    shutil.rmtree("lake/copies")
    with pytest.raises(weft.LoadRefusedError, match="The table copies of the connection 'lake' is gone"):
        run_once(**pipeline)
    assert not Path("lake/copies").exists()


@pytest.mark.usefixtures("here")
def test_another_database_is_no_loss() -> None:
    """A pipeline that goes on into another database makes its table there."""
    events = declare(n="int64")
    for number in (1, 2):
        weft.publish_sync(events, {"n": number})
        target = weft.SQLiteConnection(f"{number}.db", name="out")
        run_once(name="copy", source=events, target=target, target_table=(None, "copies"))
        assert rows("copies", "n", target) == [(number,)]
