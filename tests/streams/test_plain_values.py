"""Values of numpy, pandas, polars and Arrow, enums and subclasses are the plain values that they stand for."""

from __future__ import annotations

from collections import OrderedDict
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import weft
from weft import SchemaError
from weft.project import Project
from workers import declare, drain, log_of, plain

MOMENT = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Day(Enum):
    LAST = date(2026, 1, 31)


class Text(str):
    def __str__(self) -> str:
        return "another"


class Moment(datetime):
    pass


VALUES: dict[str, list[tuple[Any, Any]]] = {
    "string": [(np.str_("a"), "a"), (Colour.RED, "red"), (Text("a"), "a")],
    "bool": [(np.bool_(True), True), (pa.scalar(False), False)],
    "int64": [(np.int64(5), 5), (np.uint8(5), 5), (Level.HIGH, 3), (pa.scalar(5), 5), (pd.NA, None)],
    "float64": [(np.float64(1.5), 1.5), (np.float32(0.5), 0.5)],
    "decimal": [(pa.scalar(Decimal("1.50")), Decimal("1.5")), (np.int64(5), Decimal(5))],
    "date": [(np.datetime64("2026-01-31"), date(2026, 1, 31)), (Day.LAST, date(2026, 1, 31))],
    "timestamp": [
        (pd.Timestamp(MOMENT), MOMENT),
        (pd.Timestamp(MOMENT).tz_convert("Asia/Kolkata"), MOMENT),
        (np.datetime64("2026-01-31T12:00:00.123456000"), MOMENT),
        (np.datetime64("2026-01-31T12:00:00.123456"), MOMENT),
        (Moment(2026, 1, 31, 12, 0, 0, 123456, UTC), MOMENT),
        (pd.NaT, None),
        (np.datetime64("NaT"), None),
    ],
    "json": [
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (pl.Series([1.5, None]), [1.5, None]),
        (OrderedDict(a=np.int64(1), b=[Colour.RED]), {"a": 1, "b": ["red"]}),
        ({Colour.RED: Level.HIGH}, {"red": 3}),
    ],
    "bytes": [(np.bytes_(b"a"), b"a")],
}


def test_into_declared_fields(streams: Project) -> None:
    declare(fields={name: name for name in VALUES}, on_schema_drift="reject")
    for name, pairs in VALUES.items():
        weft.publish_sync("orders", [{name: given} for given, _ in pairs])
        assert [event[name] for event in drain("orders")] == [kept for _, kept in pairs]


def test_into_new_columns(streams: Project) -> None:
    declare()
    weft.publish_sync("orders", {name: pairs[0][0] for name, pairs in VALUES.items()})
    assert {name: kind.base for name, kind in log_of("orders").fields().items()} == {name: name for name in VALUES}
    assert plain(drain("orders")[0]) == {name: pairs[0][1] for name, pairs in VALUES.items()}


def test_rows_of_frames(streams: Project) -> None:
    declare(fields={"n": "int64", "x": "float64", "at": "timestamp", "text": "string"}, on_schema_drift="reject")
    frame = pd.DataFrame({"n": [1, 2], "x": [0.5, 1.5], "at": [pd.Timestamp(MOMENT), pd.NaT], "text": ["a", None]})
    weft.publish_sync("orders", [dict(row) for _, row in frame.iterrows()])
    weft.publish_sync("orders", pl.from_pandas(frame).to_dicts())
    rows = [{"n": 1, "x": 0.5, "at": MOMENT, "text": "a"}, {"n": 2, "x": 1.5}]
    assert [plain(event) for event in drain("orders")] == rows * 2


NO_VALUES: list[tuple[str, Any, str]] = [
    ("decimal(10,2)", Decimal("1.005"), r"it must be decimal\(10,2\), but it does not fit .* without rounding"),
    ("timestamp", pd.Timestamp("2026-01-31T12:00:00.000000001"), "it is finer than a microsecond"),
    ("timestamp", np.datetime64("2026-01-31T12:00:00.000000001"), "it is of type datetime64"),
    ("int64", np.timedelta64(1, "s"), "it is of type timedelta"),
    ("float64", np.float64("nan"), "NaN"),
    ("json", (1, 2), "not plain JSON"),
]


@pytest.mark.parametrize("drift", ["evolve", "reject"])
def test_what_stands_for_no_value_of_a_field(streams: Project, drift: str) -> None:
    for number, (kind, value, why) in enumerate(NO_VALUES):
        declare(f"orders{number}", fields={"it": kind}, on_schema_drift=drift)
        with pytest.raises(SchemaError, match=why) as refused:
            weft.publish_sync(f"orders{number}", [{}, {"it": value}])
        assert "serializable" not in str(refused.value)
        assert (refused.value.index, drain(f"orders{number}")) == (1, [])
