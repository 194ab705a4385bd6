"""Measures how often `ddltrace compare` decides falsely, and how often it finds a true difference.

The job trains a small network under DDP with two ranks of one thread each. Its runs are processes
of their own, so that all that differs between runs is in the result. Runs with more work take
turns with runs without: their amount of work is calibrated to a step that takes 10 % longer.

The pairs of equal runs are drawn at random from one series of runs: 100 pairs of one run a side,
and 100 of three runs a side. A run occurs in several pairs, so the pairs are not independent: a
single outlier shows in all its pairs. The comparisons with the true difference share no run.

Usage:
    python benchmarks/verdicts.py              # on an idle machine, then under load
    python benchmarks/verdicts.py --runs 6     # a trial of the benchmark itself
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

import ddltrace
from ddltrace.analyzer.compare.comparison import compare_steps
from ddltrace.analyzer.events.rank_timeline import CATEGORIES
from ddltrace.analyzer.model import Analysis

_PAIRS: Final = 100
_COMPARISONS: Final = 10
_SIDE: Final = 3
_UNITS: Final = 40
_LONGER: Final = 0.1
_LOAD: Final = "while True: sum(range(100_000))"
_LOAD_PROCESSES: Final = 2


def main() -> None:
    """Runs the job, compares its traces and prints both claims."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=_SIDE * _COMPARISONS, help="equal runs")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--condition", choices=["idle", "loaded", "both"], default="both")
    parser.add_argument("--keep", type=Path, help="keep the traces in this directory")
    parser.add_argument("--units", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.units is not None:
        _train(options.units, options.steps)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        if options.condition in ("idle", "both"):
            _measure(folder / "idle", options.runs, options.steps, find=True)
        if options.condition in ("loaded", "both"):
            load = [subprocess.Popen([sys.executable, "-c", _LOAD]) for _ in range(_LOAD_PROCESSES)]
            try:
                _measure(folder / "loaded", options.runs, options.steps, find=False)
            finally:
                for process in load:
                    process.kill()


def _measure(folder: Path, runs: int, steps: int, *, find: bool) -> None:
    """Makes the runs of one condition and prints what comparing them says.

    Args:
        folder: For the traces.
        runs: Number of equal runs, and of runs with more work.
        steps: Steps of a run.
        find: Whether to measure the true difference as well.
    """
    start, load_before = time.monotonic(), os.getloadavg()[0]
    more = _calibrated(folder, steps) if find else None
    equal, longer = [], []
    for number in range(runs):
        equal.append(_run(folder / f"equal-{number}", _UNITS, steps))
        if more is not None:
            longer.append(_run(folder / f"longer-{number}", more, steps))
    random = np.random.default_rng(0)
    found: dict[str, object] = {
        "condition": folder.name,
        "load_average_before": load_before,
        "runs": runs,
        "seconds": round(time.monotonic() - start),
        "run_mean_us": [round(each.summary.step_us.mean or 0) for each in equal],
        "cpu_wait_share": [_wait_share(each) for each in equal],
        "noise": _noise(equal),
    }
    for side in (1, _SIDE):
        verdicts: Counter[str] = Counter()
        for _ in range(_PAIRS if 2 * side <= runs else 0):
            chosen = random.permutation(runs)[: 2 * side]
            before, after = ([equal[n] for n in part] for part in np.split(chosen, 2))
            verdicts[compare_steps(before, after).verdict] += 1
        found[f"equal_{side}_a_side"] = dict(verdicts)
    if longer:
        groups = [range(n, n + _SIDE) for n in range(0, runs - _SIDE + 1, _SIDE)]
        rows = [compare_steps([equal[n] for n in g], [longer[n] for n in g]) for g in groups]
        found["longer_by"] = [
            round(row.change / row.before, 4) for row in rows if row.change and row.before
        ]
        found["longer"] = dict(Counter(row.verdict for row in rows))
    print(json.dumps(found, indent=1), flush=True)


def _noise(runs: Sequence[Analysis]) -> dict[str, dict[str, float]]:
    """By how much two equal runs differ: quantiles over all pairs.

    Step and parts of its critical path as a share of the two runs' mean step; shares of the step
    as they are.
    """
    steps = np.array([_means(each, "wall_us") for each in runs])
    parts = np.array([[_part(each, name) for name in CATEGORIES] for each in runs])
    shares = np.array(
        [[_means(each, name) for name in ("compute_share", "exposed_comm_share", "idle_share")]
         for each in runs]
    )  # fmt: skip
    first, second = np.triu_indices(len(runs), 1)
    mean = (steps[first] + steps[second]) / 2
    differences = {
        "step": np.abs(steps[first] - steps[second]) / mean,
        "part": np.abs(parts[first] - parts[second]).ravel() / np.repeat(mean, parts.shape[1]),
        "share": np.abs(shares[first] - shares[second]).ravel(),
    }
    return {
        name: {
            f"p{quantile}": round(float(np.nanpercentile(values, quantile)), 4)
            for quantile in (50, 95, 99, 100)
        }
        for name, values in differences.items()
    }


def _means(analysis: Analysis, name: str) -> float:
    values = [getattr(row, name) for row in analysis.steps if row.steady]
    return float(np.mean([np.nan if value is None else value for value in values]))


def _part(analysis: Analysis, name: str) -> float:
    rows = [getattr(row.critical_path, f"{name}_us") for row in analysis.steps if row.steady]
    return float(np.mean(rows))


def _wait_share(analysis: Analysis) -> float | None:
    shares = [row.cpu_wait_share for row in analysis.resources if row.cpu_wait_share is not None]
    return round(max(shares), 3) if shares else None


def _calibrated(folder: Path, steps: int) -> int:
    """The units of work of a step that takes 10 % longer than one of `_UNITS`."""
    times = []
    for units in (_UNITS, 2 * _UNITS):
        runs = [_run(folder / f"calibration-{units}-{n}", units, steps) for n in range(2)]
        times.append(float(np.mean([each.summary.step_us.mean or 0.0 for each in runs])))
    return _UNITS + round(_LONGER * times[0] / ((times[1] - times[0]) / _UNITS))


def _run(trace: Path, units: int, steps: int) -> Analysis:
    """Traces one run of the job, and analyzes it."""
    trace.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "ddltrace", "run", "-o", str(trace), "--force", "--"),
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(__file__, f"--units={units}", f"--steps={steps}"),
    ]
    subprocess.run(
        command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return ddltrace.open(trace).analyze()


def _train(units: int, steps: int) -> None:
    """The job: trains with some units of further work in each step."""
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    values, work = torch.randn(64, 256), torch.randn(256, 256)
    for _ in range(steps):
        with torch.no_grad():
            for _ in range(units):
                work = torch.tanh(work @ work / 16)
        loss = model(values + work[:64]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
