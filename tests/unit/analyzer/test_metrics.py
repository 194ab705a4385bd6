"""Metrics and alerts of a running job: `analyzer/metrics/`, `analyzer/watch_commands.py`."""

from __future__ import annotations

import http.server
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.collector import Received, collector

from ddltrace.analyzer.live.live_state import Alert
from ddltrace.analyzer.metrics.alert_rules import AlertRules, Raised, tell
from ddltrace.analyzer.metrics.metric_table import METRICS
from ddltrace.analyzer.metrics.open_telemetry import MetricSender
from ddltrace.analyzer.metrics.prometheus import TOKEN_VARIABLE, MetricServer
from ddltrace.analyzer.metrics.readings import Readings, Straggler, size_class
from ddltrace.tracer.alert_expression import QUANTITIES, Limit, parse_limit
from ddltrace.tracer.connections.addresses import parse_address
from ddltrace.tracer.connections.metric_targets import Collector, parse_target
from ddltrace.tracer.errors import UsageError

DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "examples" / "grafana.json"
READINGS = Readings(
    num_steps=120,
    window_steps=20,
    ranks=2,
    recording=1,
    lost=3,
    quantities={
        **dict.fromkeys(QUANTITIES, 0.25),
        "step_seconds": 0.05,
        "wait_share": 0.3,
        "lateness_seconds": 0.002,
    },
    wait_s={0: 0.01, 1: 0.0},
    memory_bytes={0: 2e9, 1: 3e9},
    busbw={("all_reduce", "1 MiB"): 1.5e9},
    straggler=Straggler(1, "data", 0.002),
    goodput={"training": 0.75, "other": 0.25},
    alerts=(Alert("hang", (0,), "all_reduce hangs."),),
)


@pytest.fixture
def server() -> Iterator[MetricServer]:
    served = MetricServer(("127.0.0.1", 0))
    served.start()
    yield served
    served.close()


def get(url: str, **headers: str) -> str:
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def samples(text: str) -> dict[str, float]:
    """Name and labels -> value."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_the_endpoint_has_all_metrics_in_base_units(server: MetricServer) -> None:
    server.readings = READINGS
    found = samples(get(server.url))
    assert found["ddltrace_step_seconds"] == 0.05
    assert found["ddltrace_exposed_seconds"] == 0.25
    assert found["ddltrace_lateness_seconds"] == 0.002
    assert found['ddltrace_wait_seconds{rank="0"}'] == 0.01
    assert found['ddltrace_straggler{cause="data",rank="1"}'] == 1
    assert found['ddltrace_busbw_bytes{operation="all_reduce",size="1 MiB"}'] == 1.5e9
    assert found['ddltrace_goodput_share{part="training"}'] == 0.75
    assert found["ddltrace_lost_records_total"] == 3
    assert found["ddltrace_steps_total"] == 120
    assert found['ddltrace_alerts{kind="hang"}'] == 1
    assert (found["ddltrace_ranks"], found["ddltrace_recording"]) == (2, 1)


def test_labels_of_former_readings_go(server: MetricServer) -> None:
    server.readings = READINGS
    before = samples(get(server.url))
    server.readings = replace(READINGS, straggler=Straggler(0, "host", 0.1))
    after = samples(get(server.url))
    assert len(before) == len(after)
    assert 'ddltrace_straggler{cause="data",rank="1"}' not in after
    server.readings = Readings(num_steps=120)
    idle = samples(get(server.url))
    assert "ddltrace_step_seconds" not in idle
    assert idle["ddltrace_steps_total"] == 120


def test_the_dashboard_shows_metrics_that_exist(server: MetricServer) -> None:
    server.readings = READINGS
    names = {re.sub(r"\{.*", "", name) for name in samples(get(server.url))}
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"ddltrace_\w+", target["expr"])
    }
    assert asked <= names
    assert {"ddltrace_step_seconds", "ddltrace_straggler", "ddltrace_busbw_bytes"} <= asked


def send(endpoint: str | None, said: list[str], every_s: float = 3600) -> None:
    """Sends `READINGS` once, at the end."""
    attributes = {"service.name": "ddltrace", "ddltrace.trace": "/tmp/trace"}
    sender = MetricSender(endpoint, attributes, every_s=every_s, say=said.append)
    sender.readings = READINGS
    sender.close()


def test_a_collector_gets_what_prometheus_gets(server: MetricServer) -> None:
    server.readings = READINGS
    text, said = get(server.url), list[str]()
    with collector() as received:
        send(received.url, said)
    (request,) = received.requests
    assert said == []
    assert request.samples == samples(text)
    assert request.resource["service.name"] == "ddltrace"
    assert request.resource["ddltrace.trace"] == "/tmp/trace"
    assert request.units["ddltrace_step_seconds"] == "s"
    assert request.units["ddltrace_memory_bytes"] == "By"
    assert request.counters == {metric.name for metric in METRICS if metric.is_counter}
    assert request.counters == {"ddltrace_steps_total", "ddltrace_lost_records_total"}


def test_the_standard_variables_lead_to_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "pretraining")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    with collector() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        sender = MetricSender(None, {"service.name": "ddltrace"}, every_s=3600, say=print)
        sender.readings = READINGS
        deadline = time.monotonic() + 30
        while not has_steps(received) and time.monotonic() < deadline:
            time.sleep(0.02)
        # Labels of former readings go.
        sender.readings = replace(READINGS, straggler=None, num_steps=121)
        sender.close()
    assert received.requests[0].headers["authorization"] == "Bearer secret"
    assert received.requests[0].resource["service.name"] == "pretraining"
    assert received.requests[-1].samples["ddltrace_steps_total"] == 121
    assert not any(name.startswith("ddltrace_straggler") for name in received.requests[-1].samples)


def has_steps(received: Received) -> bool:
    return any("ddltrace_step_seconds" in each.samples for each in received.requests)


@pytest.mark.long
def test_a_collector_that_does_not_answer_costs_a_line_and_two_seconds() -> None:
    with socket.socket() as silent:  # it accepts connections and never reads
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        began, said = time.monotonic(), list[str]()
        send(f"http://127.0.0.1:{port}", said)
        assert 1 < time.monotonic() - began < 20
    said.clear()
    with socket.socket() as deaf:  # it keeps its port from others, and does not listen
        deaf.bind(("127.0.0.1", 0))
        began = time.monotonic()
        send(f"http://127.0.0.1:{deaf.getsockname()[1]}", said)
        assert time.monotonic() - began < 20
    assert len(said) == 1
    assert said[0].startswith("OpenTelemetry (told once): ")
    assert "\n" not in said[0]
    with collector(status=401) as received:
        send(received.url, said)
    assert len(said) == 2
    assert "401" in said[1]


def test_targets_of_metrics_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_target(":9464") == ("127.0.0.1", 9464)
    assert parse_target("otlp") == Collector(None)
    assert parse_target("otlp+https://x:1/y") == Collector("https://x:1/y")
    for text in ("otlp+", "otlp+x:4318", "otlp+ftp://x", "otlp+http://", "http://x:4318/"):
        with pytest.raises(UsageError, match="is not a"):
            parse_target(text)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(UsageError, match="not grpc"):
        parse_target("otlp")


def test_other_hosts_need_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(UsageError, match=TOKEN_VARIABLE):
        MetricServer(("0.0.0.0", 0))
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    server = MetricServer(("127.0.0.1", 0))
    server.start()
    try:
        for given in ({}, {"Authorization": "Bearer wrong"}):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                get(server.url, **given)
        assert "ddltrace_steps_total" in get(server.url, Authorization="Bearer secret")
    finally:
        server.close()


def test_a_client_that_sends_nothing_holds_up_the_others_for_seconds_only(
    server: MetricServer, capfd: pytest.CaptureFixture[str]
) -> None:
    port = int(server.url.split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port)) as silent:
        began = time.monotonic()
        assert "ddltrace_ranks" in get(server.url)
        assert time.monotonic() - began < 20
        silent.close()
    assert capfd.readouterr().err == ""


def test_a_used_port_is_an_error_in_a_line(server: MetricServer) -> None:
    port = int(server.url.split(":")[2].split("/")[0])
    with pytest.raises(UsageError, match="cannot be listened on"):
        MetricServer(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("wait_share > 20% for 50 steps", ("wait_share", True, 0.2, 50)),
        ("wait_share>20% for 50 steps", ("wait_share", True, 0.2, 50)),
        ("step_seconds > 250ms", ("step_seconds", True, 0.25, 1)),
        ("overlap_ratio < 0.5 for 1 step", ("overlap_ratio", False, 0.5, 1)),
        ("memory_bytes > 2 GiB", ("memory_bytes", True, 2.0 * 2**30, 1)),
    ],
)
def test_limits_are_read(text: str, limit: tuple[str, bool, float, int]) -> None:
    found = parse_limit(text)
    assert (found.quantity, found.above, found.value, found.steps) == limit


@pytest.mark.parametrize(
    "text", ["", "wait_share", "speed > 3", "wait_share > x", "wait_share = 1"]
)
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not an alert"):
        parse_limit(text)


def test_addresses_are_read() -> None:
    assert parse_address(":9464") == ("127.0.0.1", 9464)
    assert parse_address("[::1]:80") == ("::1", 80)
    for text in ("9464", "host", "host:", ":70000", "host:x"):
        with pytest.raises(UsageError, match="is not an address"):
            parse_address(text)


def readings(step: int, wait_share: float | None, **more: Any) -> Readings:
    quantities = {} if wait_share is None else {"wait_share": wait_share}
    return Readings(num_steps=step, window_steps=10, quantities=quantities, **more)


def raised(rules: AlertRules, *looks: Readings) -> list[int]:
    """The steps at which alerts were raised."""
    return [alert.step for look in looks for alert in rules.check(look)]


def test_an_alert_is_raised_once_until_its_limit_is_kept_again() -> None:
    rules = AlertRules([Limit("x", "wait_share", above=True, value=0.2, steps=25)])
    looks = [(10, 0.1), (20, 0.3), (30, 0.3), (40, 0.3), (50, 0.3), (60, 0.1), (90, 0.4)]
    assert raised(rules, *(readings(*look) for look in looks)) == [40]
    assert raised(rules, readings(110, 0.4)) == [110]
    # A look without a new step says nothing about the limit.
    assert raised(rules, readings(110, None), readings(120, 0.4)) == []


def test_a_hang_is_told_once_while_it_lasts() -> None:
    rules = AlertRules([])
    hang = Alert("hang", (1,), "all_reduce number 3 hangs.")
    looks = [readings(5, None, alerts=(hang,))] * 2 + [readings(6, 0.1)]
    assert raised(rules, *looks, readings(7, None, alerts=(hang,))) == [5, 7]


def test_an_alert_reaches_the_log_a_command_and_a_webhook(tmp_path: Path) -> None:
    received: list[Any] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            received.append(json.loads(self.rfile.read(length)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    hook = http.server.HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=hook.serve_forever, daemon=True).start()
    said: list[str] = []
    alert = Raised("wait_share > 20%", "wait_share is 0.3", 40, 0.3)
    url, told = f"http://127.0.0.1:{hook.server_port}/", tmp_path / "told"
    tell(alert, say=said.append, command=f'echo "$DDLTRACE_ALERT" > {told}', webhook=url)
    hook.shutdown()
    hook.server_close()
    assert said == ["alert: wait_share is 0.3"]
    assert told.read_text() == "wait_share is 0.3\n"
    assert received == [
        {"rule": "wait_share > 20%", "text": "wait_share is 0.3", "step": 40, "value": 0.3}
    ]
    tell(alert, say=said.append, command="exit 3", webhook=url)
    assert [line.split(":")[0] for line in said[1:]] == [
        "alert",
        "the alert's command failed",
        "the alert's webhook failed",
    ]


def test_sizes_are_classes_of_four() -> None:
    assert [size_class(n) for n in (1, 4, 5, 65536, 65537, 1 << 40)] == [
        *("1 B", "4 B", "16 B", "64 KiB", "256 KiB", "256 GiB"),
    ]
