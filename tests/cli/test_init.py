"""`weft init` starts a project that works as it is."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from weft.project import Project, use
from weft.testing import table_rows


@pytest.mark.parametrize("folder", [".", "new/project"])
def test_files(run, folder: str) -> None:
    done = run("init", folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert tomllib.loads(Path(folder, "weft.toml").read_text()) == {"modules": ["my_streams", "my_pipelines"]}
    assert "@stream(" in Path(folder, "my_streams.py").read_text()
    assert Path(folder, ".gitignore").read_text() == ".weft/\n"
    assert "weft streams publish page_views --data '{" in done.stdout
    assert "weft streams tail page_views" in done.stdout
    assert (f"cd {folder}" in done.stdout) == (folder != ".")


def test_commented_connection_is_valid_once_uncommented(run) -> None:
    run("init")
    text = Path("weft.toml").read_text()
    text = text.replace("# [connections", "[connections").replace("# url", "url")
    assert tomllib.loads(text)["connections"]["default"]["url"].startswith("postgres://")


@pytest.mark.parametrize("name", ["weft.toml", "my_streams.py", "my_pipelines.py"])
def test_nothing_is_overwritten_unless_forced(run, name: str) -> None:
    Path(name).write_text("# mine\n")
    done = run("init")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {name} exists already; nothing was written.")
    assert [each.name for each in Path().iterdir()] == [name]
    assert Path(name).read_text() == "# mine\n"
    assert run("init", "--force").returncode == 0
    assert Path(name).read_text() != "# mine\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [("*.pyc", "*.pyc\n.weft/\n"), ("*.pyc\n", "*.pyc\n.weft/\n"), (".weft/\n*.pyc\n", ".weft/\n*.pyc\n")],
)
def test_gitignore_is_added_to(run, before: str, after: str) -> None:
    Path(".gitignore").write_text(before)
    run("init")
    assert Path(".gitignore").read_text() == after


def test_place_that_cannot_be_written(run) -> None:
    Path("file").write_text("")
    done = run("init", "file/project")
    assert done.returncode == 1
    assert done.stderr.startswith("error: file/project cannot be written: Not a directory.")


def test_first_steps_work(run) -> None:
    run("init")
    published = run("streams", "publish", "page_views", "--data", '{"user_id": "u_123", "page": "/"}')
    assert published.returncode == 0, published.stderr
    listed = run("streams", "list")
    assert "page_views" in listed.stdout, listed.stderr
    ran = run("run", "views_by_page")
    assert "analytics.views_by_page: 1 read, 1 inserted (pushdown)" in ran.stdout, ran.stderr
    assert "succeeded" in run("status").stdout


@pytest.mark.parametrize(
    "command", [("run", "--all"), ("run-due",), ("preview", "views_by_page"), ("validate",)], ids=" ".join
)
def test_before_anything_is_published(run, command: tuple[str, ...]) -> None:
    run("init")
    failed = run(*command)
    assert failed.returncode == 1
    assert "The table of the stream 'page_views' is created when something is first published to it: " in failed.stderr
    assert "weft streams publish page_views --data" in failed.stderr
    # Nor a path of ours, which nobody knows.
    assert "weft-preview" not in failed.stdout + failed.stderr
    run("streams", "publish", "page_views", "--data", '{"user_id": "u_123", "page": "/"}')
    done = run(*command)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("system", ["postgres", "mysql"], indirect=True)
def test_before_anything_is_published_to_a_server(run, system, monkeypatch) -> None:
    """Each says in its own words that there is no such table."""
    run("init")
    monkeypatch.setenv("WEFT_DSN", system.url)
    assert "weft streams publish page_views --data" in run("run", "--all").stderr


ODD_EVENTS = [
    {},
    {"page": None},
    {"page": 5},
    {"page": {"path": "/"}},
    {"page": ""},
    {"page": "/a"},
    {"page": "/A"},
    {"page": "/a "},
    {"page": "/\u0000"},
    {"page": "/\U0001f600"},
    {"page": "/" + "".join(chr(0x4E00 + number) for number in range(4_000))},
    {"page": "/a", "more": [1]},
    {"user_id": 7, "timestamp": "yesterday"},
]


@pytest.mark.parametrize("system", ["sqlite", "postgres", "mysql"], indirect=True)
def test_every_event_that_the_stream_takes_leaves_the_pipeline_well(run, system, monkeypatch) -> None:
    run("init")
    assert "kind" not in Path("my_pipelines.py").read_text()
    monkeypatch.setenv("WEFT_DSN", system.url)
    Path("odd.ndjson").write_text("".join(json.dumps(event) + "\n" for event in ODD_EVENTS))
    published = run("streams", "publish", "page_views", "odd.ndjson")
    assert published.returncode == 0, published.stderr
    for command in (("run", "views_by_page"), ("run-due",), ("preview", "views_by_page"), ("validate",)):
        done = run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    views: Counter[str] = Counter()
    with use(Project()):
        for row in table_rows("analytics.views_by_page"):
            # MariaDB groups texts without the blanks at their end, SQLite ends them at a zero, PostgreSQL takes none.
            views[row["page"].rstrip(" \0")] += row["views"]
    views.pop("/", None)
    assert views == {"": 1, "/a": 3, "/A": 1, "/\U0001f600": 1, ODD_EVENTS[10]["page"][:200]: 1}


def test_sample_goes_with_the_quickstart(run) -> None:
    run("init")
    quickstart = Path(__file__).parents[2] / "examples" / "quickstart.py"
    Path("quickstart.py").write_text(quickstart.read_text())
    listed = run("streams", "list", "--module", "quickstart")
    assert listed.returncode == 0, listed.stderr
    assert "user_events" in listed.stdout and "page_views" in listed.stdout
