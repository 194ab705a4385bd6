"""Compares what a calibration says that messages take of the processors with what they take.

    python benchmarks/calibrated_codecs.py
    python benchmarks/calibrated_codecs.py --workload vgg --strategy qsgd --rounds 20

Calibrates on four ranks of this machine, then times training steps of each workload with each
strategy and without any exchange: the difference is what messages take. Both are recorded, as the
jobs of an experiment are. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddltrace.analyzer.whatif.calibration import read_calibration
from ddltrace.experiments import workloads
from ddltrace.experiments.calibration import busy_us, calibrate
from ddltrace.experiments.harness.job_process import ranks_launcher
from ddltrace.experiments.strategy.spec import parse

if TYPE_CHECKING:
    from ddltrace.experiments.strategy.strategy import Strategy
    from ddltrace.experiments.workloads.base import Workload

WORKLOADS = ("vgg", "resnet", "gpt")
CODECS = ("fp16", "int8", "fp8", "int4", "thc", "qsgd", "ternary", "signsgd", "topk", "powersgd")
TIMEOUT_S = 600.0


def main() -> None:
    """Calibrates, and starts the ranks that compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="default: all")
    parser.add_argument("--strategy", action="append", help="a codec; default: ten")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calibration", type=Path, help=argparse.SUPPRESS)  # of the ranks
    options = parser.parse_args()
    specs = options.strategy or CODECS
    if options.calibration:
        compare(options.calibration, options.workload or WORKLOADS, specs, options.rounds)
        return
    print("calibrating ...", flush=True)
    found = calibrate(
        options.ranks, options.rounds, TIMEOUT_S, hosts=None, bandwidth=None, strategies=specs
    )
    with tempfile.TemporaryDirectory(prefix="ddltrace-calibrated-") as folder:
        file = Path(folder) / "calibration.json"
        file.write_text(json.dumps(found), encoding="utf-8")
        record = [sys.executable, "-m", "ddltrace", "run", "--level", "layer"]
        record += ["-o", str(Path(folder) / "trace"), "--"]
        own = [__file__, *sys.argv[1:], "--calibration", str(file)]
        ranks = ranks_launcher(options.ranks)
        sys.exit(subprocess.run([*record, *ranks, *own], check=False).returncode)


def compare(file: Path, names: Sequence[str], specs: Sequence[str], rounds: int) -> None:
    """Times messages on one rank; rank 0 prints."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # as the ranks of a job
    dist.init_process_group("gloo")
    calibration = read_calibration(file)
    if dist.get_rank() == 0:
        print(f"{'':30} {'calibrated':>14} {'in training':>14}")
    for name in names:
        own, parts = training_us(name, None, rounds), messages_of(name)
        for spec in specs:
            each_ns = [calibration.exchange_ns(spec, each, messages=len(parts)) for each in parts]
            calibrated = sum(ns or 0.0 for ns in each_ns) / 1e3
            taken = training_us(name, parse(spec), rounds) - own
            if dist.get_rank() == 0:
                times = f"{calibrated / 1e3:11.1f} ms {taken / 1e3:11.1f} ms"
                print(f"{name:8} {spec:21} {times} ({taken / calibrated:4.2f})", flush=True)
    dist.destroy_process_group()


def training_us(name: str, strategy: Strategy | None, rounds: int) -> float:
    """How long processors are busy with a training step; without a strategy, of ranks alone."""
    import torch
    import torch.distributed as dist

    from ddltrace.experiments.engine.attach import attach
    from ddltrace.experiments.engine.groups import destroy_groups

    workload = create(name)
    exchange = None if strategy is None else attach(workload.model, strategy)
    model = workload.model if exchange is None else exchange.model
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.01, momentum=0.9)
    batches = workload.batches(dist.get_rank(), dist.get_world_size())

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()

    busy = busy_us(step, rounds)
    if exchange is not None:
        exchange.close()
        del exchange, model
        destroy_groups()
    return busy


def messages_of(name: str) -> list[list[int]]:
    """Elements of each gradient in each message of a step of a workload."""
    from ddltrace.experiments.messages.message_plan import describe_gradient
    from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets

    named = list(enumerate(create(name).model.named_parameters()))
    plan = DdpBuckets().plan([describe_gradient(i, n, p) for i, (n, p) in reversed(named)])
    return [[each.elements for each in message.slices] for message in plan.messages]


def create(name: str) -> Workload:
    """A workload of its default width."""
    return workloads.create(name, width=workloads.WORKLOADS[name].width, batch_size=16, seed=0)


if __name__ == "__main__":
    main()
