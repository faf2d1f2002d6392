"""Rows that are put aside are JSON, and come back as they were."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from weft.systems import payloads
from weft.systems.dead_letter_store import as_json
from weft.systems.sql import quarantine


def refuse(word: str) -> Any:
    raise AssertionError(f"{word} is not JSON")


@pytest.mark.parametrize("write", [as_json, quarantine.payload])
def test_numbers_that_json_has_no_word_for(write: Any) -> None:
    row = {"n": math.inf, "o": {"x": [-math.inf, 1.5, None]}, "t": "NaN", "d": Decimal("1.10")}
    row["union"] = {"float": "NaN"}  # as Avro writes it
    text = write(row)
    json.loads(text, parse_constant=refuse)
    assert payloads.loads(text) == {**row, "o": {"x": [-math.inf, msgspec.Raw(b"1.5"), None]}, "d": "1.10"}
    assert math.isnan(payloads.loads(write({"n": math.nan}))["n"])


def test_numbers_stay_as_they_are_written() -> None:
    text = '{"n":[1e400,12345678901234567890.10,-0,1E2],"big":' + "9" * 5000 + "}"
    assert payloads.encode(payloads.loads(text)).decode() == text


def test_where_they_are() -> None:
    assert payloads.has_not_finite([{"a": (1.0, math.nan)}])
    assert not payloads.has_not_finite({"a": [1.0, "NaN", None, 10**400]})
