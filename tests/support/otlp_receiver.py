"""A little receiver of OTLP over HTTP, on a free port: what a daemon sends, decoded.

with OtlpReceiver() as receiver:
    ... receiver.url ... receiver.spans ... receiver.metrics ...
"""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


class Span(NamedTuple):
    """A span with hexadecimal ids; missing ids are empty."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    links: list[tuple[str, str]]
    """(trace id, span id)"""
    attributes: dict[str, Any]
    resource: dict[str, Any]
    took_ms: float


class OtlpReceiver:
    """Keep what arrives, in order. A set `status` is answered instead."""

    def __init__(self) -> None:
        self.status = 200
        self.spans: list[Span] = []
        self.metrics: dict[str, Any] = {}
        """The last state of each metric, by name, as protobuf has it."""
        self.headers: list[dict[str, str]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver._take(self.path, dict(self.headers.items()), body)
                self.send_response(receiver.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *about: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        self.headers.append({name.lower(): value for name, value in headers.items()})
        if self.status != 200:
            return
        if path == "/v1/traces":
            traces = ExportTraceServiceRequest.FromString(body)
            for of_resource in traces.resource_spans:
                resource = _plain(of_resource.resource.attributes)
                for scope in of_resource.scope_spans:
                    self.spans += [_span(raw, resource) for raw in scope.spans]
        else:
            assert path == "/v1/metrics", path
            result = ExportMetricsServiceRequest.FromString(body)
            for metrics in result.resource_metrics:
                for scope_metrics in metrics.scope_metrics:
                    self.metrics |= {metric.name: metric for metric in scope_metrics.metrics}

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _span(raw: Any, resource: dict[str, Any]) -> Span:
    return Span(
        raw.name,
        raw.trace_id.hex(),
        raw.span_id.hex(),
        raw.parent_span_id.hex(),
        [(link.trace_id.hex(), link.span_id.hex()) for link in raw.links],
        _plain(raw.attributes),
        resource,
        (raw.end_time_unix_nano - raw.start_time_unix_nano) / 1e6,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute) for attribute in attributes}


def _value(one: KeyValue) -> Any:
    kind = one.value.WhichOneof("value")
    return getattr(one.value, kind or "string_value")
