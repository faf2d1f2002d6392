"""The options of the functions for frames, and their defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypedDict

from weft.dataframes.layout import Layout, OnError, To, check_choice, check_frames
from weft.errors import SettingsError, did_you_mean
from weft.streams.consuming import LONGEST_SECONDS


class ScanOptions(TypedDict, total=False):
    """The options that all functions for frames share."""

    schema: Mapping[str, Any] | None
    start_id: str
    end_id: str
    count: int | None
    include_id: bool
    id_column: str
    include_timestamp: bool
    timestamp_column: str
    include_sequence: bool
    sequence_column: str
    on_error: OnError


class ReadOptions(ScanOptions, total=False):
    """The options of the functions that can read as a member of a group."""

    to: To
    group: str | None
    consumer: str | None
    auto_ack: bool
    create_group: bool
    claim_idle: int | None
    include_delivery: bool


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a call. A name of a column that is `None` is a column that is left out."""

    schema: Mapping[str, Any] | None = None
    start_id: str = "-"
    end_id: str = "+"
    count: int | None = None
    include_id: bool = True
    id_column: str = "_id"
    include_timestamp: bool = True
    timestamp_column: str = "_ts"
    include_sequence: bool = False
    sequence_column: str = "_seq"
    on_error: OnError = "null"
    to: To = "polars"
    group: str | None = None
    consumer: str | None = None
    auto_ack: bool = False
    create_group: bool = True
    claim_idle: int | None = None
    include_delivery: bool = False
    stream_column: str | None = None

    def __post_init__(self) -> None:
        check_choice("to", self.to, To)
        if self.count is not None:
            whole_number("count", self.count)
        for each in fields(self):
            if isinstance(each.default, bool):
                true_or_false(each.name, getattr(self, each.name))

    @cached_property
    def layout(self) -> Layout:
        """The columns of the frame."""
        layout = Layout(
            self.schema,
            id_column=self.id_column if self.include_id else None,
            timestamp_column=self.timestamp_column if self.include_timestamp else None,
            sequence_column=self.sequence_column if self.include_sequence else None,
            delivery_column="_deliveries" if self.include_delivery else None,
            stream_column=self.stream_column,
            on_error=self.on_error,
        )
        check_frames(self.to, layout)
        return layout


def refuse_unknown_options(
    function: Callable[..., Any], typed: type[ScanOptions], options: Mapping[str, object]
) -> None:
    """Refuse an option that a function does not have, as Python does, naming the nearest one that it has."""
    known = [*inspect.signature(function).parameters, *typed.__annotations__]
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known) or ""
            if name in ReadOptions.__annotations__:
                hint = "read_stream and iter_stream have it."
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}. {hint}".rstrip())


def whole_number(name: str, value: object, least: int = 0) -> int:
    """Return the value, which must be a whole number of 64 bits that is not below `least`."""
    if type(value) is not int or not least <= value < 2**63:
        raise SettingsError(f"{name} must be a whole number from {least} to 2^63 - 1, not {value!r}.")
    return value


def true_or_false(name: str, value: object) -> bool:
    """Return the value of an option that is true or false. A text, as from an environment, would be true whatever it
    says."""
    if value not in (True, False):
        raise SettingsError(f"{name} must be True or False, not {value!r}.")
    return bool(value)


def wait_of(block_ms: int | None) -> float | None:
    """Return how many seconds to wait; `None` is indefinitely, which Redis calls 0."""
    if block_ms is None:
        return 0.0
    return min(whole_number("block_ms", block_ms) / 1000, LONGEST_SECONDS) or None
