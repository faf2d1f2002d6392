"""The name by which a source knows a checkpoint: each has one of its own, and keeps it."""

from __future__ import annotations

import shutil
from pathlib import Path

from weft.engine.streaming.checkpoint import Checkpoint, stored


def test_each_checkpoint_has_a_reader_of_its_own(project: Path) -> None:
    one = Checkpoint("copies")
    name = one.reader()
    assert name.startswith("copies-") and Checkpoint("copies").reader() == name
    others = [
        Checkpoint("copies", str(project / "elsewhere")),
        Checkpoint("merged"),
        Checkpoint("x" * 400, str(project / "x")),
    ]
    assert len({name, *(each.reader() for each in others)}) == 4
    assert max(len(each.reader()) for each in others) <= 255
    # A checkpoint that is reset goes on under its name: nobody else would move that on.
    one.home.at("metadata").write('{"id": "1"}')
    one.reset()
    assert not one.path.exists() and one.reader() == name
    # A copy is another one: both may run.
    one.home.at("metadata").write('{"id": "1"}')
    shutil.copytree(one.path, project / "copy")
    assert Checkpoint("copies", str(project / "copy")).reader() != name
    assert [each.name for each in stored()] == ["copies"]


def test_a_copy_of_a_project_has_readers_of_its_own(project: Path, tmp_path: Path) -> None:
    """All files are copied: both may run, and each gets every message."""
    place = project / "checkpoints"
    one = Checkpoint("copies", str(place / "copies"))
    one.home.at("metadata").write('{"id": "1"}')
    name = one.reader()
    shutil.copytree(place, tmp_path / "copied")
    copy = Checkpoint("copies", str(tmp_path / "copied" / "copies"))
    assert copy.reader() not in {name, one.reader()} and copy.reader() == copy.reader()
    assert one.reader() == name
    # Another way to the same place is no copy.
    (tmp_path / "link").symlink_to(place)
    for way in (f"{tmp_path}/link/copies", f"file://{place}/copies"):
        assert Checkpoint("copies", way).reader() == name
    # A file of an earlier version has no place: whoever has it goes on.
    file = place / "copies~reader"
    file.write_text(file.read_text().partition("\n")[0])
    assert one.reader() == name == one.reader()
