"""What no event can do to who prints it, and what no range can do to who acknowledges it."""

from __future__ import annotations

import json
from typing import Any

import pytest

import weft
from weft.cli import streams_consume
from weft.cli.events_out import to_ndjson
from workers import declare

CONTROL = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), "\u2028", "\u2029"]


@pytest.mark.parametrize("character", CONTROL, ids=ascii)
def test_json_escapes_control_characters(character: str) -> None:
    event = {"text": f"a{character}b", f"k{character}": [{"in": character}]}
    line = to_ndjson(event)
    assert character not in line
    assert json.loads(line) == event


def test_json_leaves_the_rest_readable() -> None:
    assert to_ndjson({"größe": "日本 \xa0 \\u009b €"}) == '{"größe": "日本 \xa0 \\\\u009b €"}'


def test_tail_prints_no_control_character(local: Any, call: Any) -> None:
    declare("events")
    weft.publish_sync("events", {"text": "\x9b31mred"})
    assert '"text": "\\u009b31mred"' in call("streams", "tail", "events", "--format", "json").stdout


@pytest.mark.parametrize("output", ["json", "table"])
def test_show_prints_no_control_character(local: Any, call: Any, output: str) -> None:
    text = "".join(CONTROL)
    declare("events", description=f"a{text}b", owner="größe")
    shown = call("streams", "show", "events", "--format", output).stdout
    assert [each for each in CONTROL if each in shown] == ["\n"]
    if output == "json":
        assert json.loads(shown)["description"] == f"a{text}b"
        assert '"größe"' in shown


@pytest.mark.parametrize("command", ["ack", "nack"])
def test_ranges_are_bounded(local: Any, call: Any, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_consume, "_MAX_OFFSETS", 5)
    declare("numbers")
    weft.publish_sync("numbers", [{"n": n} for n in range(8)])
    call("streams", "consume", "numbers", "mine")
    for ranges in (["1-999999999"], ["1-4", "5-8"]):
        done = call("streams", command, "numbers", "mine", *ranges, code=2)
        assert f"{ranges[-1]} names too many events: at most 5 are settled at once." in " ".join(done.stderr.split())
    # It is events that count, not how far a range goes.
    assert call("streams", command, "numbers", "mine", "4-999999999").stdout.startswith("5 events")
