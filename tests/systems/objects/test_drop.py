"""What needs no Spark: a table that is dropped, and the positions of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft import ObjectStoreLocalConnection
from weft.spark_support.folder import LocalFolder, Location
from weft.systems.load import Load
from weft.systems.objects import paths, stream_source
from weft.systems.objects.stream_source import FileSource
from weft.systems.objects.target import FileTarget
from weft.systems.stream_source import SourceSettings


@pytest.mark.parametrize("removed", range(9))
def test_a_drop_that_was_cut_off_is_finished_by_the_next(
    removed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, table = tmp_path / "_weft" / "orders" / "log", tmp_path / "orders"
    log.mkdir(parents=True)
    table.mkdir()
    for number in range(2, 5):  # the first was swept: the second has the whole state
        entry: dict[str, Any] = {
            "version": number,
            "mode": "append",
            "format": "parquet",
            "dialect": {},
            "schema": "{}",
        }
        entry |= {"writer": "w", "batch": number, "at": "2026-03-01T00:00:00+00:00", "staging": "s", "rows": 1}
        entry |= {"files": {"a": f"part-{number}"}, "removes": [], "schema": "{}"}
        if number == 2:
            entry["state"] = {"files": ["part-1", "part-2"], "narrow": [], "rows": 2, "ledger": {}, "states": {}}
        (log / f"{number:020}.json").write_text(json.dumps(entry))
        (log / f"{number:020}.done").touch()
        (table / f"part-{number}").touch()
    (table / "part-1").touch()
    target, load = FileTarget(ObjectStoreLocalConnection(str(tmp_path))), Load.declare(target="orders")
    remove, count = paths.LogFiles.remove, 0

    def some(files: paths.LogFiles, names: Any) -> None:
        nonlocal count
        for name in names:
            if count == removed:
                raise KeyboardInterrupt
            count += 1
            remove(files, [name])

    with monkeypatch.context() as patched:
        patched.setattr(paths.LogFiles, "remove", some)
        with pytest.raises(KeyboardInterrupt):
            target.drop(load)
    assert target.version(load) is not None
    target.drop(load)
    assert target.version(load) is None
    assert not list(table.iterdir())
    assert not log.exists()


def test_a_plan_reads_the_log_of_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["v1", *(json.dumps({"path": f"/in/{each}", "timestamp": each, "batchId": each}) for each in range(3))]
    (tmp_path / "2.compact").write_text("\n".join(lines))
    source_log, read, asked = Location(LocalFolder(), str(tmp_path)), stream_source.entries, []

    def entries(*given: Any) -> Any:
        asked.append(given)
        return read(*given)

    monkeypatch.setattr(stream_source, "entries", entries)
    source = FileSource(ObjectStoreLocalConnection(str(tmp_path), format="json_lines"), SourceSettings("in"))
    planned = [source.planned({"logOffset": 2}, source_log) for _ in range(3)]
    assert len(asked) == 1
    assert planned == [planned[0]] * 3
    assert source.planned({"logOffset": 1}, source_log)["files"] != planned[0]["files"]
    assert FileSource.show(planned[0], source_log) == "3 files"
    assert FileSource.show({"logOffset": 2, "other": 1}, source_log) is None
