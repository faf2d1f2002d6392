"""A batch that failed is tried again: each of its rows is in the target or a dead letter, once, whatever the first
attempt left behind."""

from __future__ import annotations

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


@pytest.mark.brief("sqlite-there", "mysql-made", "delta-there")
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


@pytest.mark.brief("stream")
@pytest.mark.parametrize("store", ["stream", "table", "topic", "path"])
def test_letters_of_an_attempt_that_failed(store: str, kafka: Any, project: Path) -> None:
    """A batch whose numbers make the SQL wrong is read again without them. Where that fails too, nothing stays."""
    where: dict[str, Any] = {f"dead_letter_{store}": "failed", "dead_letter_stream": None}
    if store == "stream":
        where = {}
    if store == "topic":
        where["dead_letter_topic"] = kafka.create_topic()
    bits = "SELECT id, {} & 1 AS bit FROM source"
    topic = Topic(kafka, transform_sql=bits.format("flags"), **where)
    pipeline = make(target="default", **topic.declared)

    def found() -> list[int]:
        return [json.loads(each.payload)["id"] for each in letters_of(pipeline)]

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
