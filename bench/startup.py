"""What importing Weft and asking for help costs, against Python's own start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from bench.harness import Case

Job = Callable[[], int]


def _run(*command: str) -> Job:
    def job() -> int:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return 1

    return job


def import_weft(_: float) -> tuple[Job, Job]:
    """`import weft` in a new interpreter; an interpreter that imports json alone."""
    return _run(sys.executable, "-c", "import weft"), _run(sys.executable, "-c", "import json")


def show_help(_: float) -> tuple[Job, Job]:
    """`weft --help`; an interpreter that imports json alone."""
    return _run(sys.executable, "-m", "weft", "--help"), _run(sys.executable, "-c", "import json")


# The bars are 100 ms and 250 ms on an idle core, where an interpreter takes about 20 ms to start.
CASES = [
    Case("import weft (time)", "import json (time)", 5, import_weft, at_most=True, rounds=15),
    Case("weft --help (time)", "import json (time)", 12.5, show_help, at_most=True, rounds=15),
]
