"""How far our times are from torch.profiler's, for the same collectives and layers in one run.

    python benchmarks/truth.py

Needs the repository's tests beside it: the job and the comparison are theirs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from support.jobs import environment, torchrun, traced  # noqa: E402
from support.truth import differences  # noqa: E402


def main() -> None:
    """Runs the job and prints the differences."""
    with tempfile.TemporaryDirectory(prefix="ddltrace-truth-") as name:
        directory = Path(name)
        command = traced(directory / "trace", torchrun("profiled.py", name))
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"the job failed:\n{done.stderr[-2000:]}")
        found = differences(directory / "trace", directory)
    print("ours minus torch.profiler's, us: median and 95th percentile of the absolute value")
    print(f"{'':<12} {'count':>6} {'start':>8} {'p95':>8} {'end':>8} {'p95':>8}")
    for difference in found:
        figures = []
        for values in (difference.start_us, difference.end_us):
            figures += [np.median(values), np.percentile(np.abs(values), 95)]
        cells = " ".join(f"{figure:8.1f}" for figure in figures)
        print(f"{difference.what:<12} {len(difference.start_us):6d} {cells}")
        before = difference.end_us[difference.waited]
        if len(before):
            own = np.abs(difference.end_us[~difference.waited])
            print(
                f"  {len(before)} were over, since backward had waited for them, "
                f"{-before.max():.0f} to {-before.min():.0f} us before the profiler knew; "
                f"the end of the others: 95th percentile {np.percentile(own, 95):.1f}"
            )


if __name__ == "__main__":
    main()
