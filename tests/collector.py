"""A collector of OpenTelemetry over the official protobufs: it keeps what it was sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    """What came, as pairs of a path and a request of OTLP."""

    def __init__(self) -> None:
        self.received: list[tuple[str, Any]] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"otlp://127.0.0.1:{self.port}"

    @property
    def spans(self) -> dict[str, Any]:
        """The spans by their names; an error where two have one."""
        found: dict[str, Any] = {}
        for span in self.all_spans():
            assert span.name not in found, span.name
            found[span.name] = span
        return found

    def all_spans(self) -> list[Any]:
        return [
            span
            for path, request in list(self.received)
            if path == "/v1/traces"
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def attributes(of: Any) -> dict[str, Any]:
    """The attributes of a span or a link as Python has them."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    kinds = {"/v1/metrics": ExportMetricsServiceRequest, "/v1/traces": ExportTraceServiceRequest}
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            made.received.append((self.path, kinds[self.path].FromString(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()
