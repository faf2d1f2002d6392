"""How a streaming pipeline is run: the options of `weft consume`, which the functions of Python take too."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, TypedDict

from weft.errors import SettingsError
from weft.options import refuse_unknown


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """How a pipeline that failed is started again."""

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

    def seconds(self, failures: int) -> float:
        """How long to wait after so many failures. Part of it is chance: what failed together, because one database
        was down, does not come back together."""
        longest = min(self.max_backoff_ms, self.min_backoff_ms << min(failures - 1, 40))
        return random.uniform(0.5, 1.0) * longest / 1000


@dataclass(frozen=True, kw_only=True)
class Running(Restarts):
    """How a pipeline is run; how it is started again counts where `restart_on_error` says that it is."""

    once: bool = False
    """Take what is there now, then stop."""
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    restart_on_error: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> Self:
        """These options; an unknown one is an error that names the nearest."""
        refuse_unknown(given, OPTIONS, where)
        return cls(**given)

    def __post_init__(self) -> None:
        super().__post_init__()
        port = self.metrics_port
        if port is not None and (type(port) is not int or not 0 <= port <= 65535):
            raise SettingsError(f"metrics_port must be a port, a number from 0 to 65535, not {port!r}.")


class RunKeywords(TypedDict, total=False):
    """The fields of `Running` as keywords of functions, for editors and type checkers."""

    min_backoff_ms: int
    max_backoff_ms: int
    max_restarts: int | None
    once: bool
    metrics_port: int | None
    metrics_host: str
    restart_on_error: bool


OPTIONS = tuple(each.name for each in fields(Running))
