"""Where frames come from: a stream that is read batch by batch."""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa


class Feed(Protocol):
    """A position in a stream. It is used by one thread at a time."""

    finished: bool
    """Whether nothing more can come: a range was read to its end."""

    drained: bool
    """Whether the last fetch saw the end of what is there now."""

    @property
    def page_size(self) -> int:
        """How many rows to fetch at once, where the caller does not mind."""

    def begin(self) -> None:
        """Fix where to start, and make what must be there."""

    def fetch(self, limit: int, wait_seconds: float | None, more: bool = True) -> pa.RecordBatch | None:
        """The next rows, up to so many; `None` where none came while it waited (`None` waits for as long as it takes).
        `more` says that there will be another fetch."""

    def confirm(self) -> None:
        """Acknowledge what was fetched, without waiting for an answer."""

    def settle(self) -> None:
        """Wait until what was confirmed is stored."""

    def give_back(self) -> None:
        """Let other members have what was fetched last: nobody saw it."""

    def close(self) -> None:
        """Let go of the connection."""
