"""The archive of Spark's classes: made once, used where it fits, and never in the way."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engine.conftest import Python, finish
from weft import StorageError
from weft.engine import archive, archive_files, session
from weft.engine.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# It makes one of its own, for a minute of both cores. The one that the other tests share is made by a session too.
SHARED = """
from weft.engine import session
answer = weft.spark().range(3).count()
maps = open(f"/proc/{session._running.jvm.process.pid}/maps").read()
print(answer, ".jsa" in maps)
"""


def test_is_used(plain_spark: SparkSession) -> None:
    assert session._running is not None
    _, used = archive_files.archive_files(find_java())
    assert str(used) in Path(f"/proc/{session._running.jvm.process.pid}/maps").read_text()


@pytest.mark.full
def test_need_not_be_used(python: Python, project: Path) -> None:
    (project / "weft.toml").write_text("[spark]\narchive = false\n")
    assert finish(python(SHARED)) == ["3 False"]


@pytest.mark.full
def test_one_that_does_not_fit_is_ignored(spark_cache: str, python: Python, project: Path, tmp_path: Path) -> None:
    """Without a word: here one of another time, as after half a copy of the cache."""
    own = tmp_path / "cache" / "archives"
    own.mkdir(parents=True)
    for path in (Path(spark_cache) / "archives").glob("*.jsa"):
        (own / path.name).write_bytes(path.read_bytes()[:100_000])
    assert finish(python(SHARED, WEFT_CACHE=str(tmp_path / "cache"))) == ["3 False"]


@pytest.fixture
def trained(spark_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Training that only writes a file, into a cache with the archive of Java's own classes alone."""
    base, _ = archive_files.archive_files(find_java())
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    archive_files.archives_folder().mkdir(parents=True)
    if base is not None:
        (archive_files.archives_folder() / base.name).symlink_to(base)
    done: list[Path] = []

    def train(java: object, base: Path | None, path: Path) -> None:
        path.write_text("trained")
        done.append(path)

    monkeypatch.setattr(archive, "_train", train)
    return done


def test_is_made_once_and_in_one_step(trained: list[Path]) -> None:
    java = find_java()
    shutil.rmtree(archive_files.archives_folder())
    assert archive_files.archive_flags(java) == []
    made = archive.build(java)
    assert made.read_text() == "trained"
    assert not trained[0].exists()
    assert archive.build(java) == made
    assert len(trained) == 1
    assert any(str(made) in flag for flag in archive_files.archive_flags(java))


def test_what_is_half_made_or_unused_is_removed(trained: list[Path]) -> None:
    java = find_java()
    made = archive.build(java)
    half, old, other = (made.with_name(name) for name in ("unfinished-1-x.jsa", "spark-old.jsa", "spark-other.jsa"))
    for path in (half, old, other):
        path.touch()
    os.utime(old, (time.time() - 40 * 86_400,) * 2)
    made.unlink()
    archive.build(java)
    assert not half.exists()
    assert not old.exists()
    assert other.exists()


def test_use_is_remembered(trained: list[Path]) -> None:
    java = find_java()
    made = archive.build(java)
    os.utime(made, (time.time() - 10 * 86_400,) * 2)
    archive_files.archive_flags(java)
    assert time.time() - made.stat().st_mtime < 60


def test_a_failure_leaves_nothing(trained: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(java: object, base: object, path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive, "_train", fail)
    with pytest.raises(StorageError, match=r"cannot be made .*No space left(.|\n)*WEFT_CACHE"):
        archive.build(find_java())
    assert not [path for path in archive_files.archives_folder().iterdir() if "spark" in path.name]


def test_nobody_makes_one_that_is_being_made(trained: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = archive_files.archives_folder()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(archive_files.subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
        archive_files.build_in_background(find_java())


@pytest.mark.timing
@pytest.mark.full
def test_the_first_session_has_it_made(python: Python, tmp_path: Path) -> None:
    """By a process that goes on when the one that started it has ended."""
    folder = tmp_path / "cache"
    assert finish(python(SHARED, WEFT_CACHE=str(folder))) == ["3 False"]
    deadline = time.monotonic() + 240
    while not list(folder.glob("archives/spark-*.jsa")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert finish(python(SHARED, WEFT_CACHE=str(folder))) == ["3 True"]
