"""Tickets for clients that cannot send headers: each opens one subscription to one stream, once, within seconds.

A ticket is a file whose name is a hash of ticket and stream. The process that removes it has redeemed it. It holds the
id of the key that it was issued for: when the key ends, its tickets end too.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

SECONDS = 30


class Tickets:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        self._swept = 0.0

    def issue(self, stream: str, opened_by: str) -> str:
        """Issue a ticket for a stream to a caller whom `opened_by` admitted."""
        self._sweep()
        ticket = secrets.token_urlsafe(32)
        with open(self._path(ticket, stream), "x") as file:
            file.write(f"{time.monotonic() + SECONDS!r} {opened_by}")
        return ticket

    def redeem(self, ticket: str, stream: str) -> str | None:
        """Return what admitted its owner, if it is a ticket for that stream. It is not valid again after this."""
        path = self._path(ticket, stream)
        try:
            expires, opened_by = _parts(path)
            path.unlink()
        except FileNotFoundError:
            return None
        return opened_by if time.monotonic() <= expires else None

    def _path(self, ticket: str, stream: str) -> Path:
        return self._folder / sha256(f"{stream} {ticket}".encode("utf-8", "surrogatepass")).hexdigest()

    def _sweep(self) -> None:
        """Remove tickets that were not used in time."""
        now = time.monotonic()
        if now - self._swept < SECONDS:
            return
        self._swept = now
        for entry in os.scandir(self._folder):
            # A ticket that is being written, or was redeemed meanwhile, is left alone.
            with suppress(FileNotFoundError, ValueError):
                if _parts(Path(entry))[0] < now:
                    os.unlink(entry)


def _parts(path: Path) -> tuple[float, str]:
    expires, _, opened_by = path.read_text().partition(" ")
    return float(expires), opened_by
