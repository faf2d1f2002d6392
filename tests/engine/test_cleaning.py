"""What a command leaves in the JVM of the engine."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from weft.engine import cleaning

# A process whose child forks a worker as Spark does, and is told when to see that this has ended.
_PARENT = """
import os, signal, sys
if os.fork():
    os.wait()
else:
    worker = os.fork()
    if worker == 0:
        signal.pause()
    print(worker, flush=True)
    sys.stdin.readline()
    os.waitpid(worker, 0)
"""


@pytest.mark.timing
def test_workers_are_gone_before_the_next_command() -> None:
    """Spark would give its first task to one that was killed and is still there."""
    command = [sys.executable, "-IS", "-c", _PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert list(cleaning.python_workers(parent.pid)) == [worker]
        ending = threading.Thread(target=cleaning.end_workers, args=(parent.pid,))
        ending.start()
        ending.join(0.2)
        assert ending.is_alive()
        parent.stdin.write("\n")
        parent.stdin.close()
        ending.join(60)
        assert not ending.is_alive()
