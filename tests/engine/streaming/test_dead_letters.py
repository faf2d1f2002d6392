"""Bad rows alone go to the dead letters, with the reason and where they are from; their neighbours go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import weft
from conftest import System
from engine.streaming.conftest import declare, rows, run_once
from weft.engine.streaming.dead import stream_of
from weft.errors import WeftError

pytestmark = pytest.mark.usefixtures("plain_spark")

SQL = "SELECT n, CAST(text AS INT) AS number FROM source"
EVENTS = [{"n": n, "text": "x" if n in (0, 3, 6) else str(n)} for n in range(7)]
GOOD = [(n, n) for n in (1, 2, 4, 5)]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("place", ["stream", "table", "path"])
def test_rows_that_cannot_be_transformed(place: str, way: str, project: Path) -> None:
    events = declare(n="int64", text="string")
    weft.publish_sync(events, EVENTS)
    where = {"stream": "failed", "table": (None, "failed"), "path": str(project / "failed")}
    pipeline: dict[str, Any] = {
        "name": "numbers",
        "source": events,
        "target_table": (None, "numbers"),
        "transform_sql": SQL,
        "transform_on_error": "dlq",
        f"dead_letter_{place}": where[place],
    }
    if place == "table":
        pipeline["dead_letter_connection"] = "default"
    run_once(**pipeline)
    _forget_last_commit(project)
    run_once(**pipeline)
    assert rows("numbers") == GOOD
    letters = _letters(place, project)
    assert [(each["offset"], json.loads(each["payload"])["n"]) for each in letters] == [("1", 0), ("4", 3), ("7", 6)]
    for each in letters:
        assert (each["pipeline"], each["stage"], each["source"]) == ("numbers", "transform", "events")
        assert "'x'" in each["error"] and "at org.apache" not in each["error"]


@pytest.mark.usefixtures("here")
def test_letters_name_the_source_that_they_are_of() -> None:
    one, other = declare("one", n="int64", text="string"), declare("other", text="string", m="int64")
    weft.publish_sync(one, [{"n": 1, "text": "1"}, {"n": 2, "text": "x"}])
    weft.publish_sync(other, [{"m": 3, "text": "y"}, {"m": 4, "text": "4"}])
    run_once(
        name="numbers",
        sources=[weft.Source(query=one), weft.Source(query=other)],
        target_table=(None, "numbers"),
        transform_sql="SELECT *, CAST(text AS INT) AS number FROM source",
        transform_on_error="dlq",
        dead_letter_stream="failed",
    )
    assert rows("numbers", "n, m, number") == [(1, None, 1), (None, 4, 4)]
    letters = {each["source"]: each for each in _of_stream()}
    assert {name: (each["offset"], json.loads(each["payload"])["text"]) for name, each in letters.items()} == {
        "one": ("2", "x"),
        "other": ("1", "y"),
    }


@pytest.mark.usefixtures("here")
def test_rows_may_be_dropped_or_fail_the_batch() -> None:
    events = declare(n="int64", text="string")
    weft.publish_sync(events, EVENTS)
    pipeline: dict[str, Any] = {"source": events, "transform_sql": SQL}
    with pytest.raises(WeftError, match="'x'"):
        run_once(name="fail", target_table=(None, "failing"), **pipeline)
    run_once(name="drop", target_table=(None, "dropping"), transform_on_error="drop", **pipeline)
    assert rows("dropping") == GOOD


@pytest.mark.usefixtures("here")
def test_a_batch_that_only_fails_together_is_an_error() -> None:
    events = declare(n="int64")
    weft.publish_sync(events, [{"n": 2**62}, {"n": 2**62}])
    with pytest.raises(WeftError, match="overflow"):
        run_once(
            name="sums",
            source=events,
            target_table=(None, "sums"),
            transform_sql="SELECT sum(n) AS n FROM source",
            transform_on_error="drop",
        )


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("place", ["stream", "table"])
def test_other_letters_of_the_same_batch_are_not_taken_for_those(place: str, project: Path) -> None:
    """SQL was changed between two tries of a batch: what is bad now is another row, and the first one stays."""
    events = declare(n="int64", text="string")
    weft.publish_sync(events, [{"n": 0, "text": "1"}, {"n": 1, "text": "x"}])
    pipeline: dict[str, Any] = {
        "name": "numbers",
        "source": events,
        "target_table": (None, "numbers"),
        "transform_on_error": "dlq",
        f"dead_letter_{place}": "failed",
    }
    run_once(**pipeline, transform_sql=SQL)
    _forget_last_commit(project)
    run_once(**pipeline, transform_sql="SELECT n, 1 DIV n AS number FROM source")
    assert sorted(json.loads(each["payload"])["n"] for each in _letters(place, project)) == [0, 1]


@pytest.mark.usefixtures("streams")
def test_rows_that_a_target_rejects(system: System, way: str) -> None:
    events = declare(n="int64", name="string")
    weft.load([{"n": 100, "name": "there"}], target="strict", mode="merge", keys=["n"])
    weft.publish_sync(events, [{"n": None if n in (0, 3, 6) else n, "name": f"row {n}"} for n in range(7)])
    run_once(
        name="strict",
        source=events,
        target_table=(None, "strict"),
        dead_letter_stream="failed",
    )
    assert rows("strict", "n") == sorted([(1,), (100,), (2,), (4,), (5,)], key=repr)
    letters = _of_stream()
    assert [json.loads(each["payload"])["name"] for each in letters] == ["row 0", "row 3", "row 6"]
    assert {(each["stage"], each["target"]) for each in letters} == {("store", "strict")}
    assert rows("strict__quarantine") == []


def _forget_last_commit(project: Path) -> None:
    last = max((project / ".weft/checkpoints/numbers/commits").glob("[0-9]*"), key=lambda each: int(each.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


def _letters(place: str, project: Path) -> list[dict[str, Any]]:
    if place == "stream":
        return _of_stream()
    if place == "table":
        names = ("offset", "payload", "pipeline", "stage", "source", "error")
        return [
            dict(zip(names, row, strict=True))
            for row in rows("failed", '"offset", payload, pipeline, stage, source, error')
        ]
    frame = weft.read("failed", source=weft.ObjectStoreLocalConnection(str(project), name="project"))
    return sorted(frame.toArrow().to_pylist(), key=lambda each: each["offset"])


def _of_stream() -> list[dict[str, Any]]:
    return list(weft.consume_sync(stream_of("failed", None), "me"))
