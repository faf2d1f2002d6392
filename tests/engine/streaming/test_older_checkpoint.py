"""A checkpoint that is older than what its targets have: its next batches have numbers that the targets know, and other
rows. They are refused, not taken as done."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import weft
from engine.streaming.conftest import declare, forget_last_commit, rows, run_once
from weft.engine.streaming.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("plain_spark", "here")


def lose_batch(pipeline: str, number: int) -> None:
    """As after a power loss: Spark does not have its log written through to the disk."""
    home = Checkpoint(pipeline).path
    for folder in ("offsets", "commits"):
        (home / folder / str(number)).unlink()
        (home / folder / f".{number}.crc").unlink(missing_ok=True)


def test_a_batch_with_other_rows_under_the_number_of_one_that_is_done(project: Path) -> None:
    events = declare(n="int64")
    second = weft.SQLiteConnection("second.db", name="second")
    first, other = weft.Target(table=(None, "copies")), weft.Target(connection=second, table=(None, "copies"))
    pipeline: dict[str, Any] = {"name": "copy", "source": events, "targets": [first]}
    weft.publish_sync(events, [{"n": 1}, {"n": 2}])
    run_once(**pipeline)
    shutil.copytree(Checkpoint("copy").path, project / "backup")
    weft.publish_sync(events, {"n": 3})
    run_once(**pipeline)
    lose_batch("copy", 1)
    # Planned again as it was: it is done, and filled into a target that does not have it.
    run_once(**pipeline | {"targets": [first, other]})
    forget_last_commit("copy")
    run_once(**pipeline)
    assert (rows("copies", "n"), rows("copies", "n", second)) == ([(1,), (2,), (3,)], [(3,)])
    lose_batch("copy", 1)
    weft.publish_sync(events, {"n": 4})
    for _ in range(2):  # the second time the plan is in Spark's log
        with pytest.raises(weft.LoadRefusedError) as caught:
            run_once(**pipeline | {"targets": [other, first]})
        assert caught.value.what.startswith(
            "The checkpoint of copy is older than its target copies of the connection 'second': that has batch 1 up to "
            "events 3, and the checkpoint planned batch 1 up to events 4."
        )
        assert "weft checkpoints rewind copy" in (caught.value.hint or "")
    # Several batches behind.
    shutil.rmtree(Checkpoint("copy").path)
    shutil.copytree(project / "backup", Checkpoint("copy").path)
    run_once(**pipeline | {"targets": [weft.Target(table=(None, "others"))]})
    weft.publish_sync(events, {"n": 5})
    run_once(**pipeline | {"targets": [weft.Target(table=(None, "others"))]})
    shutil.rmtree(Checkpoint("copy").path)
    shutil.copytree(project / "backup", Checkpoint("copy").path)
    with pytest.raises(weft.LoadRefusedError, match="has batch 2 up to events 5, and the checkpoint planned batch 1"):
        run_once(**pipeline | {"targets": [weft.Target(table=(None, "others"))]})
    assert rows("copies", "n") == [(1,), (2,), (3,)]
    # The way out that the error names: under a new checkpoint, what the table has since is there twice.
    checkpoint = Checkpoint("copy")
    with checkpoint.changing():
        checkpoint.rewind([2], {})
    run_once(**pipeline)
    assert rows("copies", "n") == [(1,), (2,), (3,), (3,), (4,), (5,)]


@pytest.mark.full
def test_files_and_streams(project: Path) -> None:
    """From files, whose positions are numbers in a log that is brought back too, to files and to a stream."""
    lake = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake", format="csv")
    copies = declare("copies", n="int64")
    (project / "lake" / "raw").mkdir(parents=True)
    source = weft.Source(connection=lake, query="raw", columns={"n": "int64"})
    to_files = {"name": "files", "source": source, "targets": [weft.Target(connection=lake, prefix="out")]}
    to_stream = {"name": "stream", "source": source, "target": copies}

    def put(n: int) -> None:
        (project / "lake" / "raw" / f"{n}.csv").write_text(f"n\n{n}\n")

    put(1)
    for each in (to_files, to_stream):
        run_once(**each)
        shutil.copytree(Checkpoint(each["name"]).path, project / f"{each['name']} backup")
    put(2)
    for each in (to_files, to_stream):
        run_once(**each)
        forget_last_commit(each["name"])
        run_once(**each)
        shutil.rmtree(Checkpoint(each["name"]).path)
        shutil.copytree(project / f"{each['name']} backup", Checkpoint(each["name"]).path)
    put(3)
    with pytest.raises(
        weft.LoadRefusedError, match="The checkpoint of files is older than its target out of the connection 'lake'"
    ):
        run_once(**to_files)
    assert sorted(each.n for each in weft.read("out", source=lake).collect()) == [1, 2]
    # A stream gets rows at least once.
    run_once(**to_stream)
    assert sorted(weft.read_stream("default", copies)["n"].to_list()) == [1, 2, 2, 3]
