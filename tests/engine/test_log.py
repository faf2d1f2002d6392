"""Spark's log has a bound, and can be cut while others write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.engine import log


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "LIMIT", 1000)


def test_too_much_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / ".weft" / "spark.log"
    opened = log.EngineLog(path)
    os.write(opened.descriptor, b"first\n" * 200)
    opened.bound()
    os.write(opened.descriptor, b"second\n")
    opened.bound()
    assert path.read_bytes() == b"second\n"
    assert (path.parent / "spark.log.1").read_bytes() == b"first\n" * 200
    assert path.stat().st_mode & 0o077 == 0
    opened.close()


def test_two_processes_share_it(tmp_path: Path) -> None:
    one, two = log.EngineLog(tmp_path / "spark.log"), log.EngineLog(tmp_path / "spark.log")
    os.write(one.descriptor, b"x" * 2000)
    two.bound()
    os.write(one.descriptor, b"one\n")
    os.write(two.descriptor, b"two\n")
    assert (tmp_path / "spark.log").read_bytes() == b"one\ntwo\n"
    one.close()
    two.close()


def test_the_tail_is_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "spark.log").write_text("of an earlier one\n")
    opened = log.EngineLog(tmp_path / "spark.log")
    os.write(opened.descriptor, b"\n".join(b"line %d" % n for n in range(20)) + b"\n\n")
    assert opened.tail(2) == ["line 18", "line 19"]
    assert opened.tail(100)[0] == "line 0"
    opened.close()


@pytest.mark.timing
def test_it_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr(log, "_INTERVAL", 0.01)
    opened = log.EngineLog(tmp_path / "spark.log")
    opened.watch()
    os.write(opened.descriptor, b"x" * 2000)
    deadline = time.monotonic() + 10
    while (tmp_path / "spark.log").stat().st_size and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / "spark.log").stat().st_size == 0
    opened.close()
