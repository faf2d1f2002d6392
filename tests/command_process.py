"""Runs the command `weft` in processes of its own, each of which may meet a signal at a step of its run.

Reads a job a line as JSON: a folder, arguments, environment, what is on stdin, the signal and the number of the step at
which it comes. Answers how the command ended, what it printed, and which steps it passed. Each command is a fork of
this process, which is a fork itself (`warm_python`). Everything is imported in it and nothing is open: a command costs
milliseconds, and is a process like any other.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
from typing import Any

from lent_session import borrow

LOGGERS = ("weft.run", "weft.commit")


class Steps(logging.Handler):
    """Writes each step to a file, and sends this process a signal at one of them."""

    def __init__(self, file: int, at: int | None, number: int) -> None:
        super().__init__()
        self.file, self.at, self.number, self.passed = file, at, number, 0

    def emit(self, record: logging.LogRecord) -> None:
        step = f"{record.name.removeprefix('weft.')} {record.getMessage()}"
        os.write(self.file, f"{step}\n".encode())
        self.passed += 1
        if self.passed - 1 == self.at:
            send(self.number)


def send(number: int) -> None:
    """Send this process a signal. A stop must meet this thread: one for the process may meet another thread first,
    and this one goes on meanwhile, into a transaction that stays open."""
    if number == signal.SIGSTOP:
        signal.pthread_kill(threading.get_ident(), number)
    else:
        os.kill(os.getpid(), number)


def command(job: dict[str, Any], steps: int) -> None:
    """The command, in this process."""
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.executable = job["python"]
    borrow()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    handler = Steps(steps, job["at"], signal.Signals[job["signal"]])
    # Not every run of a pipeline has the same steps of the others: where it is the first, tables are missing.
    others = os.environ.get("WEFT_TEST_LOGGERS", "").split()
    for name in (*LOGGERS, *others) if job["is_watched"] else ():
        logger = logging.getLogger(name)
        logger.setLevel(logging.DEBUG)
        logger.addHandler(handler)
    if job["after"] is not None:
        wait, number = job["after"], signal.Signals[job["signal"]]
        # Each of several at another moment.
        timer = threading.Timer(random.SystemRandom().uniform(*wait), os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()
    sys.argv = ["weft", *job["arguments"]]
    from weft.cli import main

    main()


class Child:
    """A fork that runs one command as soon as `gate` is closed."""

    def __init__(self, job: dict[str, Any], gate: tuple[int, int]) -> None:
        self.given, self.out, self.err, self.steps = (tempfile.TemporaryFile() for _ in range(4))  # noqa: SIM115
        self.given.write((job.get("stdin") or "").encode())
        self.given.seek(0)
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.close(gate[1])
                os.read(gate[0], 1)
                os.dup2(self.out.fileno(), 1)
                os.dup2(self.err.fileno(), 2)
                os.dup2(self.given.fileno(), 0)
                sys.stdin = open(0)  # noqa: SIM115 - until it ends
                sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(file, "w"), write_through=True) for file in (1, 2))
                command(job, self.steps.fileno())
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1 if end.code else 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)

    def ended(self) -> dict[str, Any]:
        """How it ended. Where it is stopped, that is said first."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        while os.WIFSTOPPED(status):
            answer({"stopped": self.pid})
            _, status = os.waitpid(self.pid, os.WUNTRACED)
        code = os.waitstatus_to_exitcode(status)
        texts = []
        for file in (self.out, self.err, self.steps):
            file.seek(0)
            texts.append(file.read().decode())
            file.close()
        self.given.close()
        return {"code": code, "out": texts[0], "err": texts[1], "steps": texts[2].splitlines(), "pid": self.pid}


def answer(value: object) -> None:
    """Say something to the test."""
    print(json.dumps(value), flush=True)


def main() -> None:
    """Fork for each job, or as many times as it says, and tell how all of them ended."""
    for line in sys.stdin:
        job = json.loads(line)
        gate = os.pipe()
        children = [Child(job, gate) for _ in range(job.get("processes", 1))]
        os.close(gate[0])
        os.close(gate[1])
        answer([child.ended() for child in children])


if __name__ == "__main__":
    main()
