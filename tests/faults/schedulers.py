"""What the tests of schedulers share: several of them over one run log, in a project whose clock the test sets."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import servers
import warm_python
from operate.conftest import url_of
from servers import wait_until
from weft.errors import WeftError
from weft.operate.records import Attempt
from weft.operate.runlog import RunLog, open_run_log
from weft.operate.scheduler import LEADER

FIRST = datetime(2060, 3, 1, 9, 0, 30, tzinfo=UTC)
LEASE_SECONDS = 1
PATIENCE = 180
LOGS = ("sqlite", "postgres", "mysql", "s3")
MODULE = """
import pathlib
import weft
from weft.project import current

current().clock = lambda: float(pathlib.Path("clock").read_text())

@weft.pipeline(target="slots", mode="append", schedule="* * * * *")
def tick():
    return [{"at": pathlib.Path("clock").read_text()}]
"""


class Wire:
    """Connections to a server that can be cut: a port of its own, which hands on what comes."""

    def __init__(self, port: int) -> None:
        self.to, self.is_cut = port, False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all connections, and refuse new ones."""
        with self._lock:
            self.is_cut = True
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self.is_cut = False

    def close(self) -> None:
        self.cut()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listening.accept()
            except OSError:
                return
            with self._lock:
                try:
                    theirs = None if self.is_cut else socket.create_connection(("127.0.0.1", self.to))
                except OSError:
                    theirs = None
                if theirs is None:
                    ours.close()
                    continue
                self._open |= {ours, theirs}
            for one, other in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._hand_on, args=(one, other), daemon=True).start()

    def _hand_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        with self._lock:
            is_last = one not in self._open
            self._open -= {one, other}
            for each in (one, other):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)  # the other thread ends too
                if is_last:
                    each.close()


@dataclass
class Fleet:
    """Schedulers, and what they have done."""

    folder: Path
    log_url: str
    server: Any
    """Of the run log; `None` where that is a file."""
    log: RunLog
    wire: Wire | None = None
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def wired_url(self) -> str:
        """The run log as it is reached by the wire, where there is one."""
        url = self.log_url
        if self.wire is not None:
            url = url.replace(f":{self.server.port}/", f":{self.wire.port}/")
            if url.startswith("s3"):
                url = f"{url.partition('&endpoint=')[0]}&endpoint=http://127.0.0.1:{self.wire.port}"
            assert str(self.wire.port) in url
        return url

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        # Runs are forks of a process that has imported everything.
        path = os.pathsep.join((str(Path(warm_python.launcher()).parent), os.environ["PATH"]))
        with (self.folder / "output").open("a") as output:
            return warm_python.Popen(
                [sys.executable, "-m", "weft", *arguments],
                cwd=self.folder,
                env={**os.environ, "WEFT_RUN_LOG": self.wired_url(), "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def add(self, count: int = 1) -> None:
        """Start schedulers."""
        lease = ("--lease-seconds", str(LEASE_SECONDS), "--poll-interval", "0.2")
        self.running += [self.start("scheduler", "--executor", "subprocess://", *lease) for _ in range(count)]

    def ready(self) -> None:
        """Wait until all of them have asked who leads: one that begins while the log is away ends."""

        def asked() -> int:
            said = (self.folder / "output").read_text()
            return said.count("this scheduler leads") + said.count("the leader is")

        self.wait(lambda: asked() >= len(self.running), "all schedulers")

    def cron(self) -> None:
        """What cron would start."""
        self.others.append(self.start("run-due"))

    def at(self, moment: timedelta) -> None:
        """Set the clock of all of them."""
        new = self.folder / "clock.new"
        new.write_text(str((FIRST + moment).timestamp()))
        new.rename(self.folder / "clock")  # at once: nobody reads half a number

    def leader(self, but: int | None = None) -> subprocess.Popen[bytes]:
        """The one that leads; with `but` another one than that process."""
        found: list[subprocess.Popen[bytes]] = []

        def leads() -> bool:
            try:
                state = self.log.latest([LEADER])[LEADER]
            except WeftError:  # the log is away
                return False
            pid = state.last.pid if state.last is not None and state.is_live else None
            found[:] = [each for each in self.running if each.pid == pid and each.poll() is None and pid != but]
            return bool(found)

        self.wait(leads, "a leader")
        return found[0]

    def pause(self, leader: subprocess.Popen[bytes]) -> None:
        """Stop the leader. Inside a transaction of SQLite it would hold the lock of the file until it goes on, which no
        other process can change: then it is stopped a moment later."""
        leader.send_signal(signal.SIGSTOP)
        if self.server is None:
            while self._is_locked():
                leader.send_signal(signal.SIGCONT)
                leader.send_signal(signal.SIGSTOP)

    def _is_locked(self) -> bool:
        path = self.log_url.removeprefix("sqlite:///")
        with closing(sqlite3.connect(path, timeout=0.5, isolation_level=None)) as database:
            try:
                database.execute("BEGIN IMMEDIATE")
                database.execute("ROLLBACK")
            except sqlite3.OperationalError:
                return True
        return False

    def slots(self) -> Counter[str]:
        """How often each slot is in the target."""
        try:
            with closing(sqlite3.connect(self.folder / ".weft" / "weft.db")) as database:
                return Counter(at for (at,) in database.execute("SELECT at FROM slots"))
        except sqlite3.OperationalError:  # it is not there yet
            return Counter()

    def done(self, count: int) -> None:
        """Wait until so many slots are done."""
        self.wait(lambda: self.slots().total() >= count, f"{count} slots")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_until(condition, what, seconds=PATIENCE)
        except TimeoutError:
            print((self.folder / "output").read_text()[-5000:])
            raise

    def check(self, count: int) -> None:
        """Stop everything. Every slot was run, none twice."""
        for each in self.running:
            each.send_signal(signal.SIGTERM)
        for each in self.running:
            assert each.wait(PATIENCE) in (0, -signal.SIGTERM)  # it may have begun only now
        for each in self.others:
            each.wait(PATIENCE)
        # What ended while the wire was cut waits in the spool for the log at that URL.
        open_run_log(self.wired_url(), self.folder).close()

        def ended() -> list[Attempt] | None:
            runs = self.log.runs("tick", limit=100_000)
            return None if any(each.status == "running" for each in runs) else runs

        self.wait(lambda: ended() is not None, "the end of all runs")
        assert sorted(self.slots().values()) == [1] * count
        succeeded = Counter(each.slot for each in ended() or () if each.status == "succeeded")
        assert sorted(succeeded.values()) == [1] * count

    def close(self) -> None:
        for each in (*self.running, *self.others):
            with suppress(ProcessLookupError):
                each.send_signal(signal.SIGCONT)
                each.kill()
            each.wait()
        if self.wire is not None:
            self.wire.close()
        self.log.close()


@pytest.fixture
def fleet(
    request: pytest.FixtureRequest, project: Path, shared_server: Callable[[str], servers.Server]
) -> Iterator[Fleet]:
    """A project without schedulers, with a run log of the kind that the parameter names."""
    (project / "work.py").write_text(MODULE)
    # As on several hosts: nothing runs without a claim.
    (project / "weft.toml").write_text('modules = ["work"]\non_run_log_failure = "fail"\n')
    kind = request.param
    for url in url_of(kind, project, shared_server):
        server = None if kind == "sqlite" else shared_server(kind)
        with open_run_log(url, project) as log:
            made = Fleet(project, url, server, log)
            made.at(timedelta())
            try:
                yield made
            finally:
                made.close()
