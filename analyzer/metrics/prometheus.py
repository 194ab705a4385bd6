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

from ddltrace.analyzer.metrics.readings import Readings
from ddltrace.tracer.alert_expression import QUANTITIES
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
        now = self.readings
        yield _counter("steps", "Steps that all ranks have completed.", now.num_steps)
        yield _counter("lost_records", "Events that could not be recorded.", now.lost)
        yield _gauge("ranks", "Ranks of this launcher.", now.ranks)
        yield _gauge("recording", "Ranks whose recording is switched on.", now.recording)
        for name, text in QUANTITIES.items():
            if name in now.quantities and name not in {"wait_seconds", "memory_bytes"}:
                yield _gauge(name, f"{text[0].upper()}{text[1:]}.", now.quantities[name])
        waits = GaugeMetricFamily(
            "ddltrace_wait_seconds",
            "Waiting for other ranks in the messages of a step.",
            labels=["rank"],
        )
        for rank, seconds in sorted(now.wait_s.items()):
            waits.add_metric([str(rank)], seconds)
        yield waits
        memory = GaugeMetricFamily(
            "ddltrace_memory_bytes", "Resident memory of a rank's process.", labels=["rank"]
        )
        for rank, size in sorted(now.memory_bytes.items()):
            memory.add_metric([str(rank)], size)
        yield memory
        straggler = GaugeMetricFamily(
            "ddltrace_straggler",
            "1 for the rank that costs most time by entering collectives last.",
            labels=["rank", "cause"],
        )
        if now.straggler is not None:
            straggler.add_metric([str(now.straggler.rank), now.straggler.cause], 1)
        yield straggler
        bandwidth = GaugeMetricFamily(
            "ddltrace_busbw_bytes",
            "Bus bandwidth of collectives in bytes per second, by size up to that of the label.",
            labels=["operation", "size"],
        )
        for (operation, size_class), value in sorted(now.busbw.items()):
            bandwidth.add_metric([operation, size_class], value)
        yield bandwidth
        alerts = GaugeMetricFamily(
            "ddltrace_alerts", "Dead ranks and hangs that are seen now.", labels=["kind"]
        )
        for kind in ("dead", "hang", "silent"):
            alerts.add_metric([kind], sum(alert.kind == kind for alert in now.alerts))
        yield alerts


class _Server(WSGIServer):
    request_queue_size = _MOST_WAITING

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that breaks off is nothing to print."""


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing that a stranger sends."""


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"ddltrace_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"ddltrace_{name}", text, value=value)


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
