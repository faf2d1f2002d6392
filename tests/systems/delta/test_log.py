"""What a load keeps in the log of a Delta table, found without Spark, behind commits of others and a checkpoint too."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.errors import WeftError
from weft.systems.delta.connection import DeltaLocalConnection
from weft.systems.delta.log import label_of
from weft.systems.delta.table import writer
from weft.systems.delta.target import DeltaTarget
from weft.systems.load import Load
from weft.systems.target import TableLog
from weft.systems.watermark import STATE, LoadWatermark

SCHEMA = '{"type": "struct", "fields": []}'
AT = datetime(2026, 1, 31, tzinfo=UTC)


class Table:
    """A table with a log that is written by hand."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "orders" / "_delta_log"
        self.log.mkdir(parents=True)
        self.target = DeltaTarget(DeltaLocalConnection(str(folder)))
        self.version = -1

    def load(self, batch: int = 0, state: str = "") -> Load:
        watermark = LoadWatermark(STATE, "text", state, 0)
        return Load(table="orders", pipeline="m", checkpoint_id="model", batch_id=batch, watermark=watermark, moment=AT)

    def commit(self, load: Load | None = None, *more: dict[str, Any], label: str | None = None) -> None:
        info: dict[str, Any] = {"timestamp": int(AT.timestamp() * 1000), "userMetadata": label}
        actions = [{"commitInfo": info}, *more]
        if load is not None:
            info["userMetadata"] = label_of(load)
            actions.append({"txn": {"appId": writer(load), "version": load.batch_id}})
        self.version += 1
        text = "\n".join(map(json.dumps, actions))
        (self.log / f"{self.version:020}.json").write_text(text)

    def checkpoint(self, load: Load | None) -> None:
        """Write a checkpoint, and remove the commits that it stands for."""
        mark = None if load is None else {"appId": writer(load), "version": load.batch_id}
        rows = {
            "metaData": [{"id": "1", "schemaString": SCHEMA}, None],
            "txn": pa.array([None, mark], pa.struct([("appId", pa.string()), ("version", pa.int64())])),
        }
        pq.write_table(pa.table(rows), self.log / f"{self.version:020}.checkpoint.parquet")

    def forget(self, *versions: int) -> None:
        for each in versions:
            (self.log / f"{each:020}.json").unlink()

    def kept(self, *, with_columns: bool = True) -> TableLog | None:
        return self.target.kept(self.load(), with_columns=with_columns)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def test_no_table(table: Table) -> None:
    assert table.kept() is None


def test_newest_load_of_the_writer_counts(table: Table) -> None:
    table.commit(table.load(0, "a"), {"metaData": {"schemaString": SCHEMA}})
    table.commit(table.load(1, "b"))
    table.commit(label="somebody's text")
    table.commit(label='["a list"]')
    assert table.kept() == TableLog(3, SCHEMA, None, 1, "b", AT)
    assert table.kept(with_columns=False) == TableLog(3, None, None, 1, "b", AT)


def test_positions_of_the_newest_batch(table: Table) -> None:
    table.commit(replace(table.load(0, "a"), positions="[3]"))
    table.commit(replace(table.load(1, "b"), positions="[5]"))
    assert table.kept() == TableLog(1, None, None, 1, "b", AT, "[5]")
    table.commit(table.load(2, "c"))  # of a version that recorded none
    assert table.kept() == TableLog(2, None, None, 2, "c", AT)


def test_table_of_others(table: Table) -> None:
    table.commit(None, {"metaData": {"schemaString": SCHEMA}})
    assert table.kept() == TableLog(0, SCHEMA)
    table.checkpoint(None)
    table.commit()
    assert table.kept() == TableLog(1, SCHEMA)


def test_behind_a_checkpoint(table: Table) -> None:
    table.commit(table.load(0, "a"), {"metaData": {"schemaString": SCHEMA}})
    table.commit(table.load(1, "b"))
    table.commit()
    table.checkpoint(table.load(1))
    table.forget(0)
    # The commit that the checkpoint knows is still there.
    assert table.kept() == TableLog(2, SCHEMA, None, 1, "b", AT)
    table.commit(table.load(2, "c"))
    assert table.kept() == TableLog(3, SCHEMA, None, 2, "c", AT)


def test_commit_that_is_gone_is_known_by_its_number(table: Table) -> None:
    table.commit(table.load(4, "a"), {"metaData": {"schemaString": SCHEMA}})
    table.commit()
    table.checkpoint(table.load(4))
    table.forget(0)
    assert table.kept() == TableLog(1, SCHEMA, None, 4)


@pytest.mark.parametrize("name", [f"{1:020}.json", f"{0:020}.checkpoint.parquet"])
@pytest.mark.parametrize("text", ['{"commitInfo":', "[1]\n", "PAR1"])
def test_damaged_file_is_named(table: Table, name: str, text: str) -> None:
    table.commit(None, {"metaData": {"schemaString": SCHEMA}})
    table.checkpoint(None)
    table.commit()
    (table.log / name).write_text(text)
    with pytest.raises(WeftError, match=rf"log of a table is damaged: .*orders/_delta_log/{name}"):
        table.kept()


def test_version_is_read_from_the_names(table: Table) -> None:
    assert table.target.version(table.load()) is None
    table.commit()
    table.checkpoint(None)
    table.commit()
    for file in table.log.iterdir():
        file.write_text("nothing of this is read")
    assert table.target.version(table.load()) == 1


def test_one_writer_among_those_of_a_checkpoint(table: Table) -> None:
    table.commit(None, {"metaData": {"schemaString": SCHEMA}})
    struct = pa.struct([("appId", pa.string()), ("version", pa.int64())])
    marks = [{"appId": "another", "version": 9}, None, {"appId": writer(table.load()), "version": 3}]
    adds = [{"path": "part-0.parquet"}] * 3
    rows = {"add": adds, "metaData": [None, {"id": "1", "schemaString": SCHEMA}, None], "txn": pa.array(marks, struct)}
    pq.write_table(pa.table(rows), table.log / f"{0:020}.checkpoint.parquet")
    assert table.kept() == TableLog(0, SCHEMA, None, 3)
