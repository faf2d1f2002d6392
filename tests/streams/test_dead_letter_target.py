"""Dead letters always find a place: a consumer must not stop for ever at an event that it could not process."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from weft.streams.runtime import open_stream


def _fail(stream: Any, times: int) -> None:
    for _ in range(times):
        events = weft.consume_sync(stream, "worker", 1)
        weft.nack_sync(stream, "worker", events, reason="no")


@pytest.mark.parametrize(
    "rules", [{"on_schema_drift": "reject"}, {"on_schema_drift": "quarantine"}, {"validate_schema": True}]
)
def test_a_strict_stream_takes_them_too(streams: Any, rules: dict[str, Any]) -> None:
    @weft.stream(fields={"other": "int64"}, **rules)
    def graveyard() -> None: ...

    @weft.stream(fields={"n": "int64"}, max_deliveries=2, dead_letter="graveyard")
    def numbers() -> None: ...

    weft.publish_sync(numbers, [{"n": 1}, {"n": 2}])
    _fail(numbers, 2)
    assert [event["n"] for event in weft.consume_sync(numbers, "worker")] == [2]
    (letter,) = weft.consume_sync(graveyard, "undertaker")
    assert letter["event"] == {"n": 1}
    assert letter["reason"] == "no"


def test_a_declared_stream_keeps_its_own_connection(streams: Any, tmp_path: Any) -> None:
    elsewhere = weft.connect(url=f"sqlite:///{tmp_path}/elsewhere.db")

    @weft.stream(connection=elsewhere)
    def graveyard() -> None: ...

    @weft.stream(fields={"n": "int64"}, max_deliveries=1, dead_letter="graveyard")
    def numbers() -> None: ...

    weft.publish_sync(numbers, {"n": 1})
    _fail(numbers, 1)
    assert weft.consume_sync(numbers, "worker") == []
    (letter,) = weft.consume_sync(graveyard, "undertaker")
    assert letter["event"] == {"n": 1}
    assert open_stream(graveyard).hub.connection == elsewhere


@pytest.mark.parametrize(
    "options",
    [{"max_deliveries": 2}, {"on_schema_drift": "quarantine"}, {"max_deliveries": 2, "dead_letter": "d" * 47}],
)
def test_names_that_would_be_too_long_are_refused_at_declaration(options: dict[str, Any]) -> None:
    with pytest.raises(weft.DeclarationError, match="shorter name"):
        weft.stream("n" * 47, schema="s" * 17, **options)(lambda: None)


def test_the_longest_name_has_room_for_all(streams: Any) -> None:
    name = "n" * 44
    weft.stream(name, fields={"n": "int64"}, max_deliveries=1)(lambda: None)
    weft.publish_sync(name, {"n": 1})
    _fail(name, 1)
    assert weft.consume_sync(name, "worker") == []
    assert len(weft.consume_sync(f"{name}__dead_letter", "undertaker")) == 1
