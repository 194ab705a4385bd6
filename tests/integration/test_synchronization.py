"""Rules of synchronization on real ranks and servers, checked from their traces."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.jobs import DDLTRACE, LAUNCH_RANKS, environment
from support.sampling import sampled

from ddltrace.analyzer.open_trace import open_trace
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


@pytest.mark.long
def test_synchronous_rules_train_as_ddp_does(tmp_path: Path) -> None:
    report = train(tmp_path, SYNCHRONOUS)
    for spec in EXACT:
        assert report[spec]["distance"] < 1e-5, spec
    assert all(row["equal"] for row in report.values())


@pytest.mark.long
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


SEED = random.SystemRandom().randrange(1 << 32)


def processes_below(parent: int) -> dict[int, str]:
    """All processes that a process has started, by their ids, with their command lines."""
    found = {}
    for process in psutil.Process(parent).children(recursive=True):
        try:
            found[process.pid] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found


def of_kind(kind: str, processes: dict[int, str]) -> list[int]:
    part = {
        "worker": "-m ddltrace.experiments.harness.worker",
        "server": "asynchrony.server",
        "summing server": "collectives.server",
    }
    return sorted(
        pid
        for pid, line in processes.items()
        if part[kind] in line and "local_ranks" not in line and " run " not in line
    )


@pytest.mark.long
@pytest.mark.parametrize("victim", sampled(["worker", "server", "experiment", "summing server"], 2))
def test_a_killed_process_leaves_nothing_behind(victim: str, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    rng = random.Random(f"{SEED} {victim}")
    steps = "250" if victim == "worker" else "100000"
    synchronous = victim == "summing server"
    strategy = "ps:servers=1" if synchronous else "ps:servers=1+asp"
    command = [*DDLTRACE, "experiment", "run", "--repeats=1", "--strategy", strategy, "--json"]
    command += ["--max-other-cores", "1000"]
    command += ["--ranks", "3", "--width", "2", "--batch-size", "4", "--steps", steps]
    job = subprocess.Popen(
        [*command, "-o", str(tmp_path / "out"), "--timeout", "200"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    started = tmp_path / "out" / "ps-servers-1-asp.outcome.json.started"
    log = tmp_path / "out" / "ps-servers-1.log"

    def training() -> bool:
        if synchronous:  # rank 0 prints the placement of keys at the first step
            return log.exists() and "keys: " in log.read_text()
        return started.exists()

    while not training():
        assert job.poll() is None, job.stderr
        time.sleep(0.02)
    # Until all workers have joined its group, a server ends with the worker that started it.
    time.sleep(0.3 + rng.random() / 2)
    processes = processes_below(job.pid)
    killed = job.pid if victim == "experiment" else rng.choice(of_kind(victim, processes))
    at = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    output, errors = job.communicate(timeout=200)
    if victim == "worker":
        assert job.returncode == 0, errors
        (row,) = json.loads(output)["rows"]
        assert len(row["synchronization"]["died"]) == 1
        assert any("was dropped" in note for note in row["notes"])
        assert row["synchronization"]["violations"] == []
    elif victim.endswith("server"):
        assert job.returncode == 1
        assert "server 0 of 1 of the parameter server has died" in errors
    _, alive = psutil.wait_procs([p for p in map(existing, processes) if p], timeout=60)
    print(f"ended after {time.monotonic() - at:.1f} s")
    assert not alive


def existing(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None
