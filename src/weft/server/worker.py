"""One process of the service: an event loop that answers on the socket of its parent.

uvicorn does HTTP. What it leaves open is closed here: headers that come slowly or are huge, and subscribers that would
keep it from ending.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import sys
from types import FrameType

import httptools
import msgspec
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.server.logs import Format, configure
from weft.server.problems import Problem

# What a request line and its headers may have, and how long they may take to arrive.
_HEADER_BYTES = 32 * 1024
_HEADER_SECONDS = 10.0
_IDLE_SECONDS = 75
_GARBAGE = 20_000
# Requests that are not finished so long after the signal are cut. A client may hang.
STOP_SECONDS = 7


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a parent tells its worker."""

    listening: int
    """The descriptor of the socket that all workers accept from."""
    parent: int
    """The descriptor of the socket to the parent. It is told that requests are answered; its end ends the worker."""
    modules: tuple[str, ...]
    runtime: str
    log_format: Format
    connections: int
    guarded: bool
    """Only requests for a name of this machine are answered."""


class Connection(HttpToolsProtocol):
    """A connection whose headers have limits."""

    _timer: asyncio.TimerHandle | None = None
    """Runs while the headers of a request are awaited."""
    _received = 0
    """Bytes since then."""
    _latest = 0
    """Bytes of the last packet: a request that begins does so in it."""
    _oversized = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_ended()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        self._latest = len(data)
        super().data_received(data)
        if self._timer is not None and self._received > _HEADER_BYTES:
            self._refuse(_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:  # another request of the same connection
            self._await_headers()

    def on_headers_complete(self) -> None:
        self._headers_ended()
        if self._received > _HEADER_BYTES:  # which may be its body
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > _HEADER_BYTES:
                self._oversized = True
                raise httptools.HttpParserError("headers too large")
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn answers to what it cannot parse, and to an error of `on_headers_complete`."""
        malformed = Problem(400, "http", "Malformed request", "This is not HTTP/1.1.")
        self._refuse(_too_large() if self._oversized else malformed)

    def _await_headers(self) -> None:
        self._received = self._latest
        self._timer = self.loop.call_later(_HEADER_SECONDS, self._late)

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
        answer = problem.response(os.urandom(8).hex())
        head = f"HTTP/1.1 {problem.status} {problem.body['title']}\r\n".encode()
        headers = [*answer.raw_headers, (b"connection", b"close")]
        self.transport.write(head + b"".join(b"%s: %s\r\n" % each for each in headers) + b"\r\n" + bytes(answer.body))
        self.transport.close()


def _too_large() -> Problem:
    text = f"The request line and the headers may have {_HEADER_BYTES:,} bytes."
    return Problem(431, "headers", "Request Header Fields Too Large", text, limit=_HEADER_BYTES)


class Server(uvicorn.Server):
    """A server that tells its parent when it answers, ends with it, and tells subscribers before it waits for them."""

    def __init__(self, app: Starlette, parent: socket.socket, connections: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().add_reader(self.parent, self._orphaned)
        # What is there now stays: the collector need not look at it again, and not after every 700 objects.
        gc.freeze()
        gc.set_threshold(_GARBAGE)
        self.parent.send(b"1")

    def _orphaned(self) -> None:
        asyncio.get_running_loop().remove_reader(self.parent)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not remembered: uvicorn would raise the signal again in the end, and the exit code would be another.
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.stopping()
        await super().shutdown(sockets)


def main() -> None:
    """`python -m weft.server.worker TASK`: what `weft serve` starts."""
    from weft.server.app import app

    task = msgspec.json.decode(sys.argv[1], type=Task)
    configure(task.log_format)
    _allow_connections()
    made = app(task.modules, runtime=task.runtime, guarded=task.guarded)
    listening, parent = socket.socket(fileno=task.listening), socket.socket(fileno=task.parent)
    with listening, parent:
        Server(made, parent, task.connections).run(sockets=[listening])


def _allow_connections() -> None:
    """As many as the system lets us: a descriptor each, and the default of many systems is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()
