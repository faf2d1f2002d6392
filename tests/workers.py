"""What the tests of streams share: declare a stream in a line, and run code in other processes.

run = start(\"\"\"
    weft.publish_sync("orders", {"n": args[0]})
    answer(weft.groups_sync("orders"))
\"\"\", 5)
run.answer()      waits for the process, which must end well, and gives what it answered last

The code finds `weft`, `args`, `declare`, `answer(value)` (pickled, so that events keep their lease) and `line()`, which
waits for `run.tell()`. It runs with the connection `default` of the test, in a process of its own.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import warm_python
import weft
from weft.pipelines import model_files
from weft.pipelines.models import Model

PATIENCE = 60
_PATH = list(filter(None, [os.environ.get("PYTHONPATH")]))


def declare_model(name: str, text: str) -> Model:
    """The model of the file NAME.sql, which is written first."""
    file = Path(f"{name}.sql")
    file.write_text(text)
    return model_files.declare(file)


def declare(name: str = "orders", **options: Any) -> Any:
    """A stream of that name, as `@weft.stream(name, …)` on a function makes it."""

    def function() -> None: ...

    function.__qualname__ = f"declare.{name}"
    return weft.stream(name, **options)(function)


def rowids(events: list[dict[str, Any]]) -> list[int]:
    return [event["_weft_rowid"] for event in events]


def plain(event: dict[str, Any]) -> dict[str, Any]:
    """An event as it was published: without what Weft adds, and without columns that are null."""
    return {key: value for key, value in event.items() if not key.startswith("_weft_") and value is not None}


def drain(stream: Any, consumer: str = "drain", batch_size: int = 1000) -> list[dict[str, Any]]:
    """Everything that a consumer has not seen, acknowledged."""
    found: list[dict[str, Any]] = []
    # Longer than a machine stands still that is moved while tests run.
    while events := weft.consume_sync(stream, consumer, batch_size=batch_size, lease=3600):
        weft.ack_sync(stream, consumer, events)
        found += events
    return found


_PROLOGUE = """
import base64, pickle, sys
import weft
from workers import declare, drain, plain, rowids
args = pickle.loads(base64.b64decode(sys.argv[1]))
def answer(value):
    print("answer", base64.b64encode(pickle.dumps(value)).decode(), flush=True)
def line():
    print("ready", flush=True)
    return sys.stdin.readline()
"""


def next_millisecond() -> None:
    """Let the clock go on, where the next event must have another time of publication."""
    begin = time.time_ns()
    while time.time_ns() - begin < 2_000_000:
        pass


class Run:
    """A process that runs some code."""

    def __init__(self, code: str, args: tuple[Any, ...]) -> None:
        self.process = warm_python.Popen(
            [
                sys.executable,
                "-c",
                _PROLOGUE + textwrap.dedent(code),
                base64.b64encode(pickle.dumps(args)).decode(),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *_PATH])},
        )

    def ready(self) -> None:
        """Wait until the process waits for its next line."""
        assert self.process.stdout is not None
        told = self.process.stdout.readline()
        if told != b"ready\n":
            self.answer()
            raise AssertionError(f"the process said {told!r}")

    def tell(self) -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """End it without a chance to clean up."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=PATIENCE)

    def answer(self) -> Any:
        """What it answered, once it has ended well."""
        try:
            out, err = self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"the process did not end: {err.decode()}") from None
        if self.process.returncode != 0:
            raise AssertionError(f"the process gave status {self.process.returncode}: {err.decode()}")
        answers = [line.split()[1] for line in out.splitlines() if line.startswith(b"answer ")]
        return pickle.loads(base64.b64decode(answers[-1])) if answers else None


def start(code: str, *args: Any) -> Run:
    return Run(code, args)


@contextlib.contextmanager
def started(count: int, code: str, *args: Any) -> Iterator[list[Run]]:
    """Several processes that run the same code; the first of their `args` is the number of each."""
    runs = [Run(code, (number, *args)) for number in range(count)]
    try:
        yield runs
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.kill()


def same(got: Any, given: Any) -> bool:
    """Equal, and of the same types all through: 1 is not True, 0.0 is not -0.0."""
    if type(got) is not type(given):
        return False
    if isinstance(given, dict):
        return got.keys() == given.keys() and all(same(got[key], given[key]) for key in given)
    if isinstance(given, list):
        return len(got) == len(given) and all(map(same, got, given))
    if isinstance(given, float):
        return repr(got) == repr(given)
    return bool(got == given)


def execute(system: Any, sql: str) -> None:
    """Run a statement through the plain driver, beside Weft."""
    connection = system.connection.resolved()
    if system.kind == "sqlite":
        import sqlite3

        with contextlib.closing(sqlite3.connect(connection.path, isolation_level=None)) as driver:
            driver.execute(sql)
    elif system.kind == "postgres":
        import psycopg

        with contextlib.closing(psycopg.connect(connection.url, autocommit=True)) as driver:
            driver.execute(sql)
    else:
        import urllib.parse

        import pymysql

        url = urllib.parse.urlsplit(connection.url)
        where = {"host": url.hostname, "port": url.port, "user": url.username, "database": url.path[1:]}
        with contextlib.closing(pymysql.connect(**where, autocommit=True, ssl_disabled=True)) as driver:
            driver.cursor().execute(sql)


def log_of(stream: Any) -> Any:
    """The log protocol's end of a stream."""
    from weft.streams.runtime import open_stream

    return open_stream(stream).log


def wait_until_expired(stream: Any) -> None:
    """Wait until the clock that leases are judged by has passed every lease of the stream."""
    from servers import wait_until
    from weft.streams.runtime import open_stream

    ready = open_stream(stream)
    ends = [member.expires_at.timestamp() for group in ready.log.groups() for member in group.members]
    wait_until(lambda: ready.hub.store.now() > max(ends, default=0), "the leases to run out")
