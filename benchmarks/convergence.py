"""Held-out accuracy of the digits CNN under every lossy strategy, beside plain DDP.

Every strategy trains the same model from the same seeds, with the settings of its paper as far as
they fit a small model. Prints the mean accuracy over the seeds, its difference from plain DDP
with the same optimizer, and whether that is within one percentage point. Run with:

    torchrun --nproc-per-node 2 benchmarks/convergence.py [--seeds 5] [--steps 800] [SPEC ...]
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddltrace.experiments.engine.attach import attach
from ddltrace.experiments.strategy.spec import parse
from ddltrace.experiments.workloads import create

_WITHIN = 0.01


@dataclass(frozen=True)
class Case:
    """One strategy with the optimizer that it is trained with.

    Attributes:
        spec: The strategy.
        optimizer: ``sgd`` (momentum 0.9), ``signs`` (SGD without momentum) or ``adamw``.
        rate: Its learning rate.
    """

    spec: str
    optimizer: str = "sgd"
    rate: float = 0.02


CASES = (
    *map(Case, ("ddp", "fp16", "bf16", "int8", "qsgd:s=4", "qsgd:s=127", "ternary")),
    *map(Case, ("topk:density=0.01+feedback", "dgc:density=0.01,warmup=100,clip=1")),
    *map(Case, ("powersgd:rank=1+feedback", "powersgd:rank=4+feedback")),
    *map(Case, ("localsgd:period=8", "localsgd:period=8+qsgd", "postlocalsgd:start=100,period=8")),
    # With momentum, residuals of coarse codecs come late and together: a smaller rate.
    *(
        Case(spec, rate=0.01)
        for spec in (
            "onebit+feedback",
            "signsgd+feedback",
            "doublesqueeze",
            "randomk:density=0.05+feedback",
        )
    ),
    Case("signsgd", "signs", 0.001),
    Case("demo", "signs", 0.001),
    Case("ddp", "adamw", 0.002),
    Case("diloco:period=20", "adamw", 0.002),
    Case("diloco:period=20,outer_lr=1+topk:density=0.01+feedback", "adamw", 0.002),
    Case("streaming_diloco:period=20,fragments=4", "adamw", 0.002),
    Case("lars:eta=0.02", "sgd", 1.0),
    Case("lamb", "adamw", 0.01),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="*", metavar="SPEC")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--width", type=int, default=8)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    baselines: dict[str, float] = {}
    for case in CASES:
        if options.specs and case.spec not in {"ddp", *options.specs}:
            continue
        scores = [
            accuracy(case, seed, steps=options.steps, width=options.width)
            for seed in range(options.seeds)
        ]
        mean = statistics.fmean(scores)
        if case.spec == "ddp":
            baselines[case.optimizer] = mean
        against = mean - baselines.get(case.optimizer, baselines["sgd"])
        if dist.get_rank() == 0:
            verdict = "within 1 %" if against >= -_WITHIN else "misses"
            print(
                f"{case.spec:58} {case.optimizer:6} {case.rate:<6g} {mean:7.2%} "
                f"{min(scores):7.2%} to {max(scores):7.2%} {100 * against:+6.2f} {verdict}",
                flush=True,
            )
    dist.destroy_process_group()


def accuracy(case: Case, seed: int, *, steps: int, width: int) -> float:
    """Trains once; the held-out accuracy of rank 0's model."""
    workload = create("digits", width=width, batch_size=16, seed=seed)
    model = workload.model
    if case.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=case.rate)
    else:
        momentum = 0.9 if case.optimizer == "sgd" else 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=case.rate, momentum=momentum)
    # Half a cosine at the end, as most papers train: noise of the codec averages out.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    exchange = attach(model, parse(case.spec))
    batches = workload.batches(dist.get_rank(), dist.get_world_size())
    for _ in range(steps):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        workload.loss(exchange.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    exchange.close()
    score = torch.tensor([workload.score().test_accuracy])
    dist.broadcast(score, src=0)
    return float(score)


if __name__ == "__main__":
    main()
