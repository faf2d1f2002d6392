"""Logs as JSON, on request."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from weft.operate.log_format import JsonFormatter

PIPELINES = """
import logging
import weft

@weft.pipeline(target="copies", schedule="* * * * *")
def copies():
    logging.getLogger("mine").warning("hello \\x1b from the function")
    raise ValueError("no rows today")
"""


@pytest.fixture(autouse=True)
def shop(project: Path) -> None:
    Path("shop.py").write_text(PIPELINES)
    Path("weft.toml").write_text('modules = ["shop"]\nalerters = ["http://127.0.0.1:1/x"]\n')


def logged(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_run_due(run: Any) -> None:
    done = run("run-due", "--log-format", "json")
    assert done.returncode == 1
    # The alerter has a thread of its own, which may be faster.
    by_logger = {each["logger"]: each for each in logged(done.stderr)}
    mine, failed, alerter = (by_logger[name] for name in ("mine", "weft.cli", "weft.operate"))
    assert len(logged(done.stderr)) == 3
    assert (failed["level"], failed["logger"], failed["pipeline"]) == ("error", "weft.cli", "copies")
    assert "no rows today" in failed["message"] and failed["attempt"] == 1
    assert all(line.startswith("{") for line in done.stderr.splitlines())
    assert (mine["level"], mine["logger"], mine["message"]) == ("warning", "mine", "hello \x1b from the function")
    assert set(mine) == {"time", "level", "logger", "message", "process"}
    assert "http://127.0.0.1:1/***" in alerter["message"]


def test_what_became_of_runs(run: Any) -> None:
    """Where a container or a scheduler collects the output of runs, every line is JSON."""
    Path("shop.py").write_text(PIPELINES.replace('raise ValueError("no rows today")', 'return [{"id": 1}]'))
    done = run("run-due", "--log-format", "json")
    assert (done.returncode, done.stdout) == (0, "")
    _, outcome = logged(done.stderr)
    assert (outcome["level"], outcome["pipeline"], outcome["outcome"]) == ("info", "copies", "succeeded")
    assert "copies: 1 read, 1 inserted" in outcome["message"] and "\x1b" not in outcome["message"]
    Path("shop.py").write_text("import weft\nweft.pipeline(name='later', target='t')(lambda: [])\n")
    done = run("run-due", "--log-format", "json")
    (nothing,) = logged(done.stderr)
    assert (done.stdout, nothing["message"]) == ("", "Nothing is due.")


def test_error_of_any_command(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_LOG_FORMAT", "json")
    done = run("runs", "show", "nothing")
    assert done.returncode == 1
    (error,) = logged(done.stderr)
    assert (error["level"], error["logger"]) == ("error", "weft.cli") and "nothing" in error["message"]
    assert len(done.stderr.splitlines()) == 1


def test_unknown_format(run: Any) -> None:
    assert "'xml' is not one of 'text', 'json'" in run("run-due", "--log-format", "xml").stderr


def test_values_that_are_no_json() -> None:
    record = logging.makeLogRecord({"msg": "of %s", "args": ("a\udcff",), "path": Path("/b\udcff"), "attempt": 1})
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["path"], line["attempt"]) == ("of a\\udcff", "/b\\udcff", 1)
    line = json.loads(JsonFormatter().format(logging.makeLogRecord({"msg": "x", "path": Path("/b")})))
    assert line["path"] == "/b"


def test_fields_of_a_record() -> None:
    record = logging.makeLogRecord({"msg": "%s began", "args": ("orders",), "pipeline": "orders", "run_id": "abc"})
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["pipeline"], line["run_id"]) == ("orders began", "orders", "abc")
