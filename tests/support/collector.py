"""A collector of OpenTelemetry's metrics, as far as tests need one: it decodes what it receives."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)


@dataclass
class Request:
    """One request.

    Attributes:
        headers: Its headers, by lower-case name.
        resource: Attributes of the resource.
        samples: Name and labels, as Prometheus writes them -> value.
        units: Name -> unit.
        counters: Names of the metrics that only grow.
    """

    headers: dict[str, str]
    resource: dict[str, str] = field(default_factory=dict)
    samples: dict[str, float] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    counters: set[str] = field(default_factory=set)


@dataclass
class Received:
    """What a collector has received.

    Attributes:
        url: Its URL.
        requests: The requests, the oldest first.
    """

    url: str
    requests: list[Request] = field(default_factory=list)


@contextmanager
def collector(status: int = 200) -> Iterator[Received]:
    """Runs a collector.

    Args:
        status: What it answers.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/metrics":
                headers = {name.lower(): value for name, value in self.headers.items()}
                received.requests.append(_decoded(headers, body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received = Received(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()


def _decoded(headers: dict[str, str], body: bytes) -> Request:
    assert headers["content-type"] == "application/x-protobuf"
    request: Any = ExportMetricsServiceRequest.FromString(body)
    found = Request(headers)
    for of_resource in request.resource_metrics:
        found.resource |= {a.key: a.value.string_value for a in of_resource.resource.attributes}
        for metric in (each for scope in of_resource.scope_metrics for each in scope.metrics):
            kind = metric.WhichOneof("data")
            found.units[metric.name] = metric.unit
            if kind == "sum" and metric.sum.is_monotonic:
                found.counters.add(metric.name)
            for point in getattr(metric, kind).data_points:
                labels = sorted((a.key, a.value.string_value) for a in point.attributes)
                text = ",".join(f'{name}="{value}"' for name, value in labels)
                name = f"{metric.name}{{{text}}}" if text else metric.name
                found.samples[name] = getattr(point, point.WhichOneof("value"))
    return found
