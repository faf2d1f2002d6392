"""What windows must hold, computed in plain Python of the same batches."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SECOND = 1_000_000
ERAS = (0, -2_208_988_800 * SECOND, 7_258_118_400 * SECOND)
"""The years 1970, 1900 and 2200."""
IDLE = 30
"""After how many seconds without rows a source is idle."""
PAUSES = [0, 20, 20, 40]
"""How many seconds there are between two batches."""


class Progress:
    """The watermark of some sources, batch by batch."""

    def __init__(self, sources: tuple[Hashable, ...], lateness: int) -> None:
        self._sources, self._lateness = sources, lateness
        self._now = 0
        self._newest: dict[Hashable, int] = {}
        self.watermark: int | None = None
        self.restart()

    def restart(self) -> None:
        """A process that starts counts no source as idle."""
        self._heard = dict.fromkeys(self._sources, self._now)

    def wait(self, seconds: int) -> None:
        self._now += seconds

    def add(self, newest: Mapping[Hashable, int]) -> None:
        """Add the newest time of each source that a batch has rows of; a tick has none."""
        for source, at in newest.items():
            self._newest[source] = max(at, self._newest.get(source, at))
            self._heard[source] = self._now
        active = [each for each, heard in self._heard.items() if self._now - heard < IDLE]
        if active and all(each in self._newest for each in active):
            reached = min(self._newest[each] for each in active) - self._lateness
            self.watermark = reached if self.watermark is None else max(self.watermark, reached)


@dataclass(frozen=True)
class Event:
    source: str
    at: int
    """In microseconds."""
    key: Any
    value: int | None


@dataclass
class Case:
    """One random case: windows, and batches with rows that come in disorder, late or not at all."""

    seed: int
    length: int
    hop: int
    lateness: int
    allowed: int
    late_data: str
    sources: tuple[str, ...]
    batches: list[list[Event]] = field(default_factory=list)
    pauses: list[int] = field(default_factory=list)
    """How many seconds pass after each batch."""

    @classmethod
    def random(cls, seed: int, late_data: str, kind: str, groups: int = 0) -> Case:
        """With more groups there are more rows, in the same time: a query of Spark takes about as long for one."""
        chance, apart = random.Random(seed), random.Random(f"{seed} apart")
        length = chance.choice([5, 10, 60, 7200]) * SECOND
        hop = length if kind == "tumbling" else length // chance.choice([2, 3, 5]) // SECOND * SECOND or SECOND
        case = cls(
            seed,
            length,
            hop,
            chance.choice([0, 0, 3, 20]) * SECOND,
            chance.choice([0, 10, 60]) * SECOND if late_data == "reopen" else 0,
            late_data,
            ("a", "b")[: chance.choice([1, 1, 2])],
        )
        reached = {name: ERAS[seed % 3] + chance.randrange(-100, 100) * SECOND for name in case.sources}
        for _ in range(chance.randrange(1, 7)):
            batch = []
            for _ in range(chance.choice([0, 1, 5, 20]) * max(groups, 1)):
                source = chance.choice(case.sources)
                reached[source] += chance.randrange(4 * SECOND // max(groups, 1))
                behind = chance.choice([0, 0, 0, 2, 30, 200]) * SECOND
                key = chance.choice([None, "x", "y", "", *map(str, range(groups))])
                value = chance.choice([None, *range(-3, 10)])
                batch.append(Event(source, reached[source] - behind, key, value))
            case.batches.append(partly_again(batch, case.sources, apart))
            case.pauses.append(apart.choice(PAUSES))
        return case


def partly_again(batch: list[Event], sources: tuple[str, ...], chance: random.Random) -> list[Event]:
    """Return a batch with some rows twice, or without those of a source that says nothing for once."""
    silent = chance.choice([None, *sources]) if len(sources) > 1 else None
    rows = [each for each in batch if each.source != silent]
    return rows + chance.sample(rows, min(len(rows), chance.choice([0, 0, 3])))


def newest_of(batch: list[Event]) -> dict[Hashable, int]:
    newest: dict[Hashable, int] = {}
    for event in batch:
        newest[event.source] = max(event.at, newest.get(event.source, event.at))
    return newest


@dataclass
class Oracle:
    """The windows of a case, batch by batch."""

    case: Case
    rows: dict[tuple[int, Any], list[Event]] = field(default_factory=lambda: defaultdict(list))
    late: int = 0
    """How many rows of the last batch were late."""

    def __post_init__(self) -> None:
        self.progress = Progress(self.case.sources, self.case.lateness)

    def add(self, batch: list[Event]) -> None:
        before, self.late = self.progress.watermark, 0
        for event in batch:
            starts = [
                start
                for start in self._starts(event.at)
                if before is None or start + self.case.length + self.case.allowed > before
            ]
            self.late += not starts
            for start in starts:
                self.rows[start, event.key].append(event)
        self.progress.add(newest_of(batch))

    def _starts(self, at: int) -> Iterator[int]:
        start = at - at % self.case.hop
        while start + self.case.length > at:
            yield start
            start -= self.case.hop

    def closed(self) -> dict[tuple[int, Any], tuple[Any, ...]]:
        """Return the result of each window and group that has closed."""
        watermark = self.progress.watermark
        if watermark is None:
            return {}
        return {
            group: _aggregated(rows) for group, rows in self.rows.items() if group[0] + self.case.length <= watermark
        }


def _aggregated(rows: list[Event]) -> tuple[Any, ...]:
    """Return count, count of values, sum, min, max, avg, first, last, exact distinct."""
    dated = sorted((each.at, each.value) for each in rows if each.value is not None)
    values = [value for _, value in dated]
    if not values:
        return (len(rows), 0, None, None, None, None, None, None, 0)
    return (
        len(rows),
        len(values),
        sum(values),
        min(values),
        max(values),
        sum(values) / len(values),
        values[0],
        values[-1],
        len(set(values)),
    )


@dataclass
class SessionOracle:
    """Sessions of a case, batch by batch."""

    gap: int
    limit: int
    progress: Progress
    allowed: int = 0
    updates: bool = False
    late: int = 0
    """How many rows of the last batch were late."""
    rows: dict[Any, list[Event]] = field(default_factory=lambda: defaultdict(list))
    long: set[tuple[Any, int]] = field(default_factory=set)
    """Keys and times of rows in sessions that were longer than the limit."""
    shown: set[tuple[Any, int]] = field(default_factory=set)
    """Keys and times of rows in sessions that were written."""
    done: dict[tuple[int, int, Any], tuple[Any, ...]] = field(default_factory=dict)
    """The sessions that can no longer change."""
    written: dict[tuple[int, int, Any], tuple[Any, ...]] = field(default_factory=dict)
    """All sessions that a table has."""

    def add(self, batch: list[Event]) -> None:
        before, self.late = self.progress.watermark, 0
        for event in batch:
            if before is None or event.at + self.gap + self.allowed >= before:
                self.rows[event.key].append(event)
            else:
                self.late += 1
        self.progress.add(newest_of(batch))
        self.written = dict(self.done)
        for key, rows in self.rows.items():
            rows.sort(key=lambda each: each.at)
            kept: list[Event] = []
            for session in self._sessions(rows):
                kept += self._write(key, session)
            self.rows[key] = kept

    def _sessions(self, rows: list[Event]) -> list[list[Event]]:
        sessions: list[list[Event]] = []
        for row in rows:
            if sessions and row.at <= sessions[-1][-1].at + self.gap:
                sessions[-1].append(row)
            else:
                sessions.append([row])
        return sessions

    def _write(self, key: Any, session: list[Event]) -> list[Event]:
        """Write what is to be seen of a session, and return the rows that may change it."""
        first, last = session[0].at, session[-1].at
        pieces = [session]
        if last - first > self.limit or any((key, row.at) in self.long for row in session):
            self.long |= {(key, row.at) for row in session}
            cells: dict[int, list[Event]] = defaultdict(list)
            for row in session:
                cells[row.at - row.at % self.limit].append(row)
            pieces = list(cells.values())
        kept: list[Event] = []
        watermark = -math.inf if self.progress.watermark is None else self.progress.watermark
        for piece in pieces:
            end = last if piece is pieces[-1] else piece[0].at - piece[0].at % self.limit + self.limit
            is_closed = end + self.gap < watermark
            moments = {(key, row.at) for row in piece}
            if is_closed or self.updates or self.shown & moments:
                self.shown |= moments
                found = (piece[0].at, piece[-1].at + self.gap, key)
                assert found not in self.written
                self.written[found] = _aggregated(piece)
            if end + self.gap + self.allowed < watermark:
                self.done[found] = self.written[found]
                self.shown -= moments
            else:
                kept += piece
        return kept
