"""`weft.testing.table_rows`: what a table holds, in an order that a test can rely on."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import pytest

import weft


@pytest.mark.parametrize(
    "values",
    [
        [-10, -9, 9, 10, 100, None],
        [Decimal("-2.00"), Decimal("9.50"), Decimal("10.00"), None],
        [-1e9, 2.5, 10.0, 1e20, None],
        [date(2024, 2, 10), date(2024, 10, 1), None],
        [False, True, None],
        ["10", "9", "a", None],
        [b"\x09", b"a", b"aa", None],
    ],
    ids=lambda values: type(values[0]).__name__,
)
def test_ordered_by_value(values: list[Any]) -> None:
    with weft.testing.project():

        @weft.pipeline(target="things")
        def things() -> None: ...

        rows = [{"value": value, "number": number} for number, value in enumerate(values)]
        assert weft.testing.run_pipeline(things, list(reversed(rows))) == rows


def test_the_second_column_decides_between_equals() -> None:
    with weft.testing.project():

        @weft.pipeline(target="things")
        def things() -> None: ...

        rows = [{"a": 1, "b": 10}, {"a": None, "b": 2}, {"a": 1, "b": 9}, {"a": None, "b": None}]
        assert weft.testing.run_pipeline(things, rows) == [rows[2], rows[0], rows[1], rows[3]]
