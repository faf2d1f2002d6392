"""Traces: `otlp://collector:4318` gets the spans that `weft.tracing` asks for. Nothing of OpenTelemetry is imported
before a collector is named."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from weft import tracing
from weft.operate import otlp
from weft.project import current
from weft.settings import read_project_file

_log = logging.getLogger("weft.traces")
VARIABLE = "WEFT_TRACES"
_SINKS = ("null", "otlp")
_EXAMPLES = "otlp://collector:4318 or null://."


def project_url() -> str | None:
    """Return where the environment or the project say that traces go."""
    return os.environ.get(VARIABLE) or read_project_file(current().root).get("traces")


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

        from weft.operate.otel_tracer import OtelTracer
    endpoint = otlp.endpoint(split, "traces")
    processor = BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=otlp.FLUSH_SECONDS))
    tracing.tracer = OtelTracer(processor, environment or {})
    try:
        yield
    finally:
        tracing.tracer = None
        # The processor itself waits for 30 seconds.
        ending = threading.Thread(target=processor.shutdown, name="weft-traces", daemon=True)
        ending.start()
        ending.join(flush_seconds)
        if ending.is_alive():
            _log.warning("The last spans were not sent to %s in time.", endpoint)
