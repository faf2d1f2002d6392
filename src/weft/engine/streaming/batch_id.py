"""What names a micro-batch: targets and stores of dead letters recognise by it what they have."""

from __future__ import annotations

from typing import NamedTuple


class BatchId(NamedTuple):
    query_id: str
    """The id of Spark's query, which its checkpoint keeps, or the name of a replay."""
    number: int
    positions: str | None = None
    """How far it reaches in each source, or a digest of that: two batches of one number that differ in it have other
    rows. `None` where nothing was planned, as of a replay."""

    @property
    def checkpoint(self) -> str | None:
        """The id of its checkpoint; `None` of a replay."""
        return None if self.query_id.startswith("replay ") else self.query_id
