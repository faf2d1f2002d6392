"""The examples run as they are, from any folder."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import warm_python
from documents import ROOT, blocks_of

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# The demo starts twenty processes, whose imports would take a third of its processor time.
WARM = """
import runpy, subprocess, sys, warnings
import warm_python
warm_python.launcher()  # it starts a process itself
subprocess.Popen = warm_python.Popen
warnings.simplefilter("error")
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.timeout(900)  # it starts Spark several times, beside the other tests
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each.name)
def test_example(example: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a narrow terminal too; and the demo leaves the user's own database alone. Spark compiles its queries here."""
    monkeypatch.delenv("JDK_JAVA_OPTIONS", raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    command, run = ["-W", "error", str(example)], subprocess.run
    if example.name == "demo.py":
        monkeypatch.setenv("WEFT_DSN", f"sqlite:///{project / 'mine.db'}")
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        command, run = ["-c", WARM, str(example)], warm_python.run
    done = run([sys.executable, *command], capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    assert done.stderr == ""
    assert list(project.iterdir()) == [] or example.name != "demo.py"


@pytest.mark.timing
def test_the_worker_of_the_guide_goes_on_after_a_failure_and_stops_when_told(project: Path) -> None:
    for block in blocks_of(ROOT / "docs" / "streams.md"):
        if block.file in ("my_streams.py", "worker.py"):
            Path(block.file).write_text(block.text)
    events = [{"user_id": "a", "action": "x"}, {"user_id": "b", "action": None}, {"user_id": "c", "action": "z"}]

    def run(call: str) -> str:
        command = [sys.executable, "-c", f"import weft, my_streams; print(weft.{call})"]
        return warm_python.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    run(f"publish_sync('user_events', {events})")
    with warm_python.Popen(
        [sys.executable, "worker.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None and worker.stderr is not None
        assert [worker.stdout.readline() for _ in range(2)] == ["a X\n", "c Z\n"]
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=60) == 0
        assert "AttributeError" in worker.stderr.read()
    (group,) = ast.literal_eval(run("groups_sync('user_events')"))
    assert (group["lag"], group["pending"], group["members"]) == (0, 1, [])


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize("example", ["cdc_postgres", "cdc_delta"])
def test_example_with_servers(
    example: str, project: Path, need_server: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("debezium", "postgres"):
        need_server(each)
    monkeypatch.delenv("JDK_JAVA_OPTIONS", raising=False)
    command = [sys.executable, str(ROOT / "examples" / example / "run.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "99.99" in done.stdout
