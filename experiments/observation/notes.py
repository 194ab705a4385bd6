"""What the row of results says of a strategy in this job: choices that it made by its sizes or
measurements, and restrictions. Each is printed once."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch.distributed as dist

from ddltrace.experiments.schedules.base import Schedule

_reported: Final[dict[str, Any]] = {}


def report_choice(name: str, text: str, values: dict[str, Any]) -> None:
    """Prints a choice on rank 0 and stores it on every rank. The same choice is printed once.

    Args:
        name: Key of the choice in the results, such as ``auto``.
        text: The choice in one line.
        values: The choice with the numbers behind it, as JSON values.
    """
    if _reported.get(name) == values:
        return
    _reported[name] = values
    if dist.get_rank() == 0:
        print(f"ddltrace: {text}", file=sys.stderr, flush=True)


def report_found(schedule: Schedule) -> None:
    """Reports the parameters that a schedule has found by measurement."""
    name = type(schedule).__name__
    text = f"found by measurement: {schedule}"
    report_choice("found", text, {"schedule": name, **vars(schedule)})


def reported_choices() -> dict[str, Any]:
    """The choices in this process by name."""
    return dict(_reported)


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
