"""The project's modules are imported so that they declare what they hold; a failure says where."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import weft
from weft import DeclarationError, NotFoundError
from weft.project import Project


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch: pytest.MonkeyPatch):
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in set(sys.modules) - before:
        if name.startswith("declares_"):
            del sys.modules[name]


def declare(name: str, text: str) -> None:
    Path(f"declares_{name}.py").write_text(text)


def test_modules_of_the_settings_and_those_given(fresh: Project, write_settings) -> None:
    declare("one", "import weft\nweft.connect('sqlite:///1.db', name='one')\n")
    declare("two", "import weft\nweft.connect('sqlite:///2.db', name='two')\n")
    write_settings('modules = ["declares_one"]')
    fresh.load_modules(["declares_two", "declares_one"])
    fresh.load_modules()
    assert sorted(weft.registered_connections()) == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = nope\n", r"'declares_bad' cannot be imported: NameError.*\(declares_bad\.py, line 2\)"),
        ("x = 1\n\ndef (:\n", r"SyntaxError: .*\(declares_bad\.py, line 3\)"),
        ("import not_there_at_all\n", r"No module named 'not_there_at_all' \(declares_bad\.py, line 1\)"),
        ("\nimport json\njson.loads('{')\n", r"JSONDecodeError"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3 \(declares_bad\.py, line 2\)"),
        (
            "import weft\n\nweft.connect(kind='postgers')\n",
            r"no kind of connection named 'postgers'\. \(declares_bad\.py, line 3\)[\s\S]*Did you mean 'postgres'",
        ),
    ],
)
def test_failure_names_module_file_and_line(fresh: Project, text: str, message: str) -> None:
    declare("bad", text)
    with pytest.raises(DeclarationError, match=message):
        fresh.load_modules(["declares_bad"])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("./declares_one.py", "declares_one"),
        ("declares_one.py", "declares_one"),
        ("pkg/declares_one.py", "pkg.declares_one"),
        ("./pkg/declares_one", "pkg.declares_one"),
    ],
)
def test_file_in_the_place_of_a_module(fresh: Project, name: str, meant: str) -> None:
    declare("one", "raise AssertionError")
    with pytest.raises(NotFoundError, match=r"is a file, where the name of a module was expected") as caught:
        fresh.load_modules([name])
    assert caught.value.hint == f"Give a module's name: {meant}"


def test_missing_module_is_answered_with_the_nearest(fresh: Project) -> None:
    declare("streams", "")
    with pytest.raises(NotFoundError, match=r"no module 'declares_strems'[\s\S]*Did you mean 'declares_streams'\?"):
        fresh.load_modules(["declares_strems"])
    with pytest.raises(NotFoundError, match="Looked for in"):
        fresh.load_modules(["zzz.yyy"])
