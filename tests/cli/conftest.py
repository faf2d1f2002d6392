"""The command `weft` as a person runs it: in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture
def run(project):
    """`run("connections", "list")` gives its exit code, output and errors."""

    def run_weft(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "weft", *arguments], input=stdin, capture_output=True, text=True, check=False
        )

    return run_weft
