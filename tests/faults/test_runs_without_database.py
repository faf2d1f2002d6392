"""The database of the target, the source or the run log goes away at any point of a run: an error that says so, exit
code 1, and once it is back the run goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import servers
import weft
from commands import Commands
from faults.runs import Place, Repeat, place  # noqa: F401 - fixtures
from pipelines.conftest import Database, database  # noqa: F401 - fixture
from weft.project import Project, use
from weft.systems.base import system_for

PIPELINE = """
@weft.pipeline(
    schedule="0 * * * *",
    targets=["first", "second"],
    transforms_post=["INSERT INTO told VALUES (1)"],
    retry={"max_attempts": 9, "backoff": "fixed", "base": 0},
    source_connection=os.environ.get("SOURCE"),
)
def copy():
    return "SELECT id FROM raw"
"""
TABLES = ["CREATE TABLE raw (id BIGINT)", "CREATE TABLE told (n BIGINT)", "INSERT INTO raw VALUES (1), (2)"]


@pytest.fixture(params=["postgres", "mysql"])
def server(request: pytest.FixtureRequest, need_server: Callable[[str], None]) -> Iterator[servers.Server]:
    """A server that the test kills."""
    need_server(request.param)
    made = servers.KINDS[request.param]()
    made.start()
    yield made
    made.kill()


def counts(place: Place) -> list[int]:  # noqa: F811
    return [len(place.database.rows(name)) for name in ("first", "second", "told")]


def disturbed(commands: Commands, place: Place, server: servers.Server, at: int) -> None:  # noqa: F811
    """Start a run whose server dies at a step."""
    commands.start(place, "run-due", at=at, signal="SIGSTOP")
    pid = commands.answer()["stopped"]
    server.kill()
    os.kill(pid, signal.SIGCONT)


def some(steps: list[str], count: Repeat) -> list[int]:
    """Each step with --full, else some."""
    return list(range(len(steps)))[:: 1 if count(10) > 1 else 5]


@pytest.mark.full
@pytest.mark.timing
def test_the_target_goes_away(
    server: servers.Server,
    project: Path,
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
    count: Repeat,
) -> None:
    url = server.create_database("target")
    monkeypatch.setenv("WEFT_DSN", url)
    with use(Project()) as fresh:
        connection = weft.connect(url=url)
        tables = system_for(connection.kind).load_tables()(connection)
        target = Place(project, Database(fresh, tables), "sqlite://runs.db", {"WEFT_DSN": url})
        target.environment["WEFT_RUN_LOG"] = target.log
        target.declare(PIPELINE)
        target.database.run(*TABLES)
        target.at(0)
        steps = commands.run(target, "run-due").steps
        last = max(number for number, step in enumerate(steps) if step == "commit committed")
        for slot, at in enumerate(some(steps, count), start=1):
            target.at(slot)
            disturbed(commands, target, server, at)
            (ended,) = commands.ended()
            failed = target.runs("copy")[-1]
            if at >= last:
                # Nothing was left to do there.
                assert (ended.code, failed.status) == (0, "succeeded"), (steps[at], ended)
            else:
                assert (ended.code, failed.status) == (1, "failed"), (steps[at], ended)
                assert "127.0.0.1" in ended.err and "Traceback" not in ended.err
                assert failed.error is not None and "127.0.0.1" in failed.error
                ended = commands.run(target, "run-due")
                assert ended.code == 1, ended
            server.start()
            ended = commands.run(target, "run-due")
            assert ended.code == 0, (steps[at], ended)
            assert counts(target) == [2 * (slot + 1), 2 * (slot + 1), slot + 1], steps[at]
            assert [each.status for each in target.runs("copy")][-1] == "succeeded"
        tables.close()


@pytest.mark.timing
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_the_run_log_goes_away(
    place: Place,  # noqa: F811
    server: servers.Server,
    commands: Commands,
    count: Repeat,
) -> None:
    """The work goes on without it, and is not done again when it is back."""
    place.log = place.environment["WEFT_RUN_LOG"] = server.create_database("log")
    place.declare(PIPELINE)
    place.database.run(*TABLES)
    steps = commands.run(place, "run-due").steps
    for slot, at in enumerate(some(steps, count), start=1):
        place.at(slot)
        disturbed(commands, place, server, at)
        (ended,) = commands.ended()
        assert ended.code == 0, (steps[at], ended)
        expected = [2 * (slot + 1), 2 * (slot + 1), slot + 1]
        assert counts(place) == expected, steps[at]
        if at < len(steps) - 1:
            assert ended.err.count("the work goes on without it") == 1
        # Away from the beginning on, so that this process knows nothing of what was run.
        ended = commands.run(place, "run-due")
        assert ended.code == 0, ended
        assert "this process keeps its own" in ended.err
        assert counts(place) == expected
        server.start()
        ended = commands.run(place, "run-due")
        assert ended.code == 0, (steps[at], ended)
        assert counts(place) == expected
        log = [(each.attempt, each.status) for each in place.runs("copy")]
        assert log[-1] == (1, "succeeded"), steps[at]


@pytest.mark.full
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_the_source_is_away(place: Place, server: servers.Server, commands: Commands) -> None:  # noqa: F811
    """Nothing is written, and no Spark starts to find that out."""
    place.declare(PIPELINE)
    place.database.run(TABLES[1])
    place.environment |= {"SOURCE": "shop", "WEFT_DSN_SHOP": server.create_database("shop")}
    server.kill()
    for number in (1, 2):
        ended = commands.run(place, "run-due")
        assert ended.code == 1, ended
        assert "127.0.0.1" in ended.err and "Traceback" not in ended.err
        assert [(each.attempt, each.status) for each in place.runs("copy")][-1] == (number, "failed")
    assert place.database.rows("told") == []
    server.start()
    with server.connect("shop") as connection:
        for statement in (TABLES[0], TABLES[2]):
            connection.cursor().execute(statement)
    # Rows that this process reads itself, so that the test needs no Spark.
    place.declare(PIPELINE.replace('"SELECT id FROM raw"', '[{"id": 1}, {"id": 2}]'))
    ended = commands.run(place, "run-due")
    assert ended.code == 0, ended
    assert counts(place) == [2, 2, 1]
