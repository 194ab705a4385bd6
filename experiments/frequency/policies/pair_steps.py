"""NoLoCo."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ddltrace.experiments.frequency.noloco import NoLoCo
from ddltrace.experiments.frequency.policies.outer_steps import like_parameters
from ddltrace.experiments.frequency.policies.step_policy import StepContext, StepPolicy
from ddltrace.experiments.messages.trace_marks import carrying
from ddltrace.experiments.optimizer_rules.optimizer_rule import joined, split


class PairStepPolicy(StepPolicy):
    """Takes outer steps with one other rank at a time.

    A checkpoint of the job's optimizer contains the outer weights of its rank, their momentum and
    the number of the step.
    """

    steps_alone: ClassVar[bool] = True
    one_optimizer: ClassVar[bool] = True

    def __init__(self, context: StepContext, frequency: NoLoCo) -> None:
        super().__init__(context)
        self._noloco = frequency
        self._parameters = [parameter for _, parameter in context.parameters]
        self._outer: list[torch.Tensor] = []
        self._momentum: list[torch.Tensor] = []
        self._step = 0
        self._ended = False

    def exchanges_gradients(self) -> bool:
        """Never."""
        return False

    def before_update(self, optimizer: Optimizer) -> bool:
        """Copies the initial weights before the first step.

        Not earlier: a job loads a checkpoint of its model after it has wrapped it.
        """
        del optimizer
        if not self._outer:
            self._outer = [parameter.detach().clone() for parameter in self._parameters]
            self._momentum = [torch.zeros_like(outer) for outer in self._outer]
        return True

    @torch.no_grad()
    def after_update(self, optimizer: Optimizer) -> None:
        """Takes an outer step if one is due."""
        del optimizer
        step, self._step = self._step, self._step + 1
        if not self._noloco.steps_after(step):
            return
        own = joined(
            [*self._outer, *(p - w for p, w in zip(self._parameters, self._outer, strict=True))]
        )
        mean = self._mean_of_pair(step // self._noloco.period, own)
        parts = split(mean, [*self._outer, *self._outer])
        count = len(self._outer)
        rate, pull = self._noloco.outer_lr, self._noloco.pull
        for parameter, outer, momentum, centre, moved in zip(
            self._parameters, self._outer, self._momentum, parts[:count], parts[count:], strict=True
        ):
            momentum.mul_(self._noloco.outer_momentum).add_(moved, alpha=rate)
            momentum.add_(centre.sub_(outer), alpha=rate if pull is None else pull)
            parameter.copy_(outer.add_(momentum))

    def _mean_of_pair(self, outer_step: int, own: torch.Tensor) -> torch.Tensor:
        """The mean of this rank's vector and its partner's; its own without one."""
        group = self.context.group
        partner = self._noloco.partner(outer_step, group.rank(), group.size())
        if partner is None:
            return own
        received = torch.empty_like(own)
        with carrying("weights and distance of an outer step", self._parameters):
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, own, group=group, group_peer=partner),
                    dist.P2POp(dist.irecv, received, group=group, group_peer=partner),
                ]
            )
        for work in works:
            work.wait()
        return received.add_(own).div_(2)

    @torch.no_grad()
    def end(self) -> None:
        """Gives every rank the mean of all."""
        if self._ended:
            return
        self._ended = True
        values = joined([parameter.detach() for parameter in self._parameters])
        with carrying("mean of all ranks at the end", self._parameters):
            dist.all_reduce(values, group=self.context.group)
        values.div_(self.context.group.size())
        for parameter, part in zip(self._parameters, split(values, self._parameters), strict=True):
            parameter.copy_(part)

    def state(self) -> dict[str, Any]:
        """The number of the step, and the outer optimizer's tensors."""
        return {"step": self._step, "outer": self._outer, "momentum": self._momentum}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores them."""
        self._outer = like_parameters(self._parameters, state["outer"])
        self._momentum = like_parameters(self._parameters, state["momentum"])
        self._step = int(state["step"])
