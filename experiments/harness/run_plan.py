"""Plans the runs of an experiment and their order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddltrace.experiments.harness.settings import Settings


@dataclass(frozen=True)
class PlannedRun:
    """One planned run.

    Attributes:
        strategy: The strategy's spec.
        round: Number of the round, from 1.
        seed: Seed of the weights, the data's split and order: the same for all runs of a round.
        name: Name of the run's trace directory; unique in the experiment.
    """

    strategy: str
    round: int
    seed: int
    name: str


def plan_runs(settings: Settings) -> list[PlannedRun]:
    """All runs, round by round.

    Every round runs each strategy once, so that a drift of the machine or of the network hits
    all strategies alike. Each round begins with another strategy, so that none is always the
    first one.
    """
    names = _directory_names(settings.strategies)
    runs = []
    for number in range(settings.repeats):
        first = number % len(settings.strategies)
        for strategy in (*settings.strategies[first:], *settings.strategies[:first]):
            suffix = f".r{number + 1}" if number else ""
            runs.append(
                PlannedRun(strategy, number + 1, settings.seed + number, names[strategy] + suffix)
            )
    return runs


def _directory_names(specs: Sequence[str]) -> dict[str, str]:
    """A name of letters, digits, ``.``, ``-`` and ``_`` for each strategy, all different."""
    names: dict[str, str] = {}
    for spec in specs:
        name = re.sub(r"[^A-Za-z0-9._]+", "-", spec)
        same = sum(taken == name or taken.startswith(f"{name}-same") for taken in names.values())
        names[spec] = f"{name}-same{same + 1}" if same else name
    return names
