"""What the experiments train: real models on real data that need no download."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ddltrace.experiments.workloads.base import Workload

WORKLOADS: Final = {"digits": ("ddltrace.experiments.workloads.digits", "Digits")}
"""Name -> (module, class). Modules load when they are used: they import torch."""


def create(name: str, *, width: int, batch_size: int, seed: int) -> Workload:
    """Makes a workload by its name in `WORKLOADS`.

    Args:
        name: Which one.
        width: Size of its model.
        batch_size: Examples per rank and step.
        seed: Of its weights, its data's split and order.

    Raises:
        MissingCapabilityError: A package that it needs is not installed.
    """
    module, kind = WORKLOADS[name]
    made: Workload = getattr(importlib.import_module(module), kind)(
        width=width, batch_size=batch_size, seed=seed
    )
    return made
