"""Metrics and alerts beside a real job: `ddltrace run --metrics`, `ddltrace watch`."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from support.collector import collector
from support.jobs import DDLTRACE, free_port, on_ranks, run, start, traced

from ddltrace.analyzer.live.live_state import Alert
from ddltrace.analyzer.metrics.prometheus import MetricServer
from ddltrace.analyzer.metrics.readings import Readings, Straggler
from ddltrace.tracer.alert_expression import QUANTITIES

PATIENCE_S = 120.0
DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "examples" / "grafana.json"


def metrics(port: int) -> dict[str, float]:
    """Name and labels -> value; empty while nobody serves."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return {}
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if not line.startswith("#")
    }


def test_a_job_serves_and_sends_metrics_and_tells_of_a_passed_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, stop = free_port(), tmp_path / "stop"
    command = traced(
        tmp_path / "trace",
        on_ranks("trains_on_tokens.py", "until", str(stop)),
        *("--metrics", f":{port}", "--alert", "step_seconds > 1ms for 5 steps"),
        *("--metrics", "otlp", "--level", "op", "--op-steps", "2:5", "--peak-tflops", "0.001"),
    )
    with collector() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        job = start(command, cwd=tmp_path, stderr=subprocess.PIPE)
        try:
            found: dict[str, float] = {}
            deadline = time.monotonic() + PATIENCE_S
            while "ddltrace_mfu" not in found and time.monotonic() < deadline:
                time.sleep(0.5)
                found = metrics(port)
            stop.touch()
            _, errors = job.communicate(timeout=PATIENCE_S)
        finally:
            stop.touch()  # the ranks would outlive their launcher
            job.kill()
    sent = received.requests[-1]
    assert sent.resource["ddltrace.trace"] == str(tmp_path / "trace")
    assert sent.samples["ddltrace_ranks"] == 2
    assert sent.samples["ddltrace_steps_total"] >= found["ddltrace_steps_total"]
    assert job.returncode == 0, errors
    assert found["ddltrace_ranks"] == found["ddltrace_recording"] == 2
    assert found["ddltrace_steps_total"] > 0
    assert found["ddltrace_lost_records_total"] == 0
    parts = {name: share for name, share in found.items() if "_goodput_share" in name}
    assert sum(parts.values()) == pytest.approx(1)
    assert parts['ddltrace_goodput_share{part="training"}'] > 0
    # The job sleeps 5 ms in each step.
    assert found["ddltrace_step_seconds"] > 0.005
    assert 0 <= found["ddltrace_exposed_share"] <= 1
    # Two ranks, four samples in most steps: the others ask whether to stop.
    assert 0 < found["ddltrace_samples_per_second"] * found["ddltrace_step_seconds"] < 9
    tokens = 12 * found["ddltrace_samples_per_second"]
    assert found["ddltrace_tokens_per_second"] == pytest.approx(tokens)
    assert 0 < found["ddltrace_mfu"] < 1
    assert {name for name in found if name.startswith("ddltrace_wait_seconds")} == {
        'ddltrace_wait_seconds{rank="0"}',
        'ddltrace_wait_seconds{rank="1"}',
    }
    assert any(name.startswith('ddltrace_busbw_bytes{operation="all_reduce"') for name in found)
    alerts = [line for line in errors.splitlines() if "alert: step_seconds is " in line]
    assert len(alerts) == 1, errors
    assert metrics(port) == {}


def test_what_cannot_be_watched_is_told_in_a_line_before_the_job_starts(tmp_path: Path) -> None:
    for options in (["--metrics", "9464"], ["--metrics", "0.0.0.0:1"], ["--alert", "fast"]):
        done = run([*DDLTRACE, "watch", "nothing", *options], cwd=tmp_path)
        assert done.status == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1
    for options in (["--metrics", "9464"], ["--metrics", "otlp+x:1"], ["--alert", "fast"]):
        done = run(traced(tmp_path / "trace", ["touch", "started"], *options), cwd=tmp_path)
        assert done.status == 2
        assert not (tmp_path / "started").exists()
    done = run([*DDLTRACE, "watch", "nothing"], cwd=tmp_path)
    assert done.status != 0
    assert "is not a trace" in done.stderr


@pytest.mark.long
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus")
def test_a_real_prometheus_answers_what_the_dashboard_asks(tmp_path: Path) -> None:
    server, port = MetricServer(("127.0.0.1", 0)), free_port()
    server.readings = Readings(
        num_steps=9,
        quantities=dict.fromkeys(QUANTITIES, 0.5),
        wait_s={0: 0.1, 1: 0.2},
        memory_bytes={0: 1e9},
        busbw={("all_reduce", "64 KiB"): 1e9},
        straggler=Straggler(1, "data", 0.1),
        goodput={"training": 0.9, "other": 0.1},
        alerts=(Alert("hang", (0,), "x"),),
    )
    server.start()
    place = server.url.removeprefix("http://").removesuffix("/metrics")
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs:\n"
        f"  - {{job_name: training, static_configs: [{{targets: ['{place}']}}]}}\n"
    )
    command = [
        *("prometheus", "--config.file=prometheus.yml", f"--storage.tsdb.path={tmp_path / 'data'}"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    with (tmp_path / "log").open("w") as log:
        program = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    try:
        missing = set(asked)
        deadline = time.monotonic() + PATIENCE_S
        while missing and time.monotonic() < deadline:
            time.sleep(0.5)
            missing = {expression for expression in missing if not answers(port, expression)}
        assert not missing, (tmp_path / "log").read_text()[-2000:]
    finally:
        program.terminate()
        program.wait(PATIENCE_S)
        server.close()


def answers(port: int, expression: str) -> bool:
    """Whether Prometheus has values of an expression."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        url = f"http://127.0.0.1:{port}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            value = json.load(answer)
    except OSError:
        return False
    return value["status"] == "success" and bool(value["data"]["result"])
