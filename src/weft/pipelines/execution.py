"""What carries out a run of a pipeline, and what the run did: the runner is handed one, and imports no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from weft.pipelines.declare import Pipeline
from weft.systems.load import Counts


@dataclass(frozen=True)
class Loaded:
    """What a run did to one target."""

    target: str
    counts: Counts
    engine: str
    seconds: float
    late: int = 0
    """Rows of the source that came too late to be read, since the last run."""
    without_value: int = 0
    """Rows of the source without a value in the incremental column."""


@dataclass(frozen=True)
class Step:
    """What was done after the load."""

    text: str
    seconds: float
    replayed: bool = False


class Execution(Protocol):
    """One run. A second one under the same key does only what is not done yet."""

    @property
    def loaded(self) -> Sequence[Loaded]:
        """The targets that have been loaded so far."""

    @property
    def steps(self) -> Sequence[Step]:
        """The steps that have been done so far."""

    def execute(self) -> None:
        """Load every target, then do the steps. `loaded` and `steps` say how far it came, also where this raises."""


class ExecutionFactory(Protocol):
    """Prepares runs."""

    def __call__(self, pipeline: Pipeline, key: str, moment: datetime, *, keep: Callable[[], None]) -> Execution:
        """The run of a pipeline under a key. It calls `keep` before each change of data, which raises where the run is
        another process's by now."""
