"""`import weft` and `weft --help` load none of the heavy libraries: they are what people wait for most often."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {
    "adbc_driver_manager",
    "adbc_driver_postgresql",
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
