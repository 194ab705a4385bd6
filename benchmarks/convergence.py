"""Measures the accuracy of the digits CNN under every lossy technique, compared with plain DDP.

Four simulated ranks (`simulated_ranks.py`) train the same model from the same seeds. Every
technique is judged with the same optimizers and with the same learning rates, plain DDP among them:
its rate with an optimizer is the best of one grid, by the accuracy on separate seeds; then five
other seeds are trained, and the technique is compared with plain DDP with the same optimizer, seed
by seed. With `--most-seeds N`, a technique that is still undecided gets N seeds. A technique with
an optimizer is

* within 1 % if the 95 % interval of its mean difference in accuracy lies above -1 percentage point,
* a miss if the interval lies below -1 percentage point,
* undecided otherwise.

Every finished training is one line of a file, benchmarks/results/convergence.jsonl, so a run can be
interrupted and several can share the work. `--report` trains nothing: it writes what the file has
into its section of docs/experiments.md. Use::

    python benchmarks/convergence.py [--file FILE] [--part 1/2] [--most-seeds 10] [SPEC ...]
    python benchmarks/convergence.py --report [--file FILE]
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import scipy.stats
import torch
from page_section import PAGE, RESULTS, write_section
from simulated_training import Replica, train

from ddltrace.experiments.strategy.job_checks import refused_optimizer
from ddltrace.experiments.strategy.spec import parse
from ddltrace.experiments.workloads import create

WITHIN: Final = 0.01
RANKS: Final = 4
WIDTH: Final = 8
BATCH: Final = 16
RATES: Final = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Learning rates, for every technique and every optimizer."""

OPTIMIZERS: Final[dict[str, Callable[..., torch.optim.Optimizer]]] = {
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adamw": torch.optim.AdamW,
}
"""Optimizers with which every technique is judged, as long as it works with them."""
OPTIMIZER_TITLES: Final = {"momentum": "SGD with momentum", "adamw": "AdamW"}

BASELINE: Final = "ddp"
TECHNIQUES: Final = (
    *("fp16", "bf16", "int8", "topk:density=0.01+feedback", "dgc:density=0.01,warmup=100,clip=1"),
    *("powersgd:rank=1+feedback", "powersgd:rank=2+feedback", "powersgd:rank=4+feedback"),
    *("powersgd:rank=1,start=50+feedback", "randomk:density=0.05+feedback"),
    *("randomk:density=0.1+feedback", "localsgd:period=8", "localsgd:period=8+qsgd"),
    *("postlocalsgd:start=100,period=8", "demo", "diloco:period=20"),
    *("diloco:period=20+topk:density=0.01+feedback", "streaming_diloco:period=20,fragments=4"),
    *("lars", "lamb", "signsgd", "signsgd+feedback", "onebit+feedback", "doublesqueeze"),
    *("qsgd:s=4", "qsgd:s=127", "ternary", "fp8", "int4", "thc", "dion", "muon"),
)
"""Lossy techniques, and those that replace the optimizer."""

FIRST_TUNING: Final = 1000
"""From this seed on, seeds serve the choice of the learning rate only."""


@dataclass(frozen=True)
class Case:
    """One technique with one optimizer.

    Attributes:
        spec: The strategy.
        optimizer: A key of `OPTIMIZERS`.
    """

    spec: str
    optimizer: str


def _works(spec: str, optimizer: str) -> bool:
    kind = OPTIMIZERS[optimizer]
    name = (kind.func if isinstance(kind, functools.partial) else kind).__name__
    return refused_optimizer(parse(spec), [name]) is None


CASES: Final = tuple(
    Case(spec, optimizer)
    for optimizer in OPTIMIZERS
    for spec in (BASELINE, *TECHNIQUES)
    if _works(spec, optimizer)
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
        """A key that identifies the training."""
        return (self.case.spec, self.case.optimizer, self.rate, self.seed, self.steps)


def accuracy(training: Training) -> float:
    """Trains once; the held-out accuracy of the first rank's model."""
    case = training.case
    workloads = []

    def replica(rank: int) -> Replica:
        workload = create("digits", width=WIDTH, batch_size=BATCH, seed=training.seed)
        workloads.append(workload)
        parameters = workload.model.parameters()
        optimizer = OPTIMIZERS[case.optimizer](parameters, lr=training.rate)
        # Half a cosine: the noise of a codec averages out at the end.
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
        batches = workload.batches(rank, RANKS)

        def loss(step: int) -> torch.Tensor:
            del step
            inputs, targets = next(batches)
            value = workload.loss(workload.model(inputs), targets)
            if not bool(value.isfinite()):
                raise ValueError("diverged")
            return value

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
        except ValueError:  # diverged
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
    seeds = range(FIRST_TUNING, FIRST_TUNING + options.tuning_seeds)

    def mean(rate: float) -> float:
        return statistics.fmean(
            record.get(Training(case, rate, seed, options.steps)) for seed in seeds
        )

    return max(RATES, key=mean)


def train_pair(case: Case, seed: int, record: Record, options: argparse.Namespace) -> None:
    """Trains a technique and its baseline from one seed, each with its best rate."""
    for one in (case, baseline_of(case)):
        rate = best_rate(one, record, options)
        record.get(Training(one, rate, seed, options.steps))


@dataclass(frozen=True)
class Comparison:
    """One technique beside plain DDP, over the seeds that both have.

    Attributes:
        rate: The technique's learning rate.
        accuracy: Mean accuracy over the seeds.
        difference: Mean of the differences in accuracy.
        half: Half the width of its 95 % interval; infinite with one seed.
        seeds: Number of seeds.
    """

    rate: float
    accuracy: float
    difference: float
    half: float
    seeds: int

    @property
    def verdict(self) -> str:
        """In words: within 1 %, a miss, or not decided by these seeds."""
        if self.difference - self.half >= -WITHIN:
            return "within 1 %"
        if self.difference + self.half < -WITHIN:
            return f"misses by {-100 * self.difference:.1f}"
        return "undecided"


def comparison(case: Case, record: Record, steps: int) -> Comparison | None:
    """Compares a technique with plain DDP by what has been trained; None if there is no seed."""
    (rate, own), (_, plain) = (
        _by_seed(one, record.accuracies(), steps) for one in (case, baseline_of(case))
    )
    seeds = sorted(own.keys() & plain.keys())
    if not seeds:
        return None
    differences = [own[seed] - plain[seed] for seed in seeds]
    half = math.inf
    if len(seeds) > 1:
        quantile = float(scipy.stats.t.ppf(0.975, len(seeds) - 1))
        half = quantile * statistics.stdev(differences) / math.sqrt(len(seeds))
    mean = statistics.fmean(own[seed] for seed in seeds)
    return Comparison(rate, mean, statistics.fmean(differences), half, len(seeds))


def _by_seed(
    case: Case, accuracies: Mapping[tuple[Any, ...], float], steps: int
) -> tuple[float, dict[int, float]]:
    """The rate with which most seeds were trained, and the accuracy of each."""
    found: dict[float, dict[int, float]] = {}
    for (spec, optimizer, rate, seed, count), reached in accuracies.items():
        if (spec, optimizer, count) == (case.spec, case.optimizer, steps) and seed < FIRST_TUNING:
            found.setdefault(rate, {})[seed] = reached
    if not found:
        return math.nan, {}
    rate = max(found, key=lambda one: len(found[one]))
    return rate, found[rate]


def baseline_of(case: Case) -> Case:
    """Plain DDP with the technique's optimizer."""
    return Case(BASELINE, case.optimizer)


def section(cases: Sequence[Case], record: Record, steps: int) -> str:
    """A table for each optimizer of what has been trained, in Markdown."""
    rates = ", ".join(f"{rate:g}" for rate in RATES)
    parts = [
        "## Accuracy of lossy techniques",
        f"`benchmarks/convergence.py` with torch {torch.__version__}: the digits CNN of width "
        f"{WIDTH}, {RANKS} ranks, {BATCH} images a rank and step, {steps} steps, half a cosine. "
        "The ranks are simulated in one process with the engine's own exchanges; two simulated "
        "ranks reach the parameters of two real ranks to the last bit "
        "(`tests/integration/test_frequency.py`; codecs that round at random are equal in "
        f"distribution only). Rates, for every technique: {rates}; the best on one seed that is "
        "not among those compared. Difference: against DDP with the same optimizer, paired by "
        f"seed, with its 95 % interval. A technique is within {WITHIN:.0%} if its interval lies "
        f"above {-100 * WITHIN:g} point, and misses if its interval lies below. Techniques that "
        "are optimizers of their own replace the one named; they take its rate and weight decay, "
        "and its momentum unless they have their own. "
        "Every training is a line of `benchmarks/results/convergence.jsonl`.",
    ]
    missing = []
    for optimizer in OPTIMIZERS:
        lines = [
            f"### {OPTIMIZER_TITLES[optimizer]}",
            "",
            "| technique | rate | seeds | accuracy | difference in points | verdict |",
            "|---|---|---|---|---|---|",
        ]
        for case in cases:
            if case.optimizer != optimizer:
                continue
            found = comparison(case, record, steps)
            if found is None:
                missing.append(f"`{case.spec}` ({optimizer})")
                continue
            difference, low, high = (
                round(100 * (found.difference + sign * found.half), 2) + 0.0  # no -0.00
                for sign in (0, -1, 1)
            )
            shown, words = f"{difference:+.2f} [{low:+.2f}, {high:+.2f}]", found.verdict
            if case.spec == BASELINE:
                shown, words = "", "baseline"
            lines.append(
                f"| `{case.spec}` | {_rate_text(found.rate)} | {found.seeds} "
                f"| {100 * found.accuracy:.2f} % | {shown} | {words} |"
            )
        parts.append("\n".join(lines))
    if missing:
        parts.append(f"Not trained: {', '.join(missing)}.")
    return "\n\n".join(parts)


def _rate_text(rate: float) -> str:
    """A rate; at an end of the grid, another one might be better."""
    return f"{rate:g}" + (" (end of the grid)" if rate in (RATES[0], RATES[-1]) else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("specs", nargs="*", metavar="SPEC")
    parser.add_argument("--file", type=Path, default=RESULTS / "convergence.jsonl")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--part", default="1/1", help="NUMBER/OF: a share of the cases")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tuning-seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--report", action="store_true", help="write the section of what has been trained"
    )
    parser.add_argument(
        "--most-seeds", type=int, default=0, help="seeds of a technique that is undecided"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = Record(options.file)
    cases = [case for case in CASES if not options.specs or case.spec in options.specs]
    if options.report:
        write_section("convergence", section(cases, record, options.steps), options.page)
        print(f"wrote {options.page}")
        return
    number, of = map(int, options.part.split("/"))
    for case in itertools.islice(cases, number - 1, None, of):
        for seed in range(options.seeds):
            train_pair(case, seed, record, options)
        found = comparison(case, record, options.steps)
        if found is not None and found.verdict == "undecided":
            for seed in range(options.seeds, options.most_seeds):
                train_pair(case, seed, record, options)


if __name__ == "__main__":
    main()
