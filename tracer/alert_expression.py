"""Expressions of ``--alert``: a limit on a quantity of a running job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ddltrace.tracer.errors import UsageError

QUANTITIES: Final = {
    "step_seconds": "mean time of a step",
    "exposed_seconds": "communication in a step that compute does not hide, mean of the ranks",
    "wait_seconds": "waiting for other ranks in the messages of a step, mean of the ranks",
    "lateness_seconds": "by how much the rank that costs most enters collectives last",
    "exposed_share": "share of a step: exposed communication",
    "wait_share": "share of a step: waiting for other ranks in messages",
    "idle_share": "share of a step: neither compute nor communication",
    "data_share": "share of a step: loading of data",
    "overlap_ratio": "share of the communication that compute hides",
    "memory_bytes": "resident memory of the largest rank",
    "samples_per_second": "samples that the ranks of this launcher load",
    "tokens_per_second": "tokens that the ranks of this launcher load, with padding",
    "mfu": "share of the device's peak of floating-point operations",
}
"""Quantity -> what it is. All are of the steps of the last seconds, except the operations of a step
in `mfu`, which are the most that were recorded so far."""

_UNITS: Final = {
    **{"": 1.0, "%": 0.01, "s": 1.0, "ms": 1e-3, "us": 1e-6},
    **{"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30},
}
_LIMIT: Final = re.compile(
    r"(\w+)\s*([<>])\s*(\d+(?:\.\d+)?)\s*(%|us|ms|s|KiB|MiB|GiB)?(?:\s+for\s+(\d+)\s+steps?)?"
)


@dataclass(frozen=True)
class Limit:
    """A limit.

    Attributes:
        text: The expression.
        quantity: One of `QUANTITIES`.
        above: Whether the quantity has to be above the value, or else below it.
        value: The value, in seconds, bytes or as a ratio.
        steps: For how many steps.
    """

    text: str
    quantity: str
    above: bool
    value: float
    steps: int

    def is_passed(self, value: float) -> bool:
        """Whether a value is beyond the limit."""
        return value > self.value if self.above else value < self.value


def parse_limit(text: str) -> Limit:
    """Reads an expression such as ``wait_share>20% for 50 steps``.

    Raises:
        UsageError: It is none.
    """
    found = _LIMIT.fullmatch(text.strip())
    if found is None or found[1] not in QUANTITIES:
        raise UsageError(
            f"{text!r} is not an alert: write 'wait_share>20% for 50 steps', with one of "
            f"{', '.join(QUANTITIES)}"
        )
    quantity, sign, number, unit, steps = found.groups()
    return Limit(
        text=text.strip(),
        quantity=quantity,
        above=sign == ">",
        value=float(number) * _UNITS[unit or ""],
        steps=int(steps or 1),
    )
