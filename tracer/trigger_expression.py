"""Expressions of ``--trigger``: when a job that is not recorded begins to record."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ddltrace.tracer.errors import UsageError

DEFAULT_STEPS: Final = 20
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_SLOW: Final = re.compile(r"step\s*>\s*(\d+(?:\.\d+)?)\s*x")
_LATE: Final = re.compile(r"late\s*>\s*(\d+(?:\.\d+)?)\s*ms")
_EVERY: Final = re.compile(r"every\s+(\d+)\s*([smh])")
_LOOK_S: Final = 60.0
_STEPS: Final = re.compile(r"\s+for\s+(\d+)\s+steps?")


@dataclass(frozen=True)
class Trigger:
    """When to record, and how many steps.

    Attributes:
        steps: Number of steps to record.
        factor: Record after a step that took more than so many times the median of the former
            ones; None for other triggers.
        late_ms: Record while one rank is late by more than so much in most steps of a look; None
            for other triggers.
        period_s: Record, or look for a late rank, again after so many seconds; None for a trigger
            by slow steps.
    """

    steps: int
    factor: float | None = None
    late_ms: float | None = None
    period_s: float | None = None


def parse_trigger(text: str) -> Trigger:
    """Reads an expression: ``step>2x for 20 steps``, ``late>10ms every 5m`` or ``every 1h``.

    Raises:
        UsageError: It is not one.
    """
    rest, steps = text.strip(), DEFAULT_STEPS
    tail = _STEPS.search(rest)
    if tail is not None and tail.end() == len(rest):
        rest, steps = rest[: tail.start()], int(tail[1])
    slow, late = _SLOW.fullmatch(rest), _LATE.match(rest)
    if steps > 0 and slow is not None and float(slow[1]) > 1:
        return Trigger(steps, factor=float(slow[1]))
    late_ms = None if late is None else float(late[1])
    rest = rest if late is None else rest[late.end() :].strip()
    every = _EVERY.fullmatch(rest)
    period_s = _LOOK_S if late is not None and not rest else 0.0
    if every is not None:
        period_s = float(int(every[1]) * _SECONDS[every[2]])
    if steps > 0 and period_s > 0:
        return Trigger(steps, late_ms=late_ms, period_s=period_s)
    raise UsageError(
        f"{text!r} is not a trigger: write 'step>2x for 20 steps' (a step takes more than twice "
        "the median), 'late>10ms for 20 steps' (a rank is late in the 10 steps that are recorded "
        "every minute) or 'every 1h for 20 steps'"
    )
