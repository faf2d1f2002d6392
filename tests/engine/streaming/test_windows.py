"""Windows over many batches, with restarts between them: what is emitted is what plain Python makes of the rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

import weft
from engine.streaming.conftest import compiled, compiling, declare
from engine.streaming.states import CLOCK_MS, RESTARTS, choose_limits, moved_clock, remembered
from engine.streaming.window_oracle import (
    ERAS,
    IDLE,
    PAUSES,
    SECOND,
    Case,
    Event,
    Oracle,
    Progress,
    SessionOracle,
    partly_again,
)
from weft.engine.readers import open_tables
from weft.engine.streaming import sessions
from weft.engine.streaming import windows as windows_module
from weft.engine.streaming.sessions import Sessions
from weft.engine.streaming.windows import Windows
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.project import current
from weft.systems.sql.state_store import SqlState
from weft.systems.state_in_memory import InMemoryState
from weft.systems.state_store import StateBatch, StateStore

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SCHEMA = pa.schema([("at", pa.timestamp("us", "UTC")), ("key", pa.string()), ("value", pa.int64())])
REPLAYED = 3
"""One of so many batches is carried out a second time."""
AGGREGATIONS = [
    weft.Aggregation(agg="count", as_="n"),
    weft.Aggregation(agg="count", column="value", as_="values"),
    weft.Aggregation(agg="sum", column="value", as_="total"),
    weft.Aggregation(agg="min", column="value", as_="least"),
    weft.Aggregation(agg="max", column="value", as_="most"),
    weft.Aggregation(agg="avg", column="value", as_="mean"),
    weft.Aggregation(agg="first", column="value", as_="first"),
    weft.Aggregation(agg="last", column="value", as_="last"),
    weft.Aggregation(
        agg="count_distinct", column="value", as_="distinct", mode="exact", max_distinct_values_per_group=99
    ),
]


# Of each case a few aggregates, since each of them takes its time of Spark.
def some_of(seed: int) -> list[weft.Aggregation]:
    return [AGGREGATIONS[0], *random.Random(seed).sample(AGGREGATIONS[1:], 2)]


def values_of(results: Mapping[Any, tuple[Any, ...]], seed: int) -> dict[Any, tuple[Any, ...]]:
    """Return of what an oracle has of windows the aggregates of a case."""
    chosen = [AGGREGATIONS.index(each) for each in some_of(seed)]
    return {where: tuple(values[at] for at in chosen) for where, values in results.items()}


def pipeline_of(case: Case, aggregations: Sequence[weft.Aggregation] = ()) -> StreamingPipeline:
    is_hopping, reopens = case.hop < case.length, case.late_data == "reopen"
    window = weft.Window(
        kind="hopping" if is_hopping else "tumbling",
        duration_ms=case.length // 1000,
        hop_ms=case.hop // 1000 if is_hopping else None,
        group_by=("key",),
        aggregations=list(aggregations) or some_of(case.seed),
        late_data=case.late_data,  # type: ignore[arg-type]
        allowed_lateness_ms=case.allowed // 1000 if reopens else None,
        event_time_column="at",
    )
    return make(
        name=f"case {case.seed}",
        sources=[weft.Source(query=declare(name, at="timestamp")) for name in case.sources],
        target="default",
        target_table="results",
        window=window,
        watermark=weft.Watermark(lateness_ms=case.lateness // 1000, source_idleness_ms=IDLE * 1000),
        **({"mode": "merge", "keys": list(window.keys)} if reopens else {}),
    )


def frame_of(spark: Any, events: list[Event]) -> Any:
    rows = [{"at": EPOCH + timedelta(microseconds=each.at), "key": each.key, "value": each.value} for each in events]
    return spark.createDataFrame(pa.Table.from_pylist(rows, SCHEMA))


def emitted(table: pa.Table | None, seed: int) -> dict[tuple[int, Any], tuple[Any, ...]]:
    """Return what a batch emits, by window and group, each once."""
    rows = [] if table is None else table.to_pylist()
    names = [each.name for each in some_of(seed)]
    found = {
        ((row["window_start"] - EPOCH) // timedelta(microseconds=1), row["key"]): tuple(row[name] for name in names)
        for row in rows
    }
    assert len(found) == len(rows), "a group came twice"
    return found


def check(case: Case, spark: Any, open_store: Callable[[], StateStore]) -> None:
    """Run a case, with restarts, replays of batches and sources that become idle, and compare it with the oracle."""
    oracle, pipeline, table, written = Oracle(case), pipeline_of(case), {}, set()
    chance = random.Random(case.seed)
    restarts = chance.choice(RESTARTS)

    def may_restart() -> bool:
        nonlocal windows
        if chance.randrange(restarts):
            return False
        windows.close()
        windows = Windows(pipeline, open_store())
        oracle.progress.restart()
        return True

    def emit(number: int) -> None:
        once = emitted(windows.closed(spark), case.seed)
        # As after a crash: the state has the batch, and what it emits is the same.
        assert not may_restart() or windows.begin(number) == (windows.last is not None)
        assert (case.seed + number) % REPLAYED or emitted(windows.closed(spark), case.seed) == once
        if case.late_data != "reopen":
            assert written.isdisjoint(once), "a window was emitted twice"
        written.update(once)
        table.update(once)
        assert table == values_of(oracle.closed(), case.seed), f"case {case.seed}, batch {number}"

    with moved_clock() as clock:
        windows = Windows(pipeline, open_store())
        for number, (batch, pause) in enumerate(zip(case.batches, case.pauses, strict=True)):
            may_restart()
            assert not windows.begin(number, begun_ms=CLOCK_MS)
            sources = {name: [each for each in batch if each.source == name] for name in case.sources}
            rows = [(name, frame_of(spark, events)) for name, events in sources.items() if events]
            windows.add(number, windows.reduce(rows) if rows else windows.nothing(), spark)
            oracle.add(batch)
            assert decided(windows.last) in (None, (oracle.progress.watermark, oracle.late))
            emit(number)
            clock.now += pause
            oracle.progress.wait(pause)
            if windows.tick(spark):
                oracle.add([])
                emit(number)
            oracle.progress.add({})  # without a tick the watermark stays
            assert windows.last is None or windows.last.watermark == oracle.progress.watermark
    windows.close()


def decided(last: StateBatch | None) -> tuple[int | None, int] | None:
    """Return the watermark of a batch, and how many rows were late; `None` before the first rows."""
    return None if last is None else (last.watermark, last.late)


def store_of(seed: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], StateStore]:
    """Return what opens the state of a case: in memory, or in a database of which a process remembers rows."""
    if seed % 2:
        choose_limits(random.Random(seed), monkeypatch)
        return lambda: remembered(f"case {seed}", seed)
    store = InMemoryState()
    return lambda: store


@pytest.mark.brief("hopping-reopen")
@pytest.mark.parametrize("late_data", ["drop", "reopen"])
@pytest.mark.parametrize("kind", ["tumbling", "hopping"])
@pytest.mark.usefixtures("here")
def test_as_in_plain_python(
    kind: str, late_data: str, small_spark: Any, count: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(count(1000, 2)):  # 2,000 of each kind
        current().streams.clear()
        # Of some cases windows are folded by nearly every batch.
        monkeypatch.setattr(windows_module, "_COMPACT_ROWS", 0 if seed % 5 == 1 else 20_000)
        monkeypatch.setattr(windows_module, "_COMPACT_RATIO", 1 if seed % 5 == 1 else 4)
        open_store = store_of(seed, monkeypatch)
        check(Case.random(seed, late_data, kind, 0 if seed % 4 == 1 else 30), small_spark, open_store)


@pytest.mark.parametrize("late_data", ["drop", "reopen"])
@pytest.mark.usefixtures("streams")
@pytest.mark.brief("sqlite-reopen", "mysql-drop")
def test_state_in_a_database(late_data: str, small_spark: Any, count: Callable[..., int]) -> None:
    for seed in [1003, 1071, *range(1100, 1198)][: count(100, 1)]:
        current().streams.clear()
        connection = current().connection("default")

        def open_store(seed: int = seed, connection: Any = connection) -> StateStore:
            return SqlState(open_tables(connection), f"case {seed}", f"q{seed}")

        check(Case.random(seed, late_data, "tumbling"), small_spark, open_store)


def check_sessions(seed: int, spark: Any, open_store: Callable[[], StateStore], kind: str = "drop") -> None:
    """Run batches with sessions, with restarts, replays and idle sources, and compare with the oracle."""
    chance, apart = random.Random(seed), random.Random(f"{seed} apart")
    gap, limit = chance.choice([2, 5]) * SECOND, chance.choice([8, 20, 1000]) * SECOND
    sources, lateness = ("a", "b")[: apart.choice([1, 2])], chance.choice([0, 3, 10]) * SECOND
    oracle = SessionOracle(gap, limit, Progress(sources, lateness))
    options: dict[str, Any] = {}
    if "reopen" in kind:
        oracle.allowed = chance.choice([5, 30, 1000]) * SECOND
        options |= {"late_data": "reopen", "allowed_lateness_ms": oracle.allowed // 1000}
    if "update" in kind:
        oracle.updates = True
        options["emit"] = "update"
    window = weft.Window(
        kind="session",
        gap_ms=gap // 1000,
        max_session_duration_ms=limit // 1000,
        group_by=("key",),
        aggregations=some_of(seed),
        event_time_column="at",
        **options,
    )
    pipeline = make(
        name=f"case {seed}",
        sources=[weft.Source(query=declare(name, at="timestamp")) for name in sources],
        target="default",
        target_table="results",
        window=window,
        watermark=weft.Watermark(lateness_ms=lateness // 1000, source_idleness_ms=IDLE * 1000),
        **({"mode": "merge", "keys": list(window.keys)} if options else {}),
    )
    table: dict[tuple[Any, int], Any] = {}
    reached = ERAS[seed % 3] + chance.randrange(-100, 100) * SECOND
    batches = chance.choice([1, 1, 1, 2, 2, 5])
    restarts = chance.choice(RESTARTS)

    def may_restart() -> bool:
        nonlocal windows
        if apart.randrange(restarts):
            return False
        windows.close()
        windows = Sessions(pipeline, open_store())
        oracle.progress.restart()
        return True

    def emit(number: int) -> None:
        once, removed = sessions_of(windows.closed(spark), seed), windows.removed(spark)
        assert not may_restart() or windows.begin(number) == (windows.last is not None)
        if not (seed + number) % REPLAYED:
            assert sessions_of(windows.closed(spark), seed) == once
            assert sorted(map(repr, windows.removed(spark))) == sorted(map(repr, removed))
        for each in removed:
            del table[each["key"], each["session_id"]]  # which must be there
        assert options or not table.keys() & once.keys(), "a session was emitted twice"
        table.update(once)
        # A part of a session that became too long may be written by a later batch, which looks at this session.
        late = set() if number == batches or oracle.updates else {key for key, _ in oracle.long}
        found = {where: values for where, values in table.values() if where[2] not in late}
        wanted = {where: each for where, each in values_of(oracle.written, seed).items() if where[2] not in late}
        assert found == wanted, f"case {seed}, batch {number}"

    with moved_clock() as clock:
        windows = Sessions(pipeline, open_store())
        for number in range(batches + 1):
            batch = []
            before, reached = reached, reached + chance.choice([1, 3, 10, 40]) * SECOND + chance.randrange(SECOND)
            # Many groups, each a case of its own: a query of Spark takes about as long for one.
            for key in (None, *range(50)) if chance.randrange(6) else ():
                for _ in range(chance.choice([0, 0, 1, 2, 8])):
                    at = chance.randrange(before, reached) - chance.choice([0, 0, 0, 1, 4, 10, 30]) * SECOND
                    at -= chance.randrange(2) * (at % SECOND)  # pauses exactly as long as the gap
                    value = chance.choice([None, 1, 2, 3])
                    batch.append(Event(apart.choice(sources), at, None if key is None else str(key), value))
            batch = partly_again(batch, sources, apart)
            if number == batches:  # everything else closes
                batch = [Event(source, reached + 10_000 * SECOND, "last", 1) for source in sources]
            may_restart()
            assert not windows.begin(number, begun_ms=CLOCK_MS)
            rows = {name: [each for each in batch if each.source == name] for name in sources}
            frames = [(name, frame_of(spark, events)) for name, events in rows.items() if events]
            windows.add(number, windows.reduce(frames) if frames else windows.nothing(), spark)
            oracle.add(batch)
            assert decided(windows.last) in (None, (oracle.progress.watermark, oracle.late))
            emit(number)
            pause = apart.choice(PAUSES)
            clock.now += pause
            oracle.progress.wait(pause)
            if windows.tick(spark):
                oracle.add([])
                emit(number)
            oracle.progress.add({})  # without a tick the watermark stays
            assert windows.last is None or windows.last.watermark == oracle.progress.watermark
    assert len(table) == len(oracle.written)
    report = windows.report(0)
    # The last one; others are kept, or gone. Until its rows are put together it counts once for each source.
    assert report is not None and report.open in (1, len(sources))
    windows.close()


def sessions_of(table: pa.Table | None, seed: int) -> dict[tuple[Any, int], Any]:
    """Return what a batch emits, by group and id: the bounds and the group, and the aggregates."""
    microsecond = timedelta(microseconds=1)
    rows = [] if table is None else table.to_pylist()
    found = {}
    for row in rows:
        bounds = (row["window_start"] - EPOCH) // microsecond, (row["window_end"] - EPOCH) // microsecond
        values = tuple(row[each.name] for each in some_of(seed))
        found[row["key"], row["session_id"]] = ((*bounds, row["key"]), values)
    assert len(found) == len(rows), "a session came twice"
    return found


KINDS = ["drop", "reopen", "update", "reopen update"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full
@pytest.mark.usefixtures("here")
def test_sessions_as_in_plain_python(
    kind: str, small_spark: Any, count: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(count(500, 2)):  # 2,000 of all kinds
        current().streams.clear()
        # Groups are named one by one, or everything is read.
        monkeypatch.setattr(sessions, "_NAMED_KEYS", 1000 if seed % 4 < 2 else 10)
        check_sessions(seed, small_spark, store_of(seed, monkeypatch), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("streams")
@pytest.mark.full
def test_sessions_in_a_database(kind: str, small_spark: Any, count: Callable[..., int]) -> None:
    for seed in range(3000, 3000 + count(100, 1)):
        current().streams.clear()
        connection = current().connection("default")

        def open_store(seed: int = seed, connection: Any = connection) -> StateStore:
            return SqlState(open_tables(connection), f"case {seed}", f"q{seed}")

        check_sessions(seed, small_spark, open_store, kind)


@pytest.mark.brief("hopping")
@pytest.mark.parametrize("kind", ["tumbling", "hopping"])
@pytest.mark.usefixtures("here")
def test_a_batch_runs_the_code_of_the_one_before(kind: str, plain_spark: Any) -> None:
    """Times that move on with each batch must not be part of what Spark compiles."""
    spark = compiling(plain_spark)
    case = Case.random(1, "drop", kind)
    windows, counts = Windows(pipeline_of(case), InMemoryState()), []
    for number in range(4):
        events = [Event(name, 100 * number * case.length, "k", number) for name in case.sources]
        # Rows that are part of the plan would be computed without compiling anything.
        frames = [(each.source, frame_of(spark, [each]).persist()) for each in events]
        windows.begin(number)
        windows.add(number, windows.reduce(frames), spark)
        counts.append(compiled(spark))
    assert counts[2] == counts[3]


@pytest.mark.usefixtures("here")
def test_a_fragment_that_is_alone_needs_no_spark(plain_spark: Any) -> None:
    case = Case.random(1, "drop", "tumbling")
    aggregations = AGGREGATIONS[:8]
    windows = Windows(pipeline_of(case, aggregations), InMemoryState())
    for number, at in enumerate((0, 100 * case.length)):
        windows.begin(number)
        rows = [(name, frame_of(plain_spark, [Event(name, at, name, 7)])) for name in case.sources]
        windows.add(number, windows.reduce(rows), plain_spark)
    table = windows.emission(None)
    assert table is not None
    found = {row["key"]: tuple(row[each.name] for each in aggregations) for row in table.to_pylist()}
    assert found == dict.fromkeys(case.sources, (1, 1, 7, 7, 7, 7.0, 7, 7))
