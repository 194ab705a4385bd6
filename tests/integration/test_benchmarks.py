"""Scripts of `benchmarks/` run to their end: trials of seconds, whose numbers do not count."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import environment
from support.sampling import sampled

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
KINETO = ROOT / "tests" / "data" / "foreign" / "kineto-cpu" / "rank-0.json.gz"
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

MODULES = {
    "codec_messages",
    "experiment_runs",
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


TRIALS = {
    "analysis": "--trial --growth",
    "architectures": (
        "--sizes 65536 --rounds 1 --network 1gbit --directory FOLDER/a --page FOLDER/p.md"
    ),
    "calibrated_codecs": "--ranks 2 --rounds 1 --strategy int8 --workload gpt",
    "codecs": "int8 topk --megabytes 0.1",
    "convergence": "int8 --seeds 1 --steps 2 --file FOLDER/runs.jsonl",
    "dashboard": "--events 20000 --browser-events 20000 --repeats 1",
    "device_marks": "--turns 3 --marks 500",
    "experiments": (
        "--workload digits --bandwidth 1gbit --strategy ddp --strategy fp16 --hosts 2 --steps 4 "
        "--repeats 1 --directory FOLDER/e --results FOLDER/r --ledger FOLDER/l --page FOLDER/p.md"
    ),
    "experts": (
        "--bandwidth 1gbit --steps 4 --width 16 --repeats 1 --directory FOLDER/e "
        "--results FOLDER/r --page FOLDER/page.md"
    ),
    "injected_faults": "--jobs 1",
    "kineto_import": "FOLDER/rank-0.json.gz --events 3000 --runs 1",
    "large_trace": "--gigabytes 0.01 --seconds 2 --folder FOLDER",
    "late_rank": "--jobs 1",
    "off_instructions": "--steps 3 --without-valgrind",
    "nccl_plugin": "--turns 1 --batches 10",
    "overhead": "--job cnn --mode comm --starts 1 --rounds 1 --seconds 0.2",
    "overhead_parts": "--rounds 2 --steps 1 --only everything",
    "pytorch_hooks": "--steps 1",
    "scale": "--ranks 4 --steps 2 --compare 4 --repeat 1 --checked 4",
    "synchronization": (
        "--steps 6 --width 2 --repeats 1 --strategy ssp:bound=1 --directory FOLDER/s "
        "--results FOLDER/r --page FOLDER/page.md"
    ),
    "transports": (
        "--transport tcp --bandwidth 1gbit --max-bytes 4096 --rounds 5 --repeats 2 "
        "--directory FOLDER/t --page FOLDER/page.md"
    ),
    "truth": "",
    "verdicts": "--runs 2 --steps 5 --condition loaded",
    "whatif": (
        "--only digits:16 --bandwidth 1gbit --strategies ddp --steps 6 --repeats 1 "
        "--page FOLDER/page.md --ledger FOLDER/ledger.jsonl --directory FOLDER/runs"
    ),
    "whatif_speed": "--ranks 8 --messages 10 --steps 3",
    "writer_interval": "--rounds 1 --turn-s 0.5",
}
"""Script -> its options; FOLDER is a new folder with a Kineto file."""


def test_no_script_is_forgotten() -> None:
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")}
    assert scripts == {*MODULES, *TESTED_ELSEWHERE, *TRIALS}
    for name, place in TESTED_ELSEWHERE.items():
        assert name in (ROOT / place).read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(list(TRIALS), 8))
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
