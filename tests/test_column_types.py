"""The types of declared columns: in annotations, as Arrow fields, and what is said about those that are none."""

from __future__ import annotations

import datetime
import subprocess
import sys
import typing
import uuid
from decimal import Decimal
from typing import Annotated, Any

import pyarrow as pa
import pytest

from weft import types
from weft.column_types import TYPES, ColumnType, check_type, column_field, max_length
from weft.columns import LOCAL_TIME, UTC_TIME, canonical_field, hinted
from weft.errors import DeclarationError
from weft.types import JSON, JSONB, UUID, BigInt, Bytes, Numeric, String, Text, TimestampTZ

ARROW: dict[Any, pa.DataType] = {
    types.SmallInt: pa.int16(),
    types.Integer: pa.int32(),
    BigInt: pa.int64(),
    types.Float: pa.float32(),
    types.Double: pa.float64(),
    types.Boolean: pa.bool_(),
    Text: pa.string(),
    String: pa.string(),
    String[256]: pa.string(),
    types.Date: pa.date32(),
    types.Timestamp: LOCAL_TIME,
    TimestampTZ: UTC_TIME,
    Bytes: pa.binary(),
    Numeric: pa.decimal128(38, 18),
    Numeric[10, 2]: pa.decimal128(10, 2),
    Numeric[5]: pa.decimal128(5, 0),
}


@pytest.mark.parametrize("kind", ARROW, ids=repr)
@pytest.mark.parametrize("nullable", [True, False])
def test_field(kind: Any, nullable: bool) -> None:
    expected = pa.field("c", ARROW[kind], nullable=nullable)
    found = column_field("c", kind, nullable=nullable)
    assert found.equals(expected, check_metadata=True)
    assert canonical_field(found).equals(found, check_metadata=True)


@pytest.mark.parametrize(("kind", "hint"), [(JSON, "json"), (JSONB, "json"), (UUID, "uuid")])
def test_hinted_field(kind: Any, hint: str) -> None:
    assert column_field("c", kind, nullable=False).equals(hinted("c", hint, nullable=False), check_metadata=True)


def test_every_type_has_a_field_and_is_in_weft_types() -> None:
    for name, kind in TYPES.items():
        assert getattr(types, name) is kind
        assert column_field("c", kind).name == "c"


class Declared:
    name: Annotated[String[256] | None, "mark"]
    text: Text | None
    amount: Numeric[10, 2]
    plain: String


def test_annotations() -> None:
    hints = typing.get_type_hints(Declared, include_extras=True)
    assert typing.get_args(typing.get_args(hints["name"])[0]) == (String[256], type(None))
    assert typing.get_args(hints["text"]) == (Text, type(None))
    assert hints["amount"] is Numeric[10, 2]
    assert hints["plain"] is String


def test_a_size_names_one_type() -> None:
    assert String[256] is String[256]
    assert String[256] is not String[255]
    assert issubclass(String[256], String)
    assert repr(Numeric[10, 2]) == "Numeric[10, 2]"


def test_max_length() -> None:
    assert max_length(String[256]) == 256
    assert max_length(String) is None
    assert max_length(Text) is None


@pytest.mark.parametrize(
    ("given", "close"),
    [
        (str, "Text"),
        (int, "BigInt"),
        (float, "Double"),
        (bool, "Boolean"),
        (bytes, "Bytes"),
        (Decimal, "Numeric"),
        (datetime.datetime, "TimestampTZ"),
        (datetime.date, "Date"),
        (dict, "JSON"),
        (uuid.UUID, "UUID"),
        ("bigint", "BigInt"),
        ("TimestampTz", "TimestampTZ"),
        ("varchar", "String"),
        (ColumnType, "Types:"),
        (3, "Types:"),
        (None, "Types:"),
    ],
)
def test_nearest_type(given: Any, close: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        check_type(given)
    assert close in str(caught.value.hint)
    with pytest.raises(DeclarationError):
        column_field("c", given)


@pytest.mark.parametrize("size", [0, -1, 65_536, "a", 1.5, True, (1, 2), ()])
def test_bad_string(size: Any) -> None:
    with pytest.raises(DeclarationError):
        String[size]


@pytest.mark.parametrize("size", [0, (50, 2), (2, 3), (10, -1), (1, 2, 3), "a", (10, "b")])
def test_bad_numeric(size: Any) -> None:
    with pytest.raises(DeclarationError):
        Numeric[size]


def test_nearest_numeric() -> None:
    with pytest.raises(DeclarationError, match=r"Did you mean Numeric\[38, 2\]"):
        Numeric[50, 2]


def test_a_type_is_not_called() -> None:
    with pytest.raises(DeclarationError, match="without parentheses"):
        BigInt()


def test_nothing_heavy_is_imported() -> None:
    program = "import sys, weft.types; assert not {'pyarrow', 'numpy', 'sqlglot'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_all_names_are_types() -> None:
    """`from weft.types import *` takes no module's name, such as `datetime`."""
    assert set(types.__all__) == {"FieldType", *TYPES}
