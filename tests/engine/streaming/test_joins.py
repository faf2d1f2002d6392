"""Joins over many batches, with restarts between them: what is emitted is what plain Python makes of the rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pyarrow as pa
import pytest

import weft
from engine.streaming.conftest import compiled, compiling, declare
from engine.streaming.join_oracle import Case, Oracle, Row
from engine.streaming.states import CLOCK_MS, RESTARTS, moved_clock
from engine.streaming.window_oracle import IDLE
from weft.engine.readers import open_tables
from weft.engine.streaming.joins import Joins
from weft.engine.streaming.stateful import Reduced
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.project import current
from weft.systems.sql.state_store import SqlState
from weft.systems.state_in_memory import InMemoryState
from weft.systems.state_store import StateStore

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SCHEMA = pa.schema([("at", pa.timestamp("us", "UTC")), ("key", pa.string()), ("number", pa.int64())])
J = TypeVar("J", bound=Joins)
KINDS = ["inner", "left_outer", "right_outer", "full_outer"]


def pipeline_of(case: Case) -> StreamingPipeline:
    join = weft.Join(
        left_source="a",
        right_source="b",
        left_keys=("key",),
        right_keys=("key",),
        kind=case.kind,  # type: ignore[arg-type]
        min_delta_ms=case.least // 1000,
        max_delta_ms=case.most // 1000,
        left_event_time_column="at",
        right_event_time_column="at",
        late_data=case.late_data,  # type: ignore[arg-type]
        allowed_lateness_ms=case.allowed // 1000 if case.late_data == "reopen" else None,
    )
    return make(
        name=f"case {case.seed}",
        sources=[weft.Source(query=declare(name, at="timestamp")) for name in ("a", "b")],
        target="default",
        target_table="results",
        join=join,
        watermark=weft.Watermark(lateness_ms=case.lateness // 1000, source_idleness_ms=IDLE * 1000),
    )


def keys_of(seed: int) -> int:
    return 0 if seed % 4 == 1 else 30


def frame_of(spark: Any, rows: list[Row]) -> Any:
    dicts = [{"at": EPOCH + timedelta(microseconds=each.at), "key": each.key, "number": each.number} for each in rows]
    return spark.createDataFrame(pa.Table.from_pylist(dicts, SCHEMA))


def emitted(table: pa.Table | None) -> Counter[tuple[Any, Any]]:
    rows = [] if table is None else table.to_pylist()
    return Counter((row.get("left_number"), row.get("right_number")) for row in rows)


def check(case: Case, spark: Any, open_store: Callable[[], StateStore]) -> None:
    """Run a case by Spark."""

    def reduce(joins: Joins, batch: list[Row]) -> Reduced:
        sides = {name: [each for each in batch if each.side == side] for side, name in enumerate(("a", "b"))}
        return joins.reduce([(name, frame_of(spark, events)) for name, events in sides.items() if events])

    pipeline = pipeline_of(case)
    check_joins(case, lambda: Joins(pipeline, open_store()), reduce, spark)


def check_joins(case: Case, opened: Callable[[], J], reduce: Callable[[J, list[Row]], Reduced], spark: Any) -> None:
    """Run a case, with restarts, replays and sources that become idle, and compare it with the oracle."""
    oracle, found = Oracle(case), Counter[tuple[Any, Any]]()
    chance = random.Random(case.seed)
    restarts = chance.choice(RESTARTS)

    def may_restart() -> bool:
        nonlocal joins
        if chance.randrange(restarts):
            return False
        joins.close()
        joins = opened()
        oracle.progress.restart()
        return True

    def emit(number: int) -> None:
        once = emitted(joins.emission(spark))
        # As after a crash: the state has the batch, and what it emits is the same.
        assert not may_restart() or joins.begin(number) == (joins.last is not None)
        assert emitted(joins.emission(spark)) == once
        found.update(once)
        assert found == oracle.emitted, f"case {case.seed}, batch {number}"

    with moved_clock() as clock:
        joins = opened()
        for number, (batch, pause) in enumerate(zip(case.batches, case.pauses, strict=True)):
            may_restart()
            assert not joins.begin(number, begun_ms=CLOCK_MS)
            joins.add(number, reduce(joins, batch) if batch else joins.nothing(), spark)
            oracle.add(batch)
            if joins.last is not None:
                assert (joins.last.watermark, joins.last.late) == (oracle.progress.watermark, oracle.late)
            emit(number)
            clock.now += pause
            oracle.progress.wait(pause)
            if joins.tick(spark):
                oracle.add([])
                emit(number)
            oracle.progress.add({})  # without a tick the watermark stays
            assert joins.last is None or joins.last.watermark == oracle.progress.watermark
    joins.close()


@pytest.mark.brief("left_outer")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("here")
def test_as_in_plain_python(kind: str, small_spark: Any, count: Callable[..., int]) -> None:
    for seed in range(count(2000, 2)):
        current().streams.clear()
        store = InMemoryState()
        check(Case.random(seed, kind, keys_of(seed)), small_spark, lambda store=store: store)  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("streams")
@pytest.mark.brief("sqlite-full_outer", "mysql-right_outer")
def test_state_in_a_database(kind: str, small_spark: Any, count: Callable[..., int]) -> None:
    for seed in range(1000, 1000 + count(100, 2)):
        current().streams.clear()
        connection = current().connection("default")

        def open_store(seed: int = seed, connection: Any = connection) -> StateStore:
            return SqlState(open_tables(connection), f"case {seed}", f"q{seed}")

        check(Case.random(seed, kind, keys_of(seed)), small_spark, open_store)


@pytest.mark.full
@pytest.mark.usefixtures("here")
def test_a_batch_runs_the_code_of_the_one_before(plain_spark: Any) -> None:
    """Times that move on with each batch must not be part of what Spark compiles."""
    spark = compiling(plain_spark)
    joins, counts = Joins(pipeline_of(Case.random(1, "inner")), InMemoryState()), []
    for number in range(4):
        rows = [Row(side, (100 * number + side) * 1_000_000, "k", number) for side in (0, 1)]
        # Rows that are part of the plan would be computed without compiling anything.
        frames = [(name, frame_of(spark, [row]).persist()) for name, row in zip("ab", rows, strict=True)]
        joins.begin(number)
        joins.add(number, joins.reduce(frames), spark)
        counts.append(compiled(spark))
    assert counts[2] == counts[3]
