"""Ends a job after a number of optimizer steps."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.optim import Optimizer

from ddltrace.experiments.engine.update_control import end_last_step, install_hooks, on_step


class StepLimit:
    """Ends every rank with status 0 after its n-th optimizer step.

    Steps are those of the first optimizer that steps; a job with several has one for each
    model, and they step in turn.
    """

    def __init__(self, steps: int) -> None:
        self._left = steps
        self._optimizer: weakref.ref[Optimizer] | None = None

    def install(self) -> None:
        """Starts counting."""
        on_step.append(self._count)
        install_hooks()

    def _count(self, optimizer: Optimizer) -> None:
        if self._optimizer is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        self._left -= 1
        if self._left == 0:
            end_last_step(optimizer)
            if dist.is_initialized():
                # No rank may end while another one needs its part of a message.
                dist.barrier()
            raise SystemExit(0)
