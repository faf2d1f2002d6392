"""`validate_schema`: types, nulls and extras are checked, and a refusal says which event, field and value."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from weft import SchemaError
from weft.project import Project
from workers import declare, drain, plain

GOOD = {"user_id": "u_1", "amount": 9.99, "currency": "GBP"}


@pytest.fixture
def typed(streams: Project) -> Any:
    fields = {"user_id": "string", "amount": "float64", "currency": "string", "note": "string?"}
    return declare(fields=fields, validate_schema=True)


REFUSED: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"currency": ...}, "currency", None, "missing"),
    ({"currency": None}, "currency", None, "null"),
    ({"amount": "9.99"}, "amount", "9.99", "float64"),
    ({"amount": True}, "amount", True, "float64"),
    ({"user_id": 5}, "user_id", 5, "string"),
    ({"other": 5}, "other", 5, "no such field"),
    ({"other": None}, "other", None, "no such field"),
    ({"Currency": "GBP"}, "Currency", "GBP", "no such field"),
    ({"note": 5}, "note", 5, "string"),
]


def test_refused(typed: Any) -> None:
    for change, field, value, reason in REFUSED:
        bad = {key: value for key, value in {**GOOD, **change}.items() if value is not ...}
        for index, events in ((0, bad), (0, [bad, GOOD]), (2, [GOOD, GOOD, bad])):
            with pytest.raises(ValueError, match="orders") as caught:
                weft.publish_sync(typed, events)
            error = caught.value
            assert isinstance(error, SchemaError)
            assert (error.index, error.field, error.value) == (index, field, value), change
            assert reason in str(error)
        weft.publish_sync(typed, GOOD)
        assert [plain(event) for event in drain(typed)] == [GOOD]


def test_optional_fields(typed: Any) -> None:
    weft.publish_sync(typed, [GOOD, {**GOOD, "note": None}, {**GOOD, "note": "x"}])
    assert [event["note"] for event in drain(typed)] == [None, None, "x"]


def test_nothing_is_no_event(typed: Any) -> None:
    with pytest.raises(SchemaError) as caught:
        weft.publish_sync(typed, {})
    assert caught.value.field == "user_id"
    assert weft.publish_sync(typed, [])["rows_received"] == 0


def test_the_schema_does_not_evolve(typed: Any) -> None:
    with pytest.raises(SchemaError):
        weft.publish_sync(typed, {**GOOD, "new": 1})
    weft.publish_sync(typed, GOOD)
    assert "new" not in drain(typed)[0]


def test_without_validation_events_are_taken_whatever_their_shape(streams: Project) -> None:
    declare(fields={"user_id": "string", "amount": "float64"})
    shapes: list[dict[str, Any]] = [{"user_id": "u"}, {"amount": 1.5}, {"other": [1]}, {"amount": "lots", "user_id": 5}]
    weft.publish_sync("orders", shapes)
    assert [plain(event) for event in drain("orders")] == shapes


def test_quarantined_instead(streams: Project) -> None:
    declare(fields={"id": "int64"}, validate_schema=True, on_schema_drift="quarantine")
    result = weft.publish_sync("orders", [{"id": 1}, {}, {"id": "x"}, {"id": None}, {"id": 2, "more": 1}, {"id": 3}])
    assert (result["rows_received"], result["rows_quarantined"]) == (6, 4)
    assert [event["id"] for event in drain("orders")] == [1, 3]
    held = drain("orders__quarantine")
    assert [event["event"] for event in held] == [{}, {"id": "x"}, {"id": None}, {"id": 2, "more": 1}]
    assert [event["field"] for event in held] == ["id", "id", "id", "more"]


async def test_async(typed: Any) -> None:
    with pytest.raises(SchemaError, match="Event 1 "):
        await weft.publish(typed, [GOOD, {}])
    assert (await weft.publish(typed, GOOD))["rows_received"] == 1
