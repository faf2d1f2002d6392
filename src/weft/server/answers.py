"""Large answers: bounded by bytes, sent in parts, and all that are being sent bounded together."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from weft.server import bodies
from weft.server.problems import later
from weft.streams.events import in_json
from weft.systems.log import ROWID

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger("weft.server")

_PART = 256 * 1024


class AnswerPage:
    """The events of one answer, encoded as they come: at most `most` bytes of them, and at least one."""

    def __init__(self, most: int) -> None:
        self.events: list[msgspec.Raw] = []
        self.last: int | None = None
        """The offset of the last event."""
        self._left = most

    def add(self, event: dict[str, Any]) -> bool:
        """Add an event, if there is room for it."""
        encoded = bodies.encode(in_json(event))
        if self.events and len(encoded) > self._left:
            return False
        self._left -= len(encoded)
        self.last = event[ROWID]
        self.events.append(msgspec.Raw(encoded))
        return True

    def clear(self) -> None:
        """Take the events out again."""
        self.events, self.last = [], None


class Answers:
    """The large answers of one process: those that are being sent have at most about `memory` bytes, and a client must
    receive each part within `seconds`."""

    def __init__(self, memory: int, seconds: float) -> None:
        self._memory = memory
        self._seconds = seconds
        self._held = 0

    def require_room(self) -> None:
        """Refuse another answer while those that clients do not receive fill the memory."""
        if self._held >= self._memory:
            text = "The answers that are being sent take all the memory that they may."
            raise later(503, "overloaded", "Too much at once", text, 1.0)

    def json(self, value: object) -> Response:
        return _InParts(self, bodies.encode(value), media_type="application/json")

    async def send(self, body: bytes, send: Send, *, more: bool = False) -> None:
        """Send a body, or a piece of one; `TimeoutError` where the client does not receive it."""
        self._held += len(body)
        try:
            for at in range(0, len(body), _PART):
                await self._send(body[at : at + _PART], send, more=more or at + _PART < len(body))
        finally:
            self._held -= len(body)

    async def drain(self, send: Send) -> None:
        """Wait until the client received most of what was sent before; `TimeoutError` where it does not."""
        await self._send(b"", send, more=True)

    async def _send(self, part: bytes, send: Send, *, more: bool) -> None:
        async with asyncio.timeout(self._seconds):
            await send({"type": "http.response.body", "body": part, "more_body": more})


class _InParts(Response):
    def __init__(self, answers: Answers, body: bytes, media_type: str) -> None:
        super().__init__(body, media_type=media_type)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await self._answers.send(bytes(self.body), send)
        except TimeoutError:
            logger.warning("an answer was cut off: the client did not receive it", extra={"path": scope["path"]})
