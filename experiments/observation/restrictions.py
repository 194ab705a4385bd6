"""Records restrictions of a strategy in this job: printed once, and kept for the results."""

from __future__ import annotations

import sys
from typing import Final

import torch.distributed as dist

_said: Final[list[str]] = []


def report_restriction(spec: str, restriction: str) -> None:
    """Prints a restriction on rank 0 and keeps it on every rank. A second time it does nothing.

    Args:
        spec: The strategy.
        restriction: The part of the job to which it does not apply, and the consequence.
    """
    if restriction in _said:
        return
    _said.append(restriction)
    if dist.get_rank() == 0:
        print(f"ddltrace: strategy {spec}: {restriction}", file=sys.stderr, flush=True)


def reported_restrictions() -> list[str]:
    """The restrictions in this process, in their order."""
    return list(_said)
