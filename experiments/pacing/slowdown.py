"""A straggler on demand: which rank computes more slowly, by how much, and in which steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddltrace.tracer.errors import UsageError

EXAMPLE = "rank=2,factor=1.5 or rank=2,factor=4,burst=5,every=20"


@dataclass(frozen=True)
class Slowdown:
    """One slow rank.

    Attributes:
        rank: The rank.
        factor: How many times as long it computes for a step, at least 1.
        burst: How many steps in a row are slow; None: all of them.
        every: Steps from one burst to the next, with the burst at the end; None without bursts.
    """

    rank: int
    factor: float
    burst: int | None = None
    every: int | None = None

    def is_slow(self, step: int) -> bool:
        """Whether a step is slow, counted from 0."""
        if self.burst is None or self.every is None:
            return True
        return step % self.every >= self.every - self.burst


def factor_of(slow: Sequence[Slowdown], step: int) -> float:
    """How many times as long a rank computes in a step, with all its slowdowns.

    Args:
        slow: The slowdowns of one rank.
        step: The step, from 0.
    """
    return math.prod(each.factor for each in slow if each.is_slow(step))


def read_slowdown(text: str, ranks: int | None) -> Slowdown:
    """Reads ``rank=R,factor=F[,burst=B,every=E]``.

    Args:
        text: The option's value.
        ranks: Number of ranks; None if it is not known yet.

    Raises:
        UsageError: The text says no slowdown of one of the ranks.
    """
    wrong = UsageError(f"--slow {text!r:.60}: say {EXAMPLE}")
    pairs = [pair.partition("=") for pair in text.split(",")]
    values = {key.strip(): value for key, _, value in pairs}
    if len(values) != len(pairs) or not {"rank", "factor"} <= set(values) <= _KEYS:
        raise wrong
    try:
        rank, factor = int(values["rank"]), float(values["factor"])
        burst, every = (int(values[key]) if key in values else None for key in ("burst", "every"))
    except ValueError:
        raise wrong from None
    if rank < 0 or (ranks is not None and rank >= ranks):
        known = "" if ranks is None else f", only 0 to {ranks - 1}"
        raise UsageError(f"--slow {text!r:.60}: there is no rank {rank}{known}")
    if not 1 <= factor <= _LARGEST:
        raise UsageError(f"--slow {text!r:.60}: factor must be 1 to {_LARGEST}")
    if (burst is None) != (every is None):
        raise UsageError(f"--slow {text!r:.60}: burst and every belong together")
    if burst is not None and every is not None and not 1 <= burst <= every:
        raise UsageError(f"--slow {text!r:.60}: burst must be 1 to every")
    return Slowdown(rank, factor, burst, every)


_KEYS = {"rank", "factor", "burst", "every"}
_LARGEST = 1000
