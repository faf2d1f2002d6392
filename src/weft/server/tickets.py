"""Tickets for those who cannot send headers: each opens one subscription to one stream, once, and soon.

A ticket is a file whose name is made of ticket and stream. Whoever removes it has redeemed it, in whichever process.
It remembers what it was issued for: a key that ends meanwhile takes its tickets along.
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
    """The tickets in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        self._swept = 0.0

    def issue(self, stream: str, opened_by: str) -> str:
        """A new ticket for a stream, to one whom `opened_by` opened it."""
        self._sweep()
        ticket = secrets.token_urlsafe(32)
        with open(self._path(ticket, stream), "x") as file:
            file.write(f"{_now() + SECONDS!r} {opened_by}")
        return ticket

    def redeem(self, ticket: str, stream: str) -> str | None:
        """What it was issued for, if it is a ticket for that stream; never again after this."""
        path = self._path(ticket, stream)
        try:
            expires, opened_by = _parts(path)
            path.unlink()
        except FileNotFoundError:
            return None
        return opened_by if _now() <= expires else None

    def _path(self, ticket: str, stream: str) -> Path:
        return self._folder / sha256(f"{stream} {ticket}".encode("utf-8", "surrogatepass")).hexdigest()

    def _sweep(self) -> None:
        """Remove those that nobody came with."""
        now = _now()
        if now - self._swept < SECONDS:
            return
        self._swept = now
        for entry in os.scandir(self._folder):
            # One that is being written, or was redeemed meanwhile, is left alone.
            with suppress(FileNotFoundError, ValueError):
                if _parts(Path(entry))[0] < now:
                    os.unlink(entry)


def _parts(path: Path) -> tuple[float, str]:
    expires, _, opened_by = path.read_text().partition(" ")
    return float(expires), opened_by


def _now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)
