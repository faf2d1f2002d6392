"""How far a pipeline has read its source: the greatest value of one column that its target has seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from weft.errors import DeclarationError

_KINDS: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    int: ("int", str, int),
    float: ("float", repr, float),
    Decimal: ("decimal", str, Decimal),
    datetime: ("timestamp", datetime.isoformat, datetime.fromisoformat),
    date: ("date", date.isoformat, date.fromisoformat),
    str: ("text", str, str),
}


GROWING = "Use a column of numbers, dates, timestamps or texts that grow."
UNKNOWN = -1
"""The number of a target that cannot keep it."""
STATE = "inputs of a model"
"""Stands where a watermark names its column: the text is what a model has read of its inputs."""


@dataclass(frozen=True)
class LoadWatermark:
    """What is stored with the target's rows, in the same commit."""

    column: str
    kind: str
    text: str
    seen: int
    """How many rows of the source were at or below `counted`: more of them later are late ones."""
    after: str | None = None
    """The text of the one that this one follows. Where another is stored by then, two runs read the same rows."""
    counted: str | None = None
    """Up to where rows were counted, where that is not the value itself: a lookback reads some of them again."""
    adds_read: bool = False
    """Whether the rows that the load reads are yet to be added to `seen`: more may come until it reads."""

    @classmethod
    def of(cls, column: str, value: Any, seen: int, last: LoadWatermark | None = None) -> LoadWatermark:
        """Return the watermark of a value as a driver gives it."""
        if type(value) not in _KINDS:
            raise DeclarationError(
                f"The column {column!r} is of a type that cannot be a watermark ({type(value).__name__}).",
                hint=GROWING,
            )
        return cls(column, _KINDS[type(value)][0], text_of(value), seen, None if last is None else last.text)

    def spelled_like(self, sample: object) -> LoadWatermark:
        """Return the watermark in the form of another value of the column: SQLite keeps times as texts and compares
        texts, and a target of files knows times."""
        if self.kind != "timestamp" or not isinstance(sample, str):
            return self
        try:
            zone = datetime.fromisoformat(sample).tzinfo
        except ValueError:  # the greatest text of the column is not a time
            return self
        moment = self.value if self.value.tzinfo else self.value.replace(tzinfo=UTC)
        moment = moment.astimezone(zone or UTC).replace(tzinfo=zone)
        fraction = re.search(r"\.(\d+)", sample)
        precision = "auto" if fraction is None else "milliseconds" if len(fraction[1]) == 3 else "microseconds"
        text = moment.isoformat("T" if "T" in sample else " ", precision)
        return replace(self, kind="text", text=text.replace("+00:00", "Z") if sample.endswith("Z") else text)

    @property
    def value(self) -> Any:
        """The value, of the type that the driver gave."""
        return self._read(self.text)

    @property
    def counted_to(self) -> Any:
        """The value up to which rows were counted."""
        return self.value if self.counted is None else self._read(self.counted)

    def _read(self, text: str) -> Any:
        if self.kind == "int" and "." in text:
            return float(text)  # a lookback of half a number
        read = next(read for kind, _, read in _KINDS.values() if kind == self.kind)
        return read(text)


def text_of(value: Any) -> str:
    """Return how a value is stored."""
    return _KINDS[type(value)][1](value)


def subtract_lookback(value: Any, lookback: Any) -> Any:
    """Return a value some way back: a timedelta before a time, a number before a number."""
    if lookback is None or value is None:
        return value
    try:
        if isinstance(value, str) and isinstance(lookback, timedelta):
            # A time that SQLite keeps as a text, in the form in which it is kept.
            moved = datetime.fromisoformat(value) - lookback
            return moved.isoformat(sep="T" if "T" in value else " ")
        if isinstance(value, date) and not isinstance(value, datetime):
            span = lookback if isinstance(lookback, timedelta) else timedelta(days=lookback)
            # Whole days, and not fewer than were asked for: a date minus twelve hours would be the same date.
            return value - timedelta(days=-(-span // timedelta(days=1)))
        return value - (Decimal(str(lookback)) if isinstance(value, Decimal) else lookback)
    except (TypeError, ValueError):
        raise DeclarationError(
            f"A lookback of {lookback!r} does not fit the watermark {value!r}.",
            hint="A timedelta for times, a number for numbers.",
        ) from None
    except OverflowError:
        return value
