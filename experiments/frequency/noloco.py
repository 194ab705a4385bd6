"""NoLoCo: Kolehmainen et al., arXiv 2506.10911."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ddltrace.experiments.frequency.diloco import check_outer
from ddltrace.experiments.frequency.frequency import (
    ParameterAverage,
    ParametersApart,
    Periodic,
    StepContext,
    StepPolicy,
    like_parameters,
)
from ddltrace.experiments.lazy_torch import dist, torch
from ddltrace.experiments.messages.trace_marks import carrying
from ddltrace.experiments.optimizer_rules.optimizer_rule import joined, split
from ddltrace.experiments.technique import technique

if TYPE_CHECKING:
    from torch.optim import Optimizer


@technique(
    "frequency",
    "noloco",
    "ranks train alone; outer steps with one random other rank, without a collective",
    "NoLoCo, arXiv 2506.10911",
    needs=("memory for two copies of the parameters",),
)
@dataclass(frozen=True)
class NoLoCo(Periodic):
    """Every rank trains alone; after `period` updates it takes an outer step with one other rank.

    With the weights w of the last outer step and those of now, v, and means over the two ranks:
    m <- outer_momentum m + outer_lr mean(v - w) + pull (mean(w) - w); w <- w + m. The last term
    draws the ranks together. The pairs are drawn anew for each outer step; of an odd number of
    ranks one steps alone. At the end all ranks get the mean of all.

    Attributes:
        period: Inner updates for one outer step.
        outer_lr: Factor of the mean distance.
        outer_momentum: Decay of the momentum m.
        pull: Factor of the difference from the pair's mean; by default `outer_lr`, as in the
            authors' code.
    """

    swapped: ClassVar[int] = 2  # weights and distance
    period: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    pull: float | None = None

    def __post_init__(self) -> None:
        check_outer(self.period, self.outer_lr, self.outer_momentum)
        if self.pull is not None and not 0 <= self.pull < math.inf:
            raise ValueError("pull must be a number of at least 0")

    def policy(self, context: StepContext) -> StepPolicy:
        """Outer steps in pairs."""
        return PairStepPolicy(context, self)

    def averages_after(self, step: int, ranks: int) -> list[ParameterAverage]:
        """One of each pair."""
        if not self.exchanges_after(step):
            return []
        return [ParameterAverage(0, pair) for pair in self.pairs(step // self.period, ranks)]

    def pairs(self, outer_step: int, ranks: int) -> list[list[int]]:
        """The pairs of ranks that take an outer step together, each ascending.

        Args:
            outer_step: Number of the outer step, from 0.
            ranks: Number of ranks; of an odd number, one is in no pair.
        """
        order = list(range(ranks))
        random.Random(outer_step).shuffle(order)
        return [sorted(order[place : place + 2]) for place in range(0, ranks - 1, 2)]

    def partner(self, outer_step: int, rank: int, ranks: int) -> int | None:
        """The rank with which a rank takes an outer step; None for none.

        Args:
            outer_step: Number of the outer step, from 0.
            ranks: Number of ranks.
        """
        own = next((pair for pair in self.pairs(outer_step, ranks) if rank in pair), None)
        return None if own is None else own[own[0] == rank]


class PairStepPolicy(ParametersApart):
    """Takes outer steps with one other rank at a time.

    A checkpoint of the job's optimizer contains the outer weights of its rank, their momentum and
    the number of the step.
    """

    def __init__(self, context: StepContext, frequency: NoLoCo) -> None:
        super().__init__(context, context.group)
        self._noloco = frequency
        self._outer: list[torch.Tensor] = []
        self._momentum: list[torch.Tensor] = []
        self._step = 0

    def before_update(self, optimizer: Optimizer) -> bool:
        """Copies the initial weights before the first step.

        Not earlier: a job loads a checkpoint of its model after it has wrapped it.
        """
        del optimizer
        if not self._outer:
            self._outer = [parameter.detach().clone() for parameter in self._parameters]
            self._momentum = [torch.zeros_like(outer) for outer in self._outer]
        return True

    def after_update(self, optimizer: Optimizer) -> None:
        """Takes an outer step if one is due."""
        del optimizer
        step, self._step = self._step, self._step + 1
        if not self._noloco.exchanges_after(step):
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
        group = self._group
        partner = self._noloco.partner(outer_step, group.rank(), group.size())
        if partner is None:
            return own
        received = torch.empty_like(own)
        with carrying("weights and distance of an outer step", self._parameters):
            works = dist.batch_isend_irecv(
                # Gloo announces a receive on the connection that carries the data: behind a send,
                # both directions would go one after the other.
                [
                    dist.P2POp(dist.irecv, received, group=group, group_peer=partner),
                    dist.P2POp(dist.isend, own, group=group, group_peer=partner),
                ]
            )
        for work in works:
            work.wait()
        return received.add_(own).div_(2)

    def state(self) -> dict[str, Any]:
        """The number of the step, and the outer optimizer's tensors."""
        return {"step": self._step, "outer": self._outer, "momentum": self._momentum}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores them."""
        self._outer = like_parameters(self._parameters, state["outer"])
        self._momentum = like_parameters(self._parameters, state["momentum"])
        self._step = int(state["step"])
