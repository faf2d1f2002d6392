"""Models in Delta tables and files: what is seen of them without Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.engine.models.built import build, why
from weft.engine.models.lake import Lake
from weft.engine.models.state import StoredModel
from weft.errors import LoadRefusedError, WeftError
from weft.pipelines.models import Model


@pytest.fixture
def folder(project: Path) -> Path:
    weft.stream(name="orders", fields={"id": "int64"})(lambda: None)
    weft.connect(kind="object_store_local", path=str(project / "lake"), name="lake")
    return project / "lake"


def model_of_files() -> Model:
    @weft.model(connection="lake", dependencies=["orders"])
    def sales(orders: Any) -> Any:
        return orders

    return sales


def write(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"somebody's")


@pytest.mark.parametrize("name", ["a.parquet", "year=2026/month=1/a.parquet"])
def test_files_of_others_are_refused(folder: Path, name: str) -> None:
    write(folder / "sales" / name)
    with pytest.raises(LoadRefusedError, match=r"folder of sales has files, and no build of the model sales"):
        build(model_of_files())


def test_what_is_not_of_the_table_is_let_be(folder: Path) -> None:
    lake = Lake(weft.get_connection("lake"))
    lake.refuse_foreign(model_of_files(), StoredModel())
    for name in ("_SUCCESS", ".hidden", "orders/part-1.parquet", "_weft/orders/log/1.json"):
        write(folder / "sales" / name)
    lake.refuse_foreign(model_of_files(), StoredModel())


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "{"), (1, "[]"), (1, '{"version": 1}'), (1, '{"version": 1, "state": {"rows": "x"}}'), (2, "{}")],
)
def test_damaged_log_is_a_problem_of_its_model(folder: Path, number: int, text: str) -> None:
    log = folder / "_weft" / "sales" / "log"
    log.mkdir(parents=True)
    (log / f"{number:020}.json").write_text(text)
    (log / f"{number:020}.done").write_text("")
    found = why(model_of_files())
    assert found is not None
    assert found.startswith(f"The log of a table is damaged: {log}/{number:020}.json")


def test_gap_in_a_log_is_named(folder: Path) -> None:
    log = folder / "_weft" / "sales" / "log"
    log.mkdir(parents=True)
    (log / f"{2:020}.json").write_text(json.dumps({"version": 2}))
    (log / f"{2:020}.done").write_text("")
    with pytest.raises(WeftError, match=rf"{1:020}.json cannot be read \(it is missing\)"):
        build(model_of_files())


def test_version_of_files_is_the_last_that_readers_see(folder: Path) -> None:
    lake, log = Lake(weft.get_connection("lake")), folder / "_weft" / "sales" / "log"
    assert lake.version("sales") is None
    log.mkdir(parents=True)
    for number, end, seen in ((1, ".json", 0), (1, ".done", 1), (2, ".json", 1), (2, ".published", 2)):
        (log / f"{number:020}{end}").write_text("")
        assert lake.version("sales") == {"loads": f"version {seen}"}
