"""Python for the processes that Spark starts in tests, forked from one in which everything is imported.

Spark starts a process for each stream that a query follows, and for each kind of work on data sources. Each of them
imports PySpark, Arrow and Weft: half a second of processor time, more than all the rest of a small query. The path that
`launcher` gives stands for `python`: what Spark starts by it is a fork of one warm process, with the arguments, the
environment, the folder and the open files that Spark gave it. Everything else is run by Python itself.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

_IMPORTED = (
    "numpy",
    "pandas",
    "pyarrow.compute",
    "pyarrow.parquet",
    "pyspark.sql",
    "pyspark.sql.datasource_internal",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.worker_util",
    "weft.systems.mysql.store",
    "weft.systems.postgres.store",
    "weft.systems.redis.store",
    "weft.systems.sqlite.store",
)
# -I and -S: a start without site-packages takes milliseconds.
_LAUNCHER = """#!{python} -IS
import os, sys
if sys.argv[1] != "-m" or not sys.argv[2].startswith("pyspark."):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
import json, socket
with socket.socket(socket.AF_UNIX) as warm:
    warm.connect({socket!r})
    request = {{"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd()}}
    socket.send_fds(warm, [json.dumps(request).encode() + b"\\n"], [0, 1, 2])
    warm.recv(1)  # nothing, once the fork has ended
"""


@functools.cache
def launcher() -> str:
    """The path of what stands for `python`. The warm process ends with this one."""
    folder = tempfile.TemporaryDirectory(prefix="weft-python-")
    path, address = Path(folder.name, "python"), str(Path(folder.name, "socket"))
    path.write_text(_LAUNCHER.format(python=sys.executable, socket=address))
    path.chmod(0o755)
    warm = subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert warm.stdin is not None and warm.stdout is not None
    assert warm.stdout.readline() == b"ready\n"
    owner = os.getpid()

    def end() -> None:
        if os.getpid() == owner:  # not a fork of it
            warm.stdin.close()
            warm.wait(60)
            folder.cleanup()

    atexit.register(end)
    return str(path)


def serve(address: str) -> None:
    """Fork for each request, until stdin is closed."""
    for module in _IMPORTED:
        __import__(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        import select

        while sys.stdin not in select.select([sys.stdin, listening], [], [])[0]:
            asking, _ = listening.accept()
            with asking:
                if os.fork() == 0:
                    listening.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _become(asking)


def _become(asking: socket.socket) -> None:
    """Be the process that was asked for; `asking` stays open until it ends."""
    code = 1
    try:
        data, files, _, _ = socket.recv_fds(asking, 1 << 20, 3)
        while not data.endswith(b"\n"):
            data += asking.recv(1 << 20)
        request = json.loads(data)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.path[:0] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        module, *sys.argv[1:] = request["arguments"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


if __name__ == "__main__":
    serve(sys.argv[1])
