"""Spans of what this process does, where somebody traces it: `weft.operate.traces` puts its tracer here. Without one
these functions do nothing, and nothing of OpenTelemetry is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

Kind = Literal["internal", "producer", "consumer", "client"]
Attributes = Mapping[str, str | int | float | bool]


class Tracer(Protocol):
    """What makes spans and sends them somewhere. Its methods never raise."""

    def span(self, name: str, kind: Kind, attributes: Attributes) -> AbstractContextManager[None]: ...
    def publishing(self, ticket: Any) -> AbstractContextManager[None]: ...
    def received(self, headers: Mapping[str, str]) -> AbstractContextManager[None]: ...
    def note(self, attributes: Attributes) -> None: ...
    def link(self, publish_ids: Iterable[str], traceparents: Iterable[str]) -> None: ...
    def environment(self) -> dict[str, str]: ...


tracer: Tracer | None = None
_NOTHING = nullcontext()


def span(name: str, kind: Kind, attributes: Attributes) -> AbstractContextManager[None]:
    """Around some work: a span of it, below the one that is current. An error that leaves the block is the span's."""
    return _NOTHING if tracer is None else tracer.span(name, kind, attributes)


def publishing(ticket: Any) -> AbstractContextManager[None]:
    """Around the commit of a publish, a `weft.streams.commit.Ticket`: a span that batches find by its `publish_id`."""
    return _NOTHING if tracer is None else tracer.publishing(ticket)


def received(headers: Mapping[str, str]) -> AbstractContextManager[None]:
    """Around the work of a request: its spans belong to the trace that the request names by `traceparent`."""
    return _NOTHING if tracer is None else tracer.received(headers)


def note(attributes: Attributes) -> None:
    """Add to the span that is current."""
    if tracer is not None:
        tracer.note(attributes)


def link(publish_ids: Iterable[str], traceparents: Iterable[str] = ()) -> None:
    """Link the span that is current to the publishes that were traced, and to spans of others that messages name."""
    if tracer is not None:
        tracer.link(publish_ids, traceparents)


def environment() -> dict[str, str]:
    """Return the variables by which a process that is started belongs to the trace that is current."""
    return {} if tracer is None else tracer.environment()
