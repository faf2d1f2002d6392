"""`weft.load` and `weft.read` with files and Delta tables on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import weft
from weft import DeclarationError, DeltaLocalConnection, NotFoundError, ObjectStoreLocalConnection
from weft.engine import config

ROWS = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]


def found(path: str, source: Any = None) -> list[tuple[Any, ...]]:
    return sorted((row.id, row.name) for row in weft.read(path, source=source).collect())


def test_from_rows_to_files_to_delta_to_files(spark: Any) -> None:
    lake = ObjectStoreLocalConnection("lake", format="csv", csv_delimiter=";")
    delta = DeltaLocalConnection("delta")
    done = weft.load(ROWS, target=("sales", "orders"), connection=lake, commit_key="one")
    assert (done.inserted, done.engine) == (2, "spark")
    assert done.bytes > 0
    assert weft.load(ROWS, target=("sales", "orders"), connection=lake, commit_key="one").replayed
    assert found("sales/orders", lake) == [(1, "a"), (2, "b")]
    # By the path alone: the table's log says what belongs to it, and which types.
    assert found("lake/sales/orders") == [(1, "a"), (2, "b")]

    done = weft.load(
        "sales/orders", source=lake, target=("sales", "orders"), connection=delta, mode="merge", keys=["id"]
    )
    assert (done.rows_read, done.inserted) == (2, 2)
    done = weft.load([{"id": 2, "name": "c"}], target=("sales", "orders"), connection=delta, mode="merge", keys=["id"])
    assert (done.inserted, done.updated) == (0, 1)
    assert found("sales/orders", delta) == found("delta/sales/orders") == [(1, "a"), (2, "c")]

    done = weft.load(
        "sales/orders",
        source=delta,
        target="copy",
        connection=ObjectStoreLocalConnection("lake"),
        transform_sql="SELECT id, upper(name) AS name FROM source",
    )
    assert found("lake/copy") == [(1, "A"), (2, "C")]


def test_refused_before_spark_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.engine import session

    monkeypatch.setattr(session, "spark", lambda **_: pytest.fail("Spark was started"))
    lake = ObjectStoreLocalConnection("lake")
    with pytest.raises(DeclarationError, match=r"mode 'merge'[\s\S]*Modes of files: append, truncate"):
        weft.load(ROWS, target="orders", connection=lake, mode="merge", keys=["id"])
    with pytest.raises(DeclarationError, match="runs on Spark"):
        weft.load(ROWS, target="orders", connection=lake, engine="pushdown")
    monkeypatch.setattr(session, "running", lambda: None)
    monkeypatch.setenv("WEFT_SPARK_MASTER", "spark://elsewhere:7077")
    assert not config.read_settings(Path()).is_local
    for connection in (lake, DeltaLocalConnection("lake")):
        with pytest.raises(DeclarationError, match=r"folder of this machine[\s\S]*WEFT_SPARK_MASTER"):
            weft.load(ROWS, target="orders", connection=connection)


def test_nothing_there(spark: Any) -> None:
    with pytest.raises(NotFoundError, match="no Delta table 'sales/orders'"):
        weft.read("sales/orders", source=DeltaLocalConnection("delta"))
    with pytest.raises(NotFoundError, match="no parquet files"):
        weft.read("nothing/here")
    with pytest.raises(DeclarationError, match="gs://"):
        weft.read("gs://bucket/x.csv")
