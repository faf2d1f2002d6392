"""A connection is set in a file of settings, and nothing else in that file changes."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from weft.errors import SettingsError
from weft.settings import remove_connection, user_file, write_connection

URL = "postgres://me:${PASSWORD}@host/db"


@pytest.fixture
def file(project: Path) -> Path:
    return project / "weft.toml"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", f'[connections.x]\nurl = "{URL}"\n'),
        ("modules = []", f'modules = []\n\n[connections.x]\nurl = "{URL}"\n'),
        ("# first\nmodules = []  # none\n", f'# first\nmodules = []  # none\n\n[connections.x]\nurl = "{URL}"\n'),
        (
            '[connections.x]\nurl = "old"  # the warehouse\n\n# next\n[connections.y]\nurl = "y"\n',
            f'[connections.x]\nurl = "{URL}"  # the warehouse\n\n# next\n[connections.y]\nurl = "y"\n',
        ),
        (
            '[ connections . "x" ] # it\n# why\nkind = "sqlite"\npath = "a.db"\n',
            f'[ connections . "x" ] # it\nurl = "{URL}"\n# why\n',
        ),
        ('[connections.x]\nurl = """\na\n"""\n', f'[connections.x]\nurl = "{URL}"\n'),
        ("[connections.x]", f'[connections.x]\nurl = "{URL}"\n'),
        ("modules = []\r\n", f'modules = []\r\n\r\n[connections.x]\r\nurl = "{URL}"\r\n'),
        ('[connections]\ny.url = "y"\n', f'[connections]\ny.url = "y"\n\n[connections.x]\nurl = "{URL}"\n'),
    ],
)
def test_only_the_connection_changes(file: Path, before: str, after: str) -> None:
    file.write_bytes(before.encode())
    write_connection(file, "x", URL)
    assert file.read_bytes().decode() == after


@pytest.mark.parametrize(
    "text",
    [
        'connections = {x = {url = "a"}}\n',
        '[connections]\nx.url = "a"\n',
        '[connections.x]\nurl = """\n[a]\n"""\n',
        'text = """\n[connections.x]\n"""\n',
    ],
)
def test_file_that_cannot_be_edited_safely_is_left_alone(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(SettingsError, match="cannot be edited safely"):
        write_connection(file, "x", URL)
    assert file.read_text() == text
    assert [each.name for each in file.parent.iterdir()] == ["weft.toml"]


@pytest.mark.parametrize("name", ["a-b", "a.b", "1"])
def test_name_is_quoted_where_it_must(file: Path, name: str) -> None:
    write_connection(file, name, "sqlite:///a.db")
    write_connection(file, name, 'sqlite:///b "quoted" \\ ü.db')
    assert tomllib.loads(file.read_text()) == {"connections": {name: {"url": 'sqlite:///b "quoted" \\ ü.db'}}}


def test_malformed_file_is_left_alone(file: Path) -> None:
    file.write_text("x y")
    with pytest.raises(SettingsError, match="not valid TOML"):
        write_connection(file, "x", URL)
    assert file.read_text() == "x y"


def test_users_own_file_is_for_its_owner_only_and_made_with_its_folder(project: Path) -> None:
    write_connection(user_file(), "x", URL)
    assert user_file().stat().st_mode & 0o777 == 0o600
    assert user_file().parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_new_file_of_a_project_is_as_every_new_file(file: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_connection(file, "x", URL)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664])
def test_file_keeps_its_mode(project: Path, file: Path, mode: int) -> None:
    for each in (file, user_file()):
        each.parent.mkdir(exist_ok=True)
        each.write_text("")
        each.chmod(mode)
        write_connection(each, "x", URL)
        assert each.stat().st_mode & 0o777 == mode


def test_link_stays_a_link(project: Path, file: Path) -> None:
    (project / "real.toml").write_text("modules = []\n")
    file.symlink_to(project / "real.toml")
    write_connection(file, "x", URL)
    assert file.is_symlink()
    assert "[connections.x]" in (project / "real.toml").read_text()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('[connections.x]\nurl = "a"\n', ""),
        ('modules = []  # none\n\n[connections.x]\nurl = "a"\n', "modules = []  # none\n"),
        (
            '# first\n\n[connections.x]  # it\n# why\nkind = "a"\npath = "a"\n\n# next\n[connections.y]\nurl = "y"\n',
            '# first\n\n# next\n[connections.y]\nurl = "y"\n',
        ),
        ('modules = []\r\n\r\n[connections.x]\r\nurl = "a"', "modules = []\r\n"),
        ('[connections.x]\nurl = """\na\n"""\n\n[connections.y]\nurl = "y"\n', '[connections.y]\nurl = "y"\n'),
    ],
)
def test_only_the_connection_is_removed(file: Path, before: str, after: str) -> None:
    file.write_bytes(before.encode())
    assert remove_connection(file, "x")
    assert file.read_bytes().decode() == after
    assert not remove_connection(file, "x")


@pytest.mark.parametrize("text", ['connections = {x = {url = "a"}}\n', '[connections]\nx.url = "a"\n'])
def test_connection_that_cannot_be_removed_safely_stays(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(SettingsError, match="cannot be edited safely"):
        remove_connection(file, "x")
    assert file.read_text() == text


def test_nothing_is_made_by_removing(file: Path) -> None:
    assert not remove_connection(file, "x")
    assert not file.exists()


def test_what_was_there_is_given_back(file: Path) -> None:
    assert write_connection(file, "x", "sqlite:///a.db") is None
    assert write_connection(file, "x", "sqlite:///b.db") == {"url": "sqlite:///a.db"}
