"""Files that one may read and not write, also where the tests run as root, and a system of a third party.

def test_something(folder, stranger):
    folder                 a folder that everybody may read
    with stranger():       as somebody who may read what others made, and write nothing

def test_something(spool):  with the package in tests/third_party/weft_spool installed
    spool                   a connection of its kind, registered as `spool`
"""

from __future__ import annotations

import os
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weft.systems import base

if TYPE_CHECKING:
    from weft.project import Project

_THIRD_PARTY = Path(__file__).parents[1] / "third_party"
_STRANGER = 65534

Stranger = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that others may read, which those of a test are not."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def stranger() -> Stranger:
    """Somebody else, for a while."""
    if os.geteuid():
        pytest.skip("only root can be somebody else")

    @contextmanager
    def somebody() -> Iterator[None]:
        os.seteuid(_STRANGER)
        try:
            yield
        finally:
            os.seteuid(0)

    return somebody


@pytest.fixture
def installed_spool(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the third party's package for this process and those that it starts. Without this its modules can be
    imported, by Spark's workers too, but nothing names its entry point."""
    site, package = tmp_path_factory.mktemp("site"), _THIRD_PARTY / "weft_spool"
    declared = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / f"weft_spool-{declared['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: {declared['version']}\n")
    points = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in each.items())
        for group, each in declared["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("".join(points))
    monkeypatch.syspath_prepend(site)
    path = [str(site), str(package), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    base._third_party.cache_clear()
    yield
    base._third_party.cache_clear()


@pytest.fixture
def here(project: Path) -> Iterator[Project]:
    """A project on the embedded default."""
    import weft.streams
    from weft.project import Project, use

    fresh = Project()
    with use(fresh):
        yield fresh
        weft.streams.close(fresh)


@pytest.fixture
def spool(installed_spool: None, here: Project, project: Path) -> Any:
    """A connection of the third party's kind, to a folder without queues."""
    import weft

    (project / "queues").mkdir()
    return weft.register_connection(weft.connect(kind="spool", path=str(project / "queues"), name="spool"))
