"""The types of a source's columns: declared, those of earlier batches, or those of most values. A value that does not
fit makes its own row a bad one, and decides nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

import weft
from engine.streaming.conftest import rows, run_once
from weft.engine.streaming.dead_letters import stream_of
from weft.errors import WeftError

pytestmark = pytest.mark.usefixtures("plain_spark", "here")


class Topic:
    """A topic, and a pipeline that copies it."""

    def __init__(self, kafka: Any, **declared: Any) -> None:
        self._kafka, self.name = kafka, kafka.create_topic()
        broker = weft.KafkaConnection(name="broker", bootstrap_servers=kafka.bootstrap)
        columns = declared.pop("columns", None)
        self.declared: dict[str, Any] = {
            "name": "copy",
            "source": weft.Source(connection=broker, query=self.name, columns=columns),
            "target_table": (None, "copies"),
            "dead_letter_stream": "failed",
            **declared,
        }

    def run(self, *values: Any) -> None:
        """Send messages, and carry out one batch."""
        self._kafka.produce(self.name, [json.dumps(value).encode() for value in values])
        run_once(**self.declared)


def letters() -> list[tuple[str, Any]]:
    """The new dead letters: error and payload."""
    return [(each["error"], json.loads(each["payload"])) for each in weft.consume_sync(stream_of("failed", None), "me")]


@pytest.mark.parametrize("on_error", ["dlq", "drop", "fail"])
def test_an_odd_message_stops_nothing(on_error: str, kafka: Any) -> None:
    sql = "SELECT user_id FROM source WHERE valid"
    topic = Topic(kafka, transform_sql=sql, transform_on_error=on_error)
    odd = {"user_id": 4, "valid": "maybe"}
    topic.run({"user_id": 1, "valid": True}, odd, {"user_id": 2, "valid": False}, {"user_id": 3, "valid": True})
    topic.run(odd)
    topic.run({"user_id": 5, "valid": True}, odd)
    assert rows("copies") == [(1,), (3,), (5,)]
    found = letters()
    assert [payload for _, payload in found] == [odd] * 3
    assert {error for error, _ in found} == {"'valid' is \"maybe\", a string, which does not fit bool."}


def test_a_row_that_was_put_aside_decides_nothing(kafka: Any, way: str) -> None:
    topic = Topic(kafka)
    topic.run({"amount": 5}, {"amount": "abc", "other": 1}, {"amount": 7})
    assert rows("copies", "amount") == [(5,), (7,)]
    with pytest.raises(WeftError, match="other"):
        rows("copies", "other")
    topic.run({"amount": [1]}, {"amount": 9})
    assert rows("copies", "amount") == [(5,), (7,), (9,)]
    assert [payload for _, payload in letters()] == [{"amount": "abc", "other": 1}, {"amount": [1]}]


def test_a_declared_column_is_a_contract(kafka: Any) -> None:
    columns = {"id": "int64", "valid": "bool", "price": "decimal(10,2)", "at": "timestamp", "any": "json"}
    topic = Topic(kafka, columns=columns, transform_sql="SELECT id, price, any FROM source WHERE coalesce(valid, true)")
    bad = [{"id": 1.5}, {"id": "1"}, {"id": 2, "valid": "maybe"}, {"id": 3, "price": 1.005}, {"id": 4, "at": "soon"}]
    # Also where these are the first messages of all, and a key is in none.
    topic.run(*bad)
    assert [payload for _, payload in letters()] == bad
    topic.run({"id": 1, "price": 1.25, "any": [1]}, {"id": 2, "price": "2.50", "any": "x", "at": "2026-01-31"})
    found = [(number, str(price), any_) for number, price, any_ in rows("copies")]
    assert found == [(1, "1.25", "[1]"), (2, "2.50", '"x"')]


def test_without_a_place_for_bad_rows(kafka: Any) -> None:
    topic = Topic(kafka, dead_letter_stream=None)
    with pytest.raises(WeftError) as raised:
        topic.run({"valid": True}, {"valid": True}, {"valid": "maybe"})
    error = str(raised.value)
    for words in ("0:2", "'valid'", '"maybe"', "a string", "bool", "columns", "dead_letter_stream"):
        assert words in error


def test_parts_without_a_type_yet(kafka: Any) -> None:
    """Empty arrays and objects do not decide what comes later."""
    topic = Topic(kafka, transform_sql="SELECT to_json(struct(tags, o)) AS text FROM source")
    topic.run({"tags": [], "o": {"inner": {}}})
    topic.run({"tags": [1, 2], "o": {"inner": {"a": True}}})
    topic.run({"tags": [3], "o": {"inner": {"a": False, "b": "x"}, "c": 1}}, {"tags": ["x"]})
    assert [json.loads(text) for (text,) in rows("copies")] == [
        {"tags": [1, 2], "o": {"inner": {"a": True}}},
        {"tags": [3], "o": {"inner": {"a": False, "b": "x"}, "c": 1}},
        {"tags": [], "o": {"inner": "{}"}},
    ]
    assert [payload for _, payload in letters()] == [{"tags": ["x"]}]


@pytest.mark.parametrize("drift", ["evolve", "ignore"])
def test_integers_that_become_wider(drift: str, kafka: Any) -> None:
    topic = Topic(
        kafka, on_drift=drift, transform_sql="SELECT CAST(id AS DOUBLE) AS id, typeof(id) AS kind FROM source"
    )
    topic.run({"id": 1})
    topic.run({"id": 2}, {"id": 2.5})
    topic.run({"id": 3})
    kinds = [kind for _, kind in rows("copies")]
    assert kinds == (["bigint", "double", "double", "double"] if drift == "evolve" else ["bigint"] * 3)
    assert [payload for _, payload in letters()] == ([] if drift == "evolve" else [{"id": 2.5}])
