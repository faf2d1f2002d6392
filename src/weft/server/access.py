"""Who may do what: the credentials of a stream."""

from __future__ import annotations

import hmac
from typing import Literal

from starlette.requests import Request

from weft.server.problems import Problem
from weft.settings import interpolate
from weft.streams.declare import Stream

Scope = Literal["read", "write", "admin"]


class Access:
    """Decides about requests."""

    def admit(self, request: Request, stream: Stream, scope: Scope) -> None:
        """Let a request pass, or raise 401 or 403."""
        auth = stream.auth
        if auth is None:
            return
        if auth["type"] == "bearer":
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            if kind.lower() == "bearer" and _same(given.strip(), auth["token"], stream):
                return
            raise _unauthorized(stream, "Bearer", "a bearer token in the header Authorization")
        if _same(request.headers.get(auth["header"], ""), auth["key"], stream):
            return
        raise _unauthorized(stream, "ApiKey", f"its key in the header {auth['header']}")


def _same(given: str, wanted: str, stream: Stream) -> bool:
    """Compared in a time that tells nothing of how much of it is right."""
    secret = interpolate(wanted, f"the auth of the stream {stream.name!r}")
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), secret.encode())


def _unauthorized(stream: Stream, challenge: str, needs: str) -> Problem:
    text = f"The stream {stream.name!r} needs {needs}."
    return Problem(401, "unauthorized", "Unauthorized", text, headers={"www-authenticate": challenge})
