"""A run that is killed (-9) between any two of its steps: the next one does what is left, each target gets its rows
exactly once, and the log says what happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest

from commands import Commands
from engine import oracle
from faults.runs import FIRST_SLOT, Place, Repeat, picked, place  # noqa: F401 - fixtures
from pipelines.conftest import database  # noqa: F401 - fixture
from systems.tables.test_modes import in_order
from weft.systems.load import Load
from weft.systems.sql import watermarks

pytestmark = pytest.mark.timing

PIPELINE = """
name, mode = os.environ["NAME"], os.environ["MODE"]


@weft.pipeline(
    name=name,
    schedule="0 * * * *",
    targets=[f"first_{name}", f"second_{name}"],
    transforms_post=[f"INSERT INTO told_{name} VALUES (1)", f"INSERT INTO told_{name} VALUES (2)"],
    mode=mode,
    **({} if mode == "append" else {"keys": ["id"]}),
    **({"incremental_column": "seq"} if "INCREMENTAL" in os.environ else {}),
)
def copy():
    return f"SELECT id, name, seq FROM raw_{name}"
"""


@dataclass
class Case:
    """One pipeline with its source, and what must be in its targets."""

    place: Place
    name: str
    mode: str
    is_incremental: bool
    raw: dict[int, dict[str, Any]] = field(default_factory=dict)
    expected: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    seq: int = 0

    def __post_init__(self) -> None:
        self.targets = [f"first_{self.name}", f"second_{self.name}"]
        self.expected = {target: [] for target in self.targets}
        self.place.database.run(
            f"CREATE TABLE raw_{self.name} (id BIGINT, name VARCHAR(20), seq BIGINT)",
            f"CREATE TABLE told_{self.name} (n BIGINT)",
        )
        self.environment = {"NAME": self.name, "MODE": self.mode}
        if self.is_incremental:
            self.environment["INCREMENTAL"] = "1"

    def change(self, first: int, last: int, text: str) -> None:
        """New rows in the source, and new values in old ones."""
        for number in range(first, last):
            self.seq += 1
            self.raw[number] = {"id": number, "name": f"{text} {number % 3}", "seq": self.seq}
        values = ", ".join(f"({row['id']}, '{row['name']}', {row['seq']})" for row in self.raw.values())
        self.place.database.run(f"DELETE FROM raw_{self.name}", f"INSERT INTO raw_{self.name} VALUES {values}")

    def after_load(self, target: str, moment: datetime) -> tuple[list[dict[str, Any]], int]:
        """What a load of all that the source has makes of a target, and its watermark."""
        mark = self.marks.get(target, 0) if self.is_incremental else 0
        rows = [row for row in self.raw.values() if row["seq"] > mark]
        keys = [] if self.mode == "append" else ["id"]
        load = Load.declare(target=target, mode=self.mode, keys=keys, moment=moment)
        return oracle.apply(self.expected[target], rows, load)[0], max(row["seq"] for row in self.raw.values())

    def load(self, moment: datetime, targets: list[str] | None = None) -> None:
        """Expect that these were loaded."""
        for target in self.targets if targets is None else targets:
            self.expected[target], self.marks[target] = self.after_load(target, moment)

    def rows(self, target: str) -> list[str]:
        found = self.place.database.rows(target)
        for row in found:
            row.pop("row_hash", None)
        return in_order(found)

    def check(self) -> None:
        """Everything is as expected."""
        for target in self.targets:
            assert self.rows(target) == in_order(self.expected[target]), target
            if self.is_incremental:
                load = Load.declare(target=target, pipeline=self.name)
                found = watermarks.read(self.place.database.tables, load)
                assert found is not None
                assert found.value == self.marks[target]
        if self.place.database.tables.one_writer:
            self.place.database.tables.close()


def moment_of(slot: int) -> datetime:
    return FIRST_SLOT + timedelta(hours=slot, minutes=5)


MODES = ["append", "merge", "scd2"]
# On the others the modes share the steps, see `picked`.


@pytest.mark.brief("mysql-scd2")
@pytest.mark.parametrize("mode", MODES)
def test_killed_between_any_two_steps(place: Place, commands: Commands, mode: str, count: Repeat) -> None:  # noqa: F811
    place.declare(PIPELINE)
    steps = steps_of(place, commands, mode)
    names = [step for step in steps if step.startswith("run")]
    whole = ["claimed", "produced", "loaded", "loaded", "followed", "followed", "executed", "recorded"]
    assert names == [f"run {step}" for step in whole]
    assert len(steps) > 20
    for number in range(count(10)):
        for at in picked(place, steps, count, MODES.index(mode)):
            # By turns with a watermark or without, and repeated by the schedule or by hand.
            is_incremental, by_hand = (at + number) % 2 == 0, (at // 2 + number) % 2 == 0
            case = Case(place, f"p{number}_{at}", mode, is_incremental)
            case.change(0, 8, "a")
            run_through(case, commands, at, by_hand=by_hand, is_last=at == len(steps) - 1)


def steps_of(place: Place, commands: Commands, mode: str) -> list[str]:  # noqa: F811
    """The steps of the second run of a pipeline, which nobody disturbs."""
    case = Case(place, f"whole_{mode}", mode, is_incremental=True)
    found = []
    for slot, text in enumerate("ab"):
        case.change(slot * 4, slot * 4 + 8, text)
        place.at(slot)
        ended = commands.run(place, "run-due", **case.environment)
        assert ended.code == 0, ended
        found = ended.steps
        case.load(moment_of(slot))
    case.check()
    return found


def run_through(case: Case, commands: Commands, at: int, *, by_hand: bool, is_last: bool) -> None:
    """A run, one that is killed, its repetition, and the next."""
    place, due = case.place, ("run-due",)  # noqa: F811
    place.at(0)
    ended = commands.run(place, *due, **case.environment)
    assert ended.code == 0, ended
    case.load(moment_of(0))

    case.change(4, 12, "b")
    place.at(1)
    ended = commands.run(place, *due, at=at, **case.environment)
    assert ended.code == -9, ended
    # All of it or nothing.
    loaded = [target for target in case.targets if case.rows(target) != in_order(case.expected[target])]
    case.load(moment_of(1), loaded)
    case.check()

    # What comes meanwhile must not be lost, nor be loaded twice.
    case.change(12, 15, "c")
    again = due if is_last or not by_hand else ("run", case.name)
    place.at(1, 20)
    ended = commands.run(place, *again, **case.environment)
    assert ended.code == 0, ended
    if not is_last:
        left = [target for target in case.targets if target not in loaded]
        case.load(moment_of(1) + timedelta(minutes=15), left)
    case.check()
    _, first, *more = place.runs(case.name)
    if is_last:
        assert (first.status, more) == ("succeeded", [])
    else:
        (second,) = more
        assert (first.attempt, first.status) == (1, "interrupted")
        assert (second.attempt, second.status) == (2, "succeeded")
        assert first.run_id == second.run_id
        assert first.error is not None and "has ended" in first.error
        assert second.metrics is not None
        assert [each["target"] for each in second.metrics["targets"] if each["replayed"]] == loaded

    place.at(2)
    ended = commands.run(place, *due, **case.environment)
    assert ended.code == 0, ended
    case.load(moment_of(2))
    case.check()
    told = sorted(row["n"] for row in place.database.rows(f"told_{case.name}"))
    assert told == [1, 1, 1, 2, 2, 2]
    assert [each.status for each in place.runs(case.name)][-1] == "succeeded"
