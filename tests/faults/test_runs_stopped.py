"""A run that is told to stop (SIGTERM, SIGINT), or is stopped for so long (SIGSTOP) that another takes over."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from commands import Commands
from faults.runs import Place, Repeat, picked, place  # noqa: F401 - fixtures
from pipelines.conftest import database  # noqa: F401 - fixture
from servers import wait_until
from weft.operate.runlog import open_run_log

pytestmark = pytest.mark.timing

PIPELINE = """
@weft.pipeline(
    schedule="0 * * * *",
    targets=["first", weft.target("second", mode="merge", keys=["id"])],
    transforms_post=["INSERT INTO told VALUES (1)"],
)
def copy():
    return "SELECT id FROM raw"
"""
TABLES = ["CREATE TABLE raw (id BIGINT)", "CREATE TABLE told (n BIGINT)", "INSERT INTO raw VALUES (1), (2)"]
CODES = {"SIGTERM": 143, "SIGINT": 130}


@pytest.fixture(scope="session")
def other_commands() -> Iterator[Commands]:
    """Those of another process, while one of the first is stopped."""
    made = Commands()
    yield made
    made.close()


@pytest.fixture
def raw(place: Place) -> Place:  # noqa: F811
    place.declare(PIPELINE)
    place.database.run(
        "CREATE TABLE raw (id BIGINT)", "CREATE TABLE told (n BIGINT)", "INSERT INTO raw VALUES (1), (2)"
    )
    return place


def counts(place: Place) -> list[int]:  # noqa: F811
    """The rows of each table."""
    return [len(place.database.rows(name)) for name in ("first", "second", "told")]


@pytest.mark.brief("sqlite-SIGTERM", "mysql-SIGTERM")
@pytest.mark.parametrize("name", CODES)
def test_told_to_stop_at_each_step(raw: Place, commands: Commands, name: str, count: Repeat) -> None:
    """What was committed stays, the rest is rolled back, and the log says so; then it goes on."""
    ended = commands.run(raw, "run-due")
    assert ended.code == 0, ended
    steps = ended.steps
    assert steps[0] == "run claimed" and steps[-1] == "run recorded"
    committed = [number for number, step in enumerate(steps) if step == "commit committed"]
    assert len(committed) == 3
    chosen = [at for at in picked(raw, steps, count, list(CODES).index(name)) if 0 < at < len(steps) - 1]
    for slot, at in enumerate(chosen, start=1):
        raw.at(slot)
        ended = commands.run(raw, "run-due", at=at, signal=name)
        assert ended.code == CODES[name], (steps[at], ended)
        done = [at >= number for number in committed]
        assert counts(raw) == [2 * (slot + done[0]), 2, slot + done[2]], steps[at]
        last = raw.runs("copy")[-1]
        assert (last.status, last.attempt) == ("interrupted", 1), steps[at]
        assert last.error == f"Stopped by {'SIGTERM' if name == 'SIGTERM' else 'an interrupt'}."
        ended = commands.run(raw, "run-due") if at % 2 else commands.run(raw, "run", "copy")
        assert ended.code == 0, (steps[at], ended)
        assert counts(raw) == [2 * (slot + 1), 2, slot + 1], steps[at]
        last = raw.runs("copy")[-1]
        assert (last.status, last.attempt) == ("succeeded", 2), steps[at]


# A statement that takes minutes unless somebody ends it.
SLOW = {"postgres": "SELECT id FROM raw, pg_sleep(200)", "mysql": "SELECT id FROM raw WHERE SLEEP(200) = 0"}
RUNNING = {
    "postgres": "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'INSERT%pg_sleep(200)%'",
    "mysql": "SELECT count(*) FROM information_schema.PROCESSLIST WHERE INFO LIKE 'INSERT%SLEEP(200)%'",
}


@pytest.mark.parametrize("database", ["postgres", "mysql"], indirect=True)
def test_told_to_stop_in_a_long_statement(place: Place, commands: Commands) -> None:  # noqa: F811
    """The statement is ended in the database too: the next run does not meet its locks."""
    dialect = place.database.tables.dialect
    place.declare(PIPELINE.replace('"SELECT id FROM raw"', f"os.environ.get('QUERY', {SLOW[dialect]!r})"))
    place.database.run(
        "CREATE TABLE raw (id BIGINT)", "CREATE TABLE told (n BIGINT)", "INSERT INTO raw VALUES (1), (2)"
    )
    driver = place.database.tables.driver

    def is_running() -> bool:
        with driver.session("read") as session:
            (found,) = session.rows(RUNNING[dialect])[0]
        return int(found) == 1

    commands.start(place, "run-due")
    wait_until(is_running, "the statement to run")
    (attempt,) = place.runs("copy")
    assert attempt.status == "running" and attempt.pid is not None
    os.kill(attempt.pid, signal.SIGTERM)
    (ended,) = commands.ended()
    assert ended.code == 143, ended
    wait_until(lambda: not is_running(), "the statement to end")
    assert place.runs("copy")[-1].status == "interrupted"
    ended = commands.run(place, "run-due", QUERY="SELECT id FROM raw")
    assert ended.code == 0, ended
    assert counts(place) == [2, 2, 1]


# ------------------------------------------------------------------------------------------------------------- SIGSTOP


def expire(place: Place) -> None:  # noqa: F811
    """Let the lease of the claim be over, as if its time had passed."""
    with open_run_log(place.log, place.folder) as log, log._book.session("publish") as session:
        book = log._book
        book.update(session, book.claims, {"expires_at": datetime(2000, 1, 1, tzinfo=UTC)}, "owner IS NOT NULL", ())


@pytest.mark.brief("sqlite")
def test_stopped_for_longer_than_its_lease(
    raw: Place,
    commands: Commands,
    other_commands: Commands,
    stopped: list[int],
    count: Repeat,
) -> None:
    """Another takes over. Whoever comes back does nothing twice, and does not write over what the other recorded."""
    steps = commands.run(raw, "run-due").steps
    # Where no transaction is open: in one, the other would wait for its locks.
    safe = [number for number, step in enumerate(steps[:-1]) if step.startswith("run") or step == "commit committed"]
    chosen = safe if count(10) > 1 else safe[:: 4 if raw.database.tables.dialect == "duckdb" else 2]
    for slot, at in enumerate(chosen, start=1):
        raw.at(slot)
        commands.start(raw, "run-due", at=at, signal="SIGSTOP")
        stopped.append(commands.answer()["stopped"])
        # Its lease is not over.
        ended = other_commands.run(raw, "run-due")
        assert (ended.code, ended.out) == (0, "Nothing is due.\n"), steps[at]
        expire(raw)
        ended = other_commands.run(raw, "run-due")
        assert ended.code == 0, ended
        assert counts(raw) == [2 * (slot + 1), 2, slot + 1], steps[at]
        before = raw.runs("copy")
        assert [(each.attempt, each.status) for each in before[-2:]] == [(1, "interrupted"), (2, "succeeded")]
        assert before[-2].error is not None and "was silent for longer than its lease" in before[-2].error
        os.kill(stopped.pop(), signal.SIGCONT)
        (ended,) = commands.ended()
        assert ended.code == 1, (steps[at], ended)
        assert "Another process took over copy" in ended.out + ended.err
        assert counts(raw) == [2 * (slot + 1), 2, slot + 1], steps[at]
        assert raw.runs("copy") == before


def test_what_was_read_long_ago_does_not_replace_newer_rows(
    place: Place,  # noqa: F811
    commands: Commands,
    other_commands: Commands,
    stopped: list[int],
) -> None:
    """Stopped with rows in its hands until the next slot is done: they are not written any more."""
    place.declare(
        """
@weft.pipeline(schedule="0 * * * *", target="copies", mode="merge", keys=["id"])
def copy():
    return [{"id": 1, "name": os.environ["ROW"]}]
"""
    )
    commands.start(place, "run-due", at=1, signal="SIGSTOP", ROW="old")
    stopped.append(commands.answer()["stopped"])
    expire(place)
    place.at(1)
    ended = other_commands.run(place, "run-due", ROW="new")
    assert ended.code == 0, ended
    os.kill(stopped.pop(), signal.SIGCONT)
    (ended,) = commands.ended()
    assert ended.code == 1, ended
    assert place.database.rows("copies") == [{"id": 1, "name": "new"}]
    assert [each.status for each in place.runs("copy")] == ["interrupted", "succeeded"]
