"""`weft streams reset` moves a consumer, and asks first where somebody can answer."""

from __future__ import annotations

import json

import pytest

import weft
from workers import declare, drain


@pytest.fixture(params=["sqlite", "postgres", "mysql", "redis"])
def system(request, open_system):
    with open_system(request.param) as found:
        yield found


@pytest.fixture
def offsets(streams) -> list[int]:
    """The offsets of ten events, all consumed by `mine`."""
    declare("numbers", fields={"n": "int64"})
    weft.publish_sync("numbers", [{"n": n} for n in range(10)])
    return [event["_weft_rowid"] for event in drain("numbers", "mine")]


def left() -> list[int]:
    return [event["n"] for event in drain("numbers", "mine")]


def test_reset(offsets, call) -> None:
    reset = ["streams", "reset", "numbers", "mine", "--to"]
    call(*reset, "start", "--yes")
    assert left() == list(range(10))
    assert call(*reset, offsets[7], "--yes").stdout == f"mine goes on after offset {offsets[6]}\n"
    assert left() == [7, 8, 9]
    call(*reset, "2020-01-01T00:00", "--yes")
    assert left() == list(range(10))
    call(*reset, "1h", "--yes")
    assert json.loads(call(*reset, "end", "--yes", "--format", "json").stdout) == {
        "consumer": "mine",
        "position": int(offsets[9]),
        "position_text": str(offsets[9]),
    }
    assert left() == []


def test_wrong_place(offsets, call) -> None:
    assert (
        "is not 'start', 'end', an offset, a time"
        in call("streams", "reset", "numbers", "mine", "--to", "beginning", code=2).stderr
    )
    call("streams", "reset", "numbers", "mine", code=2)


def test_asks_on_a_terminal(on_a_terminal, run, shop) -> None:
    run("streams", "publish", "numbers", "--data", '[{"n": 1}, {"n": 2}]')
    run("streams", "consume", "numbers", "mine", "--batch-size", "1")
    reset = ["streams", "reset", "numbers", "mine", "--to", "end"]
    code, shown = on_a_terminal(*reset, typed="n\n")
    assert code == 1
    assert "mine of numbers is at 1, 1 event pending. Move it to end? [y/N]" in shown
    code, shown = on_a_terminal(*reset[:3], "new", *reset[4:], typed="n\n")
    assert "new of numbers has not read it yet." in shown
    position = json.loads(run("streams", "groups", "numbers", "--format", "json").stdout)[0]["position"]
    assert position == 1
    code, shown = on_a_terminal(*reset, typed="y\n")
    assert (code, shown.endswith("mine goes on after offset 2\n")) == (0, True)
    assert on_a_terminal(*reset, "--yes") == (0, "mine goes on after offset 2\n")


def test_nobody_can_answer(offsets, call) -> None:
    done = call("streams", "reset", "numbers", "mine", "--to", "start", code=2)
    assert "Add --yes." in done.stderr
    assert left() == []


def test_consumer_that_never_read_it(offsets, call) -> None:
    done = call("streams", "reset", "numbers", "mien", "--to", "end", "--yes")
    assert done.stderr == "note: mien had never read numbers. Is the name right?\n"
    assert call("streams", "reset", "numbers", "mine", "--to", "end", "--yes").stderr == ""


def test_offset_past_the_end(offsets, call) -> None:
    reset = ["streams", "reset", "numbers", "mine", "--yes", "--to"]
    done = call(*reset, offsets[9] + 1000)
    assert done.stdout == f"mine goes on after offset {offsets[9]}\n"
    assert "is past the end of numbers, so it goes on with the next new event.\n" in done.stderr
    assert call(*reset, offsets[9] + 1).stderr == ""
    assert call(*reset, 0).stderr == ""
