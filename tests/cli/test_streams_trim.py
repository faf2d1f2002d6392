"""`weft streams trim` removes old events, and asks first where somebody can answer."""

from __future__ import annotations

import json

import pytest

import weft
from workers import declare, drain


@pytest.fixture
def offsets(streams) -> list[int]:
    """The offsets of ten events."""
    declare("numbers", fields={"n": "int64"})
    weft.publish_sync("numbers", [{"n": n} for n in range(10)])
    return [event["_weft_rowid"] for event in drain("numbers", "all")]


def left() -> list[int]:
    weft.reset_sync("numbers", "all")
    return [event["n"] for event in drain("numbers", "all")]


def test_trim(offsets, call) -> None:
    trim = ["streams", "trim", "numbers", "--yes"]
    assert call(*trim, "--before", offsets[2]).stdout == "removed 2 events from numbers\n"
    assert left() == list(range(2, 10))
    assert json.loads(call(*trim, "--max-rows", 3, "--format", "json").stdout) == {"removed": 5}
    assert left() == [7, 8, 9]
    call(*trim, "--before", "1h")
    assert left() == [7, 8, 9]
    call(*trim, "--before", "2999-01-01")
    assert left() == []


def test_delete(offsets, call) -> None:
    done = call("streams", "delete", "numbers", code=2)
    assert "Delete the stream numbers with all its events and consumers, for good? Nobody can answer" in done.stderr
    assert call("streams", "delete", "numbers", "--yes").stdout == "deleted numbers\n"
    assert call("streams", "delete", "numbers", "--yes").stdout == "numbers is not stored: nothing to delete\n"
    assert json.loads(call("streams", "delete", "numbers", "--yes", "--format", "json").stdout) == {"deleted": False}
    assert "'nambers'" in call("streams", "delete", "nambers", "--yes", code=1).stderr


def test_declared_retention(streams, call) -> None:
    declare("numbers", retention={"max_rows": 4})
    weft.publish_sync("numbers", [{"n": n} for n in range(4)])
    weft.publish_sync("numbers", [{"n": n} for n in range(4, 10)])
    call("streams", "trim", "numbers", "--yes")
    assert left() == [6, 7, 8, 9]
    declare("forever")
    assert "declares no retention" in call("streams", "trim", "forever", "--yes", code=1).stderr


def test_asks_on_a_terminal(on_a_terminal, run, shop) -> None:
    run("streams", "publish", "numbers", "--data", '[{"n": 1}, {"n": 2}]')
    trim = ["streams", "trim", "numbers", "--max-rows", "1"]
    code, shown = on_a_terminal(*trim, typed="n\n")
    assert code == 1
    assert "Remove all but the newest 1 event of numbers, for good? [y/N]" in shown
    assert on_a_terminal(*trim, "-y") == (0, "removed 1 event from numbers\n")


def test_nobody_can_answer(offsets, call) -> None:
    done = call("streams", "trim", "numbers", "--max-rows", 1, code=2)
    assert "for good? Nobody can answer here: standard input is no terminal. Add --yes." in done.stderr
    assert left() == list(range(10))
