"""The gate of a Delta table fills in what late changes say; without Spark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from systems.tables.test_changes import DEBEZIUM, MESSAGES, NOW, UNAVAILABLE, change, row
from weft.engine.streaming.cdc.applying import ChangeBatch
from weft.engine.streaming.cdc.envelopes import opened
from weft.engine.streaming.cdc.newest import newest
from weft.spark_support.folder import LocalFolder
from weft.systems.changes import KEEPS, SAID, UNKNOWN
from weft.systems.delta import mirror
from weft.systems.load import Load


class Gate:
    """A gate that batches go through, each with its notes in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.batches = str(folder), 0

    def apply(self, *messages: dict[str, Any]) -> mirror.GatedChanges:
        found = opened(pa.Table.from_pylist(list(messages), schema=MESSAGES), DEBEZIUM)
        batch = ChangeBatch(DEBEZIUM, found, newest(found), [], found.skipped)
        load = Load.declare(target=("default", "mirror"), mode="merge", keys=("id",), pipeline="mirrors")
        rows, load = batch.planned(replace(load, moment=NOW, checkpoint_id="one", batch_id=self.batches), None)
        self.batches += 1
        table = pa.Table.from_batches(rows.batches, rows.schema)
        notes = mirror.Notes(LocalFolder(), self.folder, load)
        names = table.column_names
        return mirror.DeltaGate(notes, load).pass_through(table.select(mirror.gate_columns(load, names)), names)


def decided(gated: mirror.GatedChanges) -> dict[str, tuple[int, ...]]:
    """By key what is done, and what becomes of its name."""
    assert gated.decided is not None
    key, *others = (each.to_pylist() for each in gated.decided.columns)
    return dict(zip(key, zip(*others, strict=True), strict=True))


def test_a_late_change_fills_in_what_the_last_one_does_not_say(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.apply(change("c", None, row(1, "a", 1), 1), change("c", None, row(2, "b", 1), 2))
    unavailable = gate.apply(change("u", None, row(1, UNAVAILABLE, 5), 5), change("u", None, row(3, UNAVAILABLE, 6), 6))
    assert decided(unavailable) == {"1": (1, KEEPS), "3": (1, KEEPS)}
    late = gate.apply(
        change("u", None, row(1, "late", 3), 3), change("c", None, row(3, "c", 4), 4), change("u", None, row(2, "z"), 7)
    )
    assert late.fills == {"name": "_weft_fills_0"}
    assert decided(late) == {"1": (mirror.FILLS, True), "3": (mirror.FILLS, True), "2": (1, False)}
    # What is older than that is not.
    again = gate.apply(change("u", None, row(1, "older", 2), 2), change("c", None, row(3, "c", 4), 4))
    assert (again.decided, again.late.to_pylist()) == (None, ["1", "3"])
    # A value that the last change says is not filled in any more.
    gate.apply(change("u", None, row(1, "said", 8), 8))
    assert gate.apply(change("u", None, row(1, "late", 6), 6)).decided is None


def test_an_old_value_of_a_batch_is_not_taken_for_that_of_the_table(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.apply(change("c", None, row(1, "c", 1), 1), change("u", None, row(1, "d", 4), 4))
    both = gate.apply(change("u", None, row(1, "b", 3), 3), change("u", None, row(1, UNAVAILABLE, 5), 5))
    assert decided(both) == {"1": (1, KEEPS)}
    assert gate.apply(change("u", None, row(1, "late", 2), 2)).decided is None
    newer = gate.apply(change("u", None, row(1, "e", 6), 6), change("u", None, row(1, UNAVAILABLE, 7), 7))
    assert decided(newer) == {"1": (1, SAID)}


def test_the_row_of_an_old_key_is_another_one_if_that_key_came_again(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.apply(change("c", None, row(1, "a", 1), 1), change("c", None, row(1, "other", 9), 9))
    moved = gate.apply(change("u", row(1), row(2, UNAVAILABLE, 5), 5))
    assert decided(moved) == {"2": (1, UNKNOWN)}


def test_a_truncate_removes_what_would_be_filled_in(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.apply(change("c", None, row(1, "a", 1), 1))
    gate.apply(change("u", None, row(1, UNAVAILABLE, 9), 9), change("u", None, row(2, UNAVAILABLE, 3), 3))
    # The row 1 was changed after the truncate, and stays by that it is filled in. The row 2 is gone.
    late = gate.apply(change("t", lsn=5), change("u", None, row(1, "late", 7), 7))
    assert (late.truncates, late.stays.num_rows) == (True, 0)
    assert decided(late) == {"1": (mirror.FILLS, True)}
    # What is before the truncate is not of that row.
    gate.apply(change("u", None, row(1, UNAVAILABLE, 12), 12))
    assert gate.apply(change("u", None, row(1, "gone", 4), 4)).decided is None
