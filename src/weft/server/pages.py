"""The pages: `/` shows the state of streams and pipelines, `/docs` tries requests. They are files of this package."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def _files() -> dict[str, tuple[bytes, dict[str, str]]]:
    """Read all files with their headers, by name: no path of a request ever reaches the disk."""
    contents = {each.name: each.read_bytes() for each in files("weft.server").joinpath("static").iterdir()}
    return {name: (content, _headers(name, content)) for name, content in contents.items()}


def _headers(name: str, content: bytes) -> dict[str, str]:
    return {
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


async def page(request: Request, name: str | None = None) -> Response:
    """Answer with a file: this one, or the one that the path names."""
    name = name or request.path_params["file"]
    if name not in _files():
        raise HTTPException(404)
    content, headers = _files()[name]
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)
