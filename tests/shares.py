"""Share out the tests of a run among processes: `pytest --processes 5`.

The processes are forks of one that has collected all tests: to collect them takes longer than most files of tests. A
process that is done with a group of tests (`selection.group`) is given the next one. Where a process dies, the test
that it ran has failed, and another one goes on with what was left.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import sys
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from _pytest.config import create_terminal_writer

import selection

PROCESS = pytest.StashKey[str]()
"""The name of a process that runs a share of the tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", metavar="N", type=int, default=1, help="share out the tests among N processes")


def is_sharing(config: pytest.Config) -> bool:
    return bool(config.getoption("--processes") > 1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not is_sharing(session.config) or session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own loop runs them, or ends the run
    _Run(session).all(session.config.getoption("--processes"))
    return True


class _Run:
    """The side of the process that shares out."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for number, item in enumerate(session.items):
            groups[selection.group(item)].append(number)
        self._groups = deque(groups.values())
        self._numbers = itertools.count()
        # Made here, so that it is removed when all is done.
        self._folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._pids: dict[Connection, int] = {}
        self._left: dict[Connection, deque[int]] = {}
        """What each process was given and has not done, in the order in which it runs them."""

    def all(self, processes: int) -> None:
        try:
            for _ in range(min(processes, len(self._groups))):
                self._start()
            while self._pids:
                for connection in wait(list(self._pids)):
                    assert isinstance(connection, Connection)
                    self._answer(connection)
                    if self._session.shouldfail:
                        raise self._session.Failed(self._session.shouldfail)
                    if self._session.shouldstop:
                        raise self._session.Interrupted(self._session.shouldstop)
        finally:
            for pid in self._pids.values():
                os.kill(pid, signal.SIGINT)
            for connection in list(self._pids):
                self._forget(connection)

    def _start(self) -> None:
        ours, theirs = Pipe()
        number = next(self._numbers)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            for other in (ours, *self._pids):  # its end is seen when all have closed it
                other.close()
            _Process(self._session, theirs, self._folder / f"process-{number}").run()
        theirs.close()
        self._pids[ours], self._left[ours] = pid, deque()

    def _answer(self, connection: Connection) -> None:
        """Take one message of a process."""
        hook, config = self._session.config.hook, self._session.config
        try:
            message = connection.recv()
        except EOFError:
            self._replace(connection)
            return
        if message is None:  # it wants more
            given = self._groups.popleft() if self._groups else []
            self._left[connection] += given
            connection.send(given)
        elif isinstance(message, int):
            self._left[connection].remove(message)
        elif isinstance(message, dict):
            report = hook.pytest_report_from_serializable(config=config, data=message)
            hook.pytest_runtest_logreport(report=report)
        else:
            raise RuntimeError(f"A process of the tests failed:\n{message}")

    def _replace(self, connection: Connection) -> None:
        """Go on where a process has died, if it had not done all."""
        code, left = self._forget(connection)
        if not left:
            return
        item = self._session.items[left.popleft()]
        why = f"The process that ran this test ended: exit code {code}."
        report = pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", why, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)
        if left:
            self._groups.appendleft(list(left))
        self._start()

    def _forget(self, connection: Connection) -> tuple[int, deque[int]]:
        connection.close()
        _, status = os.waitpid(self._pids.pop(connection), 0)
        return os.waitstatus_to_exitcode(status), self._left.pop(connection)


class _Process:
    """A process that runs tests. It is a plugin, whose hook sends what became of them."""

    def __init__(self, session: pytest.Session, connection: Connection, folder: Path) -> None:
        self._session, self._config = session, session.config
        self._connection, self._folder = connection, folder

    def run(self) -> NoReturn:
        try:
            self._make_room()
            items = iter(self._items())
            following = next(items, None)
            while following is not None:
                (index, item), following = following, next(items, None)
                self._config.hook.pytest_runtest_protocol(item=item, nextitem=following and following[1])
                self._connection.send(index)
        except KeyboardInterrupt:
            pass
        except BaseException:
            with suppress(OSError):  # the other side is gone
                self._connection.send(traceback.format_exc())
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        os._exit(0)

    def _items(self) -> Iterator[tuple[int, Any]]:
        while True:
            self._connection.send(None)
            given = self._connection.recv()
            if not given:
                return
            for index in given:
                yield index, self._session.items[index]

    def _make_room(self) -> None:
        """Have what this process shares with the others, and must not, be its own."""
        plugins = self._config.pluginmanager
        capture: Any = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        self._folder.mkdir()
        self._config._tmp_path_factory._basetemp = self._folder  # type: ignore[attr-defined]
        # What a test says that hangs, and nothing else.
        plugins.unregister(name="terminalreporter")
        writer = create_terminal_writer(self._config, sys.__stderr__)
        plugins.register(SimpleNamespace(_tw=writer), "terminalreporter")
        plugins.register(self)
        self._config.stash[PROCESS] = self._folder.name

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(data)
