"""Values of dead letters that are replayed: those that were published, with all their digits."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import weft
from engine.streaming.conftest import declare, rows, run_once
from engine.streaming.letters import letters_of, pipeline_of, put, replay_all
from weft.engine.payload_rows import parsed_rows, row_of
from weft.pipelines.streaming.declare import make
from weft.systems.dead_letter_store import DeadLetter

pytestmark = pytest.mark.spark


@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "streams")
def test_values_of_every_type() -> None:
    """A row that is replayed is the row that was published."""
    event = {
        "s": 'q"é\n\t\\ \u2028',
        "b": True,
        "i": -(2**63),
        "f": 0.1,
        "d": Decimal("-12345678.90"),
        "day": date(1, 1, 1),
        "at": datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC),
        "j": {"a": [1, None, "x"]},
        "raw": b"\x00\xff",
        "u": UUID("12345678-1234-5678-1234-567812345678"),
        "empty": None,
    }
    kinds = {
        "s": "string",
        "b": "bool",
        "i": "int64",
        "f": "float64",
        "d": "decimal(10,2)",
        "day": "date",
        "at": "timestamp",
        "j": "json",
        "raw": "bytes",
        "u": "uuid",
        "empty": "int32?",
    }
    events = weft.stream(name="events", fields=kinds, on_schema_drift="evolve")(lambda: None)
    weft.publish_sync(events, [event])
    columns = "s, b, i, f, d, day, at, CAST(j AS STRING) j, raw, CAST(u AS STRING) u, empty, _event_ts"
    declared: dict[str, Any] = {
        "name": "all",
        "source": events,
        "target": "default",
        "transform_on_error": "dlq",
        "dead_letter_table": "failed",
    }
    run_once(**{**declared, "name": "right"}, target_table="right", transform_sql=f"SELECT {columns} FROM source")
    run_once(**declared, target_table="late", transform_sql=f"SELECT {columns}, CAST(s AS INT) AS x FROM source")
    mended = make(**declared, target_table="late", transform_sql=f"SELECT {columns} FROM source")
    assert len(letters_of(mended)) == 1
    assert replay_all(mended).again == 0
    assert rows("late", columns.replace("CAST(j AS STRING) ", "").replace("CAST(u AS STRING) ", "")) == rows(
        "right", columns.replace("CAST(j AS STRING) ", "").replace("CAST(u AS STRING) ", "")
    )


def _copies(duck: Any, **fields: str) -> Any:
    return pipeline_of(
        source=declare(**fields),
        targets=[weft.Target(connection=duck, table=(None, "copies"))],
        dead_letter_table="failed",
        dead_letter_connection="default",
    )


@pytest.mark.brief("read")
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("stage", ["read", "store"])
def test_numbers_that_json_has_no_word_for(stage: Any, project: Path) -> None:
    """Rows of files and of SQL can have them. Older payloads write them as Python does."""
    duck = weft.DuckDBConnection(str(project / "copies.duckdb"), name="duck")
    pipeline = _copies(duck, n="int64", x="float64")
    weft.load([{"n": 0, "x": 0.5}], target="copies", connection=duck)
    worded = '{"n": 2, "x": {"_weft_float": "-Infinity"}}'
    payloads = ['{"n": 1, "x": NaN}', worded, '{"n": 3, "x": 1}', '{"n": 4, "x": [{"_weft_float": "NaN"}]}']
    put(pipeline, [DeadLetter(stage, "?", "events", each, target="copies") for each in payloads])
    assert replay_all(pipeline).again == 1
    assert str(rows("copies", "n, x", duck)) == "[(0, 0.5), (1, nan), (2, -inf), (3, 1.0)]"
    (letter,) = letters_of(pipeline)
    assert (letter.payload, letter.replays) == (payloads[3], 1)
    assert "NaN or infinity in it" in letter.error


@pytest.mark.brief("store")
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("stage", ["read", "store"])
def test_decimals_keep_their_digits(stage: Any, project: Path) -> None:
    duck = weft.DuckDBConnection(str(project / "copies.duckdb"), name="duck")
    pipeline = _copies(duck, n="int64", x="decimal(38,18)")
    exact = Decimal("12345678901234567890.123456789012345678")
    weft.load([{"n": 0, "x": exact}], target="copies", connection=duck)
    payloads = [f'{{"n": 1, "x": {exact}}}', '{"n": 2, "x": 1e-30}']
    put(pipeline, [DeadLetter(stage, "?", "events", each, target="copies") for each in payloads])
    assert replay_all(pipeline).again == 1
    assert rows("copies", "n, x", duck) == [(0, exact), (1, exact)]
    assert [each.payload for each in letters_of(pipeline)] == [payloads[1]]


@pytest.mark.brief("read")
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("stage", ["read", "store"])
def test_numbers_are_those_that_were_written(stage: Any, project: Path) -> None:
    duck = weft.DuckDBConnection(str(project / "copies.duckdb"), name="duck")
    pipeline = _copies(duck, n="int64", x="float64", j="json")
    weft.load(pa.table({"n": [0], "x": [0.5], "j": pa.array(["0"], pa.json_())}), target="copies", connection=duck)
    document = '{"deep":[12345678901234567890.123456789012345678,-0,1e2]}'
    held = json.dumps(document)
    payloads = [f'{{"n": 1, "x": 1e2, "j": {held}}}', '{"n": 2, "x": 1e400}', f'{{"n": 3, "x": NaN, "j": {held}}}']
    put(pipeline, [DeadLetter(stage, "?", "events", each, target="copies") for each in payloads])
    assert replay_all(pipeline).again == 1
    assert str(rows("copies", "n, x, CAST(j AS VARCHAR)", duck)) == str(
        [(0, 0.5, "0"), (1, 100.0, document), (3, float("nan"), document)]
    )
    (letter,) = letters_of(pipeline)
    assert (letter.payload, letter.replays) == (payloads[1], 1)
    assert "beyond the largest of a 64-bit float" in letter.error
    # Of sources whose columns are declared.
    sent = row_of(f'{{"j": {document}, "more": "\\ud800"}}')
    assert sent is not None
    assert "not UTF-8" in parsed_rows([sent], {}, {"j": pa.json_()})[2][0]
    del sent["more"]
    assert parsed_rows([sent], {}, {"j": pa.json_()})[0].to_pydict() == {"j": [document]}


@pytest.mark.usefixtures("plain_spark", "here")
def test_what_a_stream_has_no_field_for() -> None:
    """It is where it was for the SQL, and no new column of the target."""
    pipeline = pipeline_of(
        source=declare(n="int64"),
        transform_sql="SELECT n, _weft_extra AS more FROM source",
        transform_on_error="dlq",
        dead_letter_table="failed",
    )
    payload = '{"n": 1, "odd": [1, 1e22], "_event_ts": "2026-01-31T00:00:00Z"}'
    put(pipeline, [DeadLetter("transform", "?", "events", payload, "1")])
    assert replay_all(pipeline).again == 0
    assert rows("copies") == [(1, '{"odd":[1,1e22]}')]  # as a stream stores it
