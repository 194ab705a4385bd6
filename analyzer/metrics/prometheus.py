"""The endpoint of the metrics, in the text format of Prometheus."""

from __future__ import annotations

import hmac
import ipaddress
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ddltrace.analyzer.metrics.metric_table import METRICS
from ddltrace.analyzer.metrics.readings import Readings
from ddltrace.tracer.errors import UsageError

TOKEN_VARIABLE: Final = "DDLTRACE_METRICS_TOKEN"
_REQUEST_TIMEOUT_S: Final = 5.0
_MOST_WAITING: Final = 8


class MetricServer:
    """Serves the newest readings; one request at a time, each within some seconds.

    Args:
        address: Host and port.

    Attributes:
        readings: The readings to serve.
        url: Where they are.

    Raises:
        UsageError: Nobody may listen there, or other hosts could without a token.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        host, port = address
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token and not _is_loopback(host):
            raise UsageError(
                f"other hosts can reach {host}: set {TOKEN_VARIABLE}, and authorization with these "
                "credentials in Prometheus, or listen on 127.0.0.1"
            )
        self.readings = Readings()
        registry = CollectorRegistry()
        registry.register(self)
        application = _with_token(make_wsgi_app(registry), token)
        try:
            self._server = make_server(host, port, application, _Server, _Handler)
        except OSError as error:
            raise UsageError(f"{host}:{port} cannot be listened on: {error.strerror}") from error
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def start(self) -> None:
        """Starts to serve, on a thread of its own."""
        serve = self._server.serve_forever
        threading.Thread(target=serve, name="ddltrace-metrics", daemon=True).start()

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[Metric]:
        """The metrics, as `prometheus_client` asks for them."""
        for metric in METRICS:
            family = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            found = family(metric.name, metric.text, labels=metric.labels)
            for labels, value in metric.samples(self.readings):
                found.add_metric(labels, value)
            yield found


class _Server(WSGIServer):
    request_queue_size = _MOST_WAITING

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that breaks off is nothing to print."""


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing that a stranger sends."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_token(application: Callable[..., Any], token: str) -> Callable[..., Iterable[bytes]]:
    """Lets only those pass who have the token, if there is one."""
    expected = f"Bearer {token}".encode()

    def guarded(environ: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1", "replace")
        if token and not hmac.compare_digest(given, expected):
            respond("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"the token is missing\n"]
        result: Iterable[bytes] = application(environ, respond)
        return result

    return guarded
