"""What tracing costs a job: step time, memory, per event and on disk.

Runs training jobs on two ranks again and again, in turn untraced, under `ddltrace run` at each
level, and under `torch.profiler`. A job measures its own steps and is the same in all modes.
Every round holds each mode once, so that what disturbs the machine disturbs all modes; the
ratios are taken round by round. Two runs of the same job differ by some percent on a shared
machine, so each round also has every rank switch recording on and off from step to step
(`ddltrace run --measure-cost`): that tells single percents, but not what the patched calls cost
while they are off. Prints the numbers that stand in the README::

    python benchmarks/overhead.py                      # all three jobs, some twenty minutes
    python benchmarks/overhead.py --job cnn --rounds 3 --steps 40

The jobs: `cnn`, a residual CNN under DistributedDataParallel; `messages`, a step that makes
1,000 small all-reduces; `layers`, a model of 2,000 layers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddltrace.tracer.self_measure import FIRST_STEP

if TYPE_CHECKING:
    from torch import nn

MODES = ("untraced", "comm", "layer", "op", "profiler")
TRACED = ("comm", "layer", "op")
SWITCHED = ("comm", "layer")
SWITCHED_STEPS = 200
JOBS = ("cnn", "messages", "layers")
WARM_UP_STEPS = 15  # the window of level `op` lies in it: what it leaves behind is measured
NUM_MESSAGES = 1000
NUM_LAYERS = 2000


def residual_cnn() -> nn.Module:
    """A small residual network for images of 32 x 32 pixels."""
    from torch import nn

    def block(width: int, out: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(width, out, 3, stride=2 if width != out else 1, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
        )

    widths = [16, 16, 16, 32, 32, 64, 64]
    blocks = [block(a, b) for a, b in pairwise(widths)]
    first, last = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(64, 10)
    return nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)


def make_step(job: str) -> Callable[[], None]:
    """One step of a job, ready to be called again and again."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    if job == "messages":
        tensors = [torch.ones(256) for _ in range(NUM_MESSAGES)]
        parameter = nn.Parameter(torch.ones(4))
        small = torch.optim.SGD([parameter], lr=0.01)

        def messages() -> None:
            for tensor in tensors:
                dist.all_reduce(tensor)
            parameter.square().sum().backward()  # type: ignore[no-untyped-call]
            small.step()

        return messages

    if job == "cnn":
        module, inputs = residual_cnn(), torch.randn(32, 3, 32, 32)
        labels = torch.randint(0, 10, (32,))
    else:
        halves = [nn.Linear(32, 32) if i % 20 == 0 else nn.ReLU() for i in range(NUM_LAYERS - 1)]
        module, inputs = nn.Sequential(*halves, nn.Linear(32, 10)), torch.randn(256, 32)
        labels = torch.randint(0, 10, (256,))
    model = DistributedDataParallel(module, bucket_cap_mb=0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return train


def work(job: str, steps: int, result: Path, with_profiler: bool) -> None:
    """The job, on one rank."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = make_step(job)
    for _ in range(WARM_UP_STEPS):
        step()
    profiler: Any = profile(activities=[ProfilerActivity.CPU]) if with_profiler else None
    if profiler:
        profiler.start()
    times = []
    for _ in range(steps):
        start = time.perf_counter_ns()
        step()
        times.append(time.perf_counter_ns() - start)
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if profiler:
        profiler.stop()
    if dist.get_rank() == 0:
        result.write_text(json.dumps({"times": times, "peak_kb": peak_kb}))
    dist.destroy_process_group()


@dataclass(frozen=True)
class Sample:
    """One run of a job: median step time and peak memory of rank 0."""

    step_ns: float
    peak_kb: int


def run_once(job: str, mode: str, steps: int, directory: Path, switched: int = 0) -> Sample:
    """Runs a job in one mode; a trace is left in ``directory / "trace-MODE"``.

    Args:
        job: Which.
        mode: One of `MODES`.
        steps: How many steps to time.
        directory: Where to leave what it writes.
        switched: In how many steps to switch recording on and off.
    """
    result = directory / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [__file__, "--rank-of", job, "--result", str(result), "--steps", str(steps)]
    if mode == "profiler":
        command.append("--profiler")
    if mode in TRACED:
        run = [sys.executable, "-m", "ddltrace", "run", "--force", "--level", mode]
        run += ["--measure-cost", str(switched)]
        command = [*run, "-o", str(directory / f"trace-{mode}"), "--", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"the job failed in mode {mode}:\n{done.stderr[-2000:]}")
    measured = json.loads(result.read_text())
    return Sample(statistics.median(measured["times"]), measured["peak_kb"])


def measure(job: str, rounds: int, steps: int) -> None:
    """Measures one job in all modes and prints its tables."""
    costs: dict[str, list[dict[str, float]]] = {mode: [] for mode in SWITCHED}
    samples: dict[str, list[Sample]] = {mode: [] for mode in MODES}
    order = list(MODES)
    with tempfile.TemporaryDirectory(prefix="ddltrace-overhead-") as name:
        directory = Path(name)
        for number in range(rounds):
            random.Random(number).shuffle(order)
            for mode in order:
                print(f"{job}: round {number + 1}/{rounds}: {mode}", file=sys.stderr)
                samples[mode].append(run_once(job, mode, steps, directory))
            for mode in SWITCHED:
                print(f"{job}: round {number + 1}/{rounds}: {mode}, on and off", file=sys.stderr)
                run_once(job, mode, FIRST_STEP + SWITCHED_STEPS, directory, SWITCHED_STEPS)
                costs[mode] += [rank["cost"] for rank in ranks_of(directory / f"trace-{mode}")]
        sizes = {mode: event_sizes(directory / f"trace-{mode}") for mode in TRACED}

    plain = samples["untraced"]
    print(f"\n{job}: two ranks, {steps} steps, {rounds} rounds; ratio to untraced in each round")
    print("mode       step ms   ratio    min    max  MB more  B/event")
    for mode in MODES:
        own = samples[mode]
        ratios = [s.step_ns / p.step_ns for s, p in zip(own, plain, strict=True)]
        memory = statistics.median(
            (s.peak_kb - p.peak_kb) / 1024 for s, p in zip(own, plain, strict=True)
        )
        size = f"{sizes[mode]:8.1f}" if mode in sizes else f"{'':8}"
        print(
            f"{mode:<9} {statistics.median(s.step_ns for s in own) / 1e6:8.2f} "
            f"{statistics.median(ratios):7.3f} {min(ratios):6.3f} {max(ratios):6.3f} "
            f"{memory:8.1f} {size}"
        )
    print(f"switched on and off in {SWITCHED_STEPS} steps: ratio on to off, every rank of a round")
    print("mode        ratio    min    max   mean of the 95 % intervals")
    for mode in SWITCHED:
        ratios = [cost["ratio"] for cost in costs[mode]]
        low, high = (statistics.mean(c[key] for c in costs[mode]) for key in ("low", "high"))
        print(
            f"{mode:<9} {statistics.median(ratios):7.3f} {min(ratios):6.3f} {max(ratios):6.3f}"
            f"   {low:.3f} to {high:.3f}"
        )


def ranks_of(trace: Path) -> list[dict[str, Any]]:
    """What a trace says of its ranks."""
    ranks: list[dict[str, Any]] = json.loads((trace / "run.json").read_text())["ranks"]
    return ranks


def event_sizes(trace: Path) -> float:
    """Bytes that an event takes on disk."""
    ranks = ranks_of(trace)
    size = sum(path.stat().st_size for path in trace.glob("*.arrow"))
    return float(size / sum(rank["events"] for rank in ranks))


def hot_path_costs() -> dict[str, float]:
    """Nanoseconds that one event adds to the thread that records it, by kind.

    Each is the difference between the patched and the original call, measured in turn in one
    process of world size 1.
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    from ddltrace.tracer.config import CaptureConfig
    from ddltrace.tracer.session import current_session, start_session

    def timed(call: object, count: int) -> float:
        start = time.perf_counter_ns()
        for _ in range(count):
            call()  # type: ignore[operator]
        return (time.perf_counter_ns() - start) / count

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.inner
            for _ in range(1000):
                inner(x)
            return x

    with tempfile.TemporaryDirectory() as name:
        dist.init_process_group("gloo", init_method=f"file://{name}/store", rank=0, world_size=1)
        model, tensor = Outer(), torch.ones(16)
        original_call = nn.Module.__call__

        def all_reduce() -> None:
            dist.all_reduce(tensor)

        def launch() -> None:
            dist.all_reduce(tensor, async_op=True)

        plain_layer = [timed(lambda: original_call(model, tensor), 20) / 1000 for _ in range(15)]
        plain_message = [timed(all_reduce, 300) for _ in range(15)]
        plain_launch = [timed(launch, 300) for _ in range(15)]
        start_session(CaptureConfig(directory=Path(name), level="layer"))
        session = current_session()
        assert session is not None
        traced_layer = [timed(lambda: model(tensor), 20) / 1000 for _ in range(15)]
        traced_message = [timed(all_reduce, 300) for _ in range(15)]
        traced_launch = [timed(launch, 300) for _ in range(15)]
        session.close()
        dist.destroy_process_group()
    return {
        "layer": statistics.median(traced_layer) - statistics.median(plain_layer),
        "message": statistics.median(traced_message) - statistics.median(plain_message),
        "launch": statistics.median(traced_launch) - statistics.median(plain_launch),
    }


def main() -> None:
    """Parses the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=JOBS, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rank-of", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--profiler", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        work(options.rank_of, options.steps, options.result, options.profiler)
        return
    costs = hot_path_costs()
    print(f"one layer event: {costs['layer']:.0f} ns on the thread that records it")
    print(
        f"one message: {costs['message'] / 1000:.1f} us (blocking all_reduce), "
        f"{costs['launch'] / 1000:.1f} us (launch of an asynchronous one)"
    )
    for job in options.job or JOBS:
        measure(job, options.rounds, options.steps)


if __name__ == "__main__":
    main()
