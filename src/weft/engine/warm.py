"""The warm engine as its clients see it: a process that keeps a JVM with a Spark session for the commands of a project.

`weft.engine.keeper` is that process. It listens on `.weft/engine.sock`, serves one client at a time, and has a process
that waits, attached to the JVM, for the next command. A client sends one line of JSON, with the files of its terminal:

    {"do": "run", …}       carry out a command in the waiting process
    {"do": "attach", …}    lend the JVM to this process until it closes the connection
    {"do": "ready"}        say whether it has started
    {"do": "status"}       say how it is
    {"do": "stop"}         end, after the command that runs

This module imports little: a command that is carried out by the engine takes no longer to begin than to import it.
"""

from __future__ import annotations

import atexit
import errno
import functools
import hashlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft import engine as package
from weft.engine import config
from weft.errors import WeftError

VARIABLE = "WEFT_ENGINE"
PATH_VARIABLE = "WEFT_ENGINE_PATH"
"""For a new engine: where the process that started it finds modules."""
_START_SECONDS = 120.0
_ANSWER_SECONDS = 0.3
# Not through a link that others may have put there.
_LOG_FLAGS = os.O_WRONLY | os.O_TRUNC | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# What Java, Python and their libraries look at when they start. With another value there must be another engine.
_AT_START = re.compile(
    r"((SPARK|PYSPARK|HADOOP|YARN|HIVE|JAVA|JDK|AWS|AZURE|GOOGLE|CLOUDSDK|KRB5|PYTHON|LC|LD|MALLOC|OMP|OPENBLAS|MKL|ARROW|"
    r"POLARS|CONDA|WEFT_SPARK|WEFT_IVY)_|_JAVA_|PYTHON).*|(LANG|LANGUAGE|TZ|HOME|TMPDIR|TMP|TEMP|VIRTUAL_ENV|JAVA_HOME|"
    r"WEFT_CACHE|XDG_CACHE_HOME|https?_proxy|no_proxy|all_proxy)",
    re.IGNORECASE,
)
# And what the system needs to start processes.
_BASIC = ("PATH", "USER", "LOGNAME", "SHELL")
# Variables that differ between terminals: Spark's Python workers, which stay for the next command, do not get them.
_OF_TERMINAL = re.compile(
    r"(PWD|OLDPWD|SHLVL|_|TERM.*|COLUMNS|LINES|COLORTERM|WINDOWID|DISPLAY|WAYLAND_DISPLAY|SSH_.*|XDG_SESSION.*|TMUX.*|STY|"
    r"VTE_.*|KONSOLE_.*|ITERM_.*|VSCODE_.*|GPG_TTY|PS\d|PROMPT.*|WEFT_ENGINE|TRACEPARENT|TRACESTATE)"
)

# Whether to use it


def may_use(root: Path) -> bool:
    """Return whether an engine may be used here: not for other machines' Spark, whose executors it would keep."""
    if package.starts_engine is False or os.getcwd() != str(root.absolute()) or not hasattr(os, "pidfd_open"):
        return False
    wanted = os.environ.get(VARIABLE)
    if wanted is not None:
        is_on = _is_true(wanted)
    else:
        # Another program may run for long, and nobody else could use the engine.
        is_short = bool(package.starts_engine) or "pytest" in sys.modules or "IPython" in sys.modules
        is_on = is_short and not _is_true(os.environ.get("CI", "")) and config.read_engine_settings(root).daemon
    return is_on and config.read_settings(root).is_local


def may_start() -> bool:
    """Return whether this process may start one: a command, or a program with WEFT_ENGINE=1."""
    return bool(package.starts_engine or _is_true(os.environ.get(VARIABLE, "")))


def lends(root: Path) -> bool:
    """Return whether an engine may lend this process its JVM now. A command that is carried out here, not by the
    engine, found none that is free."""
    with suppress(OSError):
        return not package.starts_engine and may_use(root) and has_started(root)
    return False


def _is_true(text: str) -> bool:
    return text.lower() not in ("", "0", "false", "no", "off")


# The identity of an engine


def fingerprint(root: Path) -> str:
    """Return a text that is another one where another engine is needed: versions, settings, jars, the environment."""
    settings = config.read_settings(root)
    jars = [(str(jar), _changed(jar)) for jar in settings.jars if isinstance(jar, Path)]
    spark = find_spec("pyspark")
    package = Path(__file__).parents[1]
    parts = (
        sys.executable,
        sys.version,
        os.getuid(),
        _umask(),
        str(root.absolute()),
        sorted(config.session_conf(settings).items()),
        (settings.profile, settings.log_level, settings.archive, jars),
        sorted((name, value) for name, value in os.environ.items() if _AT_START.fullmatch(name)),
        [(path, _changed(path)) for path in sys.path if path.endswith("-packages")],
        spark and spark.origin and _changed(spark.origin),
        str(package),
        max(_newest(str(package))),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def limits() -> list[Any]:
    """Return the niceness of this process, and what it may take. Spark's processes have those of the engine, so what
    has others goes without. Not how many files it may open, which notebooks change."""
    import resource

    named = (getattr(resource, f"RLIMIT_{name}") for name in ("AS", "CPU", "DATA", "FSIZE", "NPROC", "RSS"))
    return [os.getpriority(os.PRIO_PROCESS, 0), *(list(resource.getrlimit(each)) for each in named)]


def _changed(path: str | os.PathLike[str]) -> tuple[int, int]:
    with suppress(OSError):
        status = os.stat(path)
        return status.st_mtime_ns, status.st_size
    return 0, 0


def _newest(folder: str) -> list[int]:
    """Return when the files of a package were changed: one that is being worked on is another version each time."""
    times = [0]
    for entry in os.scandir(folder):
        if entry.name.endswith(".py"):
            times.append(entry.stat().st_mtime_ns)
        elif entry.name != "__pycache__" and entry.is_dir():
            times += _newest(entry.path)
    return times


def environment_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what the engine's own processes have of an environment. The rest comes with each command."""
    return {name: value for name, value in environment.items() if name in _BASIC or _AT_START.fullmatch(name)}


def environment_of_workers() -> dict[str, str]:
    """Return what Spark's Python workers get of the environment of this process, and where they find its modules.
    Spark starts others for another environment, and keeps those that it has."""
    kept = {name: value for name, value in os.environ.items() if not _OF_TERMINAL.fullmatch(name)}
    # Not the folder of the files that were added to a session: workers find it by themselves.
    paths = [path or os.getcwd() for path in sys.path if not os.path.basename(path).startswith("userFiles-")]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


# The connection


def folder(root: Path) -> Path:
    """Return the folder with the engine's files."""
    return root.absolute() / ".weft"


def connect(root: Path) -> socket.socket | None:
    """Return a connection to the engine, if one runs that is this user's own."""
    try:
        directory = os.open(folder(root), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Through the folder's descriptor: the path of a socket has at most 107 characters.
        path = f"/proc/self/fd/{directory}/engine.sock"
        if os.stat(path, follow_symlinks=False).st_uid != os.getuid():
            return None
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            if peer(connection)[1] == os.getuid():
                return connection
        except OSError:
            pass
        connection.close()
        return None
    except FileNotFoundError:
        return None
    finally:
        os.close(directory)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process at the other end, and its user."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def send(connection: socket.socket, message: Mapping[str, Any], files: tuple[int, ...] = ()) -> None:
    """Send one line of JSON, with open files."""
    data = json.dumps(message).encode() + b"\n"
    if files:
        sent = socket.send_fds(connection, [data], files)
        data = data[sent:]
    connection.sendall(data)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next message; none where the other end is closed."""
    data = b""
    while not data.endswith(b"\n"):
        try:
            more = connection.recv(1)
        except ConnectionResetError:
            more = b""
        if not more:
            return None
        data += more
    message: dict[str, Any] = json.loads(data)
    return message


def ask(root: Path, what: str) -> dict[str, Any] | None:
    """Ask the engine that runs something; none where none runs."""
    connection = connect(root)
    if connection is None:
        return None
    with connection:
        with suppress(BrokenPipeError):
            send(connection, {"do": what})
        answer = receive(connection)
        if what == "stop" and answer is not None and not answer["busy"]:
            receive(connection)  # nothing, once it has ended
        return answer


# Starting one


def start(root: Path) -> bool:
    """Start an engine, detached from this process, and return whether one listens."""
    process = _spawn(root)
    if process is None:
        return False
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        has_ended = process.poll() is not None  # another one may have been first
        if (connection := connect(root)) is not None:
            connection.close()
            process.returncode = process.returncode or 0  # it goes on without us
            return True
        if has_ended:
            return False
        time.sleep(0.01)
    return False


def _spawn(root: Path) -> subprocess.Popen[bytes] | None:
    there = folder(root)
    try:
        there.mkdir(mode=0o700, exist_ok=True)
        log = os.open(there / "engine.log", _LOG_FLAGS, 0o600)
    except OSError:
        return None
    try:
        return subprocess.Popen(
            # -P: a module of the project must not be taken for one of ours.
            [sys.executable, "-P", "-m", "weft", "engine", "serve"],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, PATH_VARIABLE: os.pathsep.join(sys.path)},
            start_new_session=True,
        )
    except OSError:
        return None
    finally:
        os.close(log)


@functools.cache
def start_at_exit(root: Path) -> None:
    """Have a command that did without Spark start an engine when it ends, for the commands after it."""
    if package.starts_engine and may_use(root):
        atexit.register(_start_unwatched, root)


def _start_unwatched(root: Path) -> None:
    if (connection := connect(root)) is not None:
        connection.close()
    elif (process := _spawn(root)) is not None:
        process.returncode = 0  # it goes on without us


def has_started(root: Path) -> bool:
    """Return whether an engine is ready for commands, or carries one out. What can do without does not wait for one
    that starts."""
    connection = connect(root)
    if connection is None:
        return False
    with connection:
        connection.settimeout(_ANSWER_SECONDS)  # one that starts does not answer
        send(connection, {"do": "ready"})
        answer = receive(connection)
    return answer is not None and bool(answer.get("ready"))


def ready(root: Path, request: Mapping[str, Any], files: tuple[int, ...] = ()) -> socket.socket | None:
    """Send a request to the engine that runs. None where there is none."""
    connection = connect(root)
    if connection is None:
        return None
    try:
        own = {"fingerprint": fingerprint(root), "environment": dict(os.environ), "path": sys.path, "limits": limits()}
        send(connection, {**request, **own}, files)
    except OSError:
        connection.close()
        return None
    return connection


# Commands


def run(arguments: list[str]) -> int | None:
    """Have the engine that runs carry out a command, and return its exit code; none where this process has to do it."""
    root = Path.cwd()
    package.starts_engine = True
    # A file that only this process has open cannot be read by name over there.
    if "--no-engine" in arguments or any("/dev/fd/" in each for each in arguments):
        return None
    code = connection = at = None
    try:
        if not may_use(root):
            return None
        request = {
            "do": "run",
            "argv": [sys.argv[0], *arguments],
            "folder": os.getcwd(),
            "umask": _umask(),
            "ignored": [int(each) for each in _FORWARDED if signal.getsignal(each) is signal.SIG_IGN],
        }
        if arguments[0] == "sql" and "-" in arguments:
            _keep_input()
        at = _place_in_input()
        if has_started(root):
            connection = ready(root, request, (0, 1, 2))
    except (OSError, WeftError):
        pass  # whatever is wrong, the command says it
    if connection is not None:
        with connection:
            code = _follow(connection)
    if code is None and at is not None:
        os.lseek(0, at, os.SEEK_SET)  # for this process, which begins again
    return code


def _place_in_input() -> int | None:
    """Return where the standard input is; none where that cannot be gone back to."""
    with suppress(OSError):
        return os.lseek(0, 0, os.SEEK_CUR)
    return None


def _keep_input() -> None:
    """Read the standard input, so that a command that is carried out again finds it again."""
    if _place_in_input() is not None:
        return
    kept = os.memfd_create("weft-input")
    with suppress(OSError), os.fdopen(os.dup(kept), "wb") as copy:  # it may be closed
        while data := os.read(0, 1 << 16):
            copy.write(data)
    os.lseek(kept, 0, os.SEEK_SET)
    os.dup2(kept, 0)
    os.close(kept)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _follow(connection: socket.socket) -> int | None:
    """Pass signals on to the command until it has ended, and end as it did."""
    answer = receive(connection)
    if answer is None or "began" not in answer:
        return None

    def forward(number: int, _: Any) -> None:
        with suppress(OSError):
            send(connection, {"signal": number})

    def suspend(number: int, _: Any) -> None:
        forward(signal.SIGSTOP, _)
        os.kill(os.getpid(), signal.SIGSTOP)
        forward(signal.SIGCONT, _)

    before = {}
    for number in (*_FORWARDED, signal.SIGTSTP, signal.SIGWINCH):
        if signal.getsignal(number) is not signal.SIG_IGN:
            handler = suspend if number == signal.SIGTSTP else forward
            before[number] = signal.signal(number, handler)
    ended = receive(connection)
    for number, old in before.items():
        signal.signal(number, old)
    if ended is None:
        print("weft: the engine ended; the command goes on in a process of its own", file=sys.stderr)
        return None
    if "signal" in ended:
        signal.signal(ended["signal"], signal.SIG_DFL)
        os.kill(os.getpid(), ended["signal"])
    return int(ended["exit"])


# The JVM, for a process of its own


class LentJvm:
    """The JVM of the engine, while this process has it."""

    def __init__(self, port: int, secret: str, pid: int, connection: socket.socket | None = None) -> None:
        self.port, self.secret, self.pid, self._connection = port, secret, pid, connection
        self._process = os.pidfd_open(pid)
        self.environment: dict[str, str] = {}
        """What Spark itself has for its Python workers."""
        self.objects = 0

    def has_ended(self) -> bool:
        import select

        return bool(select.select([self._process], [], [], 0)[0])

    def stop(self) -> None:
        """Give it back. What still runs in it is cancelled."""
        if self._connection is not None:
            self._connection.close()

    def forget(self) -> None:
        """In a forked child: the parent alone gives it back."""
        self.stop()


def borrow(root: Path) -> LentJvm | None:
    """Return the JVM of the engine, which is started where this process may; none where it is to start its own."""
    if not may_use(root):
        return None
    has_started = False
    while True:
        connection = ready(root, {"do": "attach"})
        if connection is not None:
            import pyspark.sql  # noqa: F401 - while the engine may still start

            answer = receive(connection)
            if answer is not None and "port" in answer:
                try:
                    return LentJvm(answer["port"], answer["secret"], answer["jvm"], connection)
                except OSError as error:
                    if error.errno != errno.ESRCH:
                        raise
            connection.close()
            if answer is not None and "busy" in answer:
                return None
        # Another one has other settings, and has made room; or there is none.
        if has_started or not may_start() or not start(root):
            return None
        has_started = True
