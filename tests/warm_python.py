"""Python processes that start within milliseconds: forks of one process in which everything is imported.

To import Weft, Arrow and PySpark takes half a second of processor time, more than most processes of the tests take for
all the rest. There are two ways to a fork:

Popen([sys.executable, "-m", "weft", "init"], …)   as subprocess.Popen: the fork is a child of this process, so that
run([sys.executable, "-c", "print(1)"], …)         signals reach it and its exit code is its own
launcher()                                         the path of a program that stands for `python`, for whoever starts
                                                   Python by itself, as Spark does. It starts a fork and waits for it;
                                                   `weft` beside it does the same, for scripts of a shell

A fork has the arguments, the environment, the folder and the files that a new process would have. The workers of a
`weft serve` are forks too. Tests of what is imported, and of what Python itself does with its arguments, start Python.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import io
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any

from lent_session import borrow
from weft.engine.python_daemon import is_jar_of_spark

_IMPORTED = (
    "click._textwrap",
    "encodings.ascii",
    "encodings.idna",
    "http.client",
    "numpy",
    "obstore.store",
    "pandas",
    "polars",
    "pyarrow.compute",
    "pyarrow.parquet",
    "pyspark.sql",
    "pyspark.sql.datasource_internal",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.worker_util",
    "urllib.request",
    "weft.cli",
    "weft.cli.connections",
    "weft.cli.consume",
    "weft.cli.doctor",
    "weft.cli.init",
    "weft.cli.inspect",
    "weft.cli.pipelines",
    "weft.cli.runs",
    "weft.cli.scheduler",
    "weft.cli.serve",
    "weft.cli.streams",
    "weft.cli.worker",
    "weft.engine.load",
    "weft.engine.models.build",
    "weft.engine.models.freshness",
    "weft.engine.models.survey",
    "weft.engine.preview",
    "weft.engine.run",
    "weft.engine.session",
    "weft.engine.validate",
    "weft.expectations",
    "weft.operate.alerters",
    "weft.operate.executors",
    "weft.operate.listener",
    "weft.operate.model_worker",
    "weft.operate.presence",
    "weft.operate.runner",
    "weft.operate.scheduler",
    "weft.operate.status",
    "weft.operate.supervisor",
    "weft.pipelines.expectations",
    "weft.pipelines.streaming",
    "weft.pipelines.streaming.declare",
    "weft.pipelines.streaming.execution",
    "weft.server.serve",
    "weft.systems.delta.connection",
    "weft.systems.duckdb.tables",
    "weft.systems.endpoint",
    "weft.systems.kafka.connection",
    "weft.systems.kinesis.connection",
    "weft.systems.mysql.store",
    "weft.systems.mysql.tables",
    "weft.systems.object_stores.by_obstore",
    "weft.systems.objects.connection",
    "weft.systems.objects.s3",
    "weft.systems.postgres.store",
    "weft.systems.postgres.tables",
    "weft.systems.pubsub.connection",
    "weft.systems.rabbitmq.connection",
    "weft.systems.redis.connection",
    "weft.systems.redis.store",
    "weft.systems.schema_registry.connection",
    "weft.systems.sql.trial",
    "weft.systems.sqlite.store",
    "weft.systems.sqlite.tables",
    "weft.systems.stream_fields",
    "weft.udfs",
)
# -I and -S: a start without site-packages takes milliseconds. The modules `json` and `socket` would double that.
_LAUNCHER = """#!{python} -IS
import os, sys
path, *arguments = sys.argv
is_weft = os.path.basename(path) == "weft"
if is_weft:
    arguments = ["-m", "weft", *arguments]
elif arguments[:1] != ["-m"] or not arguments[1].startswith(("pyspark.", "weft.engine.python_daemon")):
    os.execv({python!r}, [{python!r}, *arguments])
import _socket
request = {{"arguments": arguments, "environment": dict(os.environ),
    "folder": os.getcwd(), "parent": None, "files": [0, 1, 2],
    "new_session": False, "process_group": -1}}
if is_weft:
    request["python"] = os.path.join(os.path.dirname(path), "python")
warm = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
warm.connect({address!r})
data = ascii(request).encode() + b"\\n"
files = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
warm.sendall(data[warm.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)]):])
code = warm.recv(3)  # once the fork has ended; nothing, if it was killed
os._exit(int(code or 1))
"""
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_SERVE = ["-m", "weft", "serve"]
NAME = "warm"
"""The name of a process whose forks are the workers of a service."""
_adopting = threading.Lock()
_served_at: Any = None
"""In a service: the address of the process whose forks are its workers."""


class Popen(subprocess.Popen[Any]):
    """A process that is a fork of the warm one where its command is `python`, with `-m`, `-c` or a script."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:  # type: ignore[override]
        # The arguments in the order of Python 3.11.
        (_, pass_fds, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_) = rest
        *_, start_new_session, process_group = rest
        is_python = args[0] == sys.executable and (args[1] in ("-m", "-c") or not args[1].startswith("-"))
        if not is_python or preexec_fn or shell or executable:
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        files = [given if given != -1 else own for given, own in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2))]
        request = {
            "arguments": list(map(os.fspath, args[1:])),
            "environment": dict(os.environ if env is None else env),
            "folder": os.fspath(cwd or os.getcwd()),
            "python": sys.executable if _served_at else launcher(),
            "parent": os.getpid(),
            "files": [0, 1, 2, *pass_fds],
            "new_session": start_new_session,
            "process_group": process_group,
        }
        self.pid = _adopt(request, [*files, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`, which knows no other class of processes."""
    check, timeout, given = options.pop("check", False), options.pop("timeout", None), options.pop("input", None)
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if given is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(given, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _adopt(request: dict[str, Any], files: list[int]) -> int:
    """Return the pid of a fork that is a child of this process.

    A process between the warm one and the fork ends at once. Linux gives its child to the nearest ancestor that adopts
    orphans. This process adopts them for that moment alone, because orphans of others would stay as zombies.
    """
    with _adopting, socket.socket(socket.AF_UNIX) as warm:
        warm.connect(_address())
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(warm, [ascii(request).encode() + b"\n"], files)
            answer = warm.recv(100)
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    return int(answer)


@functools.cache
def _warm(owner: int) -> Path:
    """Start the warm process, which ends with this one; the folder with its socket."""
    folder = tempfile.TemporaryDirectory(prefix="weft-python-")
    address = str(Path(folder.name, "socket"))
    command = [sys.executable, __file__, address]
    warm = subprocess.Popen(command, cwd=folder.name, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert warm.stdin is not None and warm.stdout is not None
    with warm.stdout:
        assert warm.stdout.readline() == b"ready\n"

    def end() -> None:
        if os.getpid() == owner:  # not a fork of it
            warm.stdin.close()
            warm.wait(60)
            folder.cleanup()

    atexit.register(end)
    return Path(folder.name)


def _address() -> Any:
    return _served_at or str(_warm(os.getpid()) / "socket")


@functools.cache
def launcher() -> str:
    """The path of what stands for `python`."""
    path = Path(_address()).with_name("python")
    path.write_text(_LAUNCHER.format(python=sys.executable, address=_address()))
    path.chmod(0o755)
    path.with_name("weft").symlink_to(path)
    return str(path)


def serve(address: str) -> socket.socket | None:
    """Fork for each request, until stdin is closed. In a fork: the socket of its request."""
    for module in _IMPORTED:
        __import__(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all that is imported
    _save_coverage()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        return _fork_for_each(listening, sys.stdin)


def _save_coverage() -> None:
    """Under `make coverage`: write down what the imports reached, which each fork would do else."""
    coverage = sys.modules.get("coverage")
    measuring = coverage and coverage.Coverage.current()
    if measuring:
        measuring.save()


def _fork_for_each(listening: socket.socket, *ends: Any) -> socket.socket | None:
    """Fork for each request, until one of `ends` is closed. In a fork: the socket of its request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while listening in (ready := select.select([listening, *ends], [], [])[0]) and len(ready) == 1:
        asking, _ = listening.accept()
        if os.fork() == 0:
            # Out of the way of the files that come with it.
            moved = fcntl.fcntl(asking, fcntl.F_DUPFD_CLOEXEC, 200)
            asking.close()
            return socket.socket(fileno=moved)
        asking.close()
    return None


def _keep_workers_warm() -> socket.socket | None:
    """In a service: have its workers be forks. They are its children, so they are forks of a child, which has done
    nothing yet and ends with the service. In a fork: the socket of its request."""
    global _served_at
    libc, owner = ctypes.CDLL(None), os.getpid()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("")  # the system finds a name
        listening.listen()
        if os.fork() == 0:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            libc.prctl(_PR_SET_NAME, NAME.encode(), 0, 0, 0)
            if os.getppid() != owner:
                os._exit(1)
            return _fork_for_each(listening)
        _served_at = listening.getsockname()
    subprocess.Popen = Popen  # type: ignore[misc]
    return None


def become(asking: socket.socket) -> list[str]:
    """Be the process that was asked for; its arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    data, files, _, _ = socket.recv_fds(asking, 1 << 20, 16)
    while not data.endswith(b"\n"):
        more = asking.recv(1 << 20)
        if not more:  # who asked is gone
            os._exit(1)
        data += more
    request = ast.literal_eval(data.decode())
    if request["parent"] is not None:
        between = os.getpid()
        if os.fork():
            ctypes.CDLL(None)._exit(0)  # os._exit would write down what it reached, under `make coverage`
        while os.getppid() == between:
            time.sleep(0.0002)
        if os.getppid() != request["parent"]:  # which has ended meanwhile
            os._exit(1)
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, 100) for file in files]  # each may have the number of another
    for file in files:
        os.close(file)
    for number, file in zip(request["files"], moved, strict=True):
        os.dup2(file, number)
        os.close(file)
    if request["new_session"]:
        os.setsid()
    if request["process_group"] != -1:
        os.setpgid(0, request["process_group"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - until the process ends
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))  # as Spark asks its workers to be
    sys.stdout = io.TextIOWrapper(
        open(1, "wb", 0 if is_unbuffered else -1, closefd=False),  # noqa: SIM115
        line_buffering=os.isatty(1),
        write_through=is_unbuffered,
    )
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(request["folder"])
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    found = [each for each in given if each and not is_jar_of_spark(each)]
    sys.path[:1] = [os.getcwd(), *found]  # the first is the folder of this file
    if "python" in request:
        sys.executable = request["python"]  # for Spark, which starts more of them
    if request["parent"] is not None:
        asking.sendall(str(os.getpid()).encode())
        asking.close()
    # Not before: a test killed a worker that its service had not heard of yet, and the service waited for it.
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"python", 0, 0, 0)
    return request["arguments"]  # type: ignore[no-any-return]


def main(arguments: list[str]) -> None:
    """What Python does with its arguments."""
    borrow()
    if arguments[:3] == _SERVE and (asking := _keep_workers_warm()) is not None:
        arguments = become(asking)
    if arguments[0] == "-m":
        sys.argv[1:] = arguments[2:]
        if arguments[1] == "weft.server.worker":
            # These look at their environment, and make numbers of their process, when they are imported.
            for name in [each for each in sys.modules if each.startswith(("weft.server", "prometheus_client"))]:
                del sys.modules[name]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    if arguments[0] != "-c":
        sys.argv = arguments
        sys.path[0] = os.path.dirname(arguments[0])
        runpy.run_path(arguments[0], run_name="__main__")
        return
    sys.argv = ["-c", *arguments[2:]]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(arguments[1], "<string>", "exec"), module.__dict__)


def _end(error: BaseException | None, asking: socket.socket | None) -> None:
    """End as Python does, and tell the launcher how. The modules are left to the system: to take them down takes longer
    than to import them."""
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
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    if asking is not None and asking.fileno() != -1:
        with contextlib.suppress(OSError):  # it was killed meanwhile
            asking.sendall(str(code & 0xFF).encode())
    os._exit(code & 0xFF)


if __name__ == "__main__":
    _error: BaseException | None = None
    _asking = serve(sys.argv[1])
    try:
        if _asking is not None:
            main(become(_asking))
    except BaseException as error:
        _error = error
    _end(_error, _asking)
