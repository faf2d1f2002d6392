"""The command `weft` in processes that cost milliseconds, as forks of one in which everything is imported.

ended = commands.run(place, "run-due", at=3)             killed (-9) at its fourth step
commands.start(place, "run-due", processes=8)            eight at once
ended = commands.ended()
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import warm_python


class Place(Protocol):
    """Where a command runs, and what its environment has beyond the test's."""

    folder: Path
    environment: dict[str, str]


@dataclass
class Ended:
    """How a command ended: its exit code, or minus the number of the signal that ended it."""

    code: int
    out: str
    err: str
    steps: list[str]
    pid: int


class Commands:
    """A process that forks one for each command."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("command_process.py")
        self.server = warm_python.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(
        self,
        place: Place,
        *arguments: str,
        stdin: str | None = None,
        at: int | None = None,
        after: tuple[float, float] | None = None,
        signal: str = "SIGKILL",
        processes: int = 1,
        is_watched: bool = True,
        **environment: str,
    ) -> None:
        """Start a command. The signal comes at step `at`, or `after` seconds from this to that, by chance; one that is
        not watched does not tell its steps."""
        job = {
            "folder": str(place.folder),
            "arguments": arguments,
            "python": sys.executable,
            "environment": {**os.environ, **place.environment, **environment},
            "stdin": stdin,
            "at": at,
            "after": after,
            "signal": signal,
            "processes": processes,
            "is_watched": is_watched,
        }
        assert self.server.stdin
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()

    def answer(self) -> Any:
        """What the process says next: that it is stopped, or how all ended."""
        assert self.server.stdout
        return json.loads(self.server.stdout.readline())

    def ended(self) -> list[Ended]:
        """How the commands that were started ended."""
        return [Ended(**each) for each in self.answer()]

    def run(self, place: Place, *arguments: str, **options: Any) -> Ended:
        """Run a command to its end."""
        self.start(place, *arguments, **options)
        (ended,) = self.ended()
        return ended

    def close(self) -> None:
        """End it."""
        self.server.communicate(timeout=60)
