"""What a strategy does not apply to in this job: said once, and kept for the row of results."""

from __future__ import annotations

import sys
from typing import Final

import torch.distributed as dist

_said: Final[list[str]] = []


def report_restriction(spec: str, restriction: str) -> None:
    """Prints a restriction on rank 0 and keeps it on every rank. A second time it does nothing.

    Args:
        spec: The strategy.
        restriction: What it does not apply to, and what happens in place of it.
    """
    if restriction in _said:
        return
    _said.append(restriction)
    if dist.get_rank() == 0:
        print(f"ddltrace: strategy {spec}: {restriction}", file=sys.stderr, flush=True)


def reported_restrictions() -> list[str]:
    """The restrictions in this process, in their order."""
    return list(_said)
