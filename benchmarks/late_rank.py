"""Whether a late rank is found in real jobs, and whether its saving is the true one.

    python benchmarks/late_rank.py --jobs 60 --seed 1

Each job trains with three to six ranks under DDP, with or without buffers, while one of them sleeps
in each step, in its data, forward, backward, optimizer or host code. The truth is the difference of
the time per step to the same job without the fault, which runs before and after it. (The wall time
of a step, from its first start to its last end, is longer than that: while one rank sleeps at the
end of its step, others have begun the next.) Needs the repository's tests beside it: the job is
theirs.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from support.jobs import environment, on_ranks, traced  # noqa: E402

import ddltrace  # noqa: E402
from ddltrace.analyzer.model import Analysis  # noqa: E402

STEPS = 25
WARM = 4
ACTIVITY = {"forward": "compute", "backward": "compute", "optimizer": "update"}
CLOSE = 0.15
"""By how much of the truth a saving may differ."""


@dataclass(frozen=True)
class Job:
    """One job, and its fault."""

    ranks: int
    late: int
    activity: str
    ms: int
    buffers: bool

    def run(self, folder: Path, ms: int) -> tuple[Analysis, float]:
        """Traces it with a fault of some length; also returns the time per step, us."""
        fault = f"{self.late}:{self.activity}:{ms}:sleep:0:{STEPS}"
        own = [fault, str(int(self.buffers)), str(STEPS)]
        command = traced(folder, on_ranks("late_rank.py", *own, ranks=self.ranks))
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"the job failed:\n{done.stderr[-2000:]}")
        trace = ddltrace.open(folder)
        events = trace.events(0)
        ends = np.sort(events.filter(pc.equal(events["kind"], "step"))["end_ns"].to_numpy())[WARM:]
        return trace.analyze(), float(ends[-1] - ends[0]) / (len(ends) - 1) / 1e3


def jobs(count: int, seed: int) -> list[Job]:
    """Jobs in which every activity and both kinds of models occur equally often."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        ranks = chance.randint(3, 6)
        activity = ("data", "forward", "backward", "optimizer", "host")[number % 5]
        found.append(
            Job(ranks, chance.randrange(ranks), activity, chance.randint(30, 60), number % 2 == 0)
        )
    return found


def main() -> None:
    """Runs the jobs and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    causes = firsts = close = 0
    for job in jobs(options.jobs, options.seed):
        with tempfile.TemporaryDirectory(prefix="ddltrace-late-") as name:
            _, before = job.run(Path(name, "before"), 0)
            faulty, with_fault = job.run(Path(name, "faulty"), job.ms)
            _, after = job.run(Path(name, "after"), 0)
        truth = with_fault - (before + after) / 2
        activity = ACTIVITY.get(job.activity, job.activity)
        cause = faulty.root_causes[0] if faulty.root_causes else None
        finding = faulty.findings[0] if faulty.findings else None
        is_cause = cause is not None and (cause.rank, cause.activity) == (job.late, activity)
        is_first = finding is not None and finding.rank == job.late
        saves = finding.saves_us if finding is not None else 0.0
        is_close = abs(saves - truth) <= CLOSE * truth
        causes, firsts, close = causes + is_cause, firsts + is_first, close + is_close
        print(
            f"{job.ranks} ranks, rank {job.late} +{job.ms} ms {job.activity:<9} "
            f"{'buffers' if job.buffers else '       '}  "
            f"cause {'-' if cause is None else f'{cause.rank} {cause.activity}':<12} "
            f"finding {'-' if finding is None else f'{finding.kind} {finding.rank}':<15} "
            f"saves {saves / 1e3:6.1f} of {truth / 1e3:6.1f} ms"
            f"{'' if is_cause and is_first and is_close else '  <'}",
            flush=True,
        )
    count = options.jobs
    print(f"the rank and its activity are the first root cause: {causes} of {count}")
    print(f"the rank is named in the first finding: {firsts} of {count}")
    print(f"its saving is within {CLOSE:.0%} of the truth: {close} of {count}")


if __name__ == "__main__":
    main()
