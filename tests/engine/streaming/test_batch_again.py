"""A batch that failed is tried again: each of its rows is in the target or a dead letter, once, whatever the first
attempt left behind."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from engine.streaming.conftest import rows
from engine.streaming.letters import letters_of
from engine.streaming.test_column_types import Topic
from engine.streaming.test_evolve import at
from engine.streaming.test_odd_keys import Place, copying, letters, place  # noqa: F401 - fixture
from weft.errors import StorageError
from weft.pipelines.streaming.declare import make

pytestmark = pytest.mark.usefixtures("spark", "here")

MANY = {f"k{number}": number for number in range(101)}


@pytest.mark.full
@pytest.mark.parametrize("table", ["there", "made"])
def test_columns_that_a_table_got_before_its_rows(table: str, place: Place, kafka: Any) -> None:  # noqa: F811
    """They change neither which rows are put aside nor how many columns it gets."""
    topic = copying(kafka, place, max_new_columns=3)
    if table == "there":
        topic.run({"id": 1})

    def crash() -> None:
        raise RuntimeError("as if killed")

    step = {"delta": "altered" if table == "there" else "begun", "parquet": "staged"}.get(place.kind, "begun")
    with at(step, crash), pytest.raises(RuntimeError, match="as if killed"):
        topic.run({"id": 2, **MANY}, *({"id": 10 + number, f"k{number}": number} for number in range(5)))
    topic.run()
    topic.run({"id": 20, "k3": 3, "k4": 4})
    stored = [10, 11, 12, 13, 14, *([1] if table == "there" else []), 20]
    assert sorted(place.rows("id")) == sorted((each,) for each in stored)
    assert place.columns == ["id", "k0", "k1", "k2"]
    assert [payload["id"] for _, _, payload in letters()] == [2]


@pytest.mark.full
@pytest.mark.parametrize("store", ["stream", "table", "topic", "path"])
def test_letters_of_an_attempt_that_failed(store: str, kafka: Any, project: Path) -> None:
    """A batch whose numbers make the SQL wrong is read again without them. Where that fails too, nothing stays."""
    where = _place(store, kafka)
    bits = "SELECT id, {} & 1 AS bit FROM source"
    topic = Topic(kafka, transform_sql=bits.format("flags"), **where)
    found = functools.partial(_letters, topic)

    def fail() -> None:
        raise StorageError("The disk is full.")

    topic.run({"id": 0, "flags": 3})
    for first in (1, 3):
        with at("begun", fail), pytest.raises(StorageError, match="The disk is full"):
            topic.run({"id": first, "flags": 4}, {"id": first + 1, "flags": 1.5})
        assert found() == ([] if first == 1 else [2])
        if first == 1:
            topic.run()
            assert found() == [2]
    topic.declared["transform_sql"] = bits.format("CAST(flags AS BIGINT)")
    topic.run()
    assert found() == [2]
    assert rows("copies") == [(0, 1), (1, 0), (3, 0), (4, 1)]


@pytest.mark.full
@pytest.mark.parametrize("batch", ["first", "later", "killed"])
@pytest.mark.parametrize("store", ["stream", "topic", "path"])
def test_letters_of_an_attempt_under_other_sql(store: str, batch: str, kafka: Any, project: Path) -> None:
    """Nothing of it was stored: rows that the next attempt loads are no letters any more. If that one is killed before
    it removes them, the attempt after it does."""
    to_number = "SELECT id, CAST({} AS INT) AS n FROM source"
    topic = Topic(kafka, transform_sql=to_number.format("text"), transform_on_error="dlq", **_place(store, kafka))
    if batch == "later":
        topic.run({"id": 0, "text": "x"}, {"id": 1, "text": "1"})
    before, stored = ([0], [(1, 1)]) if batch == "later" else ([], [])
    error = StorageError if batch == "first" else RuntimeError

    def crash() -> None:
        raise error("as if killed")

    with at("begun", crash), pytest.raises(error, match="as if killed"):
        topic.run({"id": 2, "text": "x"}, {"id": 3, "text": "y"}, {"id": 4, "text": "4"})
    assert _letters(topic) == [*before, 2, 3]
    topic.declared["transform_sql"] = to_number.format("replace(text, 'x', '7')")
    if batch == "killed":
        with at("committed", crash), pytest.raises(error, match="as if killed"):
            topic.run()
        assert _letters(topic) == [2, 3]
    topic.run()
    assert _letters(topic) == [*before, 3]
    assert rows("copies", "id, n") == [*stored, (2, 7), (4, 4)]


def _place(store: str, kafka: Any) -> dict[str, Any]:
    """Where a pipeline has its dead letters; a stream is what it has anyway."""
    if store == "stream":
        return {}
    name = kafka.create_topic() if store == "topic" else "failed"
    return {f"dead_letter_{store}": name, "dead_letter_stream": None}


def _letters(topic: Topic) -> list[int]:
    found = letters_of(make(target="default", **topic.declared))
    return sorted(json.loads(each.payload)["id"] for each in found)
