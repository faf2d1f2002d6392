"""`weft worker --once`: what it says, and its exit code."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]
NOBODY = "postgres://127.0.0.1:1/none"


@pytest.fixture(autouse=True)
def shop(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_DSN", raising=False)
    Path("weft.toml").write_text('modules = ["shop"]\n')
    Path("shop.py").write_text(
        "import weft\n"
        "@weft.stream(fields={'id': 'int64'})\n"
        "def orders(): pass\n"
        "@weft.model\n"
        "def copies(orders):\n"
        "    return orders.select('id')\n"
    )


def test_once_builds_what_is_stale(run: Run) -> None:
    done = run("worker", "--once")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("succeeded copies")


def test_once_fails_where_a_build_failed(run: Run) -> None:
    with Path("shop.py").open("a") as file:
        file.write("@weft.model\ndef broken(orders):\n    raise RuntimeError('not today')\n")
    done = run("worker", "--once")
    assert done.returncode == 1
    assert "succeeded copies" in done.stdout and "failed broken" in done.stdout
    assert done.stderr.endswith("Failed or still stale: broken\n")


def test_once_fails_where_the_database_is_away(run: Run) -> None:
    Path("weft.toml").write_text(f'modules = ["shop"]\n[connections.default]\nurl = "{NOBODY}"\n')
    done = run("worker", "--once", "--run-log", "sqlite://runs.db")
    assert (done.returncode, done.stdout) == (1, "")
    warning, left = done.stderr.splitlines()[0], done.stderr.splitlines()[-1]
    assert warning.startswith("WARNING: Cannot open the connection 'default'")
    assert left == "Failed or still stale: copies"
    assert done.stderr.count("these models wait: copies") == 1


def test_worker_does_not_keep_a_run_log_of_its_own(run: Run) -> None:
    done = run("worker", "--once", "--run-log", NOBODY)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and "127.0.0.1:1" in done.stderr
    assert "keeps its own" not in done.stderr


def test_worker_whose_folder_cannot_be_written(run: Run) -> None:
    Path(".weft").write_text("a file where the folder is to be")
    done = run("worker", "--once")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
