"""Ends a job after a number of optimizer steps."""

from __future__ import annotations

import torch.distributed as dist
from torch.optim import Optimizer

from ddltrace.experiments.engine.update_control import end_last_step, install_hooks, on_step
from ddltrace.experiments.observation.step_count import StepCount


class StepLimit:
    """Ends every rank with status 0 after the first update of the n-th step of its trace."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self._count = StepCount()

    def install(self) -> None:
        """Starts counting."""
        on_step.append(self._updated)
        install_hooks()

    def _updated(self, optimizer: Optimizer) -> None:
        if not self._count.is_first_update():
            return
        self._left -= 1
        if self._left == 0:
            end_last_step(optimizer)
            if dist.is_initialized():
                # No rank may end while another one needs its part of a message.
                dist.barrier()
            raise SystemExit(0)
