"""Starting Spark's JVM ourselves, without Spark's launcher.

The launcher starts a JVM to find out how to start the JVM, and its flags ask for a module that a runtime from a package
does not have. Started directly, a session is there seconds earlier, with any Java that Spark runs on.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.engine.config import Profile
from weft.engine.java import Java
from weft.engine.log import CONFIGURATION, EngineLog
from weft.errors import ConnectionFailedError, MissingExtraError, SettingsError, StorageError, WeftError, installing

_PATIENCE = 300.0
"""Seconds for a JVM to answer. It takes two; a machine that swaps may take a minute."""
_GOODBYE = 15.0
"""Seconds for a JVM to end by itself: it runs its hooks, which remove temporary files."""

# What Spark reaches into; the list of org.apache.spark.launcher.JavaModuleOptions, less the module that no smaller
# runtime has (jdk.incubator.vector, which speeds up spark.ml alone).
_OPENED = (
    "java.base/java.lang",
    "java.base/java.lang.invoke",
    "java.base/java.lang.reflect",
    "java.base/java.io",
    "java.base/java.net",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.base/jdk.internal.ref",
    "java.base/sun.nio.ch",
    "java.base/sun.nio.cs",
    "java.base/sun.security.action",
    "java.base/sun.util.calendar",
    "java.security.jgss/sun.security.krb5",
)
MODULE_FLAGS = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    *(f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED),
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
    "-Djdk.reflect.useDirectMethodHandle=false",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
)
# The flags of each profile.
# Measured on two busy cores, 1M rows of five columns between two PostgreSQL databases, CPU of all processes:
#   four loads in tasks (no row crosses the JVM): quick 5.8 s, throughput 8.7 s
#   four loads with SQL between: quick 23.8 s, throughput 23.8 s: here compiling well has just paid for itself
#   7M rows hashed and grouped in the JVM alone: quick 45 s, throughput 33 s
# So quick is the default, and throughput is for what runs for minutes.
PROFILES: dict[Profile, tuple[str, ...]] = {
    # The first compiler alone, and the collector that needs no threads. With as much room for code as both compilers
    # have: Java gives one alone 48 MB, which Spark filled after twenty minutes of many queries. Then nothing is
    # compiled any more, and threads die in which a method is needed for the first time.
    # Java collects all garbage when classes reach a size that Spark's exceed twice, and finds none in them.
    "quick": (
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-XX:ReservedCodeCacheSize=240m",
        "-XX:MetaspaceSize=256m",
    ),
    # Not Java's own choice (G1), which took more CPU for both kinds of load. And Arrow does not check each value's
    # place: every vector was made by Spark or by Arrow itself, and the checks took a twentieth of a load with SQL.
    # This collector lets the heap grow to its limit before it takes more than a hundredth of the time. With a
    # twentieth, and at most 40 % of the heap free, six queries over 1.5M rows took 1.3 GB, not 2.0, and no longer.
    "throughput": (
        "-XX:+UseParallelGC",
        "-XX:GCTimeRatio=19",
        "-XX:MinHeapFreeRatio=20",
        "-XX:MaxHeapFreeRatio=40",
        "-Darrow.enable_unsafe_memory_access=true",
        "-Darrow.enable_null_check_for_get=false",
    ),
}


@dataclass
class Jvm:
    """A running JVM with a gateway for Python. It ends when its stdin does, so also when this process is killed."""

    process: subprocess.Popen[bytes]
    port: int
    secret: str
    log: EngineLog

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def stop(self, *, patience: float = _GOODBYE) -> None:
        """End it and wait until it has ended."""
        _end(self.process, patience)
        self.log.close()

    def forget(self) -> None:
        """In a forked child: let go of the pipe, or the JVM would live for as long as the child does."""
        assert self.process.stdin is not None
        with suppress(OSError):
            os.close(self.process.stdin.fileno())
        self.process.returncode = 0  # it is the parent's child: this process cannot wait for it


def spark_home() -> Path:
    """Return the folder of the installed pyspark, which holds Spark's own jars."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise MissingExtraError("Spark is not installed: there is no package pyspark.", hint=installing("spark"))
    home = Path(spec.origin).parent
    if not (home / "jars").is_dir():
        raise MissingExtraError(
            f"The installed pyspark ({home}) has no jars: it is the client for Spark Connect alone.",
            hint=installing("spark"),
        )
    return home


def start_jvm(
    java: Java, conf: Mapping[str, str], *, flags: Sequence[str], log: EngineLog, log_level: str = "WARN"
) -> Jvm:
    """Start a JVM with these settings of Spark, and wait for its gateway."""
    home = spark_home()
    folder = Path(tempfile.mkdtemp(prefix="weft-spark-"))
    try:
        properties, answer = folder / "spark.properties", folder / "gateway"
        # In a file of this user's own, not on the command line, which everybody on the machine can read.
        properties.write_text(_properties(conf), encoding="ascii")
        command = [
            str(java.executable),
            *MODULE_FLAGS,
            *flags,
            *_conf_flags(conf),
            "-XX:+ErrorFileToStderr",
            "-Dfile.encoding=UTF-8",
            f"-Dlog4j2.configurationFile={CONFIGURATION.as_uri()}",
            f"-Dweft.log.level={log_level}",
            *("-cp", class_path(home, conf)),
            "org.apache.spark.deploy.SparkSubmit",
            *("--properties-file", str(properties), "--load-spark-defaults", "pyspark-shell"),
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log.descriptor,
            stderr=log.descriptor,
            env=environment(os.environ, _PYSPARK_DRIVER_CONN_INFO_PATH=str(answer), PYTHONPATH=_python_path()),
            # Ctrl-C is for Python, which cancels what runs: a JVM that took it too would be gone by then.
            start_new_session=True,
        )
        try:
            port, secret = _gateway(process, answer, log)
        except BaseException:
            _end(process)
            raise
    except WeftError:  # some are errors of the operating system too
        raise
    except OSError as error:
        raise StorageError(f"Spark cannot be started: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Jvm(process, port, secret, log)


def _gateway(process: subprocess.Popen[bytes], answer: Path, log: EngineLog) -> tuple[int, str]:
    """Wait for the file in which the JVM says where it listens. It is there whole or not at all."""
    deadline = time.monotonic() + _PATIENCE
    while not answer.exists():
        ended = process.poll()
        if ended is not None or time.monotonic() > deadline:
            raise not_ready(ended, log)
        time.sleep(0.01)
    data = answer.read_bytes()
    port, length = struct.unpack(">ii", data[:8])
    return port, data[8 : 8 + length].decode()


def not_ready(ended: int | None, log: EngineLog, *, answered: bool = False) -> WeftError:
    """Return the error of a JVM that ended, or did not answer, before there was a session. One that never answered and
    ended by itself has a wrong setting, and would end so each time."""
    killed = None if ended is None else -ended if ended < 0 else ended - 128  # Java's own handlers exit with 128 + n
    if ended is None:
        how = f"did not answer within {_PATIENCE:.0f} seconds"
    elif killed in set(signal.Signals):
        how = f"was ended by signal {signal.Signals(killed).name}"
    else:
        how = f"ended with code {ended}"
    lines = "".join(f"\n    {line}" for line in log.tail())
    what = f"Spark's JVM {how} before it was ready. It said:{lines or ' nothing.'}"
    where = f"The whole log is {log.path}."
    if how.startswith("ended") and not answered:
        return SettingsError(what, hint=f"Look at [spark] in weft.toml and at JAVA_HOME. {where}")
    hint = "Where memory ran out, give it less: spark.driver.memory in [spark.conf] of weft.toml."
    return ConnectionFailedError(what, hint=f"{hint} {where}")


def _end(process: subprocess.Popen[bytes], patience: float = _GOODBYE) -> None:
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def environment(base: Mapping[str, str], **more: str) -> dict[str, str]:
    """Return what a JVM of Spark's finds in its environment."""
    # An installed Spark's home would put its pyspark, of whatever version, before the workers' own.
    left_out = {"SPARK_HOME", "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"}
    env = {name: value for name, value in base.items() if name not in left_out}
    locale = env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or ""
    if "utf" not in locale.lower():
        # Java takes the encoding of file names from here, and refuses others than ASCII otherwise.
        env["LC_ALL"] = "C.UTF-8"
    return {**env, "SPARK_CONNECT_MODE": "0", **more}


def _python_path() -> str:
    """Return where the workers of this machine find modules: where this process does, also those next to a script."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def class_path(home: Path, conf: Mapping[str, str]) -> str:
    """Return Spark's jars between what the user puts before them and the folders with the settings of Hadoop."""
    before = conf.get("spark.driver.extraClassPath")
    after = (os.environ.get(name) for name in ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR"))
    return ":".join(filter(None, [before, f"{home}/jars/*", *after]))


def _conf_flags(conf: Mapping[str, str]) -> list[str]:
    """Return the flags for settings that count when the JVM starts."""
    flags = [f"-Xmx{_java_size(conf.get('spark.driver.memory') or default_memory())}"]
    if libraries := conf.get("spark.driver.extraLibraryPath"):
        flags.append(f"-Djava.library.path={libraries}")
    for key in ("spark.driver.defaultJavaOptions", "spark.driver.extraJavaOptions"):
        flags += shlex.split(conf.get(key, ""))
    return flags


def _java_size(text: str) -> str:
    """Return Spark's "4g", "4gb" or "4096" (mebibytes) as Java wants it."""
    number = text.strip().lower().removesuffix("b")
    return f"{number}m" if number.isdigit() else number


def default_memory() -> str:
    """Return the largest heap for the memory of this machine, or of its container."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            available = min(available, int(Path(limit).read_text()))
    return heap_for(available)


def heap_for(memory: int) -> str:
    """A quarter of the memory there is, as Java itself would take, but no more than 4 GiB: nothing here needs more, and
    a heap that may grow does. At least 1 GiB, or half of a smaller memory; 512 MiB is the least that Spark takes."""
    least = min(max(memory // 2, 512 << 20), 1 << 30)
    return f"{min(max(memory // 4, least), 4 << 30) >> 20}m"


def _properties(conf: Mapping[str, str]) -> str:
    """Settings in the format of java.util.Properties."""
    return "".join(f"{_escaped(key)}={_escaped(value)}\n" for key, value in conf.items())


def _escaped(text: str) -> str:
    units: Iterable[Any] = struct.iter_unpack(">H", text.encode("utf-16-be"))
    return "".join(chr(unit) if chr(unit).isalnum() and unit < 128 else f"\\u{unit:04x}" for (unit,) in units)
