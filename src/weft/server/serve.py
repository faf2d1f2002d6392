"""`weft serve`: one listening socket, the processes that answer on it, and a parent that starts them again."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence

import msgspec

from weft.errors import ConnectionFailedError, SettingsError, WeftError
from weft.operate import presence, runlog, sinks
from weft.operate.log_format import VARIABLE
from weft.project import current
from weft.server import cors, logs
from weft.server.access import open_streams
from weft.server.cached_probe import CachedProbe
from weft.server.limits import Limits
from weft.server.metrics import FOLDER as METRICS_FOLDER
from weft.server.service import in_memory, load_modules
from weft.server.worker import STOP_SECONDS, Task

logger = logging.getLogger("weft.server")

_BACKLOG = 2048
_METRICS = "metrics"
# A worker that did not stop in its time is killed: a database that hangs would hold it indefinitely.
_KILL_SECONDS = STOP_SECONDS + 2
_SPOOL_SECONDS = 10.0
# A worker that fails before it answers is not started again at once: it would fail again.
_PAUSE_SECONDS = 0.5
_MOST_PAUSE_SECONDS = 10.0


def serve(
    modules: Sequence[str] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    workers: int = 1,
    insecure: bool = False,
    log_format: logs.Format = "json",
    models: bool = True,
    run_log: str | None = None,
    metrics: str | None = None,
) -> None:
    """Serve the streams of this project until SIGTERM or SIGINT; with `models` build its models in another process.
    `run_log`: the URL of the run log, in place of the project's; `metrics`: that of a sink for its metrics, besides
    /metrics."""
    logs.configure(log_format)
    of_project, metrics = sinks.project_url(metrics), sinks.url_beside_scrapes(metrics)
    sink = sinks.check(metrics)  # a wrong one is an error here, not one of every worker
    limits, broken = Limits.of_project(), load_modules(modules)
    cors.checked(None)  # a wrong origin is an error here, not one of every worker
    if run_log:
        runlog.check_url(run_log)
        os.environ[runlog.VARIABLE] = run_log  # of every process that this one starts
    if not current().streams:
        raise SettingsError(
            " ".join(["There is no stream to serve.", *broken.values()]),
            hint="Give the module that declares them: weft serve --module my_streams",
        )
    _refuse_memory()
    builder = _of_builder(of_project) if models and _follows_streams() else None
    addresses = _addresses(host, port)
    public = not all(ipaddress.ip_address(each[4][0]).is_loopback for each in addresses)
    exposed = [] if insecure else _exposed(public)
    if public and exposed:
        shown = ", ".join(exposed[:10]) + (", …" if len(exposed) > 10 else "")
        raise SettingsError(
            f"{host} is an address that others reach, and these streams need no credentials: {shown}.",
            hint="Make a key with `weft apikey create`, or give each of them auth=…, or allow it with --insecure.",
        )
    with (
        _listen(addresses[0], host, port) as listening,
        tempfile.TemporaryDirectory(prefix="weft-serve-", dir=in_memory()) as runtime,
    ):
        os.mkdir(os.path.join(runtime, _METRICS))
        task = Task(
            listening=listening.fileno(),
            parent=-1,
            modules=tuple(modules),
            runtime=runtime,
            log_format=log_format,
            connections=limits.connections,
            guarded=bool(exposed),
            began=time.time(),
            metrics=None if sink.scheme == "null" else metrics,
        )
        with presence.present("service", lambda: runlog.open_run_log(runlog.project_log_url())):
            asyncio.run(_Workers(task, listening, builder).run(workers))


def _refuse_memory() -> None:
    """Refuse streams in the memory of a process: each worker would have its own, and lose what it answered with 202."""
    for name, each in sorted(current().streams.items()):
        try:
            connection = current().connection(each.connection)
            is_memory = connection.resolved().is_private_memory
        except WeftError:  # which requests for this stream are answered with
            continue
        if is_memory:
            raise SettingsError(
                f"The stream {name!r} is in the memory of a process ({connection.label}), and a service would lose "
                "its events.",
                hint="Name a file: WEFT_DSN=sqlite:///events.db",
            )


def _follows_streams() -> bool:
    """Return whether there is a model that is built when its inputs change."""
    if not current().pipelines:
        return False
    from weft.pipelines.models import models

    return any(each.trigger == "auto" for each in models().values())


def _exposed(public: bool) -> list[str]:
    """Return the streams that are open. A service for this machine only starts also while the database is away."""
    try:
        return open_streams()
    except ConnectionFailedError as error:
        if public:
            raise
        logger.warning("the keys cannot be read, and all streams count as open: %s", error.what)
        return sorted(current().streams)


def _addresses(host: str, port: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)  # type: ignore[return-value]
    except OSError as error:
        raise SettingsError(f"The host {host!r} is not known: {error.strerror}.", hint="--host 127.0.0.1") from None


def _listen(address: tuple[int, int, int, str, tuple[str, int]], host: str, port: int) -> socket.socket:
    family, _, _, _, where = address
    try:
        return socket.create_server(where[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        raise SettingsError(
            f"{host}:{port} cannot be served: {error.strerror}.",
            hint="Choose another one with --port, or end what listens there." if in_use else None,
        ) from None


async def _deliver_spool() -> None:
    """Record what a run that the page started could not, while its run log was away."""
    delivery = CachedProbe(runlog.deliver_spool, fresh_seconds=0)
    while True:
        await asyncio.sleep(_SPOOL_SECONDS)
        delivery.begun()


class _Workers:
    """The worker processes. Each is started again when it ends, until all of them are to stop."""

    def __init__(self, task: Task, listening: socket.socket, builder: dict[str, str] | None) -> None:
        """`builder`: more variables of the process that builds models; `None` where there is none."""
        self.task, self.builder = task, builder
        self.listening = listening
        self.stopping = asyncio.Event()
        self.ready = asyncio.Event()

    async def run(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        keepers = [asyncio.create_task(self._keep(number)) for number in range(1, count + 1)]
        if self.builder is not None:
            keepers.append(asyncio.create_task(self._keep_building(self.builder)))
        announcing = asyncio.create_task(self._announce(count))
        delivering = asyncio.create_task(_deliver_spool())
        await self.stopping.wait()
        announcing.cancel()
        delivering.cancel()
        logger.info("the service stops")
        # Once the workers have closed theirs too, new connections are refused.
        self.listening.close()
        await asyncio.gather(*keepers)
        logger.info("the service has stopped")

    async def _announce(self, count: int) -> None:
        await self.ready.wait()
        host, port, *_ = self.listening.getsockname()
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        streams = len(current().streams)
        logger.info("serving; streams: %d, workers: %d", streams, count, extra={"url": url})

    async def _keep(self, number: int) -> None:
        pause = 0.0
        while not self.stopping.is_set():
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    process = await self._start(theirs, number)
                answers = await self._wait_until_ready(ours)
                if answers:
                    self.ready.set()
                ended = asyncio.ensure_future(process.wait())
                await _first(ended, self.stopping.wait())
                if self.stopping.is_set():
                    await _stop(process, ended)
                    return
            why = f"signal {-ended.result()}" if ended.result() < 0 else f"exit code {ended.result()}"
            logger.error("a worker ended by %s, and is started again", why, extra={"worker": number})
            pause = 0.0 if answers else min(max(pause * 2, _PAUSE_SECONDS), _MOST_PAUSE_SECONDS)
            if pause:
                await _first(asyncio.sleep(pause), self.stopping.wait())

    async def _start(self, parent: socket.socket, number: int) -> asyncio.subprocess.Process:
        # One of them hands on what all have counted.
        metrics = self.task.metrics if number == 1 else None
        task = msgspec.structs.replace(self.task, parent=parent.fileno(), metrics=metrics)
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "weft.server.worker",
            msgspec.json.encode(task).decode(),
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, METRICS_FOLDER: os.path.join(task.runtime, _METRICS)},
            pass_fds=(task.listening, task.parent),
            # Ctrl-C in a terminal reaches the parent alone, which then stops them in order.
            process_group=0,
        )

    async def _keep_building(self, environment: dict[str, str]) -> None:
        """Keep a process that builds models: Spark never runs in a process that answers requests."""
        modules = [word for name in self.task.modules for word in ("--module", name)]
        pause = _PAUSE_SECONDS
        while not self.stopping.is_set():
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "weft", "worker", *modules, "--format", "json", "--while-stdin-is-open"),
                # Ends with this process, also where that is killed.
                stdin=asyncio.subprocess.PIPE,
                env={**os.environ, VARIABLE: self.task.log_format, **environment},
                stdout=sys.stderr,
                process_group=0,
            )
            began = time.monotonic()
            ended = asyncio.ensure_future(process.wait())
            await _first(ended, self.stopping.wait())
            if self.stopping.is_set():
                await _stop(process, ended)
                return
            logger.error("the worker of models ended with code %d, and is started again", ended.result())
            # One that worked for a while is started again soon.
            has_worked = time.monotonic() - began > _MOST_PAUSE_SECONDS
            pause = _PAUSE_SECONDS if has_worked else min(pause * 2, _MOST_PAUSE_SECONDS)
            await _first(asyncio.sleep(pause), self.stopping.wait())

    async def _wait_until_ready(self, worker: socket.socket) -> bool:
        """Return whether a worker answers requests; `False` if it ended before."""
        worker.setblocking(False)
        signalled = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(worker, 1))
        await _first(signalled, self.stopping.wait())
        if not signalled.done():
            signalled.cancel()
            return False
        return signalled.exception() is None and bool(signalled.result())


def _of_builder(metrics: str | None) -> dict[str, str]:
    """Return where the process that builds models has its metrics: as the service, but at the next port. That of the
    project itself may be the scheduler's."""
    url = sinks.parsed(metrics)
    if metrics is None or url.scheme != "prometheus":
        return {} if metrics is None else {sinks.VARIABLE: metrics}
    if url.port == 65535:
        raise SettingsError(
            "The process that builds models has its metrics at the next port, and there is none after 65535.",
            hint="--metrics prometheus://:9100, or --no-worker.",
        )
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname or ""
    return {sinks.VARIABLE: f"prometheus://{host}:{(url.port or 0) + 1}"}


async def _stop(process: asyncio.subprocess.Process, ended: asyncio.Future[int]) -> None:
    if not ended.done():
        process.terminate()
        await asyncio.wait([ended], timeout=_KILL_SECONDS)
    if not ended.done():
        logger.warning("a worker did not stop within %d seconds, and is killed", _KILL_SECONDS)
        process.kill()
        await ended


async def _first(*waited: object) -> None:
    """Wait for the first of some. The others go on where they are futures of the caller, else they are cancelled."""
    tasks = {asyncio.ensure_future(each): each for each in waited}  # type: ignore[call-overload]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, awaitable in tasks.items():
        if task is not awaitable:
            task.cancel()
