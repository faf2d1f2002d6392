"""Errors as RFC 9457 has them: what is sent to a client, and what is written to the log only."""

from __future__ import annotations

import logging
import math
from typing import Any

import msgspec
from starlette.responses import Response

from weft.errors import (
    MAYBE_STORED,
    NOTHING_STORED,
    BusyError,
    ConnectionFailedError,
    EventsLostError,
    LeaseLostError,
    NotFoundError,
    SchemaError,
    SettingsError,
    StorageError,
    WeftError,
)

logger = logging.getLogger("weft.server")

# How long a client should wait for a database that is away or full.
_RETRY_SECONDS = 1.0
_FULL_SECONDS = 30.0


_PARAMETER = 422, "parameter", "A parameter does not fit"
# Errors that a client can do something about, each with the members of its problem.
_OF_CLIENTS: tuple[tuple[type[WeftError], int, str, str, tuple[str, ...]], ...] = (
    (SchemaError, 422, "event", "An event does not fit", ("index", "field")),
    (NotFoundError, 404, "not-found", "Not found", ()),
    (LeaseLostError, 409, "lease-lost", "The lease was lost", ("rowids",)),
    (EventsLostError, 410, "events-lost", "Events were removed", ("lost",)),
    (SettingsError, *_PARAMETER, ()),
)


class Problem(Exception):
    """An answer that is an error. `more` are members of the body besides those of RFC 9457."""

    def __init__(
        self,
        status: int,
        kind: str,
        title: str,
        detail: str,
        *,
        headers: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.body = {"type": f"urn:weft:problem:{kind}", "title": title, "status": status, "detail": detail, **more}
        self.headers = headers or {}

    def response(self, request_id: str) -> Response:
        return Response(
            msgspec.json.encode({**self.body, "request_id": request_id}),
            self.status,
            self.headers,
            media_type="application/problem+json",
        )


def later(status: int, kind: str, title: str, detail: str, seconds: float) -> Problem:
    """Return a refusal that says when to try again, in a header and in the body."""
    return Problem(
        status,
        kind,
        title,
        detail,
        headers={"retry-after": str(max(1, math.ceil(seconds)))},
        retry_after=round(seconds, 3),
    )


def bad_parameter(detail: str, **more: Any) -> Problem:
    return Problem(*_PARAMETER, detail, **more)


def of_error(error: BaseException, request_id: str, stream: str | None = None) -> Problem:
    """Return the problem that an error is for a client. Internal details are written to the log only."""
    if isinstance(error, Problem):
        return error
    for cls, status, kind, title, members in _OF_CLIENTS:
        if isinstance(error, cls):
            more: dict[str, Any] = {} if error.hint is None else {"hint": error.hint}
            if isinstance(error, LeaseLostError):
                more["rowids_text"] = list(map(str, error.rowids))
            return Problem(status, kind, title, error.what, **more, **{name: getattr(error, name) for name in members})
    where = "" if stream is None else f" of {stream!r}"
    if isinstance(error, StorageError):
        logger.error("%s storage: %s", request_id, error.what)
        stored = MAYBE_STORED if MAYBE_STORED in (error.hint or "") else NOTHING_STORED
        text = f"The database{where} cannot store more now. {stored}"
        return later(503, "storage", "The database is full or read-only", text, _FULL_SECONDS)
    if isinstance(error, BusyError):
        logger.warning("%s busy: %s", request_id, error.what)
        text = f"The database{where} is locked by somebody else. {NOTHING_STORED} Send it again."
        return later(503, "busy", "The database is busy", text, _RETRY_SECONDS)
    if isinstance(error, ConnectionFailedError):
        logger.warning("%s database: %s", request_id, error.what)
        text = f"The database{where} does not answer. {MAYBE_STORED} Send it again."
        return later(503, "database", "The database does not answer", text, _RETRY_SECONDS)
    if isinstance(error, WeftError):
        logger.error("%s failed: %s", request_id, error.what)
    else:
        logger.error("%s failed", request_id, exc_info=error)
    return Problem(500, "internal", "It failed here", "The log of the service has the reason under this request_id.")
