"""The pages: `/` shows the state of streams and pipelines, `/docs` tries requests. They are files of this package."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


class _File(NamedTuple):
    content: bytes
    headers: dict[str, str]


@cache
def _files() -> dict[str, _File]:
    """Read all files, by name: no path of a request ever reaches the disk."""
    return {
        each.name: _read(each.name, each.read_bytes()) for each in files("weft.server").joinpath("static").iterdir()
    }


def _read(name: str, content: bytes) -> _File:
    headers = {
        "content-type": f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8",
        "etag": f'"{sha256(content).hexdigest()[:32]}"',
        # Asked for each time, and mostly answered by 304: a new version of the service shows at once.
        "cache-control": "no-cache",
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }
    return _File(content, headers)


def _send(request: Request, name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise HTTPException(404)
    if request.headers.get("if-none-match") == file.headers["etag"]:
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)


async def dashboard(request: Request) -> Response:
    return _send(request, "dashboard.html")


async def docs(request: Request) -> Response:
    return _send(request, "docs.html")


async def static(request: Request) -> Response:
    return _send(request, request.path_params["file"])
