"""The command ``watch``: metrics and alerts of a job that runs."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ddltrace.tracer.alert_expression import QUANTITIES, parse_limit
from ddltrace.tracer.connections.metric_targets import Collector, parse_target
from ddltrace.tracer.errors import TraceError, UsageError
from ddltrace.tracer.next_command import say
from ddltrace.tracer.peak_option import peak_option

if TYPE_CHECKING:
    from ddltrace.analyzer.metrics.alert_rules import AlertRules
    from ddltrace.analyzer.metrics.open_telemetry import MetricSender
    from ddltrace.analyzer.metrics.prometheus import MetricServer
    from ddltrace.analyzer.metrics.readings import Readings

_START_S: Final = 60.0
"""How long the trace may take to appear."""


@click.command(
    epilog="""\b
Examples:
  ddltrace watch trace --metrics :9464
  ddltrace watch trace --metrics otlp+http://127.0.0.1:4318
  ddltrace watch trace --alert 'wait_share>20% for 50 steps' --alert-command 'mail -s slow me'

\b
Quantities of alerts, of the steps of the last 15 seconds:
"""
    + "\n".join(f"  {name}: {text}" for name, text in QUANTITIES.items())
)
@click.argument("directory", type=click.Path(path_type=Path), metavar="TRACE")
@click.option(
    "--metrics",
    "targets",
    multiple=True,
    metavar="TARGET",
    help="Serve metrics for Prometheus on :PORT (of 127.0.0.1) or HOST:PORT; other hosts than this "
    "one need the token in DDLTRACE_METRICS_TOKEN. Or send them to a collector of OpenTelemetry: "
    "otlp (that of OTEL_EXPORTER_OTLP_ENDPOINT) or otlp+http://HOST:4318. Repeat it for both.",
)
@click.option(
    "--alert",
    "alerts",
    multiple=True,
    metavar="EXPRESSION",
    help="Print a line when a limit is passed, such as 'wait_share>20% for 50 steps'; repeat it.",
)
@click.option(
    "--alert-command", metavar="COMMAND", help="Also run this, with the line in DDLTRACE_ALERT."
)
@click.option("--alert-webhook", metavar="URL", help="Also send a POST request with JSON.")
@click.option(
    "--every",
    type=click.FloatRange(min=0.5),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks at the trace.",
)
@peak_option("mfu")
@click.option("--beside-job", is_flag=True, hidden=True, help="End when standard input is closed.")
def watch(  # noqa: PLR0917 - click passes one argument for each option
    directory: Path,
    targets: tuple[str, ...],
    alerts: tuple[str, ...],
    alert_command: str | None,
    alert_webhook: str | None,
    every: float,
    peak_tflops: float | None,
    beside_job: bool,
) -> int:
    """Watch a job while it runs: serve or send metrics, and alert when a limit is passed.

    TRACE is the directory that ddltrace run writes to. Dead ranks and hangs are always reported.
    The command ends with the job.
    """
    from ddltrace.analyzer.live.live_trace import LiveTrace
    from ddltrace.analyzer.metrics.alert_rules import AlertRules
    from ddltrace.analyzer.metrics.readings import Readings, read

    rules = AlertRules([parse_limit(text) for text in alerts])
    parsed = [parse_target(text) for text in targets]
    publishers: list[MetricServer | MetricSender] = [
        _server(target) for target in parsed if not isinstance(target, Collector)
    ]
    live, readings = LiveTrace(_existing(directory)), Readings()
    publishers += [
        _sender(target, directory, every) for target in parsed if isinstance(target, Collector)
    ]
    try:
        while True:
            with contextlib.suppress(TraceError):  # it is being written
                readings = read(live, readings, peak_tflops)
                _tell(rules, readings, alert_command, alert_webhook)
            for publisher in publishers:
                publisher.readings = readings
            if readings.status != "running" or _job_has_ended(every, beside_job=beside_job):
                return 0
    finally:
        live.close()
        for publisher in publishers:
            publisher.close()


def _server(address: tuple[str, int]) -> MetricServer:
    from ddltrace.analyzer.metrics.prometheus import MetricServer

    server = MetricServer(address)
    server.start()
    say(f"metrics: {server.url}")
    return server


def _sender(collector: Collector, directory: Path, every_s: float) -> MetricSender:
    from ddltrace.analyzer.metrics.open_telemetry import MetricSender
    from ddltrace.tracer.trace.run_reader import read_run

    run = read_run(directory)
    attributes = {
        "service.name": "ddltrace",
        "service.instance.id": f"{run.host}:{run.launcher_pid}:{run.created_unix_ns}",
        "ddltrace.trace": str(directory.resolve()),
    }
    return MetricSender(collector.url, attributes, every_s=every_s, say=say)


def _tell(rules: AlertRules, readings: Readings, command: str | None, webhook: str | None) -> None:
    from ddltrace.analyzer.metrics.alert_rules import tell

    for alert in rules.check(readings):
        tell(alert, say=say, command=command, webhook=webhook)


def _existing(directory: Path) -> Path:
    """Waits for the trace, which a launcher may be about to create."""
    deadline = time.monotonic() + _START_S
    while not (directory / "run.json").exists() and not list(directory.glob("part-*/run.json")):
        if not directory.exists() or time.monotonic() > deadline:
            raise UsageError(f"{directory} is not a trace: give the directory of ddltrace run -o")
        time.sleep(0.1)
    return directory


def _job_has_ended(seconds: float, *, beside_job: bool) -> bool:
    """Waits for the next look; true if the launcher, whose pipe is standard input, has ended."""
    if not beside_job:
        time.sleep(seconds)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready)
