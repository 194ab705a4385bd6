"""Sends metrics to a collector of OpenTelemetry: OTLP over HTTP, as protobuf."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.environment_variables import OTEL_METRIC_EXPORT_INTERVAL
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from ddltrace.analyzer.metrics.metric_table import METRICS, Metric
from ddltrace.analyzer.metrics.readings import Readings

_LAST_EXPORT_MS: Final = 2000
"""How long the end of the job may wait for the collector."""

_LOGGER: Final = logging.getLogger("opentelemetry")
_LONGEST_LINE: Final = 300


class MetricSender:
    """Sends the newest readings at intervals, on a thread of OpenTelemetry's library.

    The standard variables of OpenTelemetry (``OTEL_EXPORTER_OTLP_ENDPOINT`` and the others) apply.

    Args:
        endpoint: URL of the collector; None for that of the variables.
        attributes: What the metrics are of; ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES``
            add to it.
        every_s: The interval, unless ``OTEL_METRIC_EXPORT_INTERVAL`` is set.
        say: Prints the first problem of the library in a line; further ones are not printed.

    Attributes:
        readings: The readings to send.
    """

    def __init__(
        self,
        endpoint: str | None,
        attributes: dict[str, str],
        *,
        every_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.readings = Readings()
        self._problems = _FirstRecord(say)
        _LOGGER.addHandler(self._problems)
        url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/metrics"
        self._provider = MeterProvider(
            [
                PeriodicExportingMetricReader(
                    OTLPMetricExporter(url),
                    None if OTEL_METRIC_EXPORT_INTERVAL in os.environ else every_s * 1e3,
                )
            ],
            Resource.create(attributes).merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,  # it would wait longer than `close`
        )
        meter = self._provider.get_meter("ddltrace")
        for metric in METRICS:
            about = (metric.name, [self._observe(metric)], metric.unit, metric.text)
            if metric.is_counter:
                meter.create_observable_counter(*about)
            else:
                meter.create_observable_gauge(*about)

    def _observe(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for labels, value in metric.samples(self.readings):
                yield Observation(value, dict(zip(metric.labels, labels, strict=True)))

        return observe

    def close(self) -> None:
        """Sends the readings a last time; waits for that for two seconds at most."""
        self._provider.shutdown(_LAST_EXPORT_MS)
        _LOGGER.removeHandler(self._problems)


class _FirstRecord(logging.Handler):
    """Prints the first warning or error in a line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say: Callable[[str], None] | None = say

    def emit(self, record: logging.LogRecord) -> None:
        say, self._say = self._say, None
        if say is not None:
            text = " ".join(record.getMessage().split())[:_LONGEST_LINE]
            say(f"OpenTelemetry (told once): {text}")
