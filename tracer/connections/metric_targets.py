"""Where ``--metrics`` brings metrics."""

from __future__ import annotations

import os
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from ddltrace.tracer.connections.addresses import parse_address
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.optional_packages import require_extra

_OTLP: Final = "otlp"
_PROTOCOL: Final = "http/protobuf"
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Collector(NamedTuple):
    """A collector of OpenTelemetry.

    Attributes:
        url: Its URL; None for that of the standard variables.
    """

    url: str | None


def parse_target(text: str) -> tuple[str, int] | Collector:
    """Reads ``:PORT`` or ``HOST:PORT`` of Prometheus' endpoint, ``otlp`` or ``otlp+URL``.

    Raises:
        MissingCapabilityError: A package that sends or serves metrics is missing.
        UsageError: It is none.
    """
    scheme, _, url = text.partition("+")
    if scheme != _OTLP:
        require_extra("metrics", f"--metrics {text}")
        return parse_address(text)
    require_extra("otlp", f"--metrics {text}")
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), _PROTOCOL)
    if protocol != _PROTOCOL:
        raise UsageError(f"--metrics otlp sends {_PROTOCOL}, and not {protocol}")
    if text == _OTLP:
        return Collector(None)
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"{text!r} is not a collector like otlp+http://127.0.0.1:4318")
    return Collector(url)
