"""What the commands of a cron job cost as whole processes, against Python's own start."""

from __future__ import annotations

import atexit
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from bench.harness import Case

Job = Callable[[], int]

_THOUSAND = """
import weft


def declare(number):
    @weft.pipeline(name=f"pipeline_{number}", target=f"table_{number}", schedule="0 2 * * *", timezone="Europe/Berlin")
    def copy():
        return "SELECT id FROM raw"


for number in range(1000):
    declare(number)
"""
_TEN = """
import weft


@weft.pipeline(target="copies", schedule="0 2 * * *")
def copy():
    return "SELECT id, name FROM raw"
"""
# As if all had run for their last slot.
_DONE = """
from weft.operate.runlog import open_run_log
from weft.operate.due import Planner
from weft.project import current

current().load_modules(["work"])
with open_run_log() as log:
    for due in Planner(log).due():
        log.finish(log.claim(due.pipeline.name, slot=due.slot), "succeeded")
"""
_NO_JVM = "import sys; import weft.cli; sys.modules['pyspark'] = None; weft.cli.main()"


def _project(module: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="weft-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "work.py").write_text(module)
    (folder / "weft.toml").write_text('modules = ["work"]\n')
    return folder


def _run(folder: Path, *command: str) -> Job:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}

    def job() -> int:
        subprocess.run([sys.executable, *command], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        return 1

    return job


def nothing_due(_: float) -> tuple[Job, Job]:
    """`weft run-due` over 1,000 pipelines that all have run; an interpreter that imports json alone."""
    folder = _project(_THOUSAND)
    _run(folder, "-c", _DONE)()
    return _run(folder, "-c", _NO_JVM, "run-due"), _run(folder, "-c", "import json")


def ten_rows(_: float) -> tuple[Job, Job]:
    """`weft run` of ten rows inside SQLite; an interpreter that imports json alone."""
    folder = _project(_TEN)
    (folder / ".weft").mkdir()
    with closing(sqlite3.connect(folder / ".weft" / "weft.db")) as database, database:
        database.execute("CREATE TABLE raw (id BIGINT, name TEXT)")
        database.executemany("INSERT INTO raw VALUES (?, ?)", [(number, f"name {number}") for number in range(10)])
    return _run(folder, "-c", _NO_JVM, "run", "copy"), _run(folder, "-c", "import json")


# The bars are 1 s and 1.5 s on an idle core, where an interpreter takes about 20 ms to start. The import of pyspark is
# refused, so no JVM can start.
CASES = [
    Case("run-due, 1,000 pipelines, none due (time)", "import json (time)", 50, nothing_due, at_most=True, rounds=15),
    Case("run of a pushdown pipeline of 10 rows (time)", "import json (time)", 75, ten_rows, at_most=True, rounds=15),
]
