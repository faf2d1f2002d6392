"""The one Spark session of the process: made when it is first needed, from `[spark]` in weft.toml.

A session that is there already, because the caller made one or because the process was started by spark-submit, is used
as it is.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from weft.engine import archive_files, cleaning, config, jvm, py4j_patches, warm
from weft.engine.java import find_java
from weft.engine.log import EngineLog
from weft.errors import ConnectionFailedError, DeclarationError, MissingExtraError, SettingsError, WeftError, installing
from weft.project import current
from weft.settings import is_secret_name, redact
from weft.spark_support.sessions import java_class

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_GATEWAY_VARIABLES = ("PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET")
_CANCEL_SECONDS = 5.0
_REACH_SECONDS = 10.0
# A process that was killed has closed its connections before its parent can see that it ended.
_ENDING_SECONDS = 1.0
_CONNECT_VARIABLES = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_LOCAL_REMOTE")


@dataclass
class _Running:
    """The session that this module started."""

    session: SparkSession
    context: SparkContext
    jvm: jvm.Jvm | warm.LentJvm
    gateway: Any

    def is_alive(self) -> bool:
        """Return whether it can be used: its context is not stopped, and its JVM has not died."""
        from pyspark import SparkContext

        return SparkContext._active_spark_context is self.context and not self.jvm.has_ended()


_lock = threading.RLock()
_running: _Running | None = None
_is_starting = False
_at_stop: list[Callable[[], object]] = []


def spark(*, jars: Iterable[str | os.PathLike[str]] = ()) -> SparkSession:
    """Return the process's Spark session, started if there is none.

    `jars` are files that it must have on its class path. The session stays the same when another project comes into
    use: a process has one.
    """
    wanted = [config.existing_jar(Path(jar)) for jar in jars]
    with _lock:
        session = running()
        if session is None:
            session = _new_session()
        if _running is None or session is not _running.session:
            _adopt(session)
        else:
            use_environment()
        require_jars(session, wanted)
        return session


def _new_session() -> SparkSession:
    global _is_starting, _running
    _discard()
    _refuse_connect()
    settings = config.read_settings(current().root)
    _is_starting = True
    try:
        if _GATEWAY_VARIABLES[0] in os.environ:
            return _submitted(settings)
        session = _borrowed(settings.root)
        if session is None:
            _running = _start(settings)
            session = _running.session
        return session
    finally:
        _is_starting = False


def running() -> SparkSession | None:
    """Return the session in use, ours or the caller's own, if there is one."""
    ours = _running
    if ours is not None and ours.is_alive():
        return ours.session
    # PySpark shows a context to all threads before it is complete: `weft shell` failed with its first query, which came
    # while another thread started Spark.
    if _is_starting:
        return None
    # Not imported for this: a process with a session has imported it.
    if "pyspark.core.context" not in sys.modules or "pyspark.sql.session" not in sys.modules:
        return None
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    context = SparkContext._active_spark_context
    if context is None or (ours is not None and context is ours.context):
        return None
    # The active one is that of a thread; the one that was made first is for all of them.
    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def is_cold() -> bool:
    """Return whether the next use of Spark would start a JVM on this machine."""
    root = current().root
    is_given = running() is not None or _GATEWAY_VARIABLES[0] in os.environ
    return not is_given and config.read_settings(root).is_local and not warm.lends(root)


def require_jars(session: SparkSession, jars: Iterable[Path]) -> None:
    """Put files onto the class path of a session that runs.

    What `spark.jars` does when a session starts can be done later too: the loader that it fills is the one of all the
    driver's threads and of Hadoop's configuration, and in local mode also of the tasks. (`ADD JAR` fills that of one
    session, which file systems do not see.) Executors elsewhere are sent the files before their next task.
    """
    present: set[str] | None = None
    for jar in jars:
        loader = java_class(session, "java.lang.Thread").currentThread().getContextClassLoader()
        url = java_class(session, "java.net.URI")(jar.as_uri()).toURL()
        try:
            present = {each.toString() for each in loader.getURLs()} if present is None else present
            if url.toString() in present:
                continue
            if not config.is_local(session.sparkContext.master or ""):
                session.sparkContext._jsc.addJar(str(jar))
            loader.addURL(url)
        except Exception:  # a session that another program started, with a loader of another kind
            if has_lost_jvm():
                raise
            raise SettingsError(
                f"{jar.name} cannot be added to the Spark session that runs.",
                hint="Start the session with it: name it in spark.jars where the session is made.",
            ) from None


def is_local() -> bool:
    """Return whether Spark runs on this machine alone, so that its tasks see the files that this process sees."""
    session = running()
    if session is not None:
        return config.is_local(session.sparkContext.master or "")
    return config.read_settings(current().root).is_local


def refuse_one_host(one_host: bool, what: str) -> None:
    """Refuse what only this machine can open, where Spark's tasks run on others."""
    if one_host and not is_local():
        raise DeclarationError(
            f"{what} is on this machine, and Spark's workers on a cluster cannot open it.",
            hint="Use a database with a server or a bucket (object_store_s3, delta_s3), or run Spark here: "
            'WEFT_SPARK_MASTER="local[*]".',
        )


def stop() -> None:
    """Stop the session that `spark` started, and its JVM. The next use starts another one."""
    with _lock:
        _call_at_stop()
        if _running is not None and _running.is_alive() and isinstance(_running.jvm, jvm.Jvm):
            _running.session.stop()
        _discard()


def _discard() -> None:
    """Let go of our session, which was stopped or whose JVM died, so that another one can be made."""
    global _running
    ended, _running = _running, None
    if ended is None:
        return
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    _mute_gateway(ended.gateway)
    ended.jvm.stop()
    if SparkContext._gateway is ended.gateway:
        SparkContext._gateway = SparkContext._jvm = None
    if SparkContext._active_spark_context is ended.context:
        _drop_context()
    if SparkSession._instantiatedSession is ended.session:
        SparkSession._instantiatedSession = SparkSession._activeSession = None


def _drop_context() -> None:
    """Have PySpark forget its context without a call to the JVM, which is gone."""
    from pyspark import SparkContext

    context: Any = SparkContext._active_spark_context
    SparkContext._active_spark_context = None
    with suppress(Exception):  # it may have none, or have none yet
        context._accumulatorServer.shutdown()


def has_lost_jvm() -> bool:
    """Return whether the JVM of the session ended, or can no longer be called. If the session is ours, the next use
    starts another one."""
    if "pyspark.core.context" not in sys.modules:
        return False
    from pyspark import SparkContext

    with _lock:
        context: Any = SparkContext._active_spark_context
        if context is None:
            return False
        try:
            context._jvm.java.lang.System.nanoTime()
        except Exception:  # which one depends on how far the call came
            # Waits for its process, which ends a moment after its connections: until then it would be taken for alive.
            if _running is not None and _running.context is context:
                _discard()
            return True
        return False


def _mute_gateway(gateway: Any) -> None:
    """Stop Py4J from releasing objects of the JVM over a gateway that is gone: it would print an error for each."""
    gateway._gateway_client.is_connected = False


def at_stop(function: Callable[[], object]) -> None:
    """Call something when the session stops, or when the process ends: what its frames still read from is closed so."""
    with _lock:
        _at_stop.append(function)


def _call_at_stop() -> None:
    while _at_stop:
        with suppress(Exception):  # one that fails must not keep the others from being closed
            _at_stop.pop()()


def _start(settings: config.SparkSettings) -> _Running:
    conf = config.session_conf(settings)
    machine = start_jvm(settings, conf)
    machine.log.watch()
    try:
        session, gateway = connect(machine, conf)
    except BaseException:
        machine.stop()
        raise
    return _Running(session, session.sparkContext, machine, gateway)


def start_jvm(settings: config.SparkSettings, conf: dict[str, str]) -> jvm.Jvm:
    """Start a JVM for the sessions of a project, with these settings of Spark."""
    listed = [jar if isinstance(jar, str) else jar.as_uri() for jar in settings.jars]
    if listed:
        conf["spark.jars"] = ",".join(dict.fromkeys([*filter(None, conf.get("spark.jars", "").split(",")), *listed]))
    _check_master(settings.master)
    log = EngineLog(settings.root.absolute() / ".weft" / "spark.log")
    try:
        java = find_java()
        flags = archive_files.archive_flags(java) if settings.archive else []
        machine = jvm.start_jvm(
            java,
            conf,
            flags=[*jvm.PROFILES[settings.profile], *flags],
            log=log,
            log_level=settings.log_level,
        )
    except BaseException:
        log.close()
        raise
    if settings.archive and not flags:
        archive_files.build_in_background(java)
    return machine


def _borrowed(root: Path) -> SparkSession | None:
    """The session of the engine, if there is one that this process may use."""
    lent = warm.borrow(root)
    if lent is None:
        return None
    try:
        return attach(lent)
    except Exception:  # it ended meanwhile
        lent.stop()
        return None


def attach(lent: warm.LentJvm, *, clean: bool = False) -> SparkSession:
    """Make a session in the JVM of the engine that of this process; to be `clean`, remove first what others left: also
    the objects from the number `lent.objects` on, which becomes that of the first one of this process."""
    global _running
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    gateway = None
    try:
        gateway = _open_gateway(lent.port, lent.secret)
        if clean:
            lent.objects = cleaning.release_objects(gateway, lent.objects)
        java = cleaning.usable_context(gateway, lent.pid if clean else None)
        with _own_interrupt(), _variables({"PYSPARK_PYTHON": sys.executable}):
            if java is None:
                session = SparkSession.builder.getOrCreate()
            else:
                context = SparkContext(gateway=gateway, jsc=java, conf=SparkConf(_jconf=java.sc().conf()))
                session = SparkSession(context, cleaning.new_session(gateway))
        session.sparkContext.pythonExec = session.sparkContext.getConf().get("spark.pyspark.python", sys.executable)
    except BaseException:
        _forget_gateway(gateway)
        raise
    session.sparkContext._accumulatorServer.handle_error = lambda *_: None  # type: ignore[method-assign]
    _running = _Running(session, session.sparkContext, lent, gateway)
    lent.environment = dict(session.sparkContext.environment)
    use_environment()
    return session


def use_environment() -> None:
    """Have Spark's Python workers of the engine get the environment that this process has now."""
    if _running is not None and isinstance(_running.jvm, warm.LentJvm):
        _running.context.environment = {**warm.environment_of_workers(), **_running.jvm.environment}


def is_lent() -> bool:
    """Return whether the JVM of the session is the engine's, which ends what this process leaves in it."""
    return _running is not None and isinstance(_running.jvm, warm.LentJvm)


def has_lost_engine() -> bool:
    """Return whether the engine lent this process a JVM that can no longer be called."""
    return is_lent() and has_lost_jvm()


def _check_master(master: str) -> None:
    """Make sure that a master answers. Spark would try for a minute, and then name its own classes."""
    problems = []
    for address in config.masters(master):
        try:
            socket.create_connection(address, timeout=_REACH_SECONDS).close()
        except OSError as error:
            problems.append(error.strerror or str(error))
        else:
            return
    if problems:
        raise ConnectionFailedError(
            f"No Spark master answers at {master}: {problems[0]}.",
            hint="Start it, or correct master in [spark] of weft.toml or WEFT_SPARK_MASTER.",
        )


def _submitted(settings: config.SparkSettings) -> SparkSession:
    """The session of a program that was started by spark-submit, which has a JVM and most of its settings already."""
    from pyspark.sql import SparkSession

    return SparkSession.builder.config(map={**config.SESSION_CONF, **settings.conf}).getOrCreate()


def _adopt(session: SparkSession) -> None:
    """Use a session that the caller made as it is, with the settings that our data sources need."""
    for key, value in config.NEEDED_CONF.items():
        if session.conf.get(key, None) != value:
            session.conf.set(key, value)
    if not config.is_local(session.sparkContext.master or ""):
        ship(session.sparkContext)


def ship(context: SparkContext) -> None:
    """Send our own package to the executors of a cluster, as a zip from which every task imports, before one that is
    installed there. What it imports in turn must be there already."""
    # Spark's own temporary folder: it is removed when the context stops, and the executors may ask until then.
    folder = Path(str(context._temp_dir)) / "weft-package"
    if folder.exists():
        return
    folder.mkdir()
    source = Path(__file__).parents[1]
    with zipfile.ZipFile(folder / "weft.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(source.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.write(file, Path("weft") / file.relative_to(source))
    context.addPyFile(str(folder / "weft.zip"))


def connect(machine: jvm.Jvm, conf: Mapping[str, str]) -> tuple[SparkSession, Any]:
    """Return the session in a JVM, and the gateway to it."""
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise MissingExtraError(f"Spark cannot be imported: {error}.", hint=installing("spark")) from error
    gateway = None
    try:
        gateway = _open_gateway(machine.port, machine.secret)
        with _own_interrupt(), _variables({"PYSPARK_PYTHON": conf.get("spark.pyspark.python")}):
            session = SparkSession.builder.getOrCreate()
        if not config.is_local(conf["spark.master"]):
            ship(session.sparkContext)
    except BaseException as error:
        try:
            # Put into words while there is a gateway: the text of an exception of Java's is over there.
            explained = _no_session(error, conf, machine) if isinstance(error, Exception) else None
        finally:
            _forget_gateway(gateway)
        raise explained or error from None
    # It prints a traceback when the JVM ends before it does, as at the end of a process.
    session.sparkContext._accumulatorServer.handle_error = lambda *_: None  # type: ignore[method-assign]
    return session, gateway


def _open_gateway(port: int, secret: str) -> Any:
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway

    # They print each error of a query to the terminal, stack trace and all, besides raising it.
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        logging.getLogger(name).disabled = True
    py4j_patches.apply()
    with _variables(dict(zip(_GATEWAY_VARIABLES, (str(port), secret), strict=True))):
        gateway = launch_gateway()  # type: ignore[no-untyped-call]
    try:
        SparkContext._ensure_initialized(gateway=gateway)
        py4j_patches.keep_classes(gateway.jvm)
        py4j_patches.use_own_numbers(gateway)
    except BaseException:
        _forget_gateway(gateway)
        raise
    return gateway


def _forget_gateway(gateway: Any) -> None:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    # A context that lost its JVM while it was made is still the active one, and the next session would be made of it.
    _drop_context()
    SparkContext._gateway = SparkContext._jvm = None
    SparkSession._instantiatedSession = SparkSession._activeSession = None
    if gateway is not None:
        with suppress(Exception):  # the JVM ended
            gateway.close()
        _mute_gateway(gateway)


def disconnect(session: SparkSession, gateway: Any) -> None:
    """End the session of a JVM that ends too. Else PySpark would look for the next one over there."""
    from pyspark import SparkContext

    session.stop()
    SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()


def _no_session(error: Exception, conf: Mapping[str, str], machine: jvm.Jvm) -> WeftError:
    with suppress(subprocess.TimeoutExpired):
        return jvm.not_ready(machine.process.wait(_ENDING_SECONDS), machine.log, answered=True)
    text = str(error)
    # The class and the message of a Java error, without its stack trace.
    reason = (text.partition("\n: ")[2] or text).partition("\n\tat ")[0].strip()
    secrets = (value for key, value in conf.items() if is_secret_name(key))
    return ConnectionFailedError(
        f"A Spark session on {conf['spark.master']} cannot be made: {redact(reason, secrets)}",
        hint=f"Look at [spark] in weft.toml. Spark's log is {machine.log.path}.",
    )


@contextmanager
def _variables(values: dict[str, str | None]) -> Iterator[None]:
    """Set variables for the block alone: a process that is started later must not find our gateway."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _own_interrupt() -> Iterator[None]:
    """Keep the handler of Ctrl-C that Spark replaces: the program's own, or else one that cancels Spark's jobs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _interrupt if before is signal.default_int_handler else before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """What Spark does on Ctrl-C, but from another thread: this one may be in the middle of a call, and then Spark's own
    way fails with tracebacks."""
    ours = _running
    if ours is not None and ours.is_alive():
        thread = threading.Thread(target=_cancel, args=(ours.context,), daemon=True)
        thread.start()
        thread.join(_CANCEL_SECONDS)
    signal.default_int_handler(number, frame)


def _cancel(context: SparkContext) -> None:
    with suppress(Exception):  # it stops meanwhile
        context.cancelAllJobs()


def _refuse_connect() -> None:
    for name in _CONNECT_VARIABLES:
        if os.environ.get(name):
            raise SettingsError(
                f"{name} is set, which makes every session one of Spark Connect; Weft needs a session of its own.",
                hint=f"Unset {name}, and name the cluster by WEFT_SPARK_MASTER or master in [spark] of weft.toml.",
            )


# The end of the process, and its children


def _at_exit() -> None:
    """The JVM would end by itself when this process has ended. It is waited for, so that nothing is left behind."""
    _call_at_stop()
    if _running is not None:
        _mute_gateway(_running.gateway)
        _running.jvm.stop()


# Kept as they are: to release them would release them in the parent's JVM too.
_inherited: list[_Running] = []
_inherited_at_stop: list[Callable[[], object]] = []


def _after_fork() -> None:
    """A child has its parent's sockets and none of its threads: what it sent would end up among its parent's calls."""
    global _is_starting, _lock, _running
    _lock, _is_starting = threading.RLock(), False
    _inherited_at_stop.extend(_at_stop)
    _at_stop.clear()
    if _running is None:
        return
    parents, _running = _running, None
    _inherited.append(parents)
    parents.jvm.forget()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    _mute_gateway(parents.gateway)  # else what is garbage here is released in the parent's JVM
    parents.gateway._gateway_client.send_command = _refuse_command
    SparkContext._lock = threading.RLock()
    SparkSession.Builder._lock = threading.RLock()
    if SparkContext._gateway is parents.gateway:
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = SparkSession._activeSession = None


def _refuse_command(*_: object, **__: object) -> None:
    raise WeftError(
        "This process was forked from one that has a Spark session, which cannot be shared.",
        hint="Call weft.spark() here for a session of this process's own, or use threads.",
    )


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
