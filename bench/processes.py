"""Jobs in processes of their own, which share no interpreter with each other: started beforehand, waiting to be told.

job = in_processes("bench.streams_sqlite:one_client", [(1000,)])     one process for each list of arguments
job()                                                               all of them at once; how many events they handled

The function gets the arguments, does what need not be measured, and gives the job. `python -m bench.processes` is what
runs in such a process. It ends with its standard input, at the latest with the process that started it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

Job = Callable[[], int]
# Where `bench` is found: a case that ran before may have changed the folder.
_ROOT = Path(__file__).parent.parent
_started: list[subprocess.Popen[str]] = []


def in_processes(
    function: str, arguments: Sequence[Sequence[object]], preload: str | None = None, python: str = sys.executable
) -> Job:
    """Processes that are ready to run a job each, and the job that runs all of theirs. `python` may be that of another
    environment."""
    environment = {**os.environ, "LD_PRELOAD": preload} if preload else None
    processes = [
        subprocess.Popen(
            [python, "-m", "bench.processes", function, json.dumps(each)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=_ROOT,
        )
        for each in arguments
    ]
    _started.extend(processes)
    for process in processes:
        _answer(process)

    def job() -> int:
        for process in processes:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        return sum(_answer(process) for process in processes)

    return job


def _answer(process: subprocess.Popen[str]) -> int:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{' '.join(process.args)} ended with status {process.wait()}")  # type: ignore[arg-type]
    return int(line)


def end_all() -> None:
    """End the processes that were started."""
    for process in _started:
        process.communicate()
    _started.clear()


def _main(function: str, arguments: str) -> None:
    module, name = function.split(":")
    job = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    print(0, flush=True)
    for _ in sys.stdin:
        print(job(), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
