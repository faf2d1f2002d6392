"""One process of the service: an event loop that answers on the socket of its parent.

uvicorn does HTTP. What it leaves open is closed here: headers that come slowly or are huge, connections without end,
bodies that it drops, and subscribers that would keep it from ending.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import shutil
import socket
import sys
from types import FrameType

import httptools
import msgspec
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.server.logs import Format, configure
from weft.server.problems import Problem, later
from weft.server.requests import new_id

logger = logging.getLogger("weft.server")

# The most bytes of a request line and its headers, and how long they may take to arrive.
_HEADER_BYTES = 32 * 1024
_HEADER_SECONDS = 10.0
_IDLE_SECONDS = 75
# How long a connection too many may take to say something that it can be refused for.
_SURPLUS_SECONDS = 1.0
_GARBAGE = 20_000
# Requests that are not finished so long after the signal are cut. A client may hang.
STOP_SECONDS = 7
# A collector that hangs must not make the parent kill a worker that has finished its requests.
_FLUSH_SECONDS = 1


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a parent passes to its worker."""

    listening: int
    """The descriptor of the socket that all workers accept from."""
    parent: int
    """The descriptor of the socket to the parent. The worker reports on it that it answers, and ends when it closes."""
    modules: tuple[str, ...]
    runtime: str
    log_format: Format
    connections: int
    guarded: bool
    """Only requests for a name of this machine are answered."""
    began: float
    """When the service began to count, by this host's clock."""
    metrics: str | None = None
    """The URL of a sink that this worker hands the metrics of all of them to."""


class HttpConnection(HttpToolsProtocol):
    """A connection whose headers have limits, as has the number of connections."""

    _timer: asyncio.TimerHandle | None = None
    """Runs while the headers of a request are awaited."""
    _received = 0
    """Bytes since then."""
    _latest = 0
    """Bytes of the last packet: a request that begins does so in it."""
    _unread: asyncio.TimerHandle | None = None
    """Runs while more is to be sent than the client takes."""
    _refusal: Problem | None = None
    """What is wrong with the headers of a request."""
    _is_surplus = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn would refuse all requests at the limit. Here earlier connections go on.
        most, self.limit_concurrency = self.limit_concurrency, None
        self._is_surplus = most is not None and len(self.connections) > most
        self._await_headers(_SURPLUS_SECONDS if self._is_surplus else _HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_ended()
        self._cancel_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        self._cancel_unread()
        super().resume_writing()

    def _await_reading(self) -> None:
        limits = self.config.app.state.service.limits  # type: ignore[union-attr]
        unsent = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(limits.send_seconds, self._check_reading, unsent)

    def _cancel_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _check_reading(self, before: int) -> None:
        """Cut off a client that received nothing for so long. To close would wait until it received all."""
        if self.transport.get_write_buffer_size() < before:
            self._await_reading()
        else:
            extra = {"path": self.scope.get("path"), "client": self.client and self.client[0]}
            logger.warning("a client was cut off: it did not receive its answer", extra=extra)
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._received += len(data)
        self._latest = len(data)
        if self._is_surplus:
            text = "There are too many connections now."
            self._refuse(later(503, "connections", "Too much at once", text, 1.0))
            return
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            why = "This is not HTTP/1.1."
            if not isinstance(error, httptools.HttpParserCallbackError):  # its text is about our own code
                why = f"This cannot be parsed as HTTP/1.1: {str(error)[:1].lower()}{str(error)[1:]}."
            self._refuse(self._refusal or _malformed(why))
        if self._timer is not None and self._received > _HEADER_BYTES:
            self._refuse(_too_large())

    def _parse(self, data: bytes) -> None:
        """Feed the parser. After a request for an upgrade it treats the rest as another protocol: the body would be
        dropped. Such a request is parsed again without that header, which a server may do."""
        rest: bytes | memoryview = data
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as stopped:
                headers = b"".join(b"%s: %s\r\n" % each for each in self.headers if each[0] != b"upgrade")
                version = self.parser.get_http_version().encode()
                line = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
                self.parser.feed_data(line + headers + b"\r\n")
                rest = memoryview(rest)[stopped.args[0] :]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:  # another request of the same connection
            self._await_headers(_HEADER_SECONDS)

    def on_headers_complete(self) -> None:
        upgrades = self.parser.should_upgrade()
        if upgrades and self.parser.get_method() != b"CONNECT":
            return
        self._headers_ended()
        self._refusal = _malformed("This is no proxy.") if upgrades else self._wrong_headers()
        if self._refusal is not None:
            raise httptools.HttpParserError("refused")
        super().on_headers_complete()

    def _wrong_headers(self) -> Problem | None:
        if self._received > _HEADER_BYTES:  # which may be its body
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > _HEADER_BYTES:
                return _too_large()
        names = [name for name, _ in self.headers]
        if names.count(b"host") > 1:
            return _malformed("There is more than one header Host.")
        if b"transfer-encoding" in names:
            coding = b", ".join(value for name, value in self.headers if name == b"transfer-encoding")
            if coding.strip().lower() != b"chunked":
                return Problem(501, "coding", "Unknown coding", "Of transfer codings chunked alone is understood.")
        return None

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _await_headers(self, seconds: float) -> None:
        self._received = self._latest
        self._timer = self.loop.call_later(seconds, self._late)

    def _headers_ended(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._received:
            text = f"The headers did not arrive within {_HEADER_SECONDS:g} seconds."
            self._refuse(Problem(408, "slow", "Too slow", text))
        else:
            self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        """Answer and close, without a request that the application could see."""
        self._headers_ended()
        if self.transport.is_closing():
            return
        request_id = new_id()
        answer = problem.response(request_id)
        head = f"HTTP/1.1 {problem.status} {problem.body['title']}\r\n".encode()
        headers = [*answer.raw_headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
        self.transport.write(head + b"".join(b"%s: %s\r\n" % each for each in headers) + b"\r\n" + bytes(answer.body))
        self.transport.close()
        extra = {"request_id": request_id, "client": self.client and self.client[0], "status": problem.status}
        logger.info("request refused: %s", problem, extra=extra)


def _malformed(why: str) -> Problem:
    return Problem(400, "http", "Malformed request", why)


def _too_large() -> Problem:
    text = f"The request line and the headers may have {_HEADER_BYTES:,} bytes."
    return Problem(431, "headers", "Request Header Fields Too Large", text, limit=_HEADER_BYTES)


class Server(uvicorn.Server):
    """A server that reports to its parent when it answers, ends with it, and ends subscriptions before it waits."""

    def __init__(self, app: Starlette, parent: socket.socket, connections: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpConnection,
                ws="none",
                loop="uvloop",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                # The address of a client is the one that connected: a header may claim any.
                proxy_headers=False,
                limit_concurrency=connections,
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=STOP_SECONDS,
            )
        )
        self.service = app.state.service
        self.parent = parent
        self.is_orphan = False
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self.parent, self._orphaned)
        # Today's objects are permanent: the collector need not visit them again, nor run after every 700 objects.
        gc.freeze()
        gc.set_threshold(_GARBAGE)
        self.parent.send(b"1")

    def _orphaned(self) -> None:
        asyncio.get_running_loop().remove_reader(self.parent)
        self.should_exit = self.is_orphan = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The signal is not kept: uvicorn would raise it again in the end, and change the exit code.
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.feeds.stop()
        await super().shutdown(sockets)


def main() -> None:
    """`python -m weft.server.worker TASK`: what `weft serve` starts."""
    task = msgspec.json.decode(sys.argv[1], type=Task)
    configure(task.log_format)
    _allow_connections()
    if traces := os.environ.get("WEFT_TRACES"):
        from weft.operate.traces import open_traces

        with open_traces(traces, flush_seconds=_FLUSH_SECONDS):
            _serve(task)
    else:
        _serve(task)


def _serve(task: Task) -> None:
    from weft.server import metrics
    from weft.server.app import app

    application = app(task.modules, runtime=task.runtime, guarded=task.guarded)
    listening, parent = socket.socket(fileno=task.listening), socket.socket(fileno=task.parent)
    with listening, parent:
        server = Server(application, parent, task.connections)
        with metrics.exported(application, task.metrics, task.began, lambda: server.loop, _FLUSH_SECONDS):
            server.run(sockets=[listening])
    if server.is_orphan:  # the parent was killed, and its files would stay in memory
        shutil.rmtree(task.runtime, ignore_errors=True)


def _allow_connections() -> None:
    """Raise the limit of open files as far as the system allows: each connection needs one, and 1,024 is a common
    default."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()
