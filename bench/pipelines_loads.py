"""Declared pipelines against the same `weft.load`, and normalizers against none."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from typing import Annotated, Any

import weft
from bench.engine_loads import _MANY, SELECT, Job, Pair, _rows, _targets, _with_reset
from bench.harness import Case
from weft import pk
from weft.engine.run import PipelineRun
from weft.normalize import lower, parse_timestamp, trim
from weft.types import BigInt, Double, Integer, Text, TimestampTZ

_numbers = count()
PLAIN = {
    "id": Annotated[BigInt, pk()],
    "name": Text | None,
    "amount": Double | None,
    "at": TimestampTZ | None,
    "n": Integer | None,
}
NORMALIZED = {
    **PLAIN,
    "name": Annotated[Text | None, lower(), trim()],
    "at": Annotated[TimestampTZ | None, parse_timestamp()],
}


def _pipeline(pair: Pair, table: str, columns: dict[str, Any], **options: Any) -> Callable[[], None]:
    """One run of a declared pipeline, under a key of its own each time."""
    target = weft.table(schema="public", name=table)(type("Target", (), {"__annotations__": columns}))
    made = weft.pipeline(
        target=target,
        name=f"bench_{next(_numbers)}",
        source_connection=weft.connect(url=pair.here),
        target_connection=weft.connect(url=pair.there),
        **options,
    )(lambda: SELECT)
    return lambda: PipelineRun(made, f"bench {next(_numbers)}", datetime.now(UTC)).execute()


def declared_append(scale: float) -> tuple[Job, Job]:
    """Append from one database to another."""
    pair = Pair(_rows(scale))
    return (
        # Without the key, as the other table has none.
        pair.emptied(_pipeline(pair, "ours", {**PLAIN, "id": BigInt}), "ours"),
        pair.emptied(lambda: pair.load("theirs"), "theirs"),
    )


def declared_merge(scale: float) -> tuple[Job, Job]:
    """Merge into a table of as many rows, a tenth of them changed."""
    pair = Pair(_rows(scale))
    ours, theirs = _targets(pair, "i % 10 = 0")
    run = _pipeline(pair, "ours", PLAIN, mode="merge")
    return (
        _with_reset(_counted(pair, run), ours),
        _with_reset(_counted(pair, lambda: pair.load("theirs", mode="merge", keys=["id"])), theirs),
    )


def normalized(mode: str) -> Callable[[float], tuple[Job, Job]]:
    """lower, trim and parse_timestamp, against the same without."""

    def prepare(scale: float) -> tuple[Job, Job]:
        pair = Pair(_rows(scale))
        jobs = []
        for table, columns in (("ours", NORMALIZED), ("theirs", PLAIN)):
            run = _pipeline(pair, table, columns, mode=mode)
            run()  # what is measured is a load into a table that is filled
            jobs.append(_counted(pair, run))
        return jobs[0], jobs[1]

    return prepare


def _counted(pair: Pair, run: Callable[[], object]) -> Job:
    def job() -> int:
        run()
        return pair.rows

    return job


CASES = [
    Case("declared append", "the same weft.load", 0.95, declared_append, rounds=_MANY, needs="postgres"),
    Case("declared merge", "the same weft.load", 0.95, declared_merge, rounds=_MANY, needs="postgres"),
    Case("merge with three normalizers", "the same without", 0.7, normalized("merge"), rounds=_MANY, needs="postgres"),
    Case("scd2 with three normalizers", "the same without", 0.7, normalized("scd2"), rounds=_MANY, needs="postgres"),
]
