"""The types of CSV files by their first rows: where these fit the types that columns had in files before, Spark need
not infer them again, which takes it several jobs."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.spark_support.lazy import T

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_SMALL = re.compile(r"[+-]?[0-9]{1,9}")
# More digits without a fraction are a decimal number to Spark, and so is what a positive exponent makes whole.
_FLOATING = re.compile(r"[+-]?([0-9]{1,18}|[0-9]*\.[0-9]+([eE]-[0-9]+)?|[0-9]+[eE]-[1-9][0-9]*)")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIMESTAMP = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|[+-](0[0-9]|1[0-7]):[0-5][0-9])?"
)
_DIALECT = {"has_header", "delimiter", "quote", "escape", "schema_infer_max_records"}


class Head(NamedTuple):
    """What a file begins with."""

    text: bytes
    is_whole: bool


def known_schema(
    heads: Sequence[Head | None], read: Mapping[str, Any], null: str, known: Mapping[str, DataType], most: int
) -> StructType | None:
    """Return the columns of files of one header, if all are known and the first rows fit them; `None` if Spark must
    infer them.

    `heads`: the beginnings of the files, as far as they were read; `read`: how the files are read; `most`: how many
    rows must be seen, or all."""
    looked_at = [head for head in heads if head is not None]
    if not looked_at or not read.keys() <= _DIALECT:
        return None
    names: list[str] = []
    seen = 0
    # The same number of rows from each file; longer files make up for shorter ones.
    for number, head in enumerate(sorted(looked_at, key=lambda head: len(head.text))):
        lines = _rows(head, read, max(-(-(most - seen) // (len(looked_at) - number)), 0))
        if lines is None:
            return None
        names, *rows = lines
        checks = [_check(known.get(name)) for name in names]
        if None in checks or len({name.lower() for name in names}) < len(names):
            return None
        for row in rows:
            if len(row) != len(names):
                return None
            if not all(value == null or check(value) for value, check in zip(row, checks, strict=True) if check):
                return None
        seen += len(rows)
    if seen < most and not all(head is not None and head.is_whole for head in heads):
        return None
    return T.StructType([T.StructField(name, known[name]) for name in names])


def _rows(head: Head, read: Mapping[str, Any], most: int) -> list[list[str]] | None:
    """Return the header and the first rows; `None` if there is none, or if Spark may read others."""
    quote, escape = read["quote"], read.get("escape", read["quote"])
    try:
        # The last line may be cut off, and the row that it is of.
        text = head.text if head.is_whole else head.text[: head.text.rindex(b"\n")]
        reader = csv.reader(
            io.StringIO(text.decode(), newline=""),
            delimiter=read["delimiter"],
            quotechar=quote,
            doublequote=escape == quote,
            escapechar=None if escape == quote else escape,
            strict=True,
        )
        rows = [row for row in islice(reader, most + 2) if row]
    except (ValueError, csv.Error):  # no line at all, another encoding, or a quote that is cut off
        return None
    return (rows if head.is_whole else rows[:-1])[: most + 1] or None


def _check(kind: DataType | None) -> Callable[[str], object] | None:
    """Return a check whether Spark infers this type, or one that it holds, of a text, and can read it."""
    return None if kind is None else _CHECKS.get(kind.simpleString())


def _moment(matches: re.Pattern[str], parse: Callable[[str], object]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            return matches.fullmatch(text) is not None and parse(text) is not None
        except ValueError:
            return False

    return check


_CHECKS: dict[str, Callable[[str], object]] = {
    "string": lambda _: True,
    "int": _SMALL.fullmatch,
    "bigint": _WHOLE.fullmatch,
    "double": _FLOATING.fullmatch,
    "boolean": ("true", "false").__contains__,
    "date": _moment(_DATE, date.fromisoformat),
    "timestamp": _moment(_TIMESTAMP, datetime.fromisoformat),
}
