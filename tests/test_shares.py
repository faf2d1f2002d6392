"""Tests that are shared out among processes: each runs once, and what happened to it is known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
FIXTURES = """
import os, pytest
from pathlib import Path

@pytest.fixture(scope="session", autouse=True)
def of_the_process(tmp_path_factory):
    yield
    Path("ended", str(os.getpid())).write_text(tmp_path_factory.getbasetemp().name)
"""
FILE = """
import os, time
from pathlib import Path

def test_first(tmp_path):
    Path("ran", "{name}").write_text(str(os.getpid()))
    deadline = time.monotonic() + 60
    while len(os.listdir("ran")) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)

def test_second():
    print("a text of {name}")
    {what}

def test_third():
    pass
"""


def run(folder: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name in ("ran", "ended"):
        (folder / name).mkdir()
    (folder / "conftest.py").write_text(FIXTURES)
    for name, what in files.items():
        (folder / f"test_{name}.py").write_text(FILE.format(name=name, what=what))
    plugins = ["-p", "selection", "-p", "shares", "-p", "no:cacheprovider"]
    # The name of a folder for temporary files, so that this run removes none of the run that it is a test of.
    command = [sys.executable, "-m", "pytest", *plugins, "--basetemp=temporary", "--processes=2", "--rootdir=."]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_each_file_runs_in_one_process_and_the_run_says_what_failed(tmp_path: Path) -> None:
    done = run(tmp_path, {"one": "assert 1 == 2", "two": "pass"})
    assert "5 passed" in done.stdout and "1 failed" in done.stdout, done.stdout
    assert "test_one.py::test_second - assert 1 == 2" in done.stdout and "a text of one" in done.stdout
    assert "a text of two" not in done.stdout
    assert done.returncode == 1
    processes = {(tmp_path / "ran" / name).read_text() for name in ("one", "two")}
    assert len(processes) == 2
    ended = {each.name: each.read_text() for each in (tmp_path / "ended").iterdir()}
    assert ended.keys() == processes and set(ended.values()) == {"process-0", "process-1"}


def test_a_process_that_dies_fails_one_test_and_the_others_run(tmp_path: Path) -> None:
    done = run(tmp_path, {"one": "os.kill(os.getpid(), 9)", "two": "pass"})
    assert "5 passed" in done.stdout and "1 failed" in done.stdout, done.stdout
    assert "The process that ran this test ended: exit code -9." in done.stdout
    assert "FAILED test_one.py::test_second" in done.stdout
    assert done.returncode == 1
