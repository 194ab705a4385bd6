"""Gradient accumulation."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ddltrace.experiments.frequency.accumulate import Accumulate
from ddltrace.experiments.frequency.policies.step_policy import StepContext, StepPolicy


class AccumulationPolicy(StepPolicy):
    """Adds up gradients in backward; the last backward pass of a cycle exchanges their mean.

    In the steps between, the job's optimizer updates nothing.
    """

    def __init__(self, context: StepContext, frequency: Accumulate) -> None:
        super().__init__(context)
        self._frequency = frequency
        self._step = 0
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}

    def state(self) -> dict[str, Any]:
        """The number of the step, and this rank's sums by parameter index."""
        parameters = [parameter for _, parameter in self.context.parameters]
        return {
            "step": self._step,
            "sums": {n: self._sums[p] for n, p in enumerate(parameters) if p in self._sums},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores both."""
        parameters = [parameter for _, parameter in self.context.parameters]
        sums = {}
        for number, saved in state["sums"].items():
            if number >= len(parameters) or saved.shape != parameters[number].shape:
                raise ValueError("its parameters have other shapes")
            sums[parameters[number]] = saved.to(parameters[number].device, copy=True)
        self._sums = sums
        self._step = int(state["step"])

    def exchanges_gradients(self) -> bool:
        """Whether gradients are exchanged: in the last step of a cycle."""
        return self._frequency.updates_after(self._step)

    @torch.no_grad()
    def gradient_ready(self, parameter: torch.nn.Parameter, *, exchanged: bool) -> None:
        """Adds the gradient to the sum, or the sum to the gradient."""
        gradient = parameter.grad
        assert gradient is not None
        if not exchanged:
            known = self._sums.get(parameter)
            self._sums[parameter] = gradient.clone() if known is None else known.add_(gradient)
            return
        known = self._sums.pop(parameter, None)
        if known is not None:
            gradient.add_(known)
        gradient.div_(self._frequency.steps)

    def before_update(self, optimizer: Optimizer) -> bool:
        """Updates in the last step of a cycle only."""
        del optimizer
        return self._frequency.updates_after(self._step)

    def after_update(self, optimizer: Optimizer) -> None:
        """Counts the step."""
        del optimizer
        self._step += 1
