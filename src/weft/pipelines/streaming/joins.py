"""Joins of two sources of a streaming pipeline: which rows belong together, and how long one waits for the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from weft.errors import DeclarationError
from weft.options import Option, column_names
from weft.pipelines.streaming.windows import LONGEST_MS, LateData, Structure, milliseconds
from weft.systems.load import Columns
from weft.systems.log import EVENT_TIME, RESERVED_PREFIX

JoinKind = Literal["inner", "left_outer", "right_outer", "full_outer"]


def _delta(value: Any, option: str, where: str) -> int:
    if type(value) is not int or abs(value) > LONGEST_MS:
        raise DeclarationError(
            f"{where}: {option} must be a whole number of milliseconds, at most {LONGEST_MS:,} before or after, not "
            f"{value!r}."
        )
    return value


@dataclass(frozen=True, kw_only=True)
class Join(Structure):
    """Puts rows of two sources together that have the same keys and are close in time:
    `Join(left_source="orders", right_source="payments", left_keys=("order_id",), right_keys=("order_id",),
    time_window_ms=300_000)`."""

    left_source: Annotated[str, Option("The source of one side: its topic, stream or path.")]
    right_source: Annotated[str, Option("The source of the other side.")]
    left_keys: Annotated[Columns, Option("The columns of the left rows that are compared.", check=column_names)]
    right_keys: Annotated[
        Columns, Option("The columns of the right rows, in the same order. A null equals nothing.", check=column_names)
    ]
    kind: Annotated[
        JoinKind,
        Option(
            "`inner`: pairs alone. `left_outer`, `right_outer`, `full_outer`: also the rows of the left, the right or "
            "both sides that have no partner, when none can come any more."
        ),
    ] = "inner"
    time_window_ms: Annotated[
        int | None, milliseconds("How far apart the times of two rows may be, whichever is first.")
    ] = None
    min_delta_ms: Annotated[
        int | None,
        Option(
            "In place of `time_window_ms`: how much later than the left row the right one is at least; may be "
            "negative.",
            check=_delta,
            kinds=("integer",),
        ),
    ] = None
    max_delta_ms: Annotated[
        int | None, Option("How much later it is at most; may be negative.", check=_delta, kinds=("integer",))
    ] = None
    left_prefix: Annotated[str, Option("What the names of the left columns begin with in the result.")] = "left_"
    right_prefix: Annotated[str, Option("What the names of the right columns begin with.")] = "right_"
    left_event_time_column: Annotated[str, Option("The column with the time of a left row.")] = EVENT_TIME
    right_event_time_column: Annotated[str, Option("The column with the time of a right row.")] = EVENT_TIME
    late_data: Annotated[
        LateData,
        Option(
            "What happens to a row that is behind the watermark: `drop`, `dlq` (a dead letter), or `reopen`: rows are "
            "kept `allowed_lateness_ms` longer, and one that is that late still finds its partners."
        ),
    ] = "drop"
    allowed_lateness_ms: Annotated[
        int | None, milliseconds("How far behind the watermark a row may be with `reopen`.")
    ] = None

    def check(self) -> None:
        if self.left_source == self.right_source:
            self._refuse("left_source and right_source are the same: a join needs two sources.")
        if not self.left_keys:
            self._refuse("left_keys is empty.", 'left_keys=("order_id",), right_keys=("order_id",)')
        if len(self.left_keys) != len(self.right_keys):
            self._refuse(f"left_keys are {len(self.left_keys)}, and right_keys {len(self.right_keys)}.")
        deltas = (self.min_delta_ms, self.max_delta_ms)
        if self.time_window_ms is not None and deltas != (None, None):
            self._refuse("it has time_window_ms, or min_delta_ms and max_delta_ms.")
        if self.time_window_ms is None and None in deltas:
            self._refuse(
                "it needs time_window_ms, or both min_delta_ms and max_delta_ms.",
                "For example time_window_ms=300_000: rows within five minutes of each other.",
            )
        if (self.time_window_ms or 0) > LONGEST_MS:
            self._refuse(f"time_window_ms may be {LONGEST_MS:,} at most.")
        if self.least_ms > self.most_ms:
            self._refuse(f"min_delta_ms ({self.least_ms:,}) is greater than max_delta_ms ({self.most_ms:,}).")
        left, right = self.left_prefix.lower(), self.right_prefix.lower()
        if left.startswith(right) or right.startswith(left):
            self._refuse("one prefix begins with the other: columns of both sides could have one name.")
        for prefix in (self.left_prefix, self.right_prefix):
            if prefix.lower().startswith(RESERVED_PREFIX):
                self._refuse(f"a prefix cannot be {prefix!r}: names that begin with {RESERVED_PREFIX} belong to Weft.")
        if self.late_data == "reopen" and self.allowed_lateness_ms is None:
            self._refuse(
                'late_data = "reopen" requires allowed_lateness_ms.', "For example allowed_lateness_ms=30_000."
            )
        if self.late_data != "reopen" and self.allowed_lateness_ms is not None:
            self._refuse(
                'allowed_lateness_ms is for late_data = "reopen".',
                "To wait longer for all, use weft.Watermark(…).",
            )

    @property
    def least_ms(self) -> int:
        """How much later than the left row the right one is at least."""
        return -(self.time_window_ms or 0) if self.min_delta_ms is None else self.min_delta_ms

    @property
    def most_ms(self) -> int:
        """How much later it is at most."""
        return (self.time_window_ms or 0) if self.max_delta_ms is None else self.max_delta_ms

    @property
    def sides(self) -> tuple[tuple[str, Columns, str, str], ...]:
        """The source, keys, time column and prefix of each side."""
        return (
            (self.left_source, self.left_keys, self.left_event_time_column, self.left_prefix),
            (self.right_source, self.right_keys, self.right_event_time_column, self.right_prefix),
        )
