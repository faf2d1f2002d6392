"""Who is told what a streaming pipeline does, and what they are told."""

from __future__ import annotations

from weft.pipelines.streaming.execution import Lag, Report


class RunListener:
    """Is told what a pipeline does, from threads of the engine. Whoever wants to know overrides what it needs.

    What it raises is logged, and the pipeline goes on. `BrokenPipeError` ends it after the batch in hand: what it
    writes is read no more.
    """

    wants_idle = False
    """Whether to be told of each look at the sources that found nothing."""

    def started(self, lag: Lag) -> None:
        """It runs; batches come from now on. `lag` tells how far it is behind."""

    def batch(self, report: Report) -> None:
        """A batch was carried out."""

    def idle(self) -> None:
        """There was nothing to do."""

    def failed(self, error: Exception, again_in: float | None) -> None:
        """It failed; it is started again after so many seconds, or not."""
