"""Scripts of `benchmarks/` run to their end: trials of seconds, whose numbers do not count."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import environment

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
KINETO = ROOT / "tests" / "data" / "foreign" / "kineto-cpu" / "rank-0.json.gz"
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

MODULES = {
    "codec_messages",
    "measured_files",
    "page_section",
    "simulated_ranks",
    "simulated_training",
    "svg_plots",
    "synthetic",
}
"""Imported by the scripts."""

TESTED_ELSEWHERE = {
    "gpu": "tests/integration/test_gpu_kit.py",
    "make_gpu_kit": "tests/integration/test_gpu_kit.py",
    "paced_schedules": "tests/integration/test_paced_schedules.py",
    "pytorch_suite": "tests/integration/test_pytorch_suite.py",
}


WITHOUT_TRIAL = {
    *("architectures", "dashboard", "device_marks", "experiments", "large_trace", "late_rank"),
    *("nccl_plugin", "scale", "synchronization", "transports", "verdicts"),
}
"""Not tried yet."""

TRIALS = {
    "analysis": "--trial --growth",
    "codecs": "int8 topk --megabytes 0.1",
    "convergence": "int8 --seeds 1 --steps 2 --file FOLDER/runs.jsonl",
    "kineto_import": "FOLDER/rank-0.json.gz --events 3000 --runs 1",
    "overhead": "--job cnn --mode comm --starts 1 --rounds 1 --seconds 0.2",
    "overhead_parts": "--rounds 2 --steps 1 --only everything",
    "pytorch_hooks": "--steps 1",
    "truth": "",
    "writer_interval": "--rounds 1 --turn-s 0.5",
}
"""Script -> its options; FOLDER is a new folder with a Kineto file."""


def test_no_script_is_forgotten() -> None:
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")}
    assert scripts == {*MODULES, *TESTED_ELSEWHERE, *TRIALS, *WITHOUT_TRIAL}
    for name, place in TESTED_ELSEWHERE.items():
        assert name in (ROOT / place).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TRIALS)
def test_it_runs_to_its_end(name: str, tmp_path: Path) -> None:
    shutil.copy(KINETO, tmp_path)
    launcher = RANKS if name == "pytorch_hooks" else ()
    options = TRIALS[name].replace("FOLDER", str(tmp_path)).split()
    done = subprocess.run(
        [sys.executable, *launcher, str(BENCHMARKS / f"{name}.py"), *options],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout or (tmp_path / "runs.jsonl").is_file()
