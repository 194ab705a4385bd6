"""Random samples of long test matrices; `dev.py test --all` runs every case.

The seed is printed in pytest's header. ``DDLTRACE_TEST_SEED=N`` repeats a sample.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")

SEED_VARIABLE: Final = "DDLTRACE_TEST_SEED"
ALL_VARIABLE: Final = "DDLTRACE_TEST_ALL"


def choose_seed() -> int:
    """The seed of this run: that of the environment, or a new one left there for the workers."""
    return int(os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(1 << 32))))


def all_cases() -> bool:
    """Whether every case is to run."""
    return os.environ.get(ALL_VARIABLE) == "1"


def sampled(cases: Sequence[T], count: int) -> list[T]:
    """Picks the cases of a matrix that this run tests, in their order.

    Args:
        cases: All cases.
        count: Number of cases to pick.

    Returns:
        `count` different cases, the same on every worker of a run; all of them under ``--all``.
    """
    if all_cases() or count >= len(cases):
        return list(cases)
    # Each matrix draws on its own, so that adding one does not change another's sample.
    generator = random.Random(f"{choose_seed()} {len(cases)} {cases[0]!r}")
    return [cases[i] for i in sorted(generator.sample(range(len(cases)), count))]
