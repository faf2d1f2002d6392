"""A Delta table is compared with its source."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.engine.readers import open_tables
from weft.engine.streaming.cdc import verify
from weft.engine.streaming.cdc.verify import Difference, Side, compare
from weft.engine.streaming.cdc.verify_lake import LakeSide
from weft.errors import DeclarationError, NotFoundError


@pytest.mark.usefixtures("spark", "here")
def test_a_delta_table(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ranges of two rows, by a key of two columns."""
    monkeypatch.setattr(verify, "ROWS_A_RANGE", 2)
    rows: list[dict[str, Any]] = [{"a": n // 3, "b": f"k{n}", "name": "x", "f": 0.5, "gone": False} for n in range(7)]
    lake = weft.DeltaLocalConnection(name="lake", path=str(project / "lake"))
    theirs = [{**rows[0], "name": "y"}, *rows[1:5], {**rows[5], "gone": True}, {**rows[6], "b": "k9"}]
    weft.load(theirs, target=("default", "people"), connection=lake, mode="merge", keys=["a", "b"])
    with closing(sqlite3.connect("source.db")) as source, source:
        source.execute("CREATE TABLE people (a INTEGER, b TEXT, name TEXT, f REAL, PRIMARY KEY (a, b))")
        source.executemany("INSERT INTO people VALUES (:a, :b, :name, :f)", rows)
    keys, connection = ("a", "b"), weft.connect(url="sqlite:///source.db")
    with pytest.raises(NotFoundError, match=r"There is no table default\.persons"):
        LakeSide(lake, "default", "persons", keys)
    mirror = LakeSide(lake, "default", "people", keys, "gone")
    with closing(open_tables(connection)) as tables:
        source_side = Side(tables, None, "people", keys)
        found = compare(source_side, mirror, settle_seconds=0)
        assert found.rows == 7
        assert found.differences == [
            Difference((0, "k0"), "different", ("name",)),
            Difference((1, "k5"), "missing"),
            Difference((2, "k6"), "missing"),
            Difference((2, "k9"), "extra"),
        ]
        with pytest.raises(DeclarationError, match="cannot be mended"):
            compare(source_side, mirror, settle_seconds=0, mend=True)
