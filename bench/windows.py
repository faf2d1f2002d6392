"""Windows: a batch with its state, against the same aggregation in bare Spark SQL without any."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import weft
from bench.engine_loads import Job, Pair, _folder, _with_reset
from bench.harness import Case
from weft.engine.streaming.log_source import SMALL

BATCH = 100_000
_MINUTE = 60_000_000
# So many batches before it counts: what a JVM runs it compiles for its first half minute.
_WARM_UP = 12
_COLUMNS = "at TIMESTAMP, key BIGINT, value BIGINT"
AGGREGATIONS = [
    weft.Aggregation(agg="count", as_="n"),
    weft.Aggregation(agg="sum", column="value", as_="total"),
    weft.Aggregation(agg="avg", column="value", as_="mean"),
    weft.Aggregation(agg="max", column="value", as_="most"),
]


class Batches:
    """Batches of rows, each a minute after the one before, so that each closes the windows of that one."""

    def __init__(self, rows: int, keys: int, minutes: int = 1) -> None:
        import numpy

        from weft.engine import session

        self.rows, self._keys, self._step = rows, keys, _MINUTE * minutes
        self._chance = numpy.random.default_rng(1)
        self.spark = session.spark().newSession()
        self._numbers = {"ours": 0, "theirs": 0}
        self._ready: dict[str, Any] = {}

    def prepare(self, who: str) -> None:
        """Make the next batch of one of the two, which `frame` returns."""
        import numpy
        import pyarrow as pa

        at = self._numbers[who] * _MINUTE + numpy.sort(self._chance.integers(0, _MINUTE, self.rows))
        self._numbers[who] += 1
        columns = {
            "at": pa.array(at, pa.timestamp("us", "UTC")),
            "key": pa.array(self._chance.integers(0, self._keys, self.rows)),
            "value": pa.array(self._chance.integers(0, 1000, self.rows)),
        }
        rows = pa.table(columns)
        self._ready[who] = rows if self.rows <= SMALL else as_file(rows)

    def frame(self, who: str) -> Any:
        """Return the batch of one of the two, as a DataFrame."""
        return frame_of(self.spark, self._ready[who])


def as_file(rows: Any) -> str:
    """Write rows into a Parquet file; return its path. A source has so many rows outside of Spark."""
    import pyarrow.parquet as pq

    path = f"{tempfile.mkdtemp(dir=_folder.name)}/rows.parquet"
    pq.write_table(rows, path)
    return path


def frame_of(spark: Any, rows: Any) -> Any:
    """Return a DataFrame of rows, or of a file."""
    return spark.read.schema(_COLUMNS).parquet(rows) if isinstance(rows, str) else spark.createDataFrame(rows)


def opened_place(where: str) -> tuple[Any, Callable[[str], Any]]:
    """Return a connection for targets, and what opens a state of some name in this kind of place."""
    from weft.engine.readers import open_tables
    from weft.engine.streaming.files_state import FilesState
    from weft.spark_support.folder import LocalFolder, Location
    from weft.systems.remembered_state import RememberedState
    from weft.systems.sql.state_store import SqlState

    folder, pair = Path(tempfile.mkdtemp(dir=_folder.name)), Pair(10)
    if where == "files":
        return weft.connect(url=pair.there), lambda name: FilesState(Location(LocalFolder(), str(folder / name)))
    connection = weft.connect(url=pair.there) if where == "postgres" else weft.SQLiteConnection(str(folder / "s.db"))
    return connection, lambda name: RememberedState(SqlState(open_tables(connection), name, name))


def _tumbling(minutes: int) -> weft.Window:
    return weft.Window(
        kind="tumbling",
        duration_ms=60_000 * minutes,
        group_by="key",
        event_time_column="at",
        aggregations=AGGREGATIONS,
    )


_SESSION = weft.Window(
    kind="session",
    gap_ms=10_000,
    max_session_duration_ms=3_600_000,
    group_by="key",
    event_time_column="at",
    aggregations=AGGREGATIONS,
)


def _windows(place: tuple[Any, Callable[[str], Any]], window: weft.Window, **options: Any) -> Any:
    from weft.engine.streaming.sessions import Sessions
    from weft.engine.streaming.windows import Windows
    from weft.pipelines.streaming.declare import make

    (connection, opened), name = place, f"bench {uuid.uuid4().hex}"
    events = weft.stream(name=f"events_{uuid.uuid4().hex}", fields={"at": "timestamp"})(lambda: None)
    pipeline = make(name=name, source=events, target=connection, target_table="results", window=window, **options)
    return (Sessions if window.kind == "session" else Windows)(pipeline, opened(name))


def _batches(where: str, window: weft.Window, keys: int, rows: int = BATCH) -> Callable[[float], tuple[Job, Job]]:
    def prepare(scale: float) -> tuple[Job, Job]:
        from pyspark.sql import functions as F

        place = opened_place(where)
        batches = Batches(max(100, round(rows * min(scale, 1))), keys)
        windows = _windows(place, window)
        name = windows.pipeline.sources[0].name
        number = 0

        def ours() -> int:
            nonlocal number
            windows.begin(number)
            windows.add(number, windows.reduce([(name, batches.frame("ours"))]), batches.spark)
            windows.emission(batches.spark)
            number += 1
            return batches.rows

        def bare() -> int:
            if window.kind == "session":
                of_time = F.session_window("at", f"{window.gap_ms} milliseconds")
            else:
                of_time = F.window("at", f"{window.duration_ms} milliseconds")
            frame = batches.frame("theirs").groupBy(of_time, "key")
            frame.agg(F.count("*"), F.sum("value"), F.avg("value"), F.max("value")).toArrow()
            return batches.rows

        return warmed(ours, bare, batches.prepare, _WARM_UP)

    return prepare


def _open(groups: int, few: int, rows: int) -> Callable[[float], tuple[Job, Job]]:
    """A batch that adds a window of so many groups and closes one, while many groups are open, or few."""

    def prepare(scale: float) -> tuple[Job, Job]:
        place = opened_place("postgres")
        several = [round(groups * min(scale, 1)), few]
        return tuple(_with_open(place, max(2, each // rows), rows) for each in several)  # type: ignore[return-value]

    return prepare


def _with_open(place: tuple[Any, Callable[[str], Any]], minutes: int, rows: int) -> Job:
    """Return the job of one batch, with a window of each of the last minutes open."""
    import numpy
    import pyarrow as pa
    import pyarrow.compute as pc

    from weft.engine import session
    from weft.engine.streaming.stateful import Reduced
    from weft.systems.state_store import END

    spark = session.spark().newSession()
    windows = _windows(place, _tumbling(1), watermark=weft.Watermark(lateness_ms=60_000 * minutes))
    name, number = windows.pipeline.sources[0].name, 0

    def frame() -> Any:
        at = pa.array(numpy.full(rows, number * _MINUTE), pa.timestamp("us", "UTC"))
        keys = pa.array(numpy.arange(rows))
        return frame_of(spark, as_file(pa.table({"at": at, "key": keys, "value": keys})))

    first = windows.reduce([(name, frame())]).fragments

    def batch() -> int:
        nonlocal number
        windows.begin(number)
        windows.add(number, windows.reduce([(name, frame())]), spark)
        windows.emission(spark)
        number += 1
        return rows

    # The same rows, a minute later each: Spark would take hours for them.
    for number in range(minutes):
        shifted = first
        for at, field in enumerate(first.schema):
            if field.name in (END, "window_start", "window_end"):
                later = pc.add(first[field.name].cast(pa.int64()), number * _MINUTE).cast(field.type)
                shifted = shifted.set_column(at, field, later)
        windows.begin(number)
        windows.add(number, Reduced(shifted, {name: number * _MINUTE}, {}), spark)
    number = minutes
    for _ in range(_WARM_UP):
        batch()
    return batch


def warmed(ours: Job, bare: Job, prepare: Callable[[str], None], batches: int) -> tuple[Job, Job]:
    """Return two jobs after some batches of each, for which `prepare` makes the rows."""
    jobs = _with_reset(ours, lambda: prepare("ours")), _with_reset(bare, lambda: prepare("theirs"))
    for job in jobs * batches:
        job.reset()  # type: ignore[attr-defined]
        job()
    return jobs


_BARE = "the same aggregation in Spark SQL, no state"
PLACES = {"postgres": "PostgreSQL", "sqlite": "SQLite", "files": "files"}
_OF_A_MINUTE = {
    ("1k", 1000): (2.0, 2.3, 3.0),
    ("100k", 100_000): (2.2, 2.7, 3.0),
    ("1M", 1_000_000): (2.2, 2.7, 3.0),
}
"""The bars of each place, by how many keys there are."""


def case(name: str, bar: float, prepare: Callable[[float], tuple[Job, Job]], rounds: int, against: str = _BARE) -> Case:
    return Case(name, against, bar, prepare, True, rounds, "postgres")


CASES = [
    *(
        case(f"window of a minute, {word} keys, {name}", bar, _batches(where, _tumbling(1), keys), 9)
        for (word, keys), bars in _OF_A_MINUTE.items()
        for (where, name), bar in zip(PLACES.items(), bars, strict=True)
    ),
    *(
        case(f"sessions, 100k keys, {name}", bar, _batches(where, _SESSION, 100_000), 9)
        for (where, name), bar in zip(PLACES.items(), (1.8, 2.5, 3.0), strict=True)
    ),
    *(
        case(f"1k rows into 1k groups of a day, {name}", bar, _batches(where, _tumbling(1440), 1000, 1000), 15)
        for (where, name), bar in zip(PLACES.items(), (1.3, 1.3, 1.5), strict=True)
    ),
    case("10k rows, 10M open groups, PostgreSQL", 1.3, _open(10_000_000, 100_000, 10_000), 15, "100k open groups"),
]
