"""`weft streams publish` reads the texts of CSV, and the base64 and decimals of JSON, by the declared types."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pytest

import weft
from workers import declare, drain, plain

TYPES = {
    "string": "string",
    "bool": "bool",
    "int32": "int32",
    "int64": "int64",
    "float32": "float32",
    "float64": "float64",
    "decimal": "decimal(38,18)",
    "date": "date",
    "timestamp": "timestamp",
    "json": "json",
    "bytes": "bytes",
    "uuid": "uuid",
}
VALUES = {
    "string": "007",
    "bool": True,
    "int32": -5,
    "int64": 9223372036854775807,
    "float32": 0.5,
    "float64": 1e300,
    "decimal": Decimal("12345678901234567890.123456789012345678"),
    "date": date(2026, 1, 31),
    "timestamp": datetime(2026, 1, 31, 10, 0, tzinfo=UTC),
    "json": {"a": [1, None]},
    "bytes": b"\x00\xffhello",
    "uuid": UUID("00000000-0000-0000-0000-00000000002a"),
}
CSV = (
    ",".join(TYPES) + ",other\n"
    "007,true,-5,9223372036854775807,0.5,1e300,12345678901234567890.123456789012345678,2026-01-31,2026-01-31T12:00:00+02:00,"
    '"{""a"": [1, null]}",AP9oZWxsbw==,00000000-0000-0000-0000-00000000002a,42\n' + "," * 12 + "\n"
)
NDJSON = (
    '{"string": "007", "bool": true, "int32": -5, "int64": 9223372036854775807, "float32": 0.5, "float64": 1e300, '
    '"decimal": 12345678901234567890.123456789012345678, "date": "2026-01-31", "timestamp": "2026-01-31T10:00:00Z", '
    '"json": {"a": [1, null]}, "bytes": "AP9oZWxsbw==", "uuid": "00000000-0000-0000-0000-00000000002a"}\n'
)


def test_csv(streams, call) -> None:
    declare("all", fields=TYPES)
    Path("a.csv").write_text(CSV)
    call("streams", "publish", "all", "a.csv")
    first, second = (plain(event) for event in drain("all"))
    assert first == {**VALUES, "other": "42"}
    assert second == {}


def test_json(streams, call) -> None:
    declare("all", fields=TYPES)
    call("streams", "publish", "all", "-", stdin=NDJSON)
    assert [plain(event) for event in drain("all")] == [VALUES]


def test_decimals_of_columns_that_are_not_declared(streams, call) -> None:
    declare("grown")
    weft.publish_sync("grown", {"amount": Decimal("1.5")})
    call("streams", "publish", "grown", "-", stdin='{"amount": 12345678901234567890.123456789012345678}\n')
    call("streams", "publish", "grown", "-", stdin='[{"amount": 12345678901234567890.123456789012345678}]\n')
    assert [event["amount"] for event in drain("grown")] == [Decimal("1.5"), VALUES["decimal"], VALUES["decimal"]]


def test_decimals_that_do_not_fit(local, call) -> None:
    declare("prices", fields={"price": "decimal(10,2)"})
    call("streams", "publish", "prices", "-", stdin='{"price": 1.005}\n')
    assert [event["price"] for event in drain("prices")] == [1.005]
    done = call("streams", "publish", "prices", "-", stdin='{"price": 1.00500000000000000001}\n', code=1)
    assert "it must be decimal(10,2), but it does not fit decimal(10,2) without rounding" in done.stderr


def test_what_is_printed_can_be_published(local, call) -> None:
    declare("all", fields=TYPES)
    declare("copy", fields=TYPES)
    call("streams", "publish", "all", "-", stdin=NDJSON)
    shown = json.loads(call("streams", "tail", "all", "--format", "json").stdout)
    event = {key: value for key, value in shown.items() if not key.startswith("_weft_")}
    call("streams", "publish", "copy", "--data", json.dumps(event))
    assert [plain(event) for event in drain("copy")] == [VALUES]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("T", True),
        (" yes ", True),
        ("1", True),
        ("FALSE", False),
        ("f", False),
        ("no", False),
        ("0", False),
    ],
)
def test_booleans_of_csv(local, call, text: str, value: bool) -> None:
    declare("flags", fields={"flag": "bool"})
    call("streams", "publish", "flags", "-", "--input", "csv", stdin=f"flag\n{text}\n")
    assert [event["flag"] for event in drain("flags")] == [value]


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("bool", "maybe", "it must be bool, but it is not true or false"),
        ("int64", "1.0", "it must be int64, but it is not a whole number"),
        ("int64", "1_000", "it must be int64, but it is not a whole number"),
        ("int64", "12 3", "field 'it' = '12 3': it must be int64"),
        ("int32", "9999999999", "it must be int32, but it is out of range for int32"),
        ("float64", "abc", "it must be float64, but it is not a number"),
        ("float64", "nan", "it must be float64, but it is NaN or infinity"),
        ("decimal(4,2)", "1.234", "it does not fit decimal(4,2) without rounding"),
        ("date", "31.01.2026", "it is not a date such as"),
        ("timestamp", "noon", "it is not a timestamp such as"),
        ("json", "{", "it must be json, but it is not JSON: "),
        ("json", "NaN", "it must be json, but NaN is not JSON"),
        ("bytes", "é", "it must be bytes, but it is not base64"),
        ("bytes", "abc", "it must be bytes, but it is not base64"),
        ("uuid", "42", "it is not a UUID"),
    ],
)
def test_text_of_another_type(local, call, kind: str, text: str, problem: str) -> None:
    declare("typed", fields={"it": kind}, validate_schema=True)
    Path("a.csv").write_text(f"it\n{text}\n")
    done = call("streams", "publish", "typed", "a.csv", code=1)
    assert done.stderr.startswith("error: a.csv, line 2, field 'it' = ")
    assert problem in done.stderr


def test_text_of_json_that_is_no_base64(local, call) -> None:
    """As over HTTP."""
    declare("loose", fields={"it": "bytes"})
    call("streams", "publish", "loose", "--data", '{"it": "?"}')
    assert [event["it"] for event in drain("loose")] == ["?"]
    declare("typed", fields={"it": "bytes"}, validate_schema=True)
    done = call("streams", "publish", "typed", "--data", '{"it": "?"}', code=1)
    problem = "it must be bytes, but it is a text; in JSON, bytes are base64."
    assert done.stderr.startswith(f"error: --data, line 1, field 'it' = '?': {problem}")
