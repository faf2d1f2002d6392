"""weft.toml and ~/.weft/connections.toml are read where they are, and what is wrong in them is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft import get_connection, settings
from weft.errors import SettingsError
from weft.project import current


def test_no_files_are_no_settings(project: Path) -> None:
    assert settings.read_project_file(project) == {}
    assert settings.read_user_file() == {}


def test_every_part_is_read(project: Path) -> None:
    (project / "weft.toml").write_text(
        'modules = ["my_streams"]\n[connections.a]\nurl = "sqlite:///a.db"\n[spark]\nmaster = "local[2]"\n'
    )
    assert settings.read_project_file(project) == {
        "modules": ["my_streams"],
        "connections": {"a": {"url": "sqlite:///a.db"}},
        "spark": {"master": "local[2]"},
    }


def test_hidden_file_is_read_in_its_place(project: Path) -> None:
    hidden = project / ".weft.toml"
    hidden.write_text('[connections.warehouse]\nurl = "sqlite:///w.db"\n')
    assert settings.read_project_file(project) == {"connections": {"warehouse": {"url": "sqlite:///w.db"}}}
    assert get_connection("warehouse").resolved().target == str(project / "w.db")
    assert [info.source for info in current().describe_connections() if info.name == "warehouse"] == [".weft.toml"]
    hidden.write_text("modles = []")
    with pytest.raises(SettingsError, match=r"^\.weft\.toml: unknown key 'modles'"):
        settings.read_project_file(project)
    # Neither is ignored in silence.
    (project / "weft.toml").write_text("modules = []")
    with pytest.raises(SettingsError, match=r"Both weft\.toml and \.weft\.toml are in "):
        get_connection("warehouse")


def test_user_file_is_found_by_home_at_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other/.weft").mkdir(parents=True)
    (tmp_path / "other/.weft/connections.toml").write_text('[connections.a]\nurl = "sqlite:///a.db"\n')
    assert settings.read_user_file() == {}
    monkeypatch.setenv("HOME", str(tmp_path / "other"))
    assert settings.read_user_file() == {"connections": {"a": {"url": "sqlite:///a.db"}}}


def test_change_is_seen(project: Path) -> None:
    file = project / "weft.toml"
    for name in ("one", "two", "three"):
        file.write_text(f'modules = ["{name}"]')
        os.utime(file, ns=(0, hash(name) % 10**9))
        assert settings.read_project_file(project)["modules"] == [name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modules = [", r"weft\.toml is not valid TOML: .*\(at .*end of document\)"),
        ('modules = ["a"]\nx y\n', r"weft\.toml is not valid TOML: .*\(at line 2, column 3\)"),
        ("modles = []", r"unknown key 'modles'[\s\S]*Did you mean 'modules'\?"),
        ("zzz = 1", r"unknown key 'zzz'[\s\S]*Known keys: modules, models, connections, spark"),
        ('modules = "a"', "modules must be a list"),
        ("modules = [1]", "modules must be a list"),
        ("connections = 1", "connections must be tables"),
        ('[connections]\nwarehouse = "postgres://me:hunter2@h/db"', r"connections\.warehouse must be a table"),
    ],
)
def test_mistake_is_said_without_quoting_values(project: Path, text: str, message: str) -> None:
    (project / "weft.toml").write_text(text)
    with pytest.raises(SettingsError, match=message) as caught:
        settings.read_project_file(project)
    assert "hunter2" not in str(caught.value)


def test_user_file_holds_connections_only(project: Path) -> None:
    settings.user_file().parent.mkdir()
    settings.user_file().write_text("modules = []")
    with pytest.raises(SettingsError, match=r"~/\.weft/connections\.toml: unknown key 'modules'"):
        settings.read_user_file()


def test_file_that_is_no_text_is_said(project: Path) -> None:
    (project / "weft.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="not UTF-8"):
        settings.read_project_file(project)


def test_folder_in_the_place_of_the_file_is_said(project: Path) -> None:
    (project / "weft.toml").mkdir()
    with pytest.raises(SettingsError, match=r"cannot be read: Is a directory"):
        settings.read_project_file(project)
