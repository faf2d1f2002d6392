"""What the routes of one process share."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from weft.errors import ConnectionFailedError, DeclarationError, NotFoundError, StorageError, WeftError
from weft.project import current
from weft.server import bodies
from weft.server.access import Access
from weft.server.answers import Answers
from weft.server.bodies import Bodies
from weft.server.keys import Scope
from weft.server.limits import Limits
from weft.server.live import Feeds
from weft.server.problems import later
from weft.streams.declare import Stream
from weft.streams.runtime import Opened, open_stream_async, opened

if TYPE_CHECKING:
    from starlette.types import Receive, Send
    from starlette.types import Scope as ASGIScope

logger = logging.getLogger("weft.server")
_BROKEN_SECONDS = 30.0
_RUNTIME_BYTES = 16 * 1024 * 1024


def load_modules(modules: Iterable[str]) -> dict[str, str]:
    """Import the modules of the project; what is wrong with those that fail. The streams of the others are served."""
    broken: dict[str, str] = {}

    def failed(name: str, error: DeclarationError) -> None:
        logger.error(
            "the module %s cannot be imported, and what it did not declare is not served: %s", name, error.what
        )
        broken[name] = error.what

    current().load_modules(modules, failed=failed)
    return broken


def in_memory() -> str | None:
    """A folder for files that are mapped into memory, where the system has one that is no disk. To write to such a file
    on a disk that is full kills the process; and a disk is full when a database has filled it."""
    folder = "/dev/shm"
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    found = os.statvfs(folder)
    return folder if found.f_bavail * found.f_frsize >= _RUNTIME_BYTES else None


class Service:
    """The state of the service in one process. What its processes share is in files of the folder `runtime`; a service
    of one process makes its own."""

    def __init__(
        self, limits: Limits | None = None, runtime: str | Path | None = None, broken: Iterable[str] = ()
    ) -> None:
        self.limits = limits or Limits.of_project()
        self.broken = tuple(broken)
        """Modules that could not be imported."""
        if runtime is None:
            runtime = tempfile.mkdtemp(prefix="weft-serve-", dir=in_memory())
            weakref.finalize(self, shutil.rmtree, runtime, ignore_errors=True)
        self.runtime = Path(runtime)
        self.bodies = Bodies(self.limits.body_bytes, self.limits.body_seconds, self.limits.arriving_bytes)
        self.access = Access(self.runtime, self.bodies)
        self.answers = Answers(self.limits.answering_bytes, self.limits.send_seconds)
        self.feeds = Feeds(self.limits, self.answers)
        self._waiting: dict[tuple[str, bool], _Waiting] = {}

    async def open(self, request: Request, scope: Scope, *, ticket: str | None = None) -> Opened:
        """The stream that a request names, if it may use it."""
        stream = await self._find(request)
        await self.access.admit(request, stream, scope, ticket=ticket)
        ready = opened(stream)
        if ready is not None:
            return ready
        with self.room(stream):
            try:
                return await open_stream_async(stream)
            except (ConnectionFailedError, StorageError):
                raise
            except WeftError as error:
                # Its connection is not defined, or lacks a package: nothing that the client did.
                logger.error("the stream %s cannot be opened: %s", stream.name, error)
                raise _broken(f"The stream {stream.name!r} cannot be opened. The log has the reason.") from None

    async def _find(self, request: Request) -> Stream:
        try:
            return await self.access.find(request, request.path_params["name"])
        except NotFoundError:
            if self.broken:  # one of them may declare it
                names = ", ".join(self.broken)
                raise _broken(f"There is no such stream among those that could be loaded; {names} failed.") from None
            raise

    def room(self, stream: Stream, size: int = 0, *, publishing: bool = False) -> _Room:
        """A place among those who wait for a stream's database, as long as it is entered; or a refusal. Those who
        publish have places of their own: who only reads cannot keep them out."""
        who = stream.name, publishing
        waiting = self._waiting.get(who)
        if waiting is None:
            waiting = self._waiting[who] = _Waiting()
        limits = self.limits
        if waiting.requests >= limits.waiting_requests or (
            waiting.requests and waiting.size + size > limits.waiting_bytes
        ):
            text = f"The database of {stream.name!r} cannot keep up: {waiting.requests:,} requests wait for it."
            raise later(503, "overloaded", "Too much at once", text, 1.0)
        return _Room(waiting, size)

    async def start(self) -> None:
        """What is better done before the first request."""
        await self.access.start()

    def stopping(self) -> None:
        """Tell subscribers and those who wait for events that the service ends."""
        self.feeds.stop()

    async def stop(self) -> None:
        """The same, and close what the routes share."""
        self.stopping()
        await asyncio.sleep(0)
        self.access.close()


class _Waiting:
    """Those who wait for one database."""

    requests = 0
    size = 0


class _Room:
    """One of them. A class, since a generator in its place takes three times as long."""

    __slots__ = ("_size", "_waiting")

    def __init__(self, waiting: _Waiting, size: int) -> None:
        self._waiting = waiting
        self._size = size

    def __enter__(self) -> None:
        self._waiting.requests += 1
        self._waiting.size += self._size

    def __exit__(self, *_: object) -> None:
        self._waiting.requests -= 1
        self._waiting.size -= self._size


def _broken(detail: str) -> Exception:
    return later(503, "unavailable", "The stream is not available", detail, _BROKEN_SECONDS)


def service_of(request: Request) -> Service:
    """The service that a request came to."""
    service: Service = request.app.state.service
    return service


def json_response(value: Any, status: int = 200) -> Response:
    """JSON, also of times, decimals and bytes."""
    return _Json(bodies.encode(value), status)


class _Json(Response):
    """Encoded already. Made by hand: what Starlette does for an answer takes as long as a durable publish."""

    def __init__(self, body: bytes, status: int) -> None:
        self.status_code = status
        self.body = body
        self.background = None
        length = str(len(body)).encode()
        self.raw_headers = [(b"content-length", length), (b"content-type", b"application/json")]

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body})
