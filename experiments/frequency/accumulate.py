"""Gradient accumulation: one exchange and one update for several backward passes.

A large batch without its memory; with LARS or LAMB the setting of You, Gitman & Ginsburg,
arXiv 1708.03888.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ddltrace.experiments.frequency.frequency import (
    Exchanged,
    Frequency,
    StepContext,
    StepPolicy,
)
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.technique import technique

if TYPE_CHECKING:
    from torch.optim import Optimizer


@technique(
    "frequency",
    "accumulate",
    "one exchange and one update for several backward passes: a large batch",
    "Large Batch Training, arXiv 1708.03888",
)
@dataclass(frozen=True)
class Accumulate(Frequency):
    """The gradients of `steps` optimizer steps of the job become one exchange and one update.

    The update uses their mean, as a batch of `steps` times the size would give it.

    Attributes:
        steps: The job's steps for one update.
    """

    exchanges: ClassVar[Exchanged] = "gradients"
    steps: int = 4

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("steps must be at least 1")

    def policy(self, context: StepContext) -> StepPolicy:
        """Sums of gradients."""
        return AccumulationPolicy(context, self)

    @property
    def cycle_steps(self) -> int:
        """Steps after which the exchanges repeat."""
        return self.steps

    def updates_after(self, step: int) -> bool:
        """Whether the job's step number `step`, from 0, exchanges and updates."""
        return (step + 1) % self.steps == 0


class AccumulationPolicy(StepPolicy):
    """Adds up the gradients of steps; the last step of a cycle exchanges their mean.

    In the steps between, the job's optimizer updates nothing. A step may have several backward
    passes, and several optimizers.
    """

    steps_alone: ClassVar[bool] = True
    all_optimizers: ClassVar[bool] = True

    def __init__(self, context: StepContext, frequency: Accumulate) -> None:
        super().__init__(context)
        self._frequency = frequency
        self._own = {parameter for _, parameter in context.parameters}
        self._step = 0
        self._stepped = False
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        # Of this step: gradients so far; parameters whose gradient is the mean, or was it.
        self._now: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._divided: set[torch.nn.Parameter] = set()
        self._undivided: set[torch.nn.Parameter] = set()

    def state(self) -> dict[str, Any]:
        """The number of the step, and this rank's sums by parameter index."""
        parameters = [parameter for _, parameter in self.context.parameters]
        return {
            "step": self._step + self._stepped,
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
        self._stepped = False

    def exchanges_gradients(self) -> bool:
        """Whether gradients are exchanged: in the last step of a cycle."""
        with torch.no_grad():
            if self._stepped:
                self._step += 1
                self._stepped = False
                self._now.clear()
                self._divided.clear()
                self._undivided.clear()
            # A further backward pass of the same step adds to what was divided.
            for parameter in self._divided:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._frequency.steps)
                    self._undivided.add(parameter)
            self._divided.clear()
            return self._frequency.updates_after(self._step)

    def gradient_ready(self, parameter: torch.nn.Parameter, *, exchanged: bool) -> None:
        """Keeps the gradient for the sum, or adds the sum to it."""
        with torch.no_grad():
            gradient = parameter.grad
            assert gradient is not None
            if not exchanged:
                self._now[parameter] = gradient.clone()
                return
            known = self._sums.pop(parameter, None)
            if known is not None:
                gradient.add_(known)
            self._divide(parameter, gradient)

    def gradient_kept(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """The sum, to which the last backward pass adds nothing."""
        with torch.no_grad():
            known, gradient = self._sums.pop(parameter, None), parameter.grad
            if known is None or gradient is None:
                kept = gradient if known is None else known
            else:
                kept = known.add_(gradient)
            return None if kept is None else self._divide(parameter, kept)

    def _divide(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        self._undivided.discard(parameter)
        self._divided.add(parameter)
        return gradient.div_(self._frequency.steps)

    def before_update(self, optimizer: Optimizer) -> bool:
        """Updates in the last step of a cycle only; before, adds the gradients to the sums."""
        updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if self._frequency.updates_after(self._step):
            for parameter in self._undivided & updated:
                if parameter.grad is not None:  # a forward pass without a backward pass
                    self._divide(parameter, parameter.grad)
            return True
        for parameter in self._own & updated:
            kept = self._now.pop(parameter, None)
            if parameter.grad is not None:
                # Without `kept`, all its backward passes were under no_sync.
                gradient = parameter.grad.clone() if kept is None else kept
                known = self._sums.get(parameter)
                self._sums[parameter] = gradient if known is None else known.add_(gradient)
        return False

    def after_update(self, optimizer: Optimizer) -> None:
        """Notes that the step has ended, but for further optimizers."""
        del optimizer
        self._stepped = True
