"""Architectures on real ranks: the numbers of DDP, and exactly the formula's messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.sampling import sampled

JOB = Path(__file__).parent / "jobs" / "architecture_job.py"
ON_THREE = [
    "ring",
    "halving_doubling",
    "tree",
    "double_tree",
    "mesh",
    "hierarchical:ranks_per_host=2",
    "hierarchical:inner=tree,outer=mesh,ranks_per_host=2",
    "ps:sharded=true",
    "ps",
    "ps:servers=2+wfbp",
    "ring+topk:density=0.1+feedback",
    "mesh+topk:density=0.1+feedback",
    "mesh+powersgd+feedback",
    "ring+p3:slice=20",
    "tree+bytescheduler:partition_mb=0.0001,credit_mb=0.0002",
]
ON_FIVE = sampled(["ring", "halving_doubling", "double_tree", "mesh+wfbp", "ps:servers=3"], 3)


def run(ranks: int, specs: list[str], output: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(JOB), str(output), *specs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    value: dict[str, Any] = json.loads(output.read_text())
    return value


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(3, ON_THREE, tmp_path_factory.mktemp("architectures") / "report.json")


@pytest.mark.parametrize("spec", ON_THREE)
def test_three_ranks_train_as_with_the_librarys_all_reduce(
    spec: str, of_three: dict[str, Any]
) -> None:
    assert of_three[spec]["distance"] < 1e-6
    assert of_three[spec]["replicas_equal"]


def test_five_ranks_do_too(tmp_path: Path) -> None:
    report = run(5, ON_FIVE, tmp_path / "report.json")
    assert list(report) == ON_FIVE
    assert max(row["distance"] for row in report.values()) < 1e-6
    assert all(row["replicas_equal"] for row in report.values())
