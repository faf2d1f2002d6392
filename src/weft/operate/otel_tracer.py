"""The tracer of OpenTelemetry. To import this module imports its packages.

A batch has events of many publishes, and links to each of them. A message of a broker names the span that published it
by `traceparent`. An event carries no more of its publish than the
`_weft_publish_id`, so the ids of the span to link to are made from that. Where the publish belongs to a trace of its
caller it cannot have those ids itself: a span `create` has them, and both are linked. Such a `publish_id` is a UUID of
version 8, others are of version 4: a batch links to nothing that was not traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from weft import tracing
from weft.operate import otlp
from weft.operate.runner import described

_MOST_CHARACTERS = 1000
_MOST_LINKS = 128
"""What a span has by default; more would push out the first."""
_VERSION_AT = 14
"""Where the text of a UUID has its version."""
_given: ContextVar[tuple[int, int] | None] = ContextVar("given", default=None)
"""The ids of the trace and the span that begins now, where they are not random."""


class OtelTracer:
    """Hands the spans of this process to a processor. `environment` names the trace that all of them belong to, as
    `TRACEPARENT`, if there is one."""

    def __init__(self, processor: SpanProcessor, environment: Mapping[str, str]) -> None:
        resource, ids = Resource.create(otlp.service()), _Ids()
        # Variables of OpenTelemetry choose the sampler. What is sampled of a publish is sampled in both of its traces.
        sampled = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
        always = TracerProvider(ALWAYS_ON, resource, id_generator=ids, shutdown_on_exit=False)
        for each in (sampled, always):
            each.add_span_processor(processor)
        self._spans, self._created = sampled.get_tracer("weft"), always.get_tracer("weft")
        self._propagator = TraceContextTextMapPropagator()
        carrier = {name.lower(): value for name, value in environment.items()}
        self._parent = self._propagator.extract(carrier, context=Context())

    @contextmanager
    def span(self, name: str, kind: tracing.Kind, attributes: tracing.Attributes) -> Iterator[None]:
        with _current(self._spans.start_span(name, self._above(), SpanKind[kind.upper()], dict(attributes))):
            yield

    @contextmanager
    def publishing(self, ticket: Any) -> Iterator[None]:
        stream, publish_id = ticket.ready.stream.name, _marked(ticket.publish_id)
        attributes: dict[str, str | int] = {
            "messaging.system": "weft",
            "messaging.operation.type": "send",
            "messaging.operation.name": "publish",
            "messaging.destination.name": stream,
            "messaging.batch.message_count": len(ticket.events),
            "weft.publish_id": publish_id,
        }
        above, created = self._above(), None
        is_root = not trace.get_current_span(above).get_span_context().is_valid
        with _with_ids(publish_id if is_root else None):
            own = self._spans.start_span(f"publish {stream}", above, SpanKind.PRODUCER, attributes)
        if own.is_recording():
            ticket.publish_id = publish_id
            if not is_root:
                attributes |= {"messaging.operation.type": "create", "messaging.operation.name": "create"}
                links = [Link(own.get_span_context())]
                with _with_ids(publish_id):
                    created = self._created.start_span(
                        f"create {stream}", Context(), SpanKind.PRODUCER, attributes, links
                    )
                own.add_link(created.get_span_context())
        try:
            with _current(own):
                yield
        finally:
            if created is not None:
                created.end()

    @contextmanager
    def received(self, headers: Mapping[str, str]) -> Iterator[None]:
        token = contexts.attach(self._propagator.extract(headers, context=Context()))
        try:
            yield
        finally:
            contexts.detach(token)

    def note(self, attributes: tracing.Attributes) -> None:
        trace.get_current_span().set_attributes(dict(attributes))

    def link(self, publish_ids: Iterable[str], traceparents: Iterable[str]) -> None:
        span, flags = trace.get_current_span(), TraceFlags(TraceFlags.SAMPLED)
        links = [
            Link(SpanContext(*_ids(each), is_remote=True, trace_flags=flags), {"weft.publish_id": each})
            for each in dict.fromkeys(publish_ids)
            if _is_marked(each)
        ]
        named = (self._propagator.extract({"traceparent": each}, context=Context()) for each in traceparents)
        contexts = (trace.get_current_span(each).get_span_context() for each in named)
        links += (Link(each) for each in contexts if each.is_valid and each.trace_flags.sampled)
        for link in links[:_MOST_LINKS]:
            span.add_link(link.context, link.attributes)

    def environment(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return {name.upper(): value for name, value in carrier.items()}

    def _above(self) -> Context | None:
        """Return the context in which a span begins. A new thread has none of its own."""
        return None if trace.get_current_span().get_span_context().is_valid else self._parent


class _Ids(RandomIdGenerator):
    def generate_trace_id(self) -> int:
        ids = _given.get()
        return super().generate_trace_id() if ids is None else ids[0]

    def generate_span_id(self) -> int:
        ids = _given.get()
        return super().generate_span_id() if ids is None else ids[1]


@contextmanager
def _with_ids(publish_id: str | None) -> Iterator[None]:
    """Give the span that begins in the block the ids that the events of a publish name."""
    token = _given.set(None if publish_id is None else _ids(publish_id))
    try:
        yield
    finally:
        _given.reset(token)


@contextmanager
def _current(span: Span) -> Iterator[None]:
    with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield
        except BaseException as error:
            # Not by OpenTelemetry, which sends the text as it is, with all secrets.
            span.set_attribute("error.type", type(error).__name__)
            with suppress(Exception):  # an error whose text cannot be made must not hide itself
                span.set_status(Status(StatusCode.ERROR, described(error)[:_MOST_CHARACTERS]))
            raise


def _marked(publish_id: str) -> str:
    return f"{publish_id[:_VERSION_AT]}8{publish_id[_VERSION_AT + 1 :]}"


def _is_marked(publish_id: str) -> bool:
    return publish_id[_VERSION_AT : _VERSION_AT + 1] == "8"


def _ids(publish_id: str) -> tuple[int, int]:
    """Return the trace and the span that the events of a publish name. Samplers ask for evenly distributed bits, which
    a UUID does not have."""
    digest = blake2b(publish_id.encode(), digest_size=24).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:])
