"""Models in Delta tables and files: what is seen of them without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import weft
from tests.engine.models.built import build
from weft.engine.models.lake import Lake
from weft.engine.models.state import Stored
from weft.errors import LoadRefusedError
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
    lake.refuse_foreign(model_of_files(), Stored())
    for name in ("_SUCCESS", ".hidden", "orders/part-1.parquet", "_weft/orders/log/1.json"):
        write(folder / "sales" / name)
    lake.refuse_foreign(model_of_files(), Stored())
