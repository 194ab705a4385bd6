"""Held-out accuracy of the digits CNN under every lossy technique, beside plain DDP.

Four simulated ranks (`simulated_ranks.py`) train the same model from the same seeds, each technique
with the optimizer of its paper. The learning rate of every technique, plain DDP among them, is the
best of one grid for each kind of optimizer, by the accuracy on seeds of their own; then five other
seeds are trained, and the technique is compared with plain DDP seed by seed. A technique is

* within 1 % if the 95 % interval of its mean difference in accuracy lies above -1 percentage point,
* a miss if the interval lies below -1 percentage point,
* undecided otherwise.

Every finished training is one line of a file, so a run can be interrupted and several can share the
work. Use::

    python benchmarks/convergence.py [--file FILE] [--part 1/2] [SPEC ...]
    python benchmarks/convergence.py --report [--file FILE]
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from simulated_training import Replica, train

from ddltrace.experiments.workloads import create

WITHIN: Final = 0.01
RANKS: Final = 4
WIDTH: Final = 8
BATCH: Final = 16
GRIDS: Final = {
    "momentum": (0.01, 0.03, 0.1, 0.2),
    "plain": (0.1, 0.3, 0.6, 1.0),
    "signs": (0.0003, 0.001, 0.003, 0.01),
    "adamw": (0.001, 0.003, 0.01, 0.02),
    "lars": (0.3, 1.0, 3.0, 10.0),
}
"""Learning rates for each kind of optimizer."""

_T_95: Final = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}
_T_95_MORE: Final = 2.262
"""Quantiles of Student's t by degrees of freedom, two-sided 95 %."""


@dataclass(frozen=True)
class Case:
    """One technique with the optimizer of its paper.

    Attributes:
        spec: The strategy.
        optimizer: ``momentum`` (SGD, 0.9), ``plain`` (SGD), ``signs`` (SGD for updates of size
            1), ``adamw``, or ``lars`` (SGD with momentum whose rates LARS scales).
    """

    spec: str
    optimizer: str = "momentum"


BASELINES: Final = {"momentum": "momentum", "plain": "plain", "adamw": "adamw"}
CASES: Final = (
    *(Case("ddp", optimizer) for optimizer in BASELINES),
    *map(Case, ("fp16", "bf16", "int8", "topk:density=0.01+feedback")),
    *map(Case, ("dgc:density=0.01,warmup=100,clip=1", "powersgd:rank=1+feedback")),
    *map(Case, ("powersgd:rank=2+feedback", "powersgd:rank=4+feedback")),
    Case("powersgd:rank=1,start=50+feedback"),
    Case("randomk:density=0.05+feedback", "plain"),
    Case("randomk:density=0.1+feedback", "plain"),
    *map(Case, ("localsgd:period=8", "localsgd:period=8+qsgd", "postlocalsgd:start=100,period=8")),
    Case("demo", "signs"),
    Case("diloco:period=20", "adamw"),
    Case("diloco:period=20+topk:density=0.01+feedback", "adamw"),
    Case("streaming_diloco:period=20,fragments=4", "adamw"),
    Case("lars", "lars"),
    Case("lamb", "adamw"),
    Case("signsgd", "signs"),
    Case("signsgd+feedback"),
    Case("onebit+feedback"),
    Case("doublesqueeze", "plain"),
    *map(Case, ("qsgd:s=4", "qsgd:s=127", "ternary")),
)


@dataclass(frozen=True)
class Training:
    """One training of one case."""

    case: Case
    rate: float
    seed: int
    steps: int

    @property
    def key(self) -> tuple[str, str, float, int, int]:
        """What tells trainings apart."""
        return (self.case.spec, self.case.optimizer, self.rate, self.seed, self.steps)


def accuracy(training: Training) -> float:
    """Trains once; the held-out accuracy of the first rank's model."""
    case = training.case
    workloads = []

    def replica(rank: int) -> Replica:
        workload = create("digits", width=WIDTH, batch_size=BATCH, seed=training.seed)
        workloads.append(workload)
        parameters = workload.model.parameters()
        optimizer: torch.optim.Optimizer
        if case.optimizer == "adamw":
            optimizer = torch.optim.AdamW(parameters, lr=training.rate)
        else:
            momentum = 0.9 if case.optimizer in ("momentum", "lars") else 0.0
            optimizer = torch.optim.SGD(parameters, lr=training.rate, momentum=momentum)
        # Half a cosine: the noise of a codec averages out at the end.
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
        batches = workload.batches(rank, RANKS)

        def loss(step: int) -> torch.Tensor:
            del step
            inputs, targets = next(batches)
            return workload.loss(workload.model(inputs), targets)

        return Replica(workload.model, optimizer, loss, schedule.step)

    train(case.spec, RANKS, training.steps, replica)
    return float(workloads[0].score().test_accuracy)


class Record:
    """The finished trainings, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def accuracies(self) -> dict[tuple[Any, ...], float]:
        """Accuracy by `Training.key`."""
        if not self._path.exists():
            return {}
        rows = [json.loads(line) for line in self._path.read_text().splitlines()]
        return {
            tuple(row[k] for k in ("spec", "optimizer", "rate", "seed", "steps")): row["accuracy"]
            for row in rows
        }

    def get(self, training: Training) -> float:
        """The accuracy of a training, which runs now if the file does not have it."""
        known = self.accuracies().get(training.key)
        if known is not None:
            return known
        begin = time.monotonic()
        try:
            reached = accuracy(training)
        except ValueError:  # diverged: a loss that is not finite stops some codecs
            reached = 0.0
        row = dict(
            zip(("spec", "optimizer", "rate", "seed", "steps"), training.key, strict=True),
            accuracy=reached,
            seconds=round(time.monotonic() - begin, 2),
            at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            torch=str(torch.__version__),
        )
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        return reached


def best_rate(case: Case, record: Record, options: argparse.Namespace) -> float:
    """The rate of the grid with the best mean accuracy over the tuning seeds."""
    seeds = range(1000, 1000 + options.tuning_seeds)

    def mean(rate: float) -> float:
        return statistics.fmean(
            record.get(Training(case, rate, seed, options.steps)) for seed in seeds
        )

    return max(GRIDS[case.optimizer], key=mean)


def difference_of(
    case: Case, baseline: Case, record: Record, options: argparse.Namespace
) -> tuple[float, float, float, float]:
    """Best rate, mean accuracy, and mean and half interval of the difference, over the seeds."""
    rate, other = (best_rate(one, record, options) for one in (case, baseline))
    pairs = [
        (
            record.get(Training(case, rate, seed, options.steps)),
            record.get(Training(baseline, other, seed, options.steps)),
        )
        for seed in range(options.seeds)
    ]
    differences = [own - plain for own, plain in pairs]
    quantile = _T_95.get(len(pairs) - 1, _T_95_MORE)
    half = quantile * statistics.stdev(differences) / math.sqrt(len(pairs))
    return rate, statistics.fmean(own for own, _ in pairs), statistics.fmean(differences), half


def verdict(difference: float, half: float) -> str:
    """In words: within 1 %, a miss, or not decided by these seeds."""
    if difference - half >= -WITHIN:
        return "within 1 %"
    if difference + half < -WITHIN:
        return f"misses by {-100 * difference:.1f}"
    return "undecided"


def baseline_of(case: Case) -> Case:
    """Plain DDP with the technique's optimizer; with momentum where it replaces the optimizer."""
    return Case("ddp", BASELINES.get(case.optimizer, "momentum"))


def print_report(cases: Sequence[Case], record: Record, options: argparse.Namespace) -> None:
    print("| technique | optimizer | rate | accuracy | difference | verdict |")
    print("|---|---|---|---|---|---|")
    for case in cases:
        rate, mean, difference, half = difference_of(case, baseline_of(case), record, options)
        shown = (
            ""
            if case.spec == "ddp"
            else f"{100 * difference:+.2f} [{100 * (difference - half):+.2f}, "
            f"{100 * (difference + half):+.2f}]"
        )
        words = "baseline" if case.spec == "ddp" else verdict(difference, half)
        print(
            f"| `{case.spec}` | {case.optimizer} | {rate:g} | {100 * mean:.2f} % | {shown} "
            f"| {words} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("specs", nargs="*", metavar="SPEC")
    parser.add_argument("--file", type=Path, default=Path("convergence.jsonl"))
    parser.add_argument("--part", default="1/1", help="NUMBER/OF: a share of the techniques")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tuning-seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--report", action="store_true", help="print the table, after what is missing"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = Record(options.file)
    cases = [case for case in CASES if not options.specs or case.spec in options.specs]
    if options.report:
        print_report(cases, record, options)
        return
    number, of = map(int, options.part.split("/"))
    for case in itertools.islice(cases, number - 1, None, of):
        rate = best_rate(case, record, options)
        for seed in range(options.seeds):
            record.get(Training(case, rate, seed, options.steps))


if __name__ == "__main__":
    main()
