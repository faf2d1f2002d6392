"""Ctrl-C and SIGTERM while Spark works: one line, the run is recorded, nothing goes on, and the next run continues."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from servers import wait_until

# Each starts Spark.

PIPELINES = """
import os, time
from pathlib import Path
import weft

@weft.pipeline(target="copies")
def slow():
    def wait(batches):
        Path("FOLDER/part").write_text(str(os.getpid()))
        Path("FOLDER/part").rename("FOLDER/worker")
        time.sleep(600)
        yield from batches

    return [{"id": 1}] if Path("quick").exists() else weft.spark().range(3).mapInArrow(wait, "id long")

@weft.pipeline(target="others", depends_on=[slow])
def after():
    return [{"id": 1}]
"""


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.timing
@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "Stopped by an interrupt."), (signal.SIGTERM, 143, "Stopped by SIGTERM.")],
)
def test_while_spark_works(start: Any, run: Any, project: Path, number: signal.Signals, code: int, said: str) -> None:
    Path("slow_pipelines.py").write_text(PIPELINES.replace("FOLDER", str(project)))
    Path("weft.toml").write_text('modules = ["slow_pipelines"]\n')
    process = start("run", "--all")
    wait_until(Path("worker").exists, "the task to begin", seconds=120)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert (out, err) == (f"interrupted slow: {said} The next run goes on with it.\n", "")
    assert process.returncode == code
    wait_until(lambda: is_gone(int(Path("worker").read_text())), "the task to end")
    (found,) = json.loads(run("runs", "list", "--format", "json").stdout)
    assert (found["pipeline"], found["status"], found["error"]) == ("slow", "interrupted", said)
    Path("quick").touch()
    (again,) = json.loads(run("run", "slow", "--format", "json").stdout)
    assert (again["status"], again["attempt"], again["run_id"]) == ("succeeded", 2, found["run_id"])


@pytest.mark.timing
def test_what_scripts_read(start: Any, project: Path) -> None:
    """Also where it is stopped, they get what was done and what was not."""
    Path("waiting.py").write_text(
        "import pathlib, time\nimport weft\n\n@weft.pipeline(target='a')\ndef first():\n    return [{'id': 1}]\n\n"
        "@weft.pipeline(target='b', depends_on=[first])\ndef second():\n    pathlib.Path('began').touch()\n"
        "    time.sleep(600)\n"
    )
    process = start("run", "--all", "--module", "waiting", "--format", "json")
    wait_until(Path("began").exists, "the function to be called")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert [(each["pipeline"], each["status"]) for each in json.loads(out)] == [
        ("first", "succeeded"),
        ("second", "interrupted"),
    ]


def test_begin_anew(run: Any, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that failed is not gone on with: its first target, which was loaded, is loaded again."""
    Path("two.py").write_text(
        "import weft\n\n@weft.pipeline(targets=['a', weft.target('b', mode='merge', keys=['id'])])\ndef both():\n"
        "    import os\n    return [{'id': 1}] * int(os.environ.get('ROWS', '2'))\n"
    )
    failed = json.loads(run("run", "both", "--module", "two", "--format", "json").stdout)[0]
    assert (failed["status"], [each["target"] for each in failed["targets"]]) == ("failed", ["a"])
    monkeypatch.setenv("ROWS", "1")
    done = json.loads(run("run", "both", "--module", "two", "--format", "json", "--no-resume").stdout)[0]
    assert (done["status"], done["attempt"]) == ("succeeded", 1)
    assert done["run_id"] != failed["run_id"]
    assert [(each["target"], each["inserted"], each["replayed"]) for each in done["targets"]] == [
        ("a", 1, False),
        ("b", 1, False),
    ]
