"""Joins over many batches, with restarts between them: what is emitted is what plain Python makes of the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

import weft
from engine.streaming.conftest import compiled, compiling, declare
from engine.streaming.join_oracle import Case, Oracle, Row
from engine.streaming.states import CLOCK_MS
from weft.engine.readers import open_tables
from weft.engine.streaming.joins import Joins
from weft.pipelines.streaming.declare import make
from weft.project import current
from weft.systems.sql.state_store import SqlState
from weft.systems.state_in_memory import InMemoryState
from weft.systems.state_store import StateStore

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SCHEMA = pa.schema([("at", pa.timestamp("us", "UTC")), ("key", pa.string()), ("number", pa.int64())])
KINDS = ["inner", "left_outer", "right_outer", "full_outer"]


def joins_of(case: Case, store: StateStore) -> Joins:
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
    pipeline = make(
        name=f"case {case.seed}",
        sources=[weft.Source(query=declare(name, at="timestamp")) for name in ("a", "b")],
        target="default",
        target_table="results",
        join=join,
        watermark=weft.Watermark(lateness_ms=case.lateness // 1000, source_idleness_ms=3_600_000),
    )
    return Joins(pipeline, store)


def frame_of(spark: Any, rows: list[Row]) -> Any:
    dicts = [{"at": EPOCH + timedelta(microseconds=each.at), "key": each.key, "number": each.number} for each in rows]
    return spark.createDataFrame(pa.Table.from_pylist(dicts, SCHEMA))


def emitted(table: pa.Table | None) -> Counter[tuple[Any, Any]]:
    rows = [] if table is None else table.to_pylist()
    return Counter((row.get("left_number"), row.get("right_number")) for row in rows)


def check(case: Case, spark: Any, open_store: Callable[[], StateStore]) -> None:
    """Run a case, with a restart before each batch and a replay of each batch, and compare it with the oracle."""
    oracle, found = Oracle(case), Counter[tuple[Any, Any]]()
    for number, batch in enumerate(case.batches):
        joins = joins_of(case, open_store())
        assert not joins.begin(number, begun_ms=CLOCK_MS)
        sides = {name: [each for each in batch if each.side == side] for side, name in enumerate(("a", "b"))}
        rows = [(name, frame_of(spark, events)) for name, events in sides.items() if events]
        joins.add(number, joins.reduce(rows) if rows else joins.nothing(), spark)
        once = emitted(joins.emission(spark))
        joins.close()
        # As after a crash: the state has the batch, and what it emits is the same.
        again = joins_of(case, open_store())
        assert again.begin(number) == (again.last is not None)
        assert emitted(again.emission(spark)) == once
        again.close()
        oracle.add(batch)
        found += once
        assert found == oracle.emitted, f"case {case.seed}, batch {number}"


@pytest.mark.brief("left_outer")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("here")
def test_as_in_plain_python(kind: str, small_spark: Any, count: Callable[..., int]) -> None:
    for seed in range(count(2000, 2)):
        current().streams.clear()
        store = InMemoryState()
        check(Case.random(seed, kind), small_spark, lambda store=store: store)  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("streams")
@pytest.mark.brief("sqlite-full_outer", "mysql-right_outer")
def test_state_in_a_database(kind: str, small_spark: Any, count: Callable[..., int]) -> None:
    for seed in range(1000, 1000 + count(100, 2)):
        current().streams.clear()
        connection = current().connection("default")

        def open_store(seed: int = seed, connection: Any = connection) -> StateStore:
            return SqlState(open_tables(connection), f"case {seed}", f"q{seed}")

        check(Case.random(seed, kind), small_spark, open_store)


@pytest.mark.full
@pytest.mark.usefixtures("here")
def test_a_batch_runs_the_code_of_the_one_before(plain_spark: Any) -> None:
    """Times that move on with each batch must not be part of what Spark compiles."""
    spark = compiling(plain_spark)
    joins, counts = joins_of(Case.random(1, "inner"), InMemoryState()), []
    for number in range(4):
        rows = [Row(side, (100 * number + side) * 1_000_000, "k", number) for side in (0, 1)]
        # Rows that are part of the plan would be computed without compiling anything.
        frames = [(name, frame_of(spark, [row]).persist()) for name, row in zip("ab", rows, strict=True)]
        joins.begin(number)
        joins.add(number, joins.reduce(frames), spark)
        counts.append(compiled(spark))
    assert counts[2] == counts[3]
