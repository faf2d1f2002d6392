"""State in files of a checkpoint: as the one in memory, also after a restart at any moment."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import weft
from engine.streaming import test_joins, test_windows
from engine.streaming.conftest import declare, rows, run_once
from engine.streaming.test_window_pipelines import minutes, publish, window
from weft.engine.streaming import files_state
from weft.engine.streaming.files_state import FilesState
from weft.errors import WeftError
from weft.project import current
from weft.spark_support.folder import LocalFolder, Location
from weft.systems.state_in_memory import InMemoryState
from weft.systems.state_store import BATCH, END, KEY, Selection, StateBatch

SCHEMA = pa.schema([(END, pa.int64()), (KEY, pa.string()), (BATCH, pa.int64()), ("n", pa.int64())])


def folder_at(path: Path) -> Location:
    return Location(LocalFolder(), str(path))


def contents(store: Any) -> list[str]:
    return sorted(map(repr, store.read(Selection()).to_pylist()))


@pytest.mark.brief("1")
@pytest.mark.parametrize("seed", range(4))
def test_as_in_memory(seed: int, tmp_path: Path, count: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_state, "_MOST_FILES", 5)
    monkeypatch.setattr(files_state, "_MOST_DEAD", 20)
    for round_ in range(count(100, 3)):
        chance = random.Random(seed * 1000 + round_)
        folder = folder_at(tmp_path / f"{round_}")
        plain, schema = InMemoryState(), SCHEMA
        for number in range(20):
            stored = FilesState(folder)
            last = stored.last()
            assert last == plain.last()
            assert stored.schema() == plain.schema()
            assert last is None or contents(stored) == contents(plain)
            if last is not None and not chance.randrange(3):
                upto = chance.randrange(100)
                plain.remove(upto)
                stored.remove(upto)
            if last is not None and not chance.randrange(8):
                schema = schema.append(pa.field(f"c{number}", pa.string()))
                plain.retype(schema)
                stored.retype(schema)
            table = [
                {END: chance.randrange(100), KEY: chance.choice("abc"), BATCH: number, "n": chance.randrange(10**18)}
                for _ in range(chance.choice([0, 1, 10]))
            ]
            wanted = chance.choice([None, None, Selection(after=chance.randrange(100)), Selection(whole_keys=True)])
            if wanted is not None and wanted.whole_keys:
                wanted = Selection(after=-1, upto=chance.randrange(100), whole_keys=True, keys=("a",))
            batch = StateBatch(number, number, None, {"a": number})
            for each in (plain, stored):
                each.append(pa.Table.from_pylist(table, schema), batch, wanted)
            assert contents(stored) == contents(plain)
        assert len([name for name in folder.names() if name.endswith(".parquet")]) <= 12


def test_a_process_that_is_too_late(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    first, second = FilesState(folder), FilesState(folder)
    row = pa.Table.from_pylist([{END: 1, KEY: "a", BATCH: 0, "n": 1}], SCHEMA)
    for each in (first, second):
        each.last()
    first.append(row, StateBatch(0, None, None))
    with pytest.raises(WeftError, match="another process has gone on"):
        second.append(row, StateBatch(0, None, None))
    # What it wrote before that counts for nothing, and goes with the next batch.
    first.append(row, StateBatch(1, None, None))
    again = FilesState(folder)
    assert again.last() == StateBatch(1, None, None)
    assert again.counts() == {1: 2}
    assert len([name for name in folder.names() if name.endswith(".parquet")]) == 2


def test_a_process_that_was_stopped_for_long(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    row = pa.Table.from_pylist([{END: 1, KEY: "a", BATCH: 0, "n": 1}], SCHEMA)
    FilesState(folder).append(row, StateBatch(0, None, None))
    stopped, other = FilesState(folder), FilesState(folder)
    for each in (stopped, other):
        each.last()
    for number in (1, 2):
        other.append(row, StateBatch(number, None, None))
    with pytest.raises(WeftError, match="another process has gone on"):
        stopped.append(row, StateBatch(1, None, None))
    other.append(row, StateBatch(3, None, None))
    again = FilesState(folder)
    assert again.last() == StateBatch(3, None, None)
    assert again.counts() == {1: 4}


@pytest.mark.parametrize("left", ["", '{"files": ['])
def test_a_manifest_that_a_crash_cut_off(left: str, tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    row = pa.Table.from_pylist([{END: 1, KEY: "a", BATCH: 0, "n": 1}], SCHEMA)
    FilesState(folder).append(row, StateBatch(0, None, None))
    folder.at("1-0.json").write(left)
    again = FilesState(folder)
    assert again.last() == StateBatch(0, None, None)
    again.append(row, StateBatch(1, None, None))
    assert FilesState(folder).last() == StateBatch(1, None, None)


def test_a_wider_type_after_rows_were_removed(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    stored = FilesState(folder)
    large = pa.Table.from_pylist([{END: 5, KEY: "a", BATCH: 0, "n": 2**60 + 1}], SCHEMA)
    stored.append(large, StateBatch(0, None, None))
    stored.remove(10)
    wider = SCHEMA.set(SCHEMA.get_field_index("n"), pa.field("n", pa.float64()))
    stored.retype(wider)
    stored.append(pa.Table.from_pylist([{END: 20, KEY: "a", BATCH: 1, "n": 0.5}], wider), StateBatch(1, None, None))
    again = FilesState(folder)
    assert again.last() == StateBatch(1, None, None)
    assert again.read(Selection())["n"].to_pylist() == [0.5]


@pytest.mark.full
@pytest.mark.usefixtures("here")
def test_as_in_plain_python(plain_spark: Any, tmp_path: Path, count: Callable[..., int]) -> None:
    for seed in range(5000, 5000 + count(100, 1)):

        def opened(kind: str, seed: int = seed) -> Callable[[], FilesState]:
            current().streams.clear()
            return lambda: FilesState(folder_at(tmp_path / f"{kind} {seed}"))

        test_windows.check(test_windows.Case.random(seed, "reopen", "hopping"), plain_spark, opened("hopping"))
        test_windows.check_sessions(seed, plain_spark, opened("session"), "reopen")
        test_joins.check(test_joins.Case.random(seed, "full_outer"), plain_spark, opened("join"))


@pytest.mark.usefixtures("plain_spark", "here")
def test_a_pipeline_with_state_in_files(project: Path) -> None:
    events = declare(user="string", at="timestamp")
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": window()}
    options["state_store"] = weft.StateStore(kind="files")
    publish(events, ("ann", 1), ("bob", 2))
    run_once(**options)
    publish(events, ("ann", 3), ("ann", 61))
    run_once(**options)
    assert minutes() == [(0, "ann", 2), (0, "bob", 1)]
    assert rows("counts", "count(*)") == [(2,)]
    (folder,) = (project / ".weft" / "checkpoints" / "per_minute" / "state").iterdir()
    assert {path.suffix for path in folder.iterdir()} == {".json", ".parquet"}
