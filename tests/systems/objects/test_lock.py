"""One at a time holds the lock of a table, in a folder and in a bucket; a dead holder does not hold it for ever."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft import ObjectStoreS3Connection
from weft.spark_support.folder import BucketFolder, Folder, LocalFolder, folder_for
from weft.systems import lease, process


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.spark)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Folder, str]:
    if request.param == "folder":
        return LocalFolder(), str(tmp_path / "orders")
    spark, s3 = request.getfixturevalue("spark"), request.getfixturevalue("s3")
    connection = ObjectStoreS3Connection(**s3.fields())
    connection.configure(spark)
    folder = folder_for(spark, connection.root)
    assert isinstance(folder, BucketFolder)
    return folder, f"{connection.root}/orders"


@pytest.mark.timing
def test_one_at_a_time(place: tuple[Folder, str], count: Callable[..., int]) -> None:
    inside, most, turns, rounds = 0, 0, 0, count(3, 1)

    def run() -> None:
        nonlocal inside, most, turns
        for _ in range(rounds):
            with lease.table_lock(*place, "orders"):
                inside += 1
                most = max(most, inside)
                turns += 1
                time.sleep(0.02)
                inside -= 1

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, turns) == (1, 4 * rounds)


@pytest.fixture
def bucket(spark: Any, s3: Any) -> tuple[Folder, str, str]:
    connection = ObjectStoreS3Connection(**s3.fields())
    connection.configure(spark)
    return folder_for(spark, connection.root), f"{connection.root}/orders", f"{connection.root}/_weft/orders/lock"


def test_of_a_dead_process_here(bucket: tuple[Folder, str, str]) -> None:
    folder, path, home = bucket
    ended = subprocess.Popen(["sleep", "600"])
    owner = process.name_of(ended.pid)
    ended.kill()
    ended.wait()
    folder.create(f"{home}/{1:020}.claim", json.dumps({"owner": [owner]}).encode())
    with lease.table_lock(folder, path, "orders"):
        assert f"{2:020}.claim" in folder.files_in(home)
    assert set(folder.files_in(home)) == {f"{2:020}.claim", f"{2:020}.released"}


@pytest.mark.timing
def test_of_a_silent_process_elsewhere(bucket: tuple[Folder, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, path, home = bucket
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.5)
    folder.create(f"{home}/{1:020}.claim", json.dumps({"owner": ["elsewhere:1:1:other"]}).encode())
    with lease.table_lock(folder, path, "orders"):
        pass


@pytest.mark.timing
def test_a_holder_that_works_long_keeps_it(bucket: tuple[Folder, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, path, _ = bucket
    monkeypatch.setattr(lease, "LEASE_SECONDS", 2.0)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.1)
    order: list[str] = []

    def second() -> None:
        with lease.table_lock(folder, path, "orders"):
            order.append("second")

    with lease.table_lock(folder, path, "orders"):
        other = threading.Thread(target=second)
        other.start()
        time.sleep(4)
        order.append("first")
    other.join()
    assert order == ["first", "second"]
