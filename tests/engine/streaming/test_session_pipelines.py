"""Pipelines with sessions, from a stream to a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weft
from engine.streaming.conftest import declare, rows, run_once
from engine.streaming.test_window_pipelines import COUNT, START, publish
from weft.engine.streaming.spark_engine import SparkEngine
from weft.errors import DeclarationError, LoadRefusedError
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.execution import Report
from weft.systems.delta.target import DeltaTarget


def visits(**options: Any) -> weft.Window:
    defaults = {"kind": "session", "gap_ms": 10_000, "max_session_duration_ms": 60_000, "group_by": "user"}
    return weft.Window(**{**defaults, "event_time_column": "at", "aggregations": [COUNT], **options})


@pytest.mark.parametrize("place", ["database", "delta"])
@pytest.mark.brief("sqlite-database")
@pytest.mark.usefixtures("spark", "streams")
def test_a_late_row_makes_one_session_of_two(place: str, project: Path, count: Callable[..., int]) -> None:
    events = declare(user="string", at="timestamp")
    own = visits(late_data="reopen", allowed_lateness_ms=100_000)
    target = weft.DeltaLocalConnection(str(project / "lake")) if place == "delta" else "default"
    options: dict[str, Any] = {"name": "visits", "source": events, "target": target, "target_table": "visits"}
    options |= {"window": own, "mode": "merge", "keys": ["user", "session_id"]}

    def run(*more: tuple[str | None, float]) -> list[tuple[Any, ...]]:
        publish(events, *more)
        run_once(**options)
        found = weft.read("visits" if place == "delta" else "SELECT * FROM visits", source=target).collect()
        return sorted((each.window_start.second, each.window_end.second, each.user, each.n) for each in found)

    assert run(("ann", 1), ("ann", 15), ("bob'", 2), ("bob'", 14), ("ann", 40)) == [
        (1, 11, "ann", 1),
        (2, 12, "bob'", 1),
        (14, 24, "bob'", 1),
        (15, 25, "ann", 1),
    ]
    assert run(("ann", 8)) == [(1, 25, "ann", 3), (2, 12, "bob'", 1), (14, 24, "bob'", 1)]
    if place == "delta" and count(2, 1) == 1:  # a target has the same to do, for ten times as long
        return
    # Before the first one, so that it begins earlier; and up to a session that goes on.
    assert run(("bob'", 0), ("bob'", 7), ("ann", 25), ("ann", 35)) == [(0, 24, "bob'", 4), (1, 50, "ann", 6)]


@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "here")
def test_every_batch_updates_its_sessions() -> None:
    events = declare(user="string", at="timestamp")
    options: dict[str, Any] = {"name": "visits", "source": events, "target_table": "visits"}
    options |= {"window": visits(emit="update"), "mode": "merge", "keys": ["user", "session_id"]}
    found = []
    for more in ((("ann", 5), ("bob", 6)), (("ann", 1), ("bob", 12)), (("ann", 30),)):
        publish(events, *more)
        run_once(**options)
        found.append(sorted(((start - START).seconds, user, n) for start, _, _, user, n in rows("visits")))
    assert found == [
        [(5, "ann", 1), (6, "bob", 1)],
        [(1, "ann", 2), (6, "bob", 2)],
        [
            (1, "ann", 2),
            (6, "bob", 2),
            (30, "ann", 1),
        ],
    ]


@pytest.mark.full
@pytest.mark.parametrize("emit", ["close", "update"])
@pytest.mark.usefixtures("plain_spark", "here")
def test_sessions_that_are_kept_are_not_open(emit: str) -> None:
    events = declare(user="string", at="timestamp")
    own = visits(late_data="reopen", allowed_lateness_ms=1_000_000, emit=emit)
    options: dict[str, Any] = {"name": "visits", "source": events, "target": "default", "target_table": "visits"}
    pipeline = make(window=own, mode="merge", keys=["user", "session_id"], **options)
    reports: list[Report] = []
    for more in ((("ann", 1), ("bob", 2)), (("ann", 40), ("cid", 41)), (("cid", 43),), (("bob", 80),)):
        publish(events, *more)
        engine = SparkEngine(pipeline)
        with engine.locked():
            engine.start(once=True, committed=lambda: None, report=reports.append, idle=None)
            engine.wait()
    found = [each.windows.open for each in reports if each.windows is not None]
    # A row of a later batch is put together with its session when that may have ended, or is written.
    assert found == ([2, 2, 3, 1] if emit == "close" else [2, 2, 2, 1])


@pytest.mark.usefixtures("here")
def test_a_target_that_removes_no_rows(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeltaTarget, "removes_rows", False)
    lake = weft.DeltaLocalConnection(str(project / "lake"))
    with pytest.raises(DeclarationError, match="removes no rows"):
        make(
            name="visits",
            source=declare(user="string"),
            target=lake,
            target_table="visits",
            window=visits(emit="update"),
            mode="merge",
            keys=["user", "session_id"],
        )


@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "streams")
def test_sessions_over_several_batches() -> None:
    events = declare(user="string", at="timestamp")
    own = weft.Window(
        kind="session",
        gap_ms=10_000,
        max_session_duration_ms=60_000,
        group_by="user",
        event_time_column="at",
        max_groups_per_window=2,
        aggregations=[COUNT],
    )
    options: dict[str, Any] = {"name": "visits", "source": events, "target_table": "visits", "window": own}

    def run(*more: tuple[str | None, float]) -> list[tuple[Any, ...]]:
        publish(events, *more)
        run_once(**options)
        seconds = [(start - START, end - START, user, n) for start, end, _, user, n in rows("visits")]
        return sorted((start.seconds, end.seconds, user, n) for start, end, user, n in seconds)

    publish(events, ("ann", 1), ("bob", 5), ("ann", 10))
    run_once(**options)
    assert run(("ann", 18), ("bob", 30)) == [(1, 28, "ann", 3), (5, 15, "bob", 1)]
    assert run(("bob", 25), ("bob", 41)) == [(1, 28, "ann", 3), (5, 15, "bob", 1), (25, 40, "bob", 2)]
    with pytest.raises(LoadRefusedError, match=r"max_groups_per_window=2 reached \(3 groups\)"):
        run(("ann", 42), ("cid", 43))


@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "here")
def test_a_bridged_session_whose_group_sql_changes() -> None:
    events = declare(user="string", at="timestamp")
    columns = "window_start, window_end, session_id, upper(user) AS user, n"
    own = visits(emit="update", emit_sql=f"SELECT {columns} FROM windows")
    options: dict[str, Any] = {"name": "visits", "source": events, "target_table": "visits", "window": own}
    options |= {"mode": "merge", "keys": ["user", "session_id"], "watermark": weft.Watermark(lateness_ms=60_000)}
    publish(events, ("a", 1), ("a", 15))
    run_once(**options)
    assert rows("visits", "user, n") == [("A", 1), ("A", 1)]
    publish(events, ("a", 8))
    run_once(**options)
    assert rows("visits", "user, n") == [("A", 3)]


@pytest.mark.usefixtures("plain_spark", "here")
def test_groups_whose_sessions_end_do_not_count() -> None:
    events = declare(user="string", at="timestamp")
    options: dict[str, Any] = {"name": "visits", "source": events, "target_table": "visits"}
    options["window"] = visits(max_groups_per_window=2)
    publish(events, ("a", 1), ("b", 2))
    run_once(**options)
    publish(events, ("c", 100), ("d", 101))
    run_once(**options)
    assert sorted(user for (user,) in rows("visits", "user")) == ["a", "b"]
    publish(events, ("e", 102))
    with pytest.raises(weft.LoadRefusedError, match=r"max_groups_per_window=2 reached \(3 groups\)"):
        run_once(**options)
