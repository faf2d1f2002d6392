"""Replays of dead letters that are broken off: the next one finishes them, and every row arrives once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weft
from engine.streaming.conftest import declare, rows, run_killed
from engine.streaming.letters import letters_of, pipeline_of, put, replay_all, unread
from weft.engine.streaming.replay import Replay
from weft.errors import WeftError
from weft.project import current
from weft.systems.dead_letter_store import DeadLetter


@pytest.mark.usefixtures("here")
def test_a_target_that_is_away_in_the_middle(project: Path, open_system: Any) -> None:
    """One target has the rows when the other one is away: the next replay, of whatever, gives them to that one only."""
    declare(n="int64", text="string")
    with open_system("postgres") as system:
        away = {"url": system.url}

        def pipeline() -> Any:
            second = weft.PostgresConnection(away["url"], name="away")
            targets = [weft.Target(table=(None, "copies")), weft.Target(connection=second, table=(None, "others"))]
            return pipeline_of(source=current().streams["events"], targets=targets, dead_letter_table="failed")

        put(pipeline(), unread(1, 2))
        away["url"] = "postgres://nobody@127.0.0.1:1/none"
        with pytest.raises(WeftError):
            replay_all(pipeline())
        assert len(rows("copies")) == 2
        assert [each.stage for each in letters_of(pipeline())].count("read") == 2
        away["url"] = system.url
        put(pipeline(), unread(3))
        done = Replay(pipeline(), lambda each: each.offset == "3").run()
        assert (done.letters, done.finished) == (3, 2)
        second = pipeline().targets[1].connection
        assert rows("copies", "n") == rows("others", "n", second) == [(1,), (2,), (3,)]
        assert letters_of(pipeline()) == []


@pytest.mark.usefixtures("plain_spark", "here")
def test_a_mistake_while_it_is_broken_off(open_system: Any) -> None:
    """Between the replay that was broken off and the one that finishes it: what one target has is remembered."""
    declare(n="int64", text="string")
    with open_system("postgres") as system:

        def pipeline(url: str, sql: str) -> Any:
            second = weft.PostgresConnection(url, name="away")
            return pipeline_of(
                source=current().streams["events"],
                targets=[weft.Target(table=(None, "copies")), weft.Target(connection=second, table=(None, "others"))],
                transform_sql=sql,
                dead_letter_table="failed",
            )

        right, wrong = "SELECT n FROM source", "SELECT m FROM source"
        narrow = "SELECT n FROM source WHERE 1 DIV (n - 1) > 0"
        put(pipeline(system.url, right), unread(1, 2))
        with pytest.raises(WeftError):
            replay_all(pipeline("postgres://nobody@127.0.0.1:1/none", right))
        with pytest.raises(WeftError, match="`m`"):
            replay_all(pipeline(system.url, wrong))
        # One row of two fails: as a letter it would be replayed into the target that has it.
        with pytest.raises(WeftError, match="copies has its rows already, and of its letters 1 now fail"):
            replay_all(pipeline(system.url, narrow))
        mended = pipeline(system.url, right)
        assert replay_all(mended).finished == 2
        assert rows("copies", "n") == rows("others", "n", mended.targets[1].connection) == [(1,), (2,)]
        assert letters_of(mended) == []


PROGRAM = """
import weft
from weft.engine.streaming.replay import Replay
from weft.pipelines.streaming.declare import make

place, wanted = sys.argv[1:]
events = weft.stream(name="events", fields={"n": "int64", "text": "string"})(lambda: None)
pipeline = make(
    name="copies",
    source=events,
    targets=[weft.Target(table=(None, "copies")), weft.Target(table=(None, "others"))],
    **{f"dead_letter_{place}": "failed"},
)
Replay(pipeline, lambda each: wanted in ("all", each.offset), max_replays=1000).run()
"""


@pytest.mark.timing
@pytest.mark.usefixtures("plain_spark", "here")
def test_a_mistake_after_every_target_had_it() -> None:
    """What fails by other SQL is no letter again: nothing is left to be done with it."""
    pipeline = pipeline_of(dead_letter_path="failed")
    put(pipeline, unread(1, 2))
    assert run_killed(PROGRAM, "loaded", 2, "path", "all").returncode == -signal.SIGKILL
    other = pipeline_of(dead_letter_path="failed", transform_sql="SELECT n FROM source WHERE 1 DIV (n - 1) > 0")
    done = replay_all(other)
    assert (done.finished, done.again) == (2, 0)
    assert rows("copies", "n") == rows("others", "n") == [(1,), (2,)]
    assert letters_of(pipeline) == []


# Where, and the how manieth time. A place that is a table is loaded too, which takes these steps as well.
POINTS = [
    ("noted", 1),
    ("given back", 1),
    ("claimed", 2),
    ("moved", 2),
    ("committed", 2),
    ("committed", 3),
    ("loaded", 1),
    ("loaded", 2),
    ("removed", 1),
]


@pytest.mark.timing
@pytest.mark.full
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("place", ["table", "stream", "path"])
def test_killed_anywhere(place: str, count: Callable[[int], int]) -> None:
    """Every row is there once, whatever the next replay is asked for; what fails always is one letter."""
    pipeline = pipeline_of(**{f"dead_letter_{place}": "failed"})
    put(pipeline, [DeadLetter("read", "?", "events", "{", "bad")])
    points = POINTS * max(1, count(20) // 2)
    for number, (step, times) in enumerate(points):
        put(pipeline, unread(2 * number, 2 * number + 1), number)
        wanted = "all" if number % 2 else str(2 * number)
        ended = run_killed(PROGRAM, step, times, place, wanted)
        assert ended.returncode in (-signal.SIGKILL, 0), ended.stderr
        assert sum(each.payload == "{" for each in letters_of(pipeline)) in (1, 2), "it and what it became"
    ended = run_killed(PROGRAM, "none", 0, place, "all")
    assert ended.returncode == 0, ended.stderr
    expected = [(n,) for n in range(2 * len(points))]
    assert sorted(rows("copies", "n")) == sorted(rows("others", "n")) == expected
    (bad,) = letters_of(pipeline)
    assert bad.payload == "{"
