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
