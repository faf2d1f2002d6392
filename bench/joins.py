"""Joins: a batch with its state, against the same join in bare Spark SQL without any."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import weft
from bench.engine_loads import Job
from bench.harness import Case
from bench.windows import PLACES, as_file, frame_of, opened_place, warmed

ROWS = 50_000
"""Of each side, a batch. A batch is half a minute, so that rows of ten batches before and after find each other."""
_HALF_MINUTE, _WINDOW_MS = 30_000_000, 300_000
# So many batches before it counts: the state has all its rows then, and the JVM has compiled what it runs.
_WARM_UP = 14


class Batches:
    """Batches of two sides. A batch emits about as many pairs as a side has rows: of ours the partners came up to five
    minutes before, of theirs they are in the batch."""

    def __init__(self, rows: int) -> None:
        import numpy

        from weft.engine import session

        self.rows, self._chance = rows, numpy.random.default_rng(1)
        self.spark = session.spark().newSession()
        self._numbers = {"ours": 0, "theirs": 0}
        self._ready: dict[str, list[str]] = {}

    def prepare(self, who: str) -> None:
        """Make the next batch of one of the two, which `frames` returns."""
        import pyarrow as pa

        number = self._numbers[who]
        self._numbers[who] += 1
        sides = []
        for _ in range(2):
            at = number * _HALF_MINUTE + self._chance.integers(0, _HALF_MINUTE, self.rows)
            key = number * self.rows + self._chance.integers(0, (10 if who == "ours" else 1) * self.rows, self.rows)
            columns = {
                "at": pa.array(at, pa.timestamp("us", "UTC")),
                "key": pa.array(key),
                "value": pa.array(self._chance.integers(0, 1000, self.rows)),
            }
            sides.append(as_file(pa.table(columns)))
        self._ready[who] = sides

    def frames(self, who: str) -> list[Any]:
        """Return the batch of one of the two, a DataFrame a side."""
        return [frame_of(self.spark, each) for each in self._ready[who]]


def _joins(place: tuple[Any, Callable[[str], Any]]) -> Any:
    from weft.engine.streaming.joins import Joins
    from weft.pipelines.streaming.declare import make

    connection, opened = place
    name = f"bench {uuid.uuid4().hex}"
    fields = {"at": "timestamp", "key": "int64", "value": "int64"}
    sources = [weft.stream(name=f"{each}_{uuid.uuid4().hex}", fields=fields)(lambda: None) for each in ("l", "r")]
    join = weft.Join(
        left_source=sources[0].name,
        right_source=sources[1].name,
        left_keys="key",
        right_keys="key",
        left_event_time_column="at",
        right_event_time_column="at",
        time_window_ms=_WINDOW_MS,
    )
    declared = [weft.Source(query=each) for each in sources]
    pipeline = make(name=name, sources=declared, target=connection, target_table="results", join=join)
    return Joins(pipeline, opened(name)), [each.name for each in sources]


def _join(where: str) -> Callable[[float], tuple[Job, Job]]:
    def prepare(scale: float) -> tuple[Job, Job]:
        from pyspark.sql import functions as F

        place = opened_place(where)
        batches = Batches(max(100, round(ROWS * min(scale, 1))))
        joins, names = _joins(place)
        number = 0

        def ours() -> int:
            nonlocal number
            joins.begin(number)
            rows = list(zip(names, batches.frames("ours"), strict=True))
            joins.add(number, joins.reduce(rows), batches.spark)
            joins.emission(batches.spark)
            number += 1
            return 2 * batches.rows

        def bare() -> int:
            left, right = batches.frames("theirs")
            left, right = left.alias("l"), right.alias("r")
            apart = F.unix_micros("r.at") - F.unix_micros("l.at")
            near = apart.between(-_WINDOW_MS * 1000, _WINDOW_MS * 1000)
            left.join(right, (F.col("l.key") == F.col("r.key")) & near).toArrow()
            return 2 * batches.rows

        return warmed(ours, bare, batches.prepare, _WARM_UP)

    return prepare


_BARE = "the same join in Spark SQL, no state"
CASES = [
    Case(f"join within 5 minutes, {name}", _BARE, bar, _join(where), True, 9, "postgres")
    for (where, name), bar in zip(PLACES.items(), (2.0, 2.5, 4.0), strict=True)
]
