"""Predictions from a real trace, and the runs that prove them: `experiments/verification.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import environment


def ddltrace(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddltrace", *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
def test_a_prediction_is_written_down_and_then_measured(tmp_path: Path) -> None:
    # The traces of asp have a server, which takes no steps.
    rows = ("--strategy", "fifo", "--strategy", "asp", "--steps", "8", "--repeats", "1")
    done = ddltrace(
        "experiment", "verify", *rows, "--ledger", "ledger.jsonl", "-o", "runs", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "2 measured" in done.stdout
    *predicted, first, second = map(json.loads, (tmp_path / "ledger.jsonl").open())
    asked = [each["answer"]["question"] for each in predicted]
    assert asked == [{"strategy": "fifo"}, {"strategy": "asp"}]
    for prediction, measurement in zip(predicted, (first, second), strict=True):
        assert prediction["time"] <= measurement["time"]
        assert measurement["measured_us"] > 0
    assert (tmp_path / "runs" / "before" / "ddp" / "calibration.json").is_file()
    shown = ddltrace("experiment", "verify", "--ledger", "ledger.jsonl", "--json", cwd=tmp_path)
    pairs = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(pairs) == 2
    for pair in pairs:
        assert pair["measurement"]["prediction"] == pair["prediction"]["sha256"]


@pytest.mark.long
def test_two_ranks_are_calibrated(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    asked = ("--trace", "trace", "--strategy", "bf16")
    done = ddltrace("experiment", "calibrate", "--rounds", "3", *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("next: ddltrace whatif trace --all\n")
    found = json.loads((tmp_path / "trace" / "calibration.json").read_text())
    assert found["library"] == "gloo"
    assert {point["ranks"] for point in found["points"]} == {2}
    times = [point["us"] for point in found["points"]]
    assert times[-1] > times[0] > 0
    assert {each["strategy"] for each in found["exchanges"]} == {"bf16"}
    assert {each["gradients"] for each in found["exchanges"]} == {1, 8, 48}
