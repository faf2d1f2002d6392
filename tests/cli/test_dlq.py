"""`weft dlq`: looking at dead letters, replaying them, removing them."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.engine.streaming.batch_id import BatchId
from weft.engine.streaming.dead_letters import DeadLetterBox
from weft.pipelines.streaming.declare import find
from weft.project import Project
from weft.server.streaming import read_one
from weft.systems.dead_letter_store import DeadLetter

pytest.importorskip("pyspark")

pytestmark = pytest.mark.spark

FLOWS = """
import weft


@weft.stream(fields={"n": "int64", "text": "string"})
def events():
    pass


@weft.streaming_pipeline(source=events, target="default", target_table="copies", dead_letter_table="failed")
def copies():
    pass


@weft.streaming_pipeline(source=events, target="default", target_table="others", dead_letter_path="bad")
def others():
    pass


@weft.streaming_pipeline(source=events, target="default", target_table="third")
def careless():
    pass
"""
LETTERS = [
    DeadLetter("read", "It is not JSON: \x1b[31mtruncated.", "events", "{", "0:3"),
    DeadLetter("transform", "The value 'x' cannot be cast to INT", "events", '{"n": 1, "text": "é"}', "4"),
    DeadLetter("store", "null value in column n", "events", '{"n": 2, "text": "b"}', target="copies"),
]


@pytest.fixture
def flows(local: Project, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelines, one of which has three letters."""
    Path("flows.py").write_text(FLOWS)
    Path("weft.toml").write_text('modules = ["flows"]\n')
    monkeypatch.syspath_prepend(project)
    monkeypatch.delitem(sys.modules, "flows", raising=False)
    local.load_modules(["flows"])
    box = DeadLetterBox(find("copies"))
    for number, letter in enumerate(LETTERS):
        box.put([letter], BatchId("query", number), letter.stage)


def listed(call: Any, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(call("dlq", "list", *arguments, "--format", "json").stdout)
    return found


def rows(table: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(".weft/weft.db")) as database:
        return sorted(database.execute(f"SELECT n, text FROM {table}"))


@pytest.mark.usefixtures("flows")
def test_list(call: Any) -> None:
    found = listed(call, "copies")
    assert [each["stage"] for each in found] == ["store", "transform", "read"], "the newest first"
    assert found[1].keys() >= {"failed_at", "letter_id", "error", "source", "offset", "payload", "batch", "replays"}
    assert datetime.fromisoformat(found[0]["failed_at"]) - datetime.now(UTC) < timedelta(minutes=10)
    assert [each["stage"] for each in listed(call, "copies", "--stage", "read")] == ["read"]
    assert [each["stage"] for each in listed(call, "copies", "--error", "CAST")] == ["transform"]
    assert listed(call, "copies", "--limit", "2") == found[:2]

    shown = call("dlq", "list", "copies", "--limit", "2")
    assert [line.split()[0] for line in shown.stdout.splitlines()] == [
        "letter",
        found[0]["letter_id"][:12],
        found[1]["letter_id"][:12],
    ]
    assert shown.stderr == "1 more: --limit 3\n"
    assert call("dlq", "list", "others").stderr == "others has no dead letters.\n"
    assert call("dlq", "list", "copies", "--error", "no such").stderr == "copies has no such dead letters.\n"
    # The page of the service has them by their errors.
    letters = read_one(find("copies"))["dead_letters"]
    assert (letters["count"], letters["more"], letters["problem"]) == (3, False, None)
    assert {each["stage"]: each["count"] for each in letters["groups"]} == {"store": 1, "transform": 1, "read": 1}
    assert {each["letter_id"] for each in letters["groups"]} == {each["letter_id"] for each in found}


@pytest.mark.usefixtures("flows")
def test_list_all_pipelines(call: Any) -> None:
    found = {each["pipeline"]: each for each in listed(call)}
    assert set(found) == {"copies", "others"}, "the third has no place for them"
    assert (found["copies"]["letters"], found["others"]["letters"]) == (3, 0)
    assert (found["copies"]["place"], found["others"]["newest"]) == ("table failed of the connection 'default'", None)
    assert "cast" in listed(call, "--stage", "transform")[0]["commonest_error"]
    # A place that cannot be read does not keep anybody from the others.
    Path("bad").write_text("no folder")
    found = {each["pipeline"]: each for each in listed(call)}
    assert found["copies"]["letters"] == 3
    assert found["others"]["letters"] is None
    assert "bad" in found["others"]["failure"]
    assert "?" in call("dlq", "list").stdout


@pytest.mark.usefixtures("flows")
def test_show_values_as_they_were_written(call: Any) -> None:
    written = ["1e400", "12345678901234567890.10", "-0", '{"x":1,"x":2}', '"\\u00e9"', "[]", "9" * 5000]
    box = DeadLetterBox(find("others"))
    for number, value in enumerate([*written, "NaN", "[" * 20_000]):
        box.put([DeadLetter("read", value[:20], "events", f'{{"n":{value}}}')], BatchId("query", number), "read")
    for letter in listed(call, "others"):
        shown = call("dlq", "show", "others", letter["letter_id"]).stdout.partition("payload:")[2]
        assert "".join(shown.split()) == letter["payload"]


@pytest.mark.usefixtures("flows")
def test_show(call: Any) -> None:
    store, transform, read = listed(call, "copies")
    shown = call("dlq", "show", "copies", transform["letter_id"][:8]).stdout
    assert f"letter:      {transform['letter_id']}\n" in shown
    for line in ("stage:       transform", "source:      events", "offset:      4", "batch:       1", "replays:     0"):
        assert line in shown.splitlines()
    assert 'payload:\n  {\n    "n": 1,\n    "text": "é"\n  }\n' in shown
    assert "target:      copies" in call("dlq", "show", "copies", store["letter_id"]).stdout
    # What is no JSON is shown as it is, and drives no terminal.
    shown = call("dlq", "show", "copies", read["letter_id"]).stdout
    assert shown.endswith("payload:\n  {\n")
    assert "\x1b" not in shown
    assert json.loads(call("dlq", "show", "copies", read["letter_id"], "--format", "json").stdout) == read


@pytest.mark.usefixtures("flows")
def test_what_cannot_be_found(call: Any) -> None:
    def refused(*arguments: str, code: int = 1) -> str:
        return str(call("dlq", *arguments, code=code).stderr)

    assert "There is no streaming pipeline named 'copis'" in (told := refused("list", "copis"))
    assert "Did you mean 'copies'?" in told
    told = refused("list", "careless")
    assert "careless has no place for dead letters" in told
    assert "dead_letter_table" in told
    letter = listed(call, "copies")[0]["letter_id"]
    wrong = f"{letter[:7]}_{letter[8:]}"
    assert f"copies has no dead letter '{wrong}'.\n  Did you mean '{letter}'?" in refused("show", "copies", wrong)
    assert "3 dead letters begin with ''" in refused("show", "copies", "")
    assert "Which letters?" in refused("replay", "copies", code=2)
    assert "one of --id, --all" in refused("replay", "copies", "--all", "--id", letter, code=2)
    assert "one of --id, --all" in refused("purge", "copies", "--all", "--before", "10m", code=2)
    assert "no such option" in refused("replay", "copies", "--everything", code=2).lower()


@pytest.mark.usefixtures("flows")
def test_replay(call: Any) -> None:
    store, transform, read = (each["letter_id"] for each in listed(call, "copies"))
    told = call("dlq", "replay", "copies", "--all", "--dry-run").stdout
    assert told == "copies: 3 letters would be replayed. Nothing was done.\n"
    assert len(listed(call, "copies")) == 3
    assert call("dlq", "replay", "copies", "--id", store[:6]).stdout == "copies: replayed 1 letter; 0 failed again.\n"
    assert rows("copies") == [(2, "b")]
    assert [each["letter_id"] for each in listed(call, "copies")] == [transform, read]
    assert call("dlq", "replay", "copies", "--error", "json").stdout == "copies: replayed 1 letter; 1 failed again.\n"
    found = json.loads(call("dlq", "replay", "copies", "--all", "--max-replays", "1", "--format", "json").stdout)
    (again,) = listed(call, "copies")
    assert found == {
        "pipeline": "copies",
        "dry_run": False,
        "letters": 1,
        "finished": 0,
        "again": 0,
        "held": {again["letter_id"]: "it failed in 1 replay"},
    }
    assert rows("copies") == [(1, "é"), (2, "b")]
    done = call("dlq", "replay", "copies", "--all", "--max-replays", "1")
    assert done.stdout == "copies: replayed 0 letters; 0 failed again.\n"
    held = f"{again['letter_id'][:12]} (it failed in 1 replay)"
    assert done.stderr == f"note: 1 letter left alone: {held}.\n  To try them all the same: --max-replays 2\n"


@pytest.mark.usefixtures("flows")
def test_purge(call: Any, project: Path) -> None:
    told = call("dlq", "purge", "copies", "--error", "cast", "--dry-run").stdout
    assert told == "copies: 1 letter would be removed. Nothing was done.\n"
    refused = call("dlq", "purge", "copies", "--all", code=2).stderr
    assert "Remove 3 letters of copies from table failed" in refused
    assert "--yes" in refused
    assert len(listed(call, "copies")) == 3
    assert call("dlq", "purge", "copies", "--error", "cast", "--yes").stdout == "copies: removed 1 letter.\n"
    assert [each["stage"] for each in listed(call, "copies")] == ["store", "read"]
    assert call("dlq", "purge", "copies", "--before", "1h", "--yes").stdout == "copies: removed 0 letters.\n"
    last = listed(call, "copies")[0]["letter_id"]
    call("dlq", "purge", "copies", "--id", last[:10], "-y")
    assert [each["stage"] for each in listed(call, "copies")] == ["read"]
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert call("dlq", "purge", "copies", "--before", soon, "-y").stdout == "copies: removed 1 letter.\n"
    assert listed(call, "copies") == []
    with closing(sqlite3.connect(".weft/weft.db")) as database:
        assert database.execute("SELECT count(*) FROM failed").fetchall() == [(0,)]


@pytest.mark.usefixtures("flows")
def test_a_toml_file(call: Any) -> None:
    Path("copies.toml").write_text(
        """
        pipeline_name = "copies"
        dead_letter_table = "failed"
        source_query = "events"
        [source]
        connection = "default"
        [target]
        connection = "default"
        [target.table]
        name = "copies"
        """
    )
    assert len(listed(call, "copies.toml")) == 3
    assert call("dlq", "replay", "copies.toml", "--error", "null").stdout.startswith("copies: replayed 1 letter;")


@pytest.mark.brief("80")
@pytest.mark.usefixtures("flows")
@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal(on_a_terminal: Callable[..., tuple[int, str]], columns: int) -> None:
    weft.streams.close()
    code, shown = on_a_terminal("dlq", "list", "copies", columns=columns)
    assert code == 0
    assert max(map(len, shown.splitlines())) <= columns
    assert len(re.findall(r"^[0-9a-f]{12} ", shown, re.MULTILINE)) == 3
    assert "cannot be cast to INT" in shown
    code, shown = on_a_terminal("dlq", "list", columns=columns)
    assert (code, max(map(len, shown.splitlines())) <= columns) == (0, True)
    code, shown = on_a_terminal("dlq", "purge", "copies", "--all", typed="n\n", columns=columns)
    assert code == 1
    assert "Remove 3 letters of copies from table failed of the connection 'default'? [y/N]" in " ".join(shown.split())
    code, shown = on_a_terminal("dlq", "purge", "copies", "--all", typed="y\n", columns=columns)
    assert (code, shown.endswith("copies: removed 3 letters.\n")) == (0, True)
