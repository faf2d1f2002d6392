"""The process that keeps Spark warm for the commands of a project: a JVM, and a fork that waits for the next command.

The fork is made before any module of the project is imported, and makes the session of the JVM its own while it waits.
When a command has ended, another one is forked, which first removes from the JVM what the command left. What clients
send is in `weft.engine.warm`. This process has no threads, so that it can fork at any time.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import io
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from weft.engine import cleaning, config, jvm, python_daemon, session, warm

_PR_SET_PDEATHSIG = 1
_TICK = 5.0
_PATIENCE = 300.0
"""Seconds for a fork to be ready. It takes a tenth of one, and the first of a JVM a few."""
_OF_TERMINAL = (
    *(signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGWINCH),
    *(signal.SIGSTOP, signal.SIGCONT),
)
_ENVIRONMENTS = 8
"""Spark keeps Python processes for each environment that it has seen: after so many, another engine begins."""


@dataclass
class _Client:
    """A connection, and what it asked for."""

    connection: socket.socket
    pid: int
    data: bytes = b""
    files: list[int] = field(default_factory=list)
    request: dict[str, Any] | None = None

    def answer(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # it has left
            warm.send(self.connection, message)

    def close(self) -> None:
        self.connection.close()
        for each in self.files:
            os.close(each)
        self.files = []


@dataclass
class _Fork:
    """The process that waits for a command, and later carries it out."""

    pid: int
    ended: int
    """A file descriptor of the process (pidfd), readable when it has ended."""
    control: socket.socket
    began: float = field(default_factory=time.monotonic)
    is_ready: bool = False


class Keeper:
    """Serves the commands of a project, one at a time, until it was idle for long or is asked to stop."""

    def __init__(self, root: Path, run: Callable[[list[str]], object], modules: tuple[str, ...]) -> None:
        self.root, self._run, self._modules = root, run, modules
        self._idle_seconds = config.read_engine_settings(root).idle_minutes * 60
        self._fingerprint = warm.fingerprint(root)
        self._limits = warm.limits()
        self._clients: list[_Client] = []
        self._waiting: list[_Client] = []
        self._current: _Client | None = None
        self._fork: _Fork | None = None
        self._machine: jvm.Jvm | None = None
        self._import_path = os.environ.pop(warm.PATH_VARIABLE, "").split(os.pathsep)
        self._environment = dict(os.environ)
        self._environments: set[str] = set()
        self._served = 0
        self._began, self._used = time.time(), time.monotonic()
        self._is_open = False
        self.objects = 0
        """The number of the first object that the JVM keeps for the fork that waits, or for commands."""

    def serve(self) -> None:
        """Be the engine; return at once where another process is."""
        if not self._listen():
            return
        settings = config.read_settings(self.root)
        conf = config.session_conf(settings)  # with the references to the environment that was handed over
        environment = {**warm.environment_at_start(os.environ), python_daemon.VARIABLE: "1"}
        os.environ.clear()
        os.environ.update(environment)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with ThreadPoolExecutor(1) as beside:  # which has ended before the first fork
                starting = beside.submit(session.start_jvm, settings, conf)
                python_daemon.import_all(self._modules)
            self._machine = starting.result()
            jvm_ended = os.pidfd_open(self._machine.process.pid)
            gc.collect()
            gc.freeze()  # a collection in a fork would copy all that is imported
            self._prepare()
            while not self._is_done():
                self._turn(jvm_ended)
        finally:
            self._close()
            self._end_fork()
            if self._machine is not None:
                self._machine.stop()

    def _listen(self) -> bool:
        folder = warm.folder(self.root)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(folder / "engine.lock", flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._socket = socket.socket(socket.AF_UNIX)
        directory = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._path = folder / "engine.sock"
        self._path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._socket.bind(f"/proc/self/fd/{directory}/engine.sock")
        finally:
            os.umask(before)
            os.close(directory)
        self._inode = self._path.lstat().st_ino
        self._socket.listen()
        self._is_open = True
        return True

    def _close(self) -> None:
        """Take no more clients, and make room for another engine."""
        if not self._is_open:
            return
        self._is_open = False
        with suppress(OSError):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()
        self._socket.close()
        os.close(self._lock)
        for client in list(self._waiting):
            self._leave(client)

    def _is_done(self) -> bool:
        if self._current is not None:
            return False
        return not self._is_open or (not self._waiting and time.monotonic() - self._used > self._idle_seconds)

    def _turn(self, jvm_ended: int) -> None:
        """Wait for something to happen, and see to it."""
        assert self._machine is not None
        fork = self._fork
        watched: list[Any] = [each.connection for each in self._clients]
        if self._is_open:
            watched += [self._socket, jvm_ended]
        if fork is not None:
            watched += [fork.ended] if fork.is_ready else [fork.ended, fork.control]
        is_idle = self._current is None and not self._waiting
        left = self._used + self._idle_seconds - time.monotonic() if is_idle else _TICK
        ready = select.select(watched, [], [], max(0.0, min(_TICK, left)))[0]
        with suppress(OSError):  # a full disk: the next round may find room
            self._machine.log.bound()
        if jvm_ended in ready:
            self._close()  # a command that runs fails by itself, or goes on without Spark
        if self._is_open and self._socket in ready:
            self._accept()
        for client in list(self._clients):
            if client.connection in ready:
                self._hear(client)
        if fork is not None and fork is self._fork:
            if fork.ended in ready:
                self._after_fork_ended(fork)
            elif fork.control in ready and (objects := fork.control.recv(20)):
                fork.is_ready, self.objects = True, int(objects)
            elif not fork.is_ready and time.monotonic() - fork.began > _PATIENCE:
                self._end_fork()  # the JVM does not answer
                self._close()
        self._serve_next()

    # Clients

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._socket.accept()
            pid, uid = warm.peer(connection)
            if uid != os.getuid():
                connection.close()
                return
            connection.setblocking(False)
            self._clients.append(_Client(connection, pid))

    def _hear(self, client: _Client) -> None:
        try:
            data, files, _, _ = socket.recv_fds(client.connection, 1 << 20, 3)
        except BlockingIOError:
            return
        except OSError:
            data, files = b"", []
        client.files += files
        if not data:
            self._leave(client)
            return
        client.data += data
        while b"\n" in client.data:
            line, _, client.data = client.data.partition(b"\n")
            try:
                message = json.loads(line)
                if client.request is None:
                    client.request = message
                    self._ask(client, message)
                elif client is self._current and self._fork is not None:
                    self._signal(self._fork, message["signal"])
            except (ValueError, LookupError):  # a client of another version
                self._leave(client)
                return

    def _signal(self, fork: _Fork, number: int) -> None:
        # A terminal sends its signals to all processes that a command has started.
        send = os.killpg if number in _OF_TERMINAL else os.kill
        with suppress(ProcessLookupError):
            send(fork.pid, number)

    def _leave(self, client: _Client) -> None:
        """Forget a client. What it had asked for is ended: it may have been killed."""
        if client not in self._clients:
            return
        client.close()
        self._clients.remove(client)
        if client in self._waiting:
            self._waiting.remove(client)
        if client is self._current:
            self._end_fork()
            self._finish()

    def _ask(self, client: _Client, request: dict[str, Any]) -> None:
        if request["do"] == "ready":
            client.answer({"ready": self._served > 0 or (self._fork is not None and self._fork.is_ready)})
        elif request["do"] == "status":
            client.answer(self._status())
        elif request["do"] == "stop":
            client.answer({"busy": self._current.pid if self._current is not None else None})
            self._close()
        elif request["fingerprint"] != self._fingerprint:
            client.answer({"other": True})
            self._close()
        elif self._current is not None or self._waiting or request["limits"] != self._limits:
            client.answer({"busy": True})
        else:
            self._waiting.append(client)

    def _status(self) -> dict[str, Any]:
        assert self._machine is not None
        processes = _descendants(os.getpid())
        return {
            "pid": os.getpid(),
            "fingerprint": self._fingerprint,
            "state": "busy" if self._current else "warm" if self._fork and self._fork.is_ready else "starting",
            "client": self._current.pid if self._current is not None else None,
            "began": self._began,
            "idle_seconds": 0.0 if self._current else time.monotonic() - self._used,
            "ends_after": self._idle_seconds,
            "commands": self._served,
            "memory": sum(map(_memory, processes)),
            "processes": len(processes),
        }

    # Commands

    def _serve_next(self) -> None:
        """Give the fork that is ready, or the JVM, to a client that waits."""
        if self._current is not None or not self._waiting or self._fork is None or not self._fork.is_ready:
            return
        client = self._current = self._waiting.pop(0)
        assert client.request is not None and self._machine is not None
        self._served += 1
        self._environment, self._import_path = client.request["environment"], client.request["path"]
        self._environments.add(repr(sorted(self._environment.items())))
        if client.request["do"] == "attach":
            machine = self._machine
            client.answer({"port": machine.port, "secret": machine.secret, "jvm": machine.process.pid})
            return
        # The command keeps the connection too: it is closed once both have ended.
        files = (*client.files, client.connection.fileno())
        warm.send(self._fork.control, client.request, files)
        for each in client.files:
            os.close(each)
        client.files = []

    def _after_fork_ended(self, fork: _Fork) -> None:
        """The command has ended; or the fork that waited, and then the JVM cannot be used any more."""
        _, status = os.waitpid(fork.pid, 0)
        self._drop_fork()
        client = self._current
        if client is None or client.request is None or client.request["do"] != "run":
            self._close()
            return
        code = os.waitstatus_to_exitcode(status)
        client.answer({"exit": code} if code >= 0 else {"signal": -code})
        client.close()
        self._clients.remove(client)
        self._finish()

    def _finish(self) -> None:
        self._current, self._used = None, time.monotonic()
        if len(self._environments) > _ENVIRONMENTS:
            self._close()
        if self._is_open:
            self._prepare()

    # The fork

    def _prepare(self) -> None:
        """Fork the process that carries out the next command."""
        self._end_fork()
        ours, theirs = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: there are none of Python's
            pid = os.fork()
        if pid == 0:
            _be_command(self, theirs)
        theirs.close()
        self._fork = _Fork(pid, os.pidfd_open(pid), ours)

    def _end_fork(self) -> None:
        if self._fork is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._fork.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # it has no group of its own yet
            os.kill(self._fork.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._fork.pid, 0)
        self._drop_fork()

    def _drop_fork(self) -> None:
        assert self._fork is not None
        os.close(self._fork.ended)
        self._fork.control.close()
        self._fork = None

    def leave_to_parent(self) -> tuple[jvm.Jvm, bool]:
        """In the fork: close all that is the parent's. Return the JVM, and whether nobody waits for this fork yet."""
        assert self._machine is not None
        self._machine.forget()
        is_idle = not self._waiting and not select.select([self._socket], [], [], 0)[0]
        self._socket.close()
        os.close(self._lock)
        for client in self._clients:
            client.close()
        os.environ.clear()
        os.environ.update(self._environment)
        sys.path[:] = self._import_path
        if str(self.root) not in sys.path:
            sys.path.insert(0, str(self.root))  # as the command will
        return self._machine, is_idle

    def run(self, arguments: list[str]) -> object:
        """Carry out a command."""
        return self._run(arguments)


def _be_command(keeper: Keeper, control: socket.socket) -> NoReturn:
    """Be the process of a command: wait for it, carry it out, and end as a process of its own would."""
    error: BaseException | None = None
    try:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        machine, is_idle = keeper.leave_to_parent()
        lent = warm.LentJvm(machine.port, machine.secret, machine.process.pid)
        lent.objects = keeper.objects
        spark = session.attach(lent, clean=True)
        if is_idle:
            # Spark starts what forks its Python workers, with the environment of the last command.
            spark.sparkContext.parallelize([0], 1).map(abs).collect()
        control.send(b"%d" % lent.objects)
        arguments = _become(control)
        keeper.run(arguments)
    except BaseException as raised:
        error = raised
    _end(error)


def _become(control: socket.socket) -> list[str]:
    """Take over the files, the folder and the environment of the command that comes."""
    data, files, _, _ = socket.recv_fds(control, 1 << 20, 4)
    while data and not data.endswith(b"\n"):
        more = control.recv(1 << 20)
        if not more:
            os._exit(1)
        data += more
    if not data:
        os._exit(1)  # the engine ends
    request = json.loads(data)
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    client = files[3]  # stays open until this process ends
    os.set_inheritable(client, False)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    os.umask(request["umask"])
    os.chdir(request["folder"])
    sys.argv = request["argv"]
    sys.path[:] = request["path"]
    # As Python has opened them for the engine, by the same locale and PYTHONIOENCODING.
    encoding, errors = sys.stdin.encoding, sys.stdin.errors
    sys.stdin = open(0, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115 - until the process ends
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout = io.TextIOWrapper(
        open(1, "wb", 0 if is_unbuffered else -1, closefd=False),  # noqa: SIM115
        line_buffering=os.isatty(1),
        write_through=is_unbuffered,
        encoding=encoding,
        errors=errors,
    )
    sys.stderr = open(2, "w", buffering=1, encoding=encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    python_daemon.draw_other_numbers()
    session.use_environment()
    with socket.socket(fileno=os.dup(client)) as connection:
        warm.send(connection, {"began": os.getpid()})
    return sys.argv[1:]


def _end(error: BaseException | None) -> NoReturn:
    """End as Python does. The modules are left to the system: to take them down takes longer than a small command."""
    code: Any = 0
    if isinstance(error, SystemExit):
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as lost:  # a full disk: as Python itself ends then
        code = 120
        with suppress(OSError, ValueError):
            print(lost, file=sys.stderr)
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _descendants(pid: int) -> list[int]:
    return [pid, *(each for child in cleaning.children(pid) for each in _descendants(child))]


def _memory(pid: int) -> int:
    """Return the bytes that a process holds, its part of what it shares with others."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0
