"""What listeners of a streaming pipeline are called with."""

from __future__ import annotations

from weft.pipelines.streaming.execution import Lag, Report


class RunListener:
    """Called with what a pipeline does, from threads of the engine. Subclasses override the methods they need.

    An exception is logged, and the pipeline goes on. `BrokenPipeError` ends it after the current batch: nobody reads
    the listener's output any more.
    """

    wants_idle = False
    """Whether `idle` is to be called after each look at the sources that found nothing."""

    def started(self, lag: Lag) -> None:
        """The pipeline runs; batches come from now on. `lag` reports how far it is behind."""

    def batch(self, report: Report) -> None:
        """A batch was carried out."""

    def idle(self) -> None:
        """The sources had nothing new."""

    def failed(self, error: Exception, again_in: float | None) -> None:
        """The pipeline failed. It is started again after so many seconds; with `None` it is not."""
