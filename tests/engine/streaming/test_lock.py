"""One process at a time goes on from a checkpoint, also from another machine where it is at a URL."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import warm_python
import weft
from conftest import S3
from engine.streaming.conftest import declare, rows
from servers import wait_until
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.query import Query
from weft.errors import StorageError
from weft.pipelines.streaming.declare import make
from weft.spark_support.folder import LocalFolder
from weft.systems import lease as leases

pytestmark = [pytest.mark.usefixtures("here"), pytest.mark.spark]

# A process that runs a pipeline from a folder of its own, as if it were on a machine of its own.
PROCESS = """
import json, os, sys, threading

import weft
from weft.engine.streaming import lock
from weft.engine.streaming.query import Query
from weft.pipelines.streaming.declare import make
from weft.systems import process
from weft.systems import lease as objects

told = json.loads(sys.argv[1])
lock.LEASE_SECONDS = told["lease"]
objects.BEAT_SECONDS = told["lease"] / 6
process._machine = lambda: told["machine"]
os.chdir(told["folder"])
events = weft.stream(name="events", fields={"n": "int64"})(lambda: None)
lake = weft.ObjectStoreS3Connection(**told["bucket"], name="lake", format="parquet")
try:
    query = Query(make(
        name="copy",
        source=weft.Source(connection=weft.SQLiteConnection(told["database"], name="shared"), query="events"),
        targets=[weft.Target(connection=lake, prefix="copies")],
        checkpoint=told["checkpoint"],
    ), written=lambda batch: print("batch", flush=True))
    query.start()
    print("runs", flush=True)
    query.wait()
except weft.BusyError as error:
    print("refused", error.what, flush=True)
"""


class Machine:
    """A process of another machine, as far as it can tell."""

    def __init__(self, name: str, folder: Path, bucket: dict[str, str], lease: float) -> None:
        own = folder / name
        own.mkdir()
        told = {
            "machine": name,
            "folder": str(own),
            "bucket": bucket,
            "lease": lease,
            "database": str(folder / "shared.db"),
            "checkpoint": f"s3://{bucket['bucket']}/checkpoints/copy",
        }
        self.process = warm_python.Popen(
            [sys.executable, "-c", PROCESS, json.dumps(told)], stdout=subprocess.PIPE, text=True
        )

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def machine(project: Path, s3: S3, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`machine(name)` runs the pipeline on a machine of that name."""
    monkeypatch.setenv("WEFT_CACHE", str(pytestconfig.rootpath / ".cache" / "weft"))
    bucket, started = s3.fields(), []

    def start(name: str, lease: float = 20.0) -> Machine:
        started.append(Machine(name, project, bucket, lease))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


@pytest.mark.full
@pytest.mark.timing
def test_two_machines_and_one_checkpoint(machine: Callable[..., Machine], project: Path) -> None:
    shared = weft.SQLiteConnection(str(project / "shared.db"), name="shared")
    events = weft.stream(name="events", fields={"n": "int64"}, connection=shared)(lambda: None)
    weft.publish_sync(events, [{"n": 1}, {"n": 2}])
    first = machine("first")
    assert [first.says(), first.says()] == ["runs", "batch"]
    refused = machine("second").says()
    assert refused.startswith(f"refused The pipeline 'copy' runs already, as process {first.process.pid} on ")
    # One that is killed beats no more, and what comes after it goes on where it was.
    first.process.kill()
    weft.publish_sync(events, {"n": 3})
    third = machine("third", lease=6.0)
    assert [third.says(), third.says()] == ["runs", "batch"]


@pytest.mark.timing
@pytest.mark.usefixtures("plain_spark")
@pytest.mark.parametrize("when", ["idle", "batch", "commit"])
def test_what_another_took_is_ended(when: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next beat where there is nothing to do; else before Spark writes the batch to its log, or as it does."""
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.05 if when == "idle" else 5.0)
    events = declare(n="int64")
    place = project / "shared" / "copy"
    claims = project / "shared" / "copy~lock"
    batches: list[int] = []

    def written(batch: Any) -> None:
        batches.append(batch.batch_id)
        if batch.batch_id == 1:  # stopped here, and continued when the other had done this batch
            shutil.copy(place / "commits" / "0", place / "commits" / "1")
            take()

    def take() -> None:
        """As if this process had been stopped for a while."""
        LocalFolder().create(str(claims / f"{1:020}.released"), b"")
        LocalFolder().create(str(claims / f"{2:020}.claim"), json.dumps({"owner": ["elsewhere:1:1:other"]}).encode())
        if when != "idle":
            assert query.checkpoint.lock._lease is not None
            query.checkpoint.lock._lease._renewed -= 60  # nor did it look since

    pipeline = make(
        name="copy", source=events, target="default", target_table="copies", checkpoint=f"file://{place}", every="10ms"
    )
    query = Query(pipeline, written=written)
    query.start()
    weft.publish_sync(events, {"n": 1})
    wait_until(lambda: batches == [0], "a batch")
    if when != "commit":
        take()
    if when != "idle":
        weft.publish_sync(events, {"n": 2})
    with pytest.raises(weft.BusyError, match="no longer holds its checkpoint"):
        query.wait(60)
    if when != "commit":
        assert rows("copies", "n") == [(1,)]
        assert sorted(each.name for each in (place / "commits").glob("[0-9]*")) == ["0"]
    # Not taken away from the other, nor is it let go by us.
    assert not (claims / f"{2:020}.released").exists()


class AwayFolder(LocalFolder):
    """A store that answers no more."""

    is_away = False

    def write(self, path: str, data: bytes) -> None:
        if self.is_away:
            raise OSError("the network is down")
        super().write(path, data)


@pytest.mark.timing
def test_a_store_that_is_away_for_longer_than_the_lease(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.05)
    folder, lost = AwayFolder(), []
    lease = leases.FileLease(folder, str(project / "x~lock"), seconds=1.0, lost=lambda: lost.append(True))
    lease.take()
    assert not lease.is_lost
    folder.is_away = True
    wait_until(lambda: lost == [True], "the lease to be lost")
    assert lease.is_lost
    folder.is_away = False
    lease.release()
    leases.FileLease(folder, str(project / "x~lock"), seconds=60.0).take()


def test_a_place_where_nothing_can_be_made() -> None:
    Path("file").touch()
    with pytest.raises(StorageError, match=r"The lock .*/file/checkpoint~lock cannot be made: "):
        Checkpoint("copy", "file/checkpoint/").lock.take()
