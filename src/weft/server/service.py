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

from weft.errors import ConnectionFailedError, DeclarationError, NotFoundError, StorageError, WeftError, unknown
from weft.project import current
from weft.server import bodies
from weft.server.access import Access
from weft.server.answers import Answers
from weft.server.bodies import Bodies
from weft.server.history import History
from weft.server.keys import Scope
from weft.server.limits import Limits
from weft.server.live import Feeds
from weft.server.problems import later
from weft.streams.declare import Stream
from weft.streams.runtime import OpenedStream, find, open_stream_async, opened

if TYPE_CHECKING:
    from starlette.types import Receive, Send
    from starlette.types import Scope as ASGIScope

logger = logging.getLogger("weft.server")
_BROKEN_SECONDS = 30.0
_RUNTIME_BYTES = 16 * 1024 * 1024


def load_modules(modules: Iterable[str]) -> dict[str, str]:
    """Import the modules of the project, and return the errors of those that fail. The others' streams are served."""
    broken: dict[str, str] = {}

    def failed(name: str, error: DeclarationError) -> None:
        logger.error(
            "the module %s cannot be imported, and what it did not declare is not served: %s", name, error.what
        )
        broken[name] = error.what

    current().load_modules(modules, failed=failed)
    return broken


def in_memory() -> str | None:
    """Return a folder in memory for files that are mapped, where the system has one. To write to a mapped file on a
    full disk kills the process; and a disk is full when a database has filled it."""
    folder = "/dev/shm"
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    space = os.statvfs(folder)
    return folder if space.f_bavail * space.f_frsize >= _RUNTIME_BYTES else None


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
        self.history = History(self.limits.history_days)
        self._waiting: dict[tuple[str, bool], _Waiting] = {}

    async def open(
        self, request: Request, scope: Scope, *, ticket: str | None = None, to_read: bool = False
    ) -> OpenedStream:
        """Open the stream that a request names, if it may use it."""
        stream = await self._find(request)
        await self.access.admit(request, stream, scope, ticket=ticket)
        ready = opened(stream, to_read=to_read)
        if ready is not None:
            return ready
        with self.room(stream):
            try:
                return await open_stream_async(stream, to_read=to_read)
            except (ConnectionFailedError, StorageError):
                raise
            except WeftError as error:
                # The stream's connection is not defined, or lacks a package: not the client's fault.
                logger.error("the stream %s cannot be opened: %s", stream.name, error)
                raise _broken(f"The stream {stream.name!r} cannot be opened. The log has the reason.") from None

    async def _find(self, request: Request) -> Stream:
        name = request.path_params["name"]
        try:
            return find(name)
        except NotFoundError:
            # A caller with a wrong credential gets a 401 here, and no names of streams or modules.
            known = [stream.name for stream in await self.access.readable(request)]
            if self.broken:  # one of them may declare it
                names = ", ".join(self.broken)
                raise _broken(f"There is no such stream among those that could be loaded; {names} failed.") from None
            raise unknown("stream", name, known, otherwise="GET /api/v1/streams lists those there are.") from None

    def room(self, stream: Stream, size: int = 0, *, publishing: bool = False) -> _Room:
        """Return a place in the queue for a stream's database, for a `with` block; or refuse. Publishes have a queue of
        their own: reads cannot keep them out."""
        queue = stream.name, publishing
        waiting = self._waiting.get(queue)
        if waiting is None:
            waiting = self._waiting[queue] = _Waiting()
        limits = self.limits
        if waiting.requests >= limits.waiting_requests or (
            waiting.requests and waiting.size + size > limits.waiting_bytes
        ):
            text = f"The database of {stream.name!r} cannot keep up: {waiting.requests:,} requests wait for it."
            raise later(503, "overloaded", "Too much at once", text, 1.0)
        return _Room(waiting, size)

    async def stop(self) -> None:
        """End subscriptions and long polls, and close what the routes share."""
        self.feeds.stop()
        self.history.stop()
        await asyncio.sleep(0)
        self.access.close()


class _Waiting:
    """The requests that wait for one database."""

    requests = 0
    size = 0


class _Room:
    """One of these requests. A class, since a generator in its place takes three times as long."""

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
    service: Service = request.app.state.service
    return service


def json_response(value: Any, status: int = 200) -> Response:
    """Return an answer of JSON, also of times, decimals and bytes."""
    return encoded_response(bodies.encode(value), status)


def encoded_response(body: bytes, status: int = 200) -> Response:
    """Return an answer of what is JSON already."""
    return _EncodedResponse(body, status)


class _EncodedResponse(Response):
    """An encoded body. Starlette's own constructor takes as long as a durable publish."""

    def __init__(self, body: bytes, status: int) -> None:
        self.status_code = status
        self.body = body
        self.background = None
        length = str(len(body)).encode()
        self.raw_headers = [(b"content-length", length), (b"content-type", b"application/json")]

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body})
