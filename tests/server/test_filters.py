"""A filter by a field that no event has is refused: its subscriber would wait without a word."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from served import PREFIX
from weft.project import Project
from workers import declare

pytestmark = pytest.mark.parametrize("system", ["sqlite", "redis"], indirect=True)


def test_a_mistyped_field(streams: Project, http: Any) -> None:
    declare("clicks", fields={"action": "string", "user_id": "string"}, on_schema_drift="reject")
    for wrong, right in (("acton", "action"), ("Action", "action"), ("user", "user_id")):
        answer = http.get(f"{PREFIX}/clicks/subscribe", params={"where": f"{wrong}=x"})
        assert answer.status_code == 422
        assert answer.json()["field"] == "where"
        assert repr(wrong) in answer.json()["detail"]
        assert f"Did you mean {right!r}?" in answer.json()["hint"]


def test_a_stream_that_takes_other_fields(streams: Project, http: Any) -> None:
    """Only a name in other case is surely mistyped: no field to come can have it."""
    declare("clicks", fields={"action": "string"})
    path = f"{PREFIX}/clicks/subscribe"
    answer = http.get(path, params={"where": "Action=x"})
    assert (answer.status_code, answer.json()["hint"][:22]) == (422, "Did you mean 'action'?")
    assert "None of the newest 100 events" in answer.json()["detail"]
    assert http.request("HEAD", path, params={"where": "actions=x"}).status_code == 200
    # A browser that comes back and is refused stops for good.
    again = http.request("HEAD", path, params={"where": "Action=x"}, headers={"Last-Event-ID": "0"})
    assert again.status_code == 200


def test_a_stream_that_takes_no_other_fields(streams: Project, http: Any) -> None:
    declare("clicks", fields={"action": "string"}, on_schema_drift="reject")
    answer = http.get(f"{PREFIX}/clicks/subscribe", params={"where": "colour=red"})
    assert (answer.status_code, answer.json()["hint"]) == (422, "Fields: action.")


def test_a_field_without_a_column(streams: Project, http: Any) -> None:
    """It is not mistyped: events have it, or may have it one day."""
    declare("clicks", fields={"action": "string"}, max_new_columns=0)
    weft.publish_sync("clicks", [{"action": "a", "actions": "b"}, {"action": "c", "colour": "red"}])
    for where, action in (("actions=b", "a"), ("colour=red", "c"), ("action=c", "c")):
        (event,) = http.follow(f"{PREFIX}/clicks/subscribe?since=start&where={where}", 1)
        assert event["action"] == action
    assert http.request("HEAD", f"{PREFIX}/clicks/subscribe", params={"where": "size=1"}).status_code == 200
