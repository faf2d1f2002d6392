"""How a streaming pipeline is run: the options of `weft consume`, which the functions of Python take too."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import TypedDict

from weft.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Running:
    """How a pipeline is run. The backoff and `max_restarts` count only with `restart_on_error`."""

    once: bool = False
    """Take what is there now, then stop."""
    metrics: str | None = None
    """The URL of a sink for its metrics: those of `--metrics`."""
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    restart_on_error: bool = False
    min_backoff_ms: int = 1000
    max_backoff_ms: int = 30_000
    max_restarts: int | None = None
    """One after the other, without a batch between them."""

    def __post_init__(self) -> None:
        for name in ("min_backoff_ms", "max_backoff_ms", "max_restarts"):
            value = getattr(self, name)
            if not (type(value) is int and value >= 0) and (value is not None or name != "max_restarts"):
                raise SettingsError(f"{name} must be a whole number of at least 0, not {value!r}.")
        if self.min_backoff_ms > self.max_backoff_ms:
            raise SettingsError(
                f"min_backoff_ms is {self.min_backoff_ms}, which is more than max_backoff_ms, {self.max_backoff_ms}."
            )
        port = self.metrics_port
        if port is not None and (type(port) is not int or not 0 <= port <= 65535):
            raise SettingsError(f"metrics_port must be a port, a number from 0 to 65535, not {port!r}.")

    def backoff_seconds(self, failures: int) -> float:
        """Return how long to wait after so many failures. A part is random: pipelines that failed together, because one
        database was down, do not start again together."""
        longest = min(self.max_backoff_ms, self.min_backoff_ms << min(failures - 1, 40))
        return random.uniform(0.5, 1.0) * longest / 1000


class RunKeywords(TypedDict, total=False):
    """The fields of `Running` as keywords of functions, for editors and type checkers."""

    once: bool
    metrics: str | None
    metrics_port: int | None
    metrics_host: str
    restart_on_error: bool
    min_backoff_ms: int
    max_backoff_ms: int
    max_restarts: int | None


OPTIONS = tuple(each.name for each in fields(Running))
