"""The payloads of dead letters as rows again, before Spark has them."""

from __future__ import annotations

import json
from math import inf

import pyarrow as pa

from weft.engine.streaming import replay
from weft.systems.dead_letter_store import StoredLetter


def test_objects_that_look_like_nan() -> None:
    """They are what somebody sent, as Avro writes a float of a union."""
    known = {
        "id": pa.field("id", pa.int64()),
        "x": pa.field("x", pa.float64()),
        "Doc": pa.field("Doc", pa.struct([("float", pa.string())])),
        "more": pa.field("more", pa.json_()),
    }
    for stage, x in (("read", {"float": "NaN"}), ("transform", inf), ("store", inf)):
        word = {"float": "NaN" if stage == "read" else "Infinity"}
        row = {"id": 1, "x": word, "doc": {"float": "NaN"}, "more": {"float": "NaN"}}
        letter = StoredLetter.of({"stage": stage, "payload": json.dumps(row), "pipeline": "p", "letter_id": "1"})
        assert letter is not None
        assert replay._object(letter, known) == row | {"x": x}
    nested = '{"id": 1, "doc": {"u": {"float": "NaN"}}, "list": [{"float": "NaN"}]}'
    table, _, bad = replay._parsed([json.loads(nested)], known, {"id": pa.int64(), "doc": pa.json_()})
    assert not bad
    assert json.loads(table["Doc"].to_pylist()[0]) == {"u": {"float": "NaN"}}
