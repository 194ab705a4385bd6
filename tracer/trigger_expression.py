"""Expressions of ``--trigger``: when a job that is not recorded begins to record."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ddltrace.tracer.errors import UsageError

DEFAULT_STEPS: Final = 20
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_SLOW: Final = re.compile(r"step\s*>\s*(\d+(?:\.\d+)?)\s*x")
_EVERY: Final = re.compile(r"every\s+(\d+)\s*([smh])")
_STEPS: Final = re.compile(r"\s+for\s+(\d+)\s+steps?")


@dataclass(frozen=True)
class Trigger:
    """When to record, and how many steps.

    Attributes:
        steps: Number of steps to record.
        factor: Record after a step that took more than so many times the median of the former
            ones; None for a trigger by time.
        period_s: Record again after so many seconds; None for a trigger by slow steps.
    """

    steps: int
    factor: float | None = None
    period_s: float | None = None


def parse_trigger(text: str) -> Trigger:
    """Reads an expression such as ``step>2x for 20 steps`` or ``every 1h for 50 steps``.

    Raises:
        UsageError: It is none.
    """
    rest, steps = text.strip(), DEFAULT_STEPS
    tail = _STEPS.search(rest)
    if tail is not None and tail.end() == len(rest):
        rest, steps = rest[: tail.start()], int(tail[1])
    slow, every = _SLOW.fullmatch(rest), _EVERY.fullmatch(rest)
    if steps > 0 and slow is not None and float(slow[1]) > 1:
        return Trigger(steps, factor=float(slow[1]))
    if steps > 0 and every is not None and int(every[1]) > 0:
        return Trigger(steps, period_s=float(int(every[1]) * _SECONDS[every[2]]))
    raise UsageError(
        f"{text!r} is not a trigger: write 'step>2x for 20 steps' (a step takes more than twice "
        "the median) or 'every 1h for 20 steps'"
    )
