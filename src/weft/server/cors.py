"""Requests of pages of other sites (CORS): answers that a browser gives to the pages of named origins alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from weft.errors import SettingsError
from weft.project import current
from weft.settings import PROJECT_FILE, read_project_file

if TYPE_CHECKING:
    from starlette.types import Message, Scope, Send

_ORIGIN = re.compile(r"https?://[a-z0-9.:_\[\]-]+")
_PREFLIGHT_SECONDS = 600


def checked(origins: Iterable[str] | None) -> frozenset[bytes]:
    """Return the origins whose pages may use the service: these, or those of weft.toml."""
    if origins is None:
        origins = read_project_file(current().root).get("server", {}).get("origins", ())
    if not isinstance(origins, list | tuple | set | frozenset):
        raise SettingsError(f"{PROJECT_FILE}: origins of [server] must be a list of origins, not {origins!r}.")
    for origin in origins:
        if not isinstance(origin, str) or not _ORIGIN.fullmatch(origin):
            raise SettingsError(
                f"{origin!r} is not the origin of a page.",
                hint="It is a scheme, a host in lower case and, if it is not the usual one, a port: https://shop.example.",
            )
    return frozenset(origin.encode() for origin in origins)


def origin_of(scope: Scope, allowed: frozenset[bytes]) -> bytes | None:
    """Return the origin that a request is from, if its pages may use the service."""
    origin = _header(scope, b"origin")
    return origin if origin in allowed else None


def allow(message: Message, origin: bytes) -> None:
    """Let the page that asked see an answer."""
    message["headers"] += [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", b"x-request-id, retry-after"),
        (b"vary", b"origin"),
    ]


def is_preflight(scope: Scope) -> bool:
    """Return whether a browser asks what a page may send."""
    return scope["method"] == "OPTIONS" and _header(scope, b"access-control-request-method") is not None


async def answer_preflight(scope: Scope, send: Send) -> None:
    """Allow what the service takes. Which headers those are is up to the streams: some name their own."""
    headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", _header(scope, b"access-control-request-headers") or b"content-type"),
        (b"access-control-max-age", str(_PREFLIGHT_SECONDS).encode()),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((bytes(value) for name, value in scope["headers"] if name == wanted), None)
