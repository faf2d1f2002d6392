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


def test_keys() -> None:
    """Short ones as they have always been: a ledger knows them."""
    checkpoint = "0" * 36
    assert commit_key(checkpoint, "public.events") == f"{checkpoint} public.events"
    keys = {commit_key(checkpoint, LONG + end) for end in ("", "b", "c")}
    assert len(keys) == 3
    assert all(len(each) <= KEY_LENGTH for each in keys)
