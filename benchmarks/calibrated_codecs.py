"""Compares what a calibration says that messages take of the processors with what they take.

    python benchmarks/calibrated_codecs.py
    python benchmarks/calibrated_codecs.py --workload vgg --strategy qsgd --rounds 20

Calibrates on four ranks of this machine, then times the messages of each workload: in a loop, and
each time after a forward and a backward pass, as in a job, whose caches hold other data then. Only
the calibration is recorded. Nothing else should run.
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

from ddltrace.analyzer.whatif.calibration import Calibration, read_calibration
from ddltrace.experiments import workloads
from ddltrace.experiments.calibration import busy_clock, busy_us, calibrate, mean_of_medians
from ddltrace.experiments.harness.job_process import ranks_launcher
from ddltrace.experiments.strategy.spec import parse

if TYPE_CHECKING:
    from ddltrace.experiments.workloads.base import Workload

WORKLOADS = ("vgg", "resnet", "gpt")
CODECS = ("fp16", "int8", "fp8", "int4", "thc", "qsgd", "ternary", "signsgd", "topk", "powersgd")
WARMUP = 3
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
        own = [__file__, *sys.argv[1:], "--calibration", str(file)]
        sys.exit(subprocess.run([*ranks_launcher(options.ranks), *own], check=False).returncode)


def compare(file: Path, names: Sequence[str], specs: Sequence[str], rounds: int) -> None:
    """Times messages on one rank; rank 0 prints."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # as the ranks of a job
    dist.init_process_group("gloo")
    calibration = read_calibration(file)
    if dist.get_rank() == 0:
        print(f"{'':30} {'calibrated':>14} {'in a loop':>14} {'after backward':>20}")
    for name in names:
        width = workloads.WORKLOADS[name].width
        workload = workloads.create(name, width=width, batch_size=16, seed=0)
        for spec in specs:
            calibrated, *times = timed(workload, spec, rounds, calibration)
            if dist.get_rank() == 0:
                ratios = "".join(f" {each:8.1f} ms ({each / calibrated:4.2f})" for each in times)
                print(f"{name:8} {spec:21} {calibrated:11.1f} ms{ratios}", flush=True)
    dist.destroy_process_group()


def timed(workload: Workload, spec: str, rounds: int, calibration: Calibration) -> list[float]:
    """What all messages of a step take, ms: as calibrated, in a loop, and after backward."""
    import torch.distributed as dist

    from ddltrace.experiments.engine.create_exchange import create_message_exchange
    from ddltrace.experiments.messages.message_plan import describe_gradient
    from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets

    named = list(enumerate(workload.model.named_parameters()))
    plan = DdpBuckets().plan([describe_gradient(i, n, p) for i, (n, p) in reversed(named)])
    exchange = create_message_exchange(parse(spec), dist.group.WORLD)
    exchange.prepare(plan.gradients)
    calibrated = sum(
        calibration.exchange_ns(
            spec, [each.elements for each in message.slices], messages=len(plan.messages)
        )
        for message in plan.messages
    )
    clock, found = busy_clock(), [calibrated / 1e6]
    for computes in (False, True):
        times = []
        batches = workload.batches(dist.get_rank(), dist.get_world_size())
        for _ in range(WARMUP + rounds):
            if computes:
                inputs, targets = next(batches)
                workload.loss(workload.model(inputs), targets).backward()
            times.append(busy_us(exchange, plan.messages, clock))
        found.append(mean_of_medians(times[WARMUP:]) / 1e3)
    exchange.close()
    return found


if __name__ == "__main__":
    main()
