"""`weft streams replay` publishes rejected events again, and asks first where somebody can answer."""

from __future__ import annotations

import json

import weft
from weft.streams.rejected import group_id
from workers import declare, drain


def test_replay(streams, call) -> None:
    declare("numbers", fields={"n": "int64"}, on_schema_drift="quarantine")
    weft.publish_sync("numbers", [{"n": 1}, {"n": 2, "unit": "m"}, {"n": "three"}])
    declare("numbers", fields={"n": "int64", "unit": "string"}, on_schema_drift="quarantine")
    replay = ["streams", "replay", "numbers__quarantine"]
    asked = call(*replay, code=2).stderr
    assert "Publish all events of numbers__quarantine to numbers again, for all consumers? Nobody can answer" in asked
    done = call(*replay, "--yes").stdout
    assert done == "replayed 1 event of numbers__quarantine; 1 still does not fit\n"
    assert [event["n"] for event in drain("numbers")] == [1, 2]
    assert json.loads(call(*replay, "--yes", "--before", "1h", "--format", "json").stdout) == {
        "replayed": 0,
        "refused": 0,
        "duplicates": 0,
    }
    refused = call("streams", "replay", "numbers", "--yes", code=1).stderr
    assert "numbers holds no rejected events of a stream." in refused
    assert "numbers__quarantine" in refused


def test_one_group(streams, call) -> None:
    declare("numbers", fields={"n": "int64"}, on_schema_drift="quarantine")
    weft.publish_sync("numbers", [{"n": 1, "unit": "m"}, {"n": "two"}, {"n": 3, "unit": "m"}])
    unit, text, _ = map(group_id, drain("numbers__quarantine"))
    declare("numbers", fields={"n": "int64", "unit": "string"}, on_schema_drift="quarantine")
    place = "numbers__quarantine"
    done = call("streams", "replay", place, "--group", unit, "--yes").stdout
    assert done == "replayed 2 events of numbers__quarantine; 0 still do not fit\n"
    asked = call("streams", "purge", place, "--group", text, code=2).stderr
    assert f"Remove the events of the group {text} of numbers__quarantine, for good? Nobody can answer" in asked
    assert call("streams", "purge", place, "--group", unit, "--yes").stdout == f"removed 0 events from {place}\n"
    removed = call("streams", "purge", place, "--group", text, "--yes", "--format", "json").stdout
    assert json.loads(removed) == {"removed": 1}
    refused = call("streams", "purge", "numbers", "--yes", code=1).stderr
    assert "numbers holds no rejected events of a stream." in refused


def test_events_whose_key_is_there(streams, call) -> None:
    keyed = {"idempotency_key": "n", "on_schema_drift": "quarantine"}
    declare("numbers", fields={"n": "int64"}, **keyed)
    weft.publish_sync("numbers", [{"n": 1, "unit": "m"}, {"n": 2, "unit": "m"}])
    weft.publish_sync("numbers", {"n": 1})
    declare("numbers", fields={"n": "int64", "unit": "string"}, **keyed)
    done = call("streams", "replay", "numbers__quarantine", "--yes").stdout
    said = "1 was there already, or another event has its key"
    assert done == f"replayed 1 event of numbers__quarantine; {said}; 0 still do not fit\n"
