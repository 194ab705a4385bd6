"""Makes a rank of a user's job compute more slowly (``--slow``), without changes to its code."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddltrace.experiments.engine.refusal import end_job
from ddltrace.experiments.engine.update_control import before_step, install_hooks, on_step
from ddltrace.experiments.observation.step_count import StepCount
from ddltrace.experiments.pacing.slowdown import factor_of, read_slowdown
from ddltrace.experiments.pacing.straggler import Straggler
from ddltrace.tracer.errors import UsageError


class SlowRank:
    """Slows the first model that the job wraps in DistributedDataParallel, if this rank is slow.

    A step begins after the first update of the step of the trace before it. A job without such a
    model ends before its first optimizer step.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        """Reads the slowdowns of all ranks.

        Args:
            texts: Each as of ``--slow``.

        Raises:
            StrategyRefusedError: One of them is of a rank that the job does not have.
        """
        try:
            slow = [read_slowdown(text, dist.get_world_size()) for text in texts]
        except UsageError as error:
            end_job(str(error))
        self._own = [each for each in slow if each.rank == dist.get_rank()]
        self._straggler: Straggler | None = None
        self._found = False
        self._count = StepCount()
        self._steps = 0

    def install(self) -> None:
        """Waits for the model."""
        ddp: Any = DistributedDataParallel
        original = ddp.__init__

        @functools.wraps(original)
        def build(model: Any, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            if not self._found:
                self._found = True
                self._slow_down(model)

        ddp.__init__ = build
        before_step.append(self._check)
        on_step.append(self._stepped)
        install_hooks()

    def _slow_down(self, model: DistributedDataParallel) -> None:
        if not self._own:
            return
        self._straggler = Straggler(model, lambda step: factor_of(self._own, step))
        self._straggler.begin(0)

    def _check(self, optimizer: Optimizer) -> None:
        del optimizer
        if not self._found:
            end_job(
                "--slow cannot be applied: the job has no model in DistributedDataParallel before "
                "its first optimizer step"
            )

    def _stepped(self, optimizer: Optimizer) -> None:
        del optimizer
        if self._count.is_first_update():
            self._steps += 1
            if self._straggler is not None:
                self._straggler.begin(self._steps)
