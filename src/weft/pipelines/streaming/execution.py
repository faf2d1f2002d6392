"""What carries out a streaming pipeline, and what a batch did: the supervisor is handed one, and imports no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol


@dataclass(frozen=True)
class WindowReport:
    """What a batch did to the windows or the join of a pipeline, and how they are after it."""

    emitted: int
    """The rows that were written of them."""
    open: int
    groups: int
    """The groups of the open windows, at most; in a join, the rows that wait."""
    late: int
    """The rows of the batch that were late."""
    policy: str
    """What happens to late rows."""
    watermark: int | None
    """In microseconds since 1970."""
    sources: Mapping[str, int]
    """By source, the greatest time of its rows less the lateness."""


@dataclass(frozen=True)
class CdcReport:
    """What a batch of changes did."""

    creates: int
    """Inserted rows, and those of snapshots."""
    updates: int
    deletes: int
    skipped: int
    """Messages that are no change of a row: tombstones, and malformed ones that the pipeline drops."""
    idempotent_skipped: int
    """Changes that came again, or too late: the target had a newer one of the key."""
    lag_seconds: float | None
    """From the commit of the newest change in the source to that in the targets; `None` where messages have no time."""
    tables: Mapping[str, CdcReport] | None = None
    """A report for each table, where `route` leads changes to several."""


@dataclass(frozen=True)
class Report:
    """What a batch did."""

    pipeline: str
    batch_id: int
    consumed: int
    """Rows before the SQL; with SQL over a stream counted by offsets, so at most so many."""
    written: dict[str, int]
    """By target."""
    dead: int
    """Rows that went into the dead letters, or were dropped where the pipeline says so."""
    replayed: bool
    """Whether all targets had it already: it was done before a crash."""
    seconds: float
    ended_at: datetime
    windows: WindowReport | None = None
    """Where the pipeline has windows or a join."""
    cdc: CdcReport | None = None
    """Where it has change data capture."""


class Lag(Protocol):
    """How far the sources of a pipeline are behind."""

    def now(self, *, fresh: bool = False) -> dict[str, int]:
        """By source; nothing of one that does not answer. Without `fresh` it may be the answer of a second ago."""

    def in_words(self) -> dict[str, str]:
        """Return the lag of each source in words, with units."""


class StreamingEngine(Protocol):
    """Runs one streaming pipeline. After it failed it can be started again."""

    @property
    def name(self) -> str:
        """The pipeline's."""

    @property
    def location(self) -> str:
        """Where its checkpoint is."""

    @property
    def lag(self) -> Lag:
        """How far its sources are behind."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep every other process from running the pipeline during the block."""

    def start(
        self,
        *,
        once: bool,
        committed: Callable[[], None],
        report: Callable[[Report], None] | None,
        idle: Callable[[], None] | None,
    ) -> None:
        """Start it: after this, batches are carried out; with `once` until what is there now is done.

        From threads of the engine, `committed` is called after each batch, `report` with what a batch that had rows
        did, and `idle` whenever there was none.
        """

    def wait(self) -> None:
        """Wait until it ended; raises what made it fail."""

    def stop(self) -> None:
        """Finish the current batch, and end."""

    def note_failure(self, text: str) -> None:
        """Show why it failed to those who look at the pipeline, until it goes on."""

    def forget(self, error: Exception) -> None:
        """Release what the start that failed with this error holds, before the next one."""
