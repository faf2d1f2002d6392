"""A target that is older than its checkpoint, as after a restore from a backup: no later batch would have what it lost.
The pipeline is refused, and goes on where nothing is missing."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import weft
from engine.streaming.conftest import declare, rows, run_once
from weft.engine.streaming.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("plain_spark", "here")


def test_a_table(project: Path) -> None:
    events = declare(n="int64")
    backup = weft.SQLiteConnection("backed_up.db", name="backed_up")
    pipeline: dict[str, Any] = {
        "name": "copy",
        "source": events,
        "targets": [weft.Target(connection=backup, table=(None, "copies"))],
        "dead_letter_stream": "failed",
    }
    weft.publish_sync(events, {"n": 1})
    run_once(**pipeline)
    shutil.copy(project / "backed_up.db", project / "backup")
    weft.publish_sync(events, [{"n": 2}, {"n": 3}])
    run_once(**pipeline)
    newer = (project / "backed_up.db").read_bytes()
    shutil.copy(project / "backup", project / "backed_up.db")
    weft.publish_sync(events, {"n": 4})
    with pytest.raises(weft.LoadRefusedError) as caught:
        run_once(**pipeline)
    assert caught.value.what == (
        "The target copies of the connection 'backed_up' is older than the checkpoint of copy: the target has the last "
        "batch 0 up to events 1, and the checkpoint has finished batch 1. The rows between them would be missing."
    )
    # The first way out that the error names, then the second.
    (project / "backed_up.db").write_bytes(newer)
    run_once(**pipeline)
    assert rows("copies", "n", backup) == [(1,), (2,), (3,), (4,)]
    shutil.copy(project / "backup", project / "backed_up.db")
    weft.publish_sync(events, {"n": 5})
    with pytest.raises(weft.LoadRefusedError, match="has the last batch 0 up to events 1"):
        run_once(**pipeline)
    with (checkpoint := Checkpoint("copy")).changing():
        checkpoint.rewind([1], {})
    run_once(**pipeline)
    assert rows("copies", "n", backup) == [(1,), (2,), (3,), (4,), (5,)]
    # One that is older than the first batch, and so has no ledger, as long as the pipeline has its name.
    newer = (project / "backed_up.db").read_bytes()
    (project / "backed_up.db").unlink()
    with closing(sqlite3.connect("backed_up.db")) as other:
        other.execute("CREATE TABLE copies (n BIGINT)")
    weft.publish_sync(events, {"n": 6})
    with pytest.raises(weft.LoadRefusedError, match="the target has no batch, and the checkpoint has finished batch 2"):
        run_once(**pipeline)
    (project / "backed_up.db").write_bytes(newer)
    # A target that was none for a while is a new one.
    for n, targets in ((7, [weft.Target(table=(None, "others"))]), (8, pipeline["targets"])):
        weft.publish_sync(events, {"n": n})
        run_once(**pipeline | {"targets": targets})
    assert rows("copies", "n", backup)[5:] == [(8,)]
    # The ledger knows the batches under the name of the pipeline.
    shutil.move(project / ".weft/checkpoints/copy", project / ".weft/checkpoints/renamed")
    (project / ".weft/checkpoints/renamed/sources.json").unlink()
    weft.publish_sync(events, {"n": 9})
    run_once(**pipeline | {"name": "renamed"})
    assert rows("copies", "n", backup)[6:] == [(9,)]


def test_batches_without_rows_are_in_no_ledger(project: Path) -> None:
    """They do not count as lost, whatever ends the process between."""
    events = declare(n="int64")
    lake = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake")
    targets = [weft.Target(table=(None, "copies")), weft.Target(connection=lake, prefix="copies")]
    pipeline: dict[str, Any] = {
        "name": "copy",
        "source": events,
        "targets": targets,
        "transform_sql": "SELECT 10 div n AS n FROM source WHERE n < 9",
        "transform_on_error": "dlq",
        "dead_letter_stream": "failed",
    }
    for n in (0, 1, 9, 0, 0, 2):
        weft.publish_sync(events, {"n": n})
        run_once(**pipeline)
    assert sorted(rows("copies", "n")) == [(5,), (10,)]
    assert sorted(each.n for each in weft.read("copies", source=lake).collect()) == [5, 10]


def test_the_state_of_windows(project: Path) -> None:
    events = declare(n="int64")
    backup = weft.SQLiteConnection("backed_up.db", name="backed_up")
    pipeline: dict[str, Any] = {
        "name": "counts",
        "source": events,
        "target": weft.Target(connection=backup, table=(None, "counts")),
        "window": weft.Window(
            kind="tumbling", duration_ms=3_600_000, aggregations=[weft.Aggregation(agg="count", as_="n")]
        ),
    }
    weft.publish_sync(events, {"n": 1})
    run_once(**pipeline)
    shutil.copy(project / "backed_up.db", project / "backup")
    weft.publish_sync(events, {"n": 2})
    run_once(**pipeline)
    shutil.copy(project / "backup", project / "backed_up.db")
    weft.publish_sync(events, {"n": 3})
    with pytest.raises(weft.WeftError, match=r"The state does not end with batch 1: .* not of the same time"):
        run_once(**pipeline)
