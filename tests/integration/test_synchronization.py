"""Rules of synchronization on real ranks and servers, checked from their traces."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.jobs import DDLTRACE, LAUNCH_RANKS, environment
from support.sampling import sampled

from ddltrace.analyzer.trace.opened_trace import open_trace
from ddltrace.experiments.harness.synchronization_report import synchronization_of

JOB = Path(__file__).parent / "jobs" / "synchronization_job.py"
RANKS = 3
EXACT = ["ps:servers=2+bsp@clipped", "ps:servers=2+bsp@adam", "bsp@sgd", "grouped:size=1,every=1@"]
SYNCHRONOUS = [*EXACT, "gossip", "adpsgd"]
ON_SERVERS = sampled(
    [
        *("ps:servers=2+ssp:bound=1", "ssp:bound=0+grpc", "ps:servers=2+asp+zmq"),
        *("asp+topk:density=0.2+feedback", "adaptive_ssp", "backup:workers=1+qsgd"),
    ],
    1,
)


def train(folder: Path, specs: list[str]) -> dict[str, Any]:
    """Runs the job traced; a strategy with servers needs a trace of its own."""
    output = folder / "report.json"
    command = [*DDLTRACE, "run", "-o", str(folder / "trace"), "--", *_launch(RANKS)]
    done = subprocess.run(
        [*command, str(JOB), str(output), *specs],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(output.read_text())
    return report


def _launch(ranks: int) -> list[str]:
    return [DDLTRACE[0], str(LAUNCH_RANKS), str(ranks)]


def test_synchronous_rules_train_as_ddp_does(tmp_path: Path) -> None:
    report = train(tmp_path, SYNCHRONOUS)
    for spec in EXACT:
        assert report[spec]["distance"] < 1e-5, spec
    assert all(row["equal"] for row in report.values())


@pytest.mark.parametrize("spec", ON_SERVERS)
def test_a_rule_with_servers_keeps_its_promises(spec: str, tmp_path: Path) -> None:
    report = train(tmp_path, [spec])
    assert report[spec]["equal"]
    assert report[spec]["loss"] < 1.0
    found = synchronization_of(open_trace(tmp_path / "trace"))
    assert found is not None
    assert found["violations"] == []
    assert found["unchecked"] is None
    assert found["clocks"] == {"0": 8, "1": 8, "2": 8}
    assert found["updates"]["pushed"] == found["updates"]["applied"] + found["updates"]["dropped"]
    if "ssp:bound" in spec:
        assert found["staleness"]["max"] <= int(spec.partition("bound=")[2][0])
