"""Counts the instructions of a training step in a job of which nothing is recorded.

A small CNN under DistributedDataParallel, one rank, with Valgrind's callgrind: once with few and
once with many steps, so that the start does not count, untraced and under ``ddltrace run --off``.
With more ranks, waiting for each other would count, too. Prints the number of
docs/measurements.md::

    apt-get install valgrind
    python benchmarks/off_instructions.py            # ten minutes

The garbage collector is off in the job: one collection more or less is a hundred times the
difference.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.jobs import ONE_RANK, environment

FEW_STEPS = 4
COUNTED = re.compile(r"Collected : (\d+)")


def train(steps: int, report: Path | None) -> None:
    """The job."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    gc.disable()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)),
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(16, 3, 16, 16), torch.randint(0, 10, (16,))
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if report is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        report.write_text(f"Collected : {round((usage.ru_utime + usage.ru_stime) * 1e9)}\n")
    dist.destroy_process_group()


def count(steps: int, folder: Path, *, off: bool, with_valgrind: bool) -> int:
    """Instructions of a whole job, or without Valgrind its processor time in nanoseconds."""
    name = f"{'off' if off else 'untraced'}-{steps}"
    report = folder / f"{name}.log"
    command = [sys.executable, __file__, "--train", str(steps)]
    if with_valgrind:
        valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
        command = [*valgrind, f"--log-file={report}", *command]
    else:
        command += ["--report", str(report)]
    if off:
        trace = ["-o", str(folder / name), "--off"]
        command = [sys.executable, "-m", "ddltrace", "run", *trace, "--", *command]
    variables = environment(PYTHONHASHSEED="0", **ONE_RANK)
    subprocess.run(command, env=variables, check=True, stderr=subprocess.DEVNULL)
    found = COUNTED.search(report.read_text(encoding="utf-8"))
    assert found is not None, report.read_text(encoding="utf-8")
    return int(found[1])


def main() -> None:
    """Prints the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps that are counted")
    parser.add_argument("--without-valgrind", action="store_true", help="processor time instead")
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.report)
        return
    unit = "ns of processor time" if options.without_valgrind else "instructions"
    of_step: dict[bool, float] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        for off in (False, True):
            few, many = (
                count(steps, Path(folder), off=off, with_valgrind=not options.without_valgrind)
                for steps in (FEW_STEPS, FEW_STEPS + options.steps)
            )
            of_step[off] = (many - few) / options.steps
            what = "ddltrace run --off" if off else "untraced"
            sys.stdout.write(f"{what}: {of_step[off]:,.0f} {unit} a step\n")
    ratio = of_step[True] / of_step[False]
    sys.stdout.write(f"ratio {ratio:.5f}, {of_step[True] - of_step[False]:+,.0f} {unit} a step\n")


if __name__ == "__main__":
    main()
