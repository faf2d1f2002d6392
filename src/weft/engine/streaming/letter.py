"""What is told of a row that went nowhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stage = Literal["read", "transform", "store"]


@dataclass(frozen=True)
class Letter:
    """One row that went nowhere."""

    stage: Stage
    """Where it failed: when it was read from its source, by `transform_sql`, or when a target stored it."""
    error: str
    source: str
    payload: str
    """The row as JSON, or the text of what was no row."""
    offset: str | None = None
    target: str | None = None
