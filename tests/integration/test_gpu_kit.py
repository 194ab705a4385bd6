"""The folder of `dev.py gpu-kit` without network: in a network namespace of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "make_gpu_kit.py"


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "kit"
    command = [sys.executable, str(SCRIPT), "--output", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr[-300:]}")
    return folder


def run(kit: Path, results: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(kit / "run.sh"), "--python", sys.executable, "--output", str(results)]
    if os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip"):
        alone = 'ip link set lo up && exec "$@"'
        command = ["unshare", "--net", "sh", "-c", alone, "sh", *command]
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.timeout(600)  # longer than the budget
def test_everything_runs_without_network(kit: Path, tmp_path: Path) -> None:
    done = run(kit, tmp_path / "results", "--cpu-dry-run", "--budget", "400")
    summary = (tmp_path / "results" / "summary.txt").read_text().splitlines()
    assert done.stdout.splitlines()[-len(summary) :] == summary
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in summary[:2]] == ["ok", "ok"]
    assert "4 passed" in summary[1]
    assert "cost in one job" in (tmp_path / "results" / "benchmark" / "report.txt").read_text()


@pytest.mark.long
def test_mistakes_end_with_a_line(kit: Path, tmp_path: Path) -> None:
    assert run(kit, tmp_path / "a", "--budget", "soon").returncode == 2
    assert "Installs, tests" in run(kit, tmp_path / "b", "--help").stdout
    again = [sys.executable, str(SCRIPT), "--output", str(kit)]
    refused = subprocess.run(again, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr == f"gpu-kit: {kit} is not empty: choose another --output\n"


def test_the_machine_brings_pytorch(kit: Path) -> None:
    names = {path.name.partition("-")[0] for path in (kit / "wheels").iterdir()}
    assert {"ddltrace", "click", "isal", "msgspec", "psutil", "pyarrow", "pytest"} <= names
    assert not names & {"torch", "numpy"}
    assert sum(path.stat().st_size for path in kit.rglob("*") if path.is_file()) <= 50 << 20
