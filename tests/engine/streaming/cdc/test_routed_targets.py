"""Which batches the tables of a route have; without Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pytest

import weft
from weft.engine.streaming.batch_id import BatchId
from weft.engine.streaming.cdc.routes import resolved
from weft.engine.streaming.cdc.routing import well_formed
from weft.engine.streaming.checkpoint_files import Written
from weft.engine.streaming.dead_letters import DeadLetterBox
from weft.engine.streaming.targets import NOTHING, Targets
from weft.normalize import regex_replace, supports, trim
from weft.pipelines.streaming.declare import make
from weft.project import Project, use
from weft.spark_support.folder import LocalFolder, Location
from weft.types import BigInt, Text

BY_SPARK = regex_replace(r"a{1,3}?b", "x")
ROUTE = {"public.orders": "orders", "public.items": "items"}


@pytest.mark.parametrize("by_spark", [False, True])
def test_a_batch_that_one_table_has_is_done_only_where_they_commit_together(
    shared_server: Any, tmp_path: Path, by_spark: bool
) -> None:
    """Where Spark makes the columns of one, each commits by itself: another one may have been refused."""
    assert not supports([BY_SPARK], "postgres")
    with use(Project()), shared_server("postgres").database() as url:
        warehouse = weft.connect(name="warehouse", url=url)

        @weft.table(connection=warehouse, name="items")
        class Items:
            id: Annotated[BigInt, weft.pk()]
            state: Annotated[Text | None, trim()]

        @weft.table(connection=warehouse, name="items")
        class ItemsBySpark:
            id: Annotated[BigInt, weft.pk()]
            state: Annotated[Text | None, BY_SPARK]

        changes = weft.stream(name="changes", connection=warehouse, fields={})(lambda: None)
        targets = [
            weft.Target(connection=warehouse, table="orders"),
            weft.Target(table=ItemsBySpark if by_spark else Items),
        ]
        cdc = weft.CDC(envelope="debezium", route=ROUTE, key_field="id")
        pipeline = resolved(make(name="shop", source=changes, targets=targets, cdc=cdc))
        loading = Targets(pipeline, DeadLetterBox(pipeline), Written(Location(LocalFolder(), str(tmp_path))))
        source = {"schema": "public", "table": "orders", "lsn": 1, "ts_ms": 1}
        message = {"op": "c", "after": json.dumps({"id": 1, "state": "new"}), "source": source}
        found = well_formed(pa.Table.from_pylist([message]), pipeline.cdc)
        batch = BatchId("query", 0)
        loading.load(pipeline.targets[0], NOTHING, batch, lambda: pa.table({}), changes=found.by_table["orders"])
        assert loading.is_done(pipeline.targets, batch) is not by_spark
        loading.close()
