"""`weft run-due` called by many processes at once, again and again: each slot is run by one of them, once."""

from __future__ import annotations

from collections import Counter

import pytest

from commands import Commands
from faults.runs import Place, Repeat, place  # noqa: F401 - fixtures
from pipelines.conftest import database  # noqa: F401 - fixture

pytestmark = pytest.mark.timing

PROCESSES = 8
PIPELINES = """
@weft.pipeline(target="copies", schedule="0 * * * *")
def copy():
    return "SELECT id FROM raw"


@weft.pipeline(target="copies_of_copies", schedule="0 * * * *", depends_on=[copy], upstream_freshness_secs=1800)
def copy_again():
    return "SELECT id FROM raw"
"""


# Without a watermark, so that a slot that is run twice is there twice.
@pytest.mark.brief("sqlite")
@pytest.mark.parametrize("database", ["sqlite", "postgres", "mysql"], indirect=True)
def test_each_slot_once(place: Place, commands: Commands, count: Repeat) -> None:  # noqa: F811
    place.declare(PIPELINES)
    place.database.run("CREATE TABLE raw (id BIGINT)", "INSERT INTO raw VALUES (1), (2), (3)")
    slots = count(100, 3)
    warnings: list[str] = []
    for slot in range(slots):
        # What waits for the first is run by whoever finds it done: at the latest by who asks after all.
        place.at(slot)
        commands.start(place, "run-due", processes=PROCESSES)
        for ended in commands.ended():
            assert ended.code == 0, ended
            warnings.append(ended.err)
        ended = commands.run(place, "run-due")
        assert ended.code == 0, ended
        assert "copy_again" in ended.out or "Nothing is due" in ended.out
    for table in ("copies", "copies_of_copies"):
        assert Counter(row["id"] for row in place.database.rows(table)) == dict.fromkeys((1, 2, 3), slots)
    for pipeline in ("copy", "copy_again"):
        done = [each for each in place.runs(pipeline) if each.status != "skipped"]
        assert [(each.status, each.attempt) for each in done] == [("succeeded", 1)] * slots
        assert len({each.slot for each in done}) == slots
        # A machine that stands still may make the log seem locked for longer than a process waits. That one then goes
        # on without the log, and whoever has the claim finds the rows of the slot there.
        replayed = sum(each.metrics["targets"][0]["replayed"] for each in done if each.metrics)
        assert replayed <= sum("keeps its own" in each for each in warnings)
        assert Counter(each.rows_read for each in done) == Counter({3: slots - replayed, 0: replayed})
