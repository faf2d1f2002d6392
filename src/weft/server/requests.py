"""The middleware of every request: its id, its line in the log, the check of its host, and its errors."""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import time
from itertools import count
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.requests import Request

from weft.server import cors
from weft.server.problems import Problem, of_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("weft.server")
# Counted, not random: to ask the kernel for random bytes releases Python's lock, and the committing thread takes it.
_PROCESS, _numbers = secrets.token_hex(4), count()
_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Requests:
    """Gives each request an id, logs it, and turns errors into answers.

    `guarded`: only requests for a name of this machine are answered. A page of another site cannot read from a service
    on the visitor's own machine, unless DNS makes that site's name lead there; then the browser still sends that name.
    Pages of `origins` may read answers.
    """

    def __init__(self, app: ASGIApp, guarded: bool = False, origins: frozenset[bytes] = frozenset()) -> None:
        self.app = app
        self.guarded = guarded
        self.origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = scope["weft.request_id"] = _id_of(scope)
        status = 0
        origin = cors.origin_of(scope, self.origins) if self.origins else None

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                scope["app"].state.metrics.answered(scope, status, time.perf_counter() - started)
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                if origin is not None:
                    cors.allow(message, origin)
            await send(message)

        try:
            if self.guarded:
                _require_local(scope)
            if origin is not None and cors.is_preflight(scope):
                await cors.answer_preflight(scope, send_counted)
            else:
                await self.app(scope, receive, send_counted)
        except Exception as error:
            if status:  # a part of the answer was sent: it can only be cut off
                logger.error("failed after its answer began", exc_info=error, extra={"request_id": request_id})
                raise
            problem = of_error(error, request_id, scope.get("path_params", {}).get("name"))
            # The traceback holds this frame, which holds the error: only the collector would free them and the body.
            error.__traceback__ = None
            await problem.response(request_id)(scope, receive, send_counted)
        finally:
            scope["app"].state.service.bodies.release(scope)
            if logger.isEnabledFor(logging.INFO):
                _log(scope, request_id, status, time.perf_counter() - started)


class _IndexedHeaders(Headers):
    """Headers by name. Starlette searches all of them for each lookup, and a publish looks up six."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__(raw=raw)
        # Among headers of one name the first counts, as in Starlette.
        self._first = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(raw)}

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a header by its name in lower case."""
        return self._first.get(key, default)

    def __getitem__(self, key: str) -> str:
        return self._first[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._first


class QuickRequest(Request):
    """A request whose headers are looked up quickly."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self._indexed = _IndexedHeaders(scope["headers"])

    @property
    def headers(self) -> Headers:
        return self._indexed


def new_id() -> str:
    return f"{_PROCESS}{next(_numbers):08x}"


def _id_of(scope: Scope) -> str:
    """Return the id that a proxy gave the request, where it is well-formed; else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_ID.fullmatch(value):
            return bytes(value).decode()
    return new_id()


def _require_local(scope: Scope) -> None:
    host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    name = re.sub(r":\d*$", "", host).strip("[]").lower().rstrip(".")
    try:
        local = ipaddress.ip_address(name).is_loopback
    except ValueError:
        local = name == "localhost" or name.endswith(".localhost")
    if not local:
        raise Problem(
            421,
            "host",
            "Not for this host",
            f"This service answers on its own machine alone, not as {host[:100]!r}: some of its streams are open.",
            hint="Close them with keys (weft apikey create), or start it with --insecure.",
        )


def _log(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    # Without the query: a ticket may be in it.
    client = scope.get("client")
    logger.info(
        "request",
        extra={
            "request_id": request_id,
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "milliseconds": round(seconds * 1000, 3),
        },
    )
