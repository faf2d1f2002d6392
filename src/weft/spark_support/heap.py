"""The heap of Spark's JVM, which must not grow with garbage."""

from __future__ import annotations

import time
from typing import Any

from weft.spark_support.sessions import java_class

# The places of old objects in collectors that stop all threads. Others collect beside them, and sooner.
_POOLS = {"PS Old Gen", "Tenured Gen"}
_LEAST_BYTES = 192 << 20
_EACH_SECONDS = 5.0


class Heap:
    """The place of old objects in the JVM of a session. The JVM lets it grow to its limit before it collects garbage
    there: after 2M messages it took 350 MB, of which 80 were in use."""

    def __init__(self, spark: Any) -> None:
        self._system = java_class(spark, "java.lang.System")
        beans = java_class(spark, "java.lang.management.ManagementFactory").getMemoryPoolMXBeans()
        self._pool = next((each for each in beans if each.getName() in _POOLS), None)
        self._kept = 0
        self._looked = 0.0

    def used(self) -> int:
        """Return how many bytes objects take there, also those that nobody uses any more."""
        return 0 if self._pool is None else int(self._pool.getUsage().getUsed())

    def collect(self) -> None:
        """Collect garbage if twice as much is taken as was in use the last time."""
        now = time.monotonic()
        if now - self._looked < _EACH_SECONDS:
            return
        self._looked = now
        if self.used() > max(2 * self._kept, _LEAST_BYTES):
            self._system.gc()
            self._kept = self.used()
