"""Dead letters of lines of files that are no rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weft
from engine.streaming.conftest import forget_last_commit, rows, run_once
from engine.streaming.letters import kept_letters, replay_all
from weft.errors import WeftError
from weft.pipelines.streaming.declare import make

pytestmark = pytest.mark.usefixtures("plain_spark")


@pytest.mark.full
@pytest.mark.usefixtures("here")
def test_lines_of_files_that_are_no_rows(project: Path, count: Callable[..., int]) -> None:
    lake = weft.ObjectStoreLocalConnection("lake", name="lake")
    files = {
        "json/a.json": b'{"n": 1}\n[2]\n{"n": 3, "text": "\xff"}\n{"n": 4, "te',
        "json/b.json": b'{"n": 5, "text": "x"}\n',
        "bad/a.json": b"nothing\n\n5\n",
        "csv/a.csv": b"n,text\n1,x\n2,x,y\n3\n" + b"".join(b"%d,x\n" % n for n in range(4, 1100)) + b"many,x\n",
    }
    for name, data in files.items():
        (project / "lake" / name).parent.mkdir(parents=True, exist_ok=True)
        (project / "lake" / name).write_bytes(data)
    pipeline: dict[str, Any] = {"source": lake, "dead_letter_path": "failed"}
    is_full = count(2, 1) > 1
    for prefix in ("json", "bad", "csv"):
        if is_full or prefix == "csv":
            with pytest.raises(WeftError, match=rf"lines of {prefix} cannot be parsed, the first at {prefix}/a\."):
                run_once(name=f"{prefix} alone", source=lake, source_query=prefix, target_table="none")
        run_once(name=prefix, source_query=prefix, target_table=prefix, **pipeline)
        if is_full or prefix == "csv":
            forget_last_commit(prefix)
            run_once(name=prefix, source_query=prefix, target_table=prefix, **pipeline)
    assert rows("json", "n, text") == [(1, None), (5, "x")]
    assert len(rows("csv", "n")) == 1097
    found = {(each["pipeline"], each["offset"], each["payload"]) for each in kept_letters("path", project)}
    assert len(found) == len(kept_letters("path", project))
    assert {each["error"] for each in kept_letters("path", project)} == {
        "It is not a JSON object.",
        "It cannot be parsed as a row of these columns: n bigint, text string.",
    }
    assert {each[2] for each in found if each[0] == "bad"} == {"nothing", "5"}
    assert {each[2].strip() for each in found if each[0] == "csv"} == {"2,x,y", "3", "many,x"}
    assert {each[1:] for each in found if each[0] == "json"} == {
        ("json/a.json", "[2]"),
        ("json/a.json", '{"n": 3, "text": "\\xff"}'),
        ("json/a.json", '{"n": 4, "te'),
    }
    tried = replay_all(make(name="csv", source_query="csv", target="default", target_table="csv", **pipeline))
    assert tried.letters == 0 and len(tried.held) == 3
    assert {*tried.held.values()} == {"it is a line of csv: put it, mended, into a new file of csv"}
    run_once(
        name="dropping",
        source=lake,
        source_query="json",
        target_table="dropping",
        transform_sql="SELECT n FROM source",
        transform_on_error="drop",
    )
    assert rows("dropping") == [(1,), (5,)]
    # What could not be read leaves no column behind.
    (project / "lake/json/c.json").write_bytes(b'{"n": 6}\n')
    run_once(name="json", source_query="json", target_table="json", **pipeline)
    assert rows("json", "*")[-1][:2] == (6, None) and len(rows("json", "*")[0]) == 3


CSV_OPTIONS = [
    ({"null_regex": "^-$"}, 3, {"2,x,y", "3", "4,x,y,z", '-,"a, b",', 'many,"-, "'}),
    ({"truncated_rows_ok": True}, 3, {"2,x,y", "4,x,y,z", "-,x", '-,"a, b",', 'many,"-, "'}),
    ({"null_regex": "^-$", "truncated_rows_ok": True}, 5, {"2,x,y", "4,x,y,z", 'many,"-, "'}),
]


@pytest.mark.full
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("options", "good", "bad"), CSV_OPTIONS)
def test_rows_of_files_that_are_read_as_texts_first(
    options: dict[str, Any], good: int, bad: set[str], project: Path, count: Callable[..., int]
) -> None:
    many = "".join(f"{n},x\n" for n in range(10, 1010))
    (project / "lake/raw").mkdir(parents=True)
    (project / "lake/raw/a.csv").write_text(f'n,text\n{many}1,x\n2,x,y\n3\n-,x\n-,"a, b",\nmany,"-, "\n')
    (project / "lake/raw/b.csv").write_text("n,text\n1,-\n4,x,y,z\n")
    lake = weft.ObjectStoreLocalConnection("lake", name="lake", format="csv", csv_read_options=options)
    pipeline: dict[str, Any] = {"source": lake, "source_query": "raw", "target_table": "copies"}
    with pytest.raises(WeftError, match=r"lines of raw cannot be parsed, the first at raw/[ab]\.csv"):
        run_once(name="alone", **pipeline)
    for _ in range(count(2, 1)):
        run_once(name="numbers", dead_letter_path="failed", **pipeline)
        assert len(rows("copies")) == 1000 + good
        letters = kept_letters("path", project)
        assert len(letters) == len(bad)
        forget_last_commit("numbers")
    assert {each["payload"].strip() for each in letters} == bad
    assert {each["error"] for each in letters} == {
        "It cannot be parsed as a row of these columns: n bigint, text string."
    }
