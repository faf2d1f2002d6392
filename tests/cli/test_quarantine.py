"""`weft quarantine` lists the rows that pipelines put aside, loads them again and removes them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

import weft
from weft.engine.run import PipelineRun
from weft.expectations import not_null, range
from weft.project import current

pytestmark = pytest.mark.parametrize("system", ["sqlite"], indirect=True)
ROWS = [{"id": 1, "amount": 1}, {"id": 2, "amount": -1}, {"id": 3, "amount": -3}, {"id": None, "amount": 5}]


def declared(*expectations: Any) -> Any:
    current().pipelines.clear()
    options: dict[str, Any] = {"expectations": list(expectations), "on_quality_failure": "quarantine"}
    return weft.pipeline(target="sales", name="sales", **options)(lambda: ROWS)


def test_list_replay_and_purge(streams, call) -> None:
    negative = range("amount", min=0)
    pipeline = declared(negative, not_null("id"))
    assert "No pipeline has rows in quarantine." in call("quarantine", "list").stderr
    PipelineRun(pipeline, "first", datetime.now(UTC)).execute()
    listed = json.loads(call("quarantine", "list", "--format", "json").stdout)
    assert [(each["rows"], each["error"]) for each in listed] == [
        (2, f"expectation {negative}"),
        (1, "expectation not_null(id)"),
    ]
    shown = call("quarantine", "list", "sales").stdout
    assert listed[0]["group"] in shown and "sales__quarantine" in shown
    assert "Give one of --all and --group. Which rows?" in call("quarantine", "replay", "sales", code=2).stderr
    declared(not_null("id"))
    replay = ["quarantine", "replay", "sales", "--all"]
    assert "3 rows would be loaded once more" in call(*replay, "--dry-run").stdout
    assert "has 3 such rows in quarantine by now, not 2" in call(*replay, "--expect", "2", code=1).stderr
    assert call(*replay, "--expect", "3").stdout == "sales: loaded 2 rows; 1 failed again.\n"
    purge = ["quarantine", "purge", "sales", "--group", listed[1]["group"]]
    assert "Remove 1 row of sales from sales__quarantine? Nobody can answer" in call(*purge, code=2).stderr
    assert call(*purge, "--yes").stdout == "sales: removed 1 row.\n"
    assert "sales has no rows in quarantine." in call("quarantine", "list", "sales").stderr
    assert "has no group" in call(*purge, "--yes", code=1).stderr
