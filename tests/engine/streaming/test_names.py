"""Targets with names that are longer than the key of a ledger."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from engine.streaming.conftest import declare, rows, run_once
from weft.engine.streaming.targets import commit_key
from weft.systems.load import KEY_LENGTH

pytestmark = pytest.mark.usefixtures("plain_spark", "here")
LONG = "a" * 190


def test_a_long_name() -> None:
    events = declare(n="int64")
    lake = weft.ObjectStoreLocalConnection("lake", name="lake")
    targets = [weft.Target(connection=lake, prefix=f"{LONG}/{LONG}"), weft.Target(table=LONG)]
    pipeline: dict[str, Any] = {"name": "long", "source": events, "targets": targets}
    for n in range(2):
        weft.publish_sync(events, {"n": n})
        run_once(**pipeline)
    assert rows(LONG, "n") == [(0,), (1,)]
    found = weft.read(f"{LONG}/{LONG}", source=lake).toArrow().to_pylist()
    assert sorted(each["n"] for each in found) == [0, 1]


@pytest.mark.brief("sqlite")
@pytest.mark.parametrize("where", ["sqlite", pytest.param("delta", marks=pytest.mark.delta)])
def test_columns_that_differ_in_case_alone(where: str) -> None:
    events = declare(n="int64", text="string")
    lake = weft.DeltaLocalConnection("lake", name="lake")
    target = weft.Target(connection=lake, prefix="twins") if where == "delta" else weft.Target(table="twins")
    weft.publish_sync(events, {"n": 1, "text": "one"})
    with pytest.raises(weft.WeftError, match="twins has the columns 'n' and 'N', which are one column"):
        run_once(name="twins", source=events, targets=[target], transform_sql="SELECT n, text AS N FROM source")


@pytest.mark.brief("MONTH")
@pytest.mark.parametrize("unit", ["DAY", "MONTH"])
def test_a_type_that_no_table_holds(unit: str) -> None:
    events = declare(n="int64")
    weft.publish_sync(events, {"n": 1})
    pipeline: dict[str, Any] = {"source": events, "targets": [weft.Target(table="times")]}
    with pytest.raises(weft.WeftError, match=r"Column 'late' is of type .*, which no table can hold") as caught:
        run_once(name="times", **pipeline, transform_sql=f"SELECT n, INTERVAL '1' {unit} AS late FROM source")
    assert "CAST(late AS STRING) AS late" in str(caught.value)


def test_keys() -> None:
    """Short ones as they have always been: a ledger knows them."""
    checkpoint = "0" * 36
    assert commit_key(checkpoint, "public.events") == f"{checkpoint} public.events"
    keys = {commit_key(checkpoint, LONG + end) for end in ("", "b", "c")}
    assert len(keys) == 3
    assert all(len(each) <= KEY_LENGTH for each in keys)
