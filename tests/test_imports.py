"""`import weft` and `weft --help` load none of the heavy libraries: they are what people wait for most often."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "adbc_driver_manager",
    "adbc_driver_postgresql",
    "google",
    "grpc",
    "numpy",
    "pandas",
    "polars",
    "psycopg",
    "psycopg_binary",
    "pyarrow",
    "pymysql",
    "pyspark",
    "sqlalchemy",
    "starlette",
    "uvicorn",
}

IMPORT = "import weft"
HELP = """
import sys
from weft.cli import main
sys.argv = ["weft", "--help"]
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
"""
LIST_MODULES = """
import sys
print("loaded:", *sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize("program", [IMPORT, HELP], ids=["import", "help"])
def test_loads_nothing_heavy(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program + LIST_MODULES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].removeprefix("loaded:").split())
    assert "weft" in loaded
    assert loaded & HEAVY == set()


VALIDATE = """
import sys
import weft
from weft.cli import main

@weft.pipeline(target="copies")
def copies():
    return "SELECT 1 AS id"

sys.argv = ["weft", sys.argv[1], "copies"]
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
print("loaded:", *(name for name in sys.modules if name.startswith(("pyspark", "weft.engine.streaming"))))
"""


@pytest.mark.parametrize("command", ["validate", "preview"])
def test_commands_for_loads_import_no_spark(command: str, tmp_path: Path) -> None:
    """They take no longer than the run."""
    program = [sys.executable, "-c", VALIDATE, command]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


FRAMES = """
import sys
import weft

@weft.stream(fields={"n": "int64"})
def events():
    pass

weft.publish_sync(events, {"n": 1})
batches = weft.iter_stream("default", "events", group="g", consumer="c", to=sys.argv[1])
before = {name.partition(".")[0] for name in sys.modules}
assert len(next(batches)) == 1
batches.close()
print("loaded:", *{name.partition(".")[0] for name in sys.modules} - before)
"""


@pytest.mark.parametrize("to", ["polars", "arrow"])
def test_frames_import_what_they_need_before_a_lease_runs(to: str, tmp_path: Path) -> None:
    """Of its first array pyarrow imports pandas, which takes as long as a short lease."""
    program = [sys.executable, "-c", FRAMES, to]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"
