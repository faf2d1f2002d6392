"""Traces by OpenTelemetry: `otlp://collector:4318` gets the spans that `weft.tracing` asks for.

A batch has events of many publishes, and links to each of them. An event carries no more of its publish than the
`_weft_publish_id`, so the ids of the span to link to are made from that. Where the publish belongs to a trace of its
caller it cannot have those ids itself: a span `create` has them, and both are linked. Such a `publish_id` is a UUID of
version 8, others are of version 4: a batch links to nothing that was not traced.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any

from weft import tracing
from weft.operate import otlp
from weft.operate.runner import described

_log = logging.getLogger("weft.traces")
VARIABLE = "WEFT_TRACES"
_SINKS = ("null", "otlp")
_EXAMPLES = "otlp://collector:4318 or null://."
_MOST_CHARACTERS = 1000
_VERSION_AT = 14
"""Where the text of a UUID has its version."""


def check(url: str | None) -> None:
    """Raise where traces cannot be sent to a URL."""
    if otlp.sink(url, "traces", _SINKS, _EXAMPLES).scheme == "otlp":
        with otlp.importing():
            import opentelemetry.exporter.otlp.proto.http.trace_exporter
            import opentelemetry.sdk.trace  # noqa: F401


@contextmanager
def open_traces(
    url: str | None, environment: Mapping[str, str] | None = None, *, flush_seconds: float = otlp.FLUSH_SECONDS
) -> Iterator[None]:
    """Send the spans of this process to the sink at a URL while the block runs. `environment`: where a run finds the
    trace that it belongs to, as `TRACEPARENT`."""
    split = otlp.sink(url, "traces", _SINKS, _EXAMPLES)
    if split.scheme == "null" or tracing.tracer is not None:  # one in a process is enough
        yield
        return
    with otlp.importing():
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    processor = BatchSpanProcessor(OTLPSpanExporter(otlp.endpoint(split, "traces"), timeout=otlp.FLUSH_SECONDS))
    tracing.tracer = _tracer(processor, environment or {})
    try:
        yield
    finally:
        tracing.tracer = None
        # The processor itself waits for 30 seconds.
        ending = threading.Thread(target=processor.shutdown, name="weft-traces", daemon=True)
        ending.start()
        ending.join(flush_seconds)
        if ending.is_alive():
            _log.warning("The last spans were not sent to %s in time.", otlp.endpoint(split, "traces"))


def _tracer(processor: Any, environment: Mapping[str, str]) -> tracing.Tracer:
    """Return a tracer that hands its spans to a processor. OpenTelemetry is imported here and not before."""
    from opentelemetry import context as contexts
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    given: ContextVar[tuple[int, int] | None] = ContextVar("given", default=None)
    propagator = TraceContextTextMapPropagator()
    most_links = 128
    """What a span has by default; more would push out the first."""

    class Ids(RandomIdGenerator):
        """Gives a span the ids that are set for it, else random ones."""

        def generate_trace_id(self) -> int:
            ids = given.get()
            return super().generate_trace_id() if ids is None else ids[0]

        def generate_span_id(self) -> int:
            ids = given.get()
            return super().generate_span_id() if ids is None else ids[1]

    def creation(publish_id: str) -> SpanContext:
        trace_id, span_id = _ids(publish_id)
        return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    resource, ids = Resource.create(otlp.SERVICE), Ids()
    # The variables of OpenTelemetry choose the sampler. What is sampled of a publish is sampled in both of its traces.
    sampled = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
    always = TracerProvider(ALWAYS_ON, resource, id_generator=ids, shutdown_on_exit=False)
    for each in (sampled, always):
        each.add_span_processor(processor)
    spans, created_spans = sampled.get_tracer("weft"), always.get_tracer("weft")
    parent = propagator.extract({name.lower(): value for name, value in environment.items()}, context=Context())

    def above() -> Context | None:
        """The context in which a span begins. A thread of this process has none of its own."""
        return None if trace.get_current_span().get_span_context().is_valid else parent

    @contextmanager
    def current(span: Span) -> Iterator[None]:
        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield
            except BaseException as error:
                # Not by OpenTelemetry, which sends the text as it is, with all secrets.
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(Status(StatusCode.ERROR, described(error)[:_MOST_CHARACTERS]))
                raise

    class OtelTracer:
        @contextmanager
        def span(self, name: str, kind: tracing.Kind, attributes: tracing.Attributes) -> Iterator[None]:
            with current(spans.start_span(name, above(), SpanKind[kind.upper()], dict(attributes))):
                yield

        @contextmanager
        def publishing(self, ticket: Any) -> Iterator[None]:
            stream = ticket.ready.stream.name
            publish_id = _marked(ticket.publish_id)
            attributes = {
                "messaging.system": "weft",
                "messaging.operation.type": "send",
                "messaging.operation.name": "publish",
                "messaging.destination.name": stream,
                "messaging.batch.message_count": len(ticket.events),
                "weft.publish_id": publish_id,
            }
            context, name = above(), f"publish {stream}"
            is_root = not trace.get_current_span(context).get_span_context().is_valid
            created: Span | None = None
            token = given.set(_ids(publish_id) if is_root else None)
            try:
                own = spans.start_span(name, context, SpanKind.PRODUCER, attributes)
                if own.is_recording() and not is_root:
                    given.set(_ids(publish_id))
                    about = {
                        **attributes,
                        "messaging.operation.type": "create",
                        "messaging.operation.name": "create",
                    }
                    links = [Link(own.get_span_context())]
                    created = created_spans.start_span(f"create {stream}", Context(), SpanKind.PRODUCER, about, links)
                    own.add_link(created.get_span_context())
            finally:
                given.reset(token)
            if own.is_recording():
                ticket.publish_id = publish_id
            try:
                with current(own):
                    yield
            finally:
                if created is not None:
                    created.end()

        @contextmanager
        def received(self, headers: Mapping[str, str]) -> Iterator[None]:
            token = contexts.attach(propagator.extract(headers, context=Context()))
            try:
                yield
            finally:
                contexts.detach(token)

        def note(self, attributes: tracing.Attributes) -> None:
            trace.get_current_span().set_attributes(dict(attributes))

        def link(self, publish_ids: Iterable[str]) -> None:
            span = trace.get_current_span()
            traced = [each for each in dict.fromkeys(publish_ids) if _is_marked(each)]
            for each in traced[:most_links]:
                span.add_link(creation(each), {"weft.publish_id": each})

        def environment(self) -> dict[str, str]:
            carrier: dict[str, str] = {}
            propagator.inject(carrier)
            return {name.upper(): value for name, value in carrier.items()}

    return OtelTracer()


def _marked(publish_id: str) -> str:
    return f"{publish_id[:_VERSION_AT]}8{publish_id[_VERSION_AT + 1 :]}"


def _is_marked(publish_id: str) -> bool:
    return publish_id[_VERSION_AT : _VERSION_AT + 1] == "8"


def _ids(publish_id: str) -> tuple[int, int]:
    """Return the trace and the span that the events of a publish name. Samplers ask for evenly distributed bits, which
    a UUID does not have."""
    digest = blake2b(publish_id.encode(), digest_size=24).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:])
