"""How a ratio is measured: ours and the yardstick take turns in one run, and the median of the rounds' ratios counts.

Machines are noisy; a rate alone says little about the code. What takes turns meets the same noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import redis_server  # noqa: F401 - so that there are servers of Redis
import servers
from bench import processes


class SkippedError(Exception):
    """A case cannot be measured here; the text says what to install."""


@dataclass(frozen=True)
class Case:
    """One row of the table: two jobs that do the same amount of work, and the bar for their ratio."""

    name: str
    against: str
    bar: float
    prepare: Callable[[float], tuple[Callable[[], int], Callable[[], int]]]
    """Given a scale, sets up and gives (ours, yardstick); each runs once and returns how many events it handled."""
    at_most: bool = False
    """The ratio must stay below the bar: it compares times per event."""
    rounds: int = 5
    needs: str | None = None
    """The server it needs; without it the case is skipped."""


@dataclass
class Result:
    """What the rounds gave."""

    case: Case
    ours: list[float] = field(default_factory=list)
    yardstick: list[float] = field(default_factory=list)
    skipped: str | None = None
    """Why it was not measured."""

    @property
    def ratios(self) -> list[float]:
        """Ours over the yardstick, round by round; for times per event the other way round."""
        return [
            theirs / ours if self.case.at_most else ours / theirs
            for ours, theirs in zip(self.ours, self.yardstick, strict=True)
        ]

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)

    @property
    def holds(self) -> bool:
        """Whether the bar is reached, or not to be measured."""
        if self.skipped:
            return True
        return self.ratio <= self.case.bar if self.case.at_most else self.ratio >= self.case.bar


def measure(case: Case, scale: float, report: Callable[[str], None]) -> Result:
    """Run a case, unless something for it is missing."""
    try:
        if case.needs and servers.KINDS[case.needs].is_missing():
            server = servers.KINDS[case.needs]
            raise SkippedError(str(servers.MissingServerError(server.name, server.package)))
        return _measure(case, scale, report)
    except SkippedError as error:
        report(f"{case.name}: skipped: {error}")
        return Result(case, skipped=str(error))
    finally:
        processes.end_all()


def _measure(case: Case, scale: float, report: Callable[[str], None]) -> Result:
    """One warm-up of each, then the rounds."""
    ours, yardstick = case.prepare(scale)
    result = Result(case)
    for job in (ours, yardstick):
        _reset(job)
        job()
    for number in range(case.rounds):
        report(f"{case.name}: round {number + 1} of {case.rounds}")
        # Who goes first changes, so that what one leaves behind (dirty pages) does not always meet the other.
        order = [(ours, result.ours), (yardstick, result.yardstick)]
        for job, rates in order if number % 2 == 0 else reversed(order):
            _reset(job)
            start = time.perf_counter()
            events = job()
            rates.append(events / (time.perf_counter() - start))
    return result


def _reset(job: Callable[[], int]) -> None:
    """Some jobs need to find things as they were: they carry how, and its time does not count."""
    getattr(job, "reset", lambda: None)()
