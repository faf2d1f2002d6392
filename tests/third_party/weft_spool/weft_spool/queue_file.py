"""The broker itself: a queue is a folder with one file, to which messages are appended, one a line."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple


class Message(NamedTuple):
    """One message of a queue."""

    line: int
    """Its number, from 1 on."""
    sent_at: datetime
    value: bytes


class Queue:
    """The messages of one queue. Any number of processes may append and read at once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "messages"

    def exists(self) -> bool:
        """Return whether somebody has appended to it."""
        return self.file.exists()

    def append(self, values: Iterable[bytes]) -> int:
        """Append messages and return how many. When this returns, they are on disk."""
        # JSON needs no line breaks, and those between its tokens may be spaces.
        lines = [value.replace(b"\n", b" ") for value in values]
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.file.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # A process that died while it appended may have left part of a line.
            os.truncate(self.file, self._whole())
            sent_at = datetime.now(UTC).isoformat().encode()
            file.write(b"".join(b"%s %s\n" % (sent_at, line) for line in lines))
            file.flush()
            os.fsync(file.fileno())
        return len(lines)

    def read(self, after: int = 0, upto: int | None = None) -> Iterator[Message]:
        """Yield the messages behind line `after`, up to line `upto` or to the end."""
        if not self.exists():
            return
        with self.file.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") or (upto is not None and number > upto):
                    return
                if number > after:
                    sent_at, _, value = line[:-1].partition(b" ")
                    yield Message(number, datetime.fromisoformat(sent_at.decode()), value)

    def count(self) -> int:
        """Return how many messages there are."""
        return sum(1 for _ in self.read())

    def _whole(self) -> int:
        """Return the size of all whole lines."""
        return self.file.read_bytes().rfind(b"\n") + 1
