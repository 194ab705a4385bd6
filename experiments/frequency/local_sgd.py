"""Local SGD: Stich, ICLR 2019, arXiv 1805.09767.

Post-local SGD: Lin, Stich, Patel & Jaggi, ICLR 2020, arXiv 1808.07217.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ddltrace.experiments.frequency.frequency import (
    Periodic,
    StepContext,
    StepPolicy,
    like_parameters,
)
from ddltrace.experiments.frequency.parameter_exchange import ParameterExchange
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.technique import technique

if TYPE_CHECKING:
    from torch.optim import Optimizer

_NAME = "average of parameters"


@technique(
    "frequency",
    "localsgd",
    "ranks train alone and average parameters; a codec encodes the differences",
    "Local SGD, arXiv 1805.09767",
)
@dataclass(frozen=True)
class LocalSgd(Periodic):
    """Every rank trains alone; after every `period` updates the parameters are averaged.

    With a codec the ranks exchange, in encoded form, how far each has come since the last
    average.

    Attributes:
        period: Updates from one average to the next, H.
    """

    period: int = 8

    def policy(self, context: StepContext) -> StepPolicy:
        """Averages."""
        return AveragingPolicy(context, self)

    def exchanges_gradients(self, step: int) -> bool:
        """Whether gradients are averaged in update number `step`, from 0: never."""
        del step
        return False


@technique(
    "frequency",
    "postlocalsgd",
    "synchronous at first, then local SGD",
    "Post-local SGD, arXiv 1808.07217",
)
@dataclass(frozen=True)
class PostLocalSgd(Periodic):
    """Synchronous SGD for `start` updates, then local SGD.

    The steps are those of ``torch.distributed.algorithms``: ``PostLocalSGDState`` without gradient
    averaging after `start`, and ``PeriodicModelAverager`` with ``warmup_steps=start``.

    Attributes:
        start: Updates with averaged gradients.
        period: Updates from one average of the parameters to the next.
    """

    period: int = 8
    start: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start < 0:
            raise ValueError("start must be at least 0")

    def policy(self, context: StepContext) -> StepPolicy:
        """Averages."""
        return AveragingPolicy(context, self)

    @property
    def opening_steps(self) -> int:
        """The steps of synchronous SGD."""
        return self.start

    def exchanges_gradients(self, step: int) -> bool:
        """Whether gradients are averaged in update number `step`, from 0."""
        return step < self.start

    def exchanges_after(self, step: int) -> bool:
        """Whether parameters are averaged after update number `step`, from 0.

        The first local update is followed by an average, as in PyTorch's model averager.
        """
        return step >= self.start and (step - self.start) % self.period == 0


class AveragingPolicy(StepPolicy):
    """Averages parameters after some updates, or how far they have come since the last time."""

    steps_alone: ClassVar[bool] = True
    one_optimizer: ClassVar[bool] = True

    def __init__(self, context: StepContext, frequency: LocalSgd | PostLocalSgd) -> None:
        super().__init__(context)
        self._frequency = frequency
        self._step = 0
        self._exchange = ParameterExchange(context.parameters, context.exchange())
        self._parameters = [parameter for _, parameter in context.parameters]
        # With a codec, differences are sent, and the parameters of the last average are kept.
        self._last: list[torch.Tensor] | None = None

    def exchanges_gradients(self) -> bool:
        """Whether gradients are exchanged, by the frequency technique."""
        return self._frequency.exchanges_gradients(self._step)

    def before_update(self, optimizer: Optimizer) -> bool:
        """Copies the initial weights, from which differences are computed.

        Not earlier: a job loads a checkpoint of its model after it has wrapped it.
        """
        del optimizer
        if self.context.encodes and self._last is None:
            self._last = [parameter.detach().clone() for parameter in self._parameters]
        return True

    def state(self) -> dict[str, Any]:
        """The number of the step, and the parameters of the last average."""
        return {"step": self._step, "last": self._last}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores both."""
        if self.context.encodes and state["last"] is not None:
            self._last = like_parameters(self._parameters, state["last"])
        self._step = int(state["step"])

    def after_update(self, optimizer: Optimizer) -> None:
        """Averages, if it is time."""
        del optimizer
        step, self._step = self._step, self._step + 1
        if not self._frequency.exchanges_after(step):
            return
        if self._last is None:
            own = [parameter.detach() for parameter in self._parameters]
            for parameter, average in zip(
                self._parameters, self._exchange.average(own, _NAME), strict=True
            ):
                parameter.copy_(average)
            return
        moves = [p.detach() - last for p, last in zip(self._parameters, self._last, strict=True)]
        averages = self._exchange.average(moves, _NAME)
        for parameter, last, average in zip(self._parameters, self._last, averages, strict=True):
            last.add_(average)
            parameter.copy_(last)
