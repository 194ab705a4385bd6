"""Splits of a model train as data parallelism does, and their messages are in the trace."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.jobs import DDLTRACE, LAUNCH_RANKS, environment

from ddltrace.analyzer.open_trace import open_trace

JOB = Path(__file__).parent / "jobs" / "parallelism_job.py"
SPLITS = [
    *("gpt:tensor", "gpt:gpipe:microbatches=2", "gpt:1f1b:microbatches=4"),
    *("gpt:zero", "gpt:fsdp", "moe:expert"),
]


@pytest.mark.long
def test_every_split_has_the_losses_of_data_parallelism(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    launch = [DDLTRACE[0], str(LAUNCH_RANKS), "2", str(JOB), str(output), *SPLITS]
    done = subprocess.run(
        [*DDLTRACE, "run", "-o", str(tmp_path / "trace"), "--", *launch],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(output.read_text())
    assert list(report) == SPLITS
    for split, found in report.items():
        assert found["losses"] < 1e-5, split
        # AdamW divides by the root of a gradient's square: what rounds to zero may take a step.
        assert found["parameters"] < 4 * 0.002 + 1e-6, split
    events = open_trace(tmp_path / "trace").events(0)
    operations = set(events["op"].cast("string").drop_null().to_pylist())
    assert {"all_reduce", "all_to_all", "all_gather", "reduce_scatter", "send"} <= operations
