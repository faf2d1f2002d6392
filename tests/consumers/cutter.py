"""Replies that are lost on their way."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit


class Cutter:
    """A way to the server that can be told to carry a command there and never bring the reply."""

    def __init__(self, url: str) -> None:
        self.to = urlsplit(url)
        self.cut = b""
        """Commands that hold this are carried out, and the connection ends before the reply."""
        self.passes = 0
        """So many of them come through before."""
        self.cuts = 0
        self._ends: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Cutter:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"redis://127.0.0.1:{port}{self.to.path}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for end in self._ends:
            end.close()
        await asyncio.gather(*(end.wait_closed() for end in self._ends), return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there = await asyncio.open_connection(self.to.hostname, self.to.port)

        self._ends += [writer, there]

        async def back() -> None:
            while data := await there_reader.read(1 << 16):
                writer.write(data)
            writer.close()

        answering = asyncio.create_task(back())
        while data := await reader.read(1 << 16):
            if self.cut and self.cut in data and self.passes > 0:
                self.passes -= 1
            elif self.cut and self.cut in data:
                answering.cancel()
                self.cuts, self.cut = self.cuts + 1, b""
                there.write(data)
                await there_reader.read(1)  # it was carried out
                writer.transport.abort()
                break
            there.write(data)
        there.close()
