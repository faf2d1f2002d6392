"""What waits in a state, of one group or key: what `weft state show --key` shows."""

from __future__ import annotations

from datetime import UTC, date, datetime

import pyarrow as pa
import pytest

import weft
from weft.engine.streaming.status import waiting_in
from weft.errors import DeclarationError
from weft.pipelines.streaming.declare import make
from weft.systems.state_in_memory import InMemoryState
from weft.systems.state_store import END, StateBatch


@pytest.mark.usefixtures("here")
def test_what_waits_of_one_key() -> None:
    sides = [weft.Source(query=weft.stream(name=name, fields={"at": "timestamp"})(lambda: None)) for name in "lr"]
    counts = [weft.Aggregation(agg="count", as_="n")]
    window = weft.Window(kind="tumbling", duration_ms=60_000, group_by=("day", "user"), aggregations=counts)
    windows = make(name="w", source=sides[0], target="default", target_table="t", window=window)
    stored = InMemoryState()
    ends = [60_000_000, 120_000_000]
    groups = [("2026-11-01", 1), ("2026-11-01", 2), ("2026-11-02", 1)]
    rows = [{END: end, "day": date.fromisoformat(day), "user": user} for end in ends for day, user in groups]
    rows.append({END: ends[1], "day": None, "user": 1})
    schema = pa.schema([(END, pa.int64()), ("day", pa.date32()), ("user", pa.int64())])
    stored.append(pa.Table.from_pylist(rows, schema), StateBatch(0, ends[0], None))
    (found,) = waiting_in(windows, stored, ("2026-11-01", "1"))  # the first window has closed
    assert (found["window_end"], found["rows"]) == (datetime(1970, 1, 1, 0, 2, tzinfo=UTC), 1)
    assert waiting_in(windows, stored)[0]["rows"] == 4
    assert waiting_in(windows, stored, ("2026-11-03", "1")) == []
    with pytest.raises(DeclarationError, match="has 2 columns, not 1: day, user"):
        waiting_in(windows, stored, ("1",))
    with pytest.raises(DeclarationError, match=r"No row of w has such a key: day, user: .*'x'"):
        waiting_in(windows, stored, ("2026-11-01", "x"))

    join = weft.Join(left_source="l", right_source="r", left_keys="id", right_keys="of", time_window_ms=1)
    joined = make(name="j", sources=sides, target="default", target_table="t", join=join)
    stored = InMemoryState()
    rows = [{END: 1, "left_id": 1}, {END: 1, "left_id": 2}, {END: 2, "right_of": "1"}, {END: 2, "right_of": "x"}]
    schema = pa.schema([(END, pa.int64()), ("left_id", pa.int64()), ("right_of", pa.string())])
    stored.append(pa.Table.from_pylist(rows, schema), StateBatch(0, None, None))
    assert [each["rows"] for each in waiting_in(joined, stored, ("1",))] == [1, 1]
    assert [each["rows"] for each in waiting_in(joined, stored, ("x",))] == [1]  # one side has numbers alone
