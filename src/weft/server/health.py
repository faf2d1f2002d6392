"""`/healthz`: this process lives. `/readyz`: its modules were imported, and the databases of its streams answer."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.project import current
from weft.server.cached_probe import CachedProbe
from weft.server.service import json_response, service_of
from weft.streams.runtime import open_hub
from weft.systems.base import Connection

logger = logging.getLogger("weft.server")

_ANSWER_SECONDS = 2.0
_FRESH_SECONDS = 1.0


class Health:
    """Checks the databases."""

    def __init__(self) -> None:
        self._probes: dict[str | Connection | None, CachedProbe[None]] = {}

    async def databases(self) -> dict[str, str]:
        """Return `ok`, `failed` or `no answer` by the name of the connection. Each has its own time limit."""
        used = {stream.connection for stream in current().streams.values()}
        answers = await asyncio.gather(*(self._ask(connection) for connection in used))
        return {_name(connection): answer for connection, answer in zip(used, answers, strict=True)}

    async def _ask(self, connection: str | Connection | None) -> str:
        def ask() -> None:
            open_hub(current().connection(connection)).store.names()

        probe = self._probes.setdefault(connection, CachedProbe(ask, fresh_seconds=_FRESH_SECONDS))
        try:
            await probe.get(_ANSWER_SECONDS)
        except TimeoutError:
            return "no answer"
        except Exception as error:  # any error: the other databases are reported
            # The reason has addresses in it, and this answer is public.
            logger.warning("the database of %s is not ready: %s", _name(connection), error)
            return "failed"
        return "ok"


def _name(connection: str | Connection | None) -> str:
    if isinstance(connection, Connection):
        return connection.name or connection.kind
    return connection or "default"


async def healthz(request: Request) -> Response:
    return json_response({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Answer whether to send requests here: not while it ends, or a module failed, or a database does not answer."""
    health: Health = request.app.state.health
    service = service_of(request)
    databases, failed = await health.databases(), service.broken
    answer: dict[str, Any] = {"status": "ready", "databases": databases, "failed_modules": list(failed)}
    if service.feeds.stopping:
        answer["status"] = "stopping"
    elif failed or any(each != "ok" for each in databases.values()):
        answer["status"] = "not ready"
    return json_response(answer, 200 if answer["status"] == "ready" else 503)
