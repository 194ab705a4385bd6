"""Dion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ddltrace.experiments.codecs.forms.base import Coding
from ddltrace.experiments.codecs.power_sgd import orthonormal
from ddltrace.experiments.collectives.base import LibraryCollectives
from ddltrace.experiments.frequency.dion import Dion
from ddltrace.experiments.frequency.policies.step_policy import OwnUpdates, StepContext
from ddltrace.experiments.messages.trace_marks import carrying
from ddltrace.experiments.optimizer_rules.muon import is_hidden_matrix
from ddltrace.experiments.optimizer_rules.optimizer_rule import (
    adam_direction,
    dense_gradient,
    joined,
    kept_buffer,
    split,
    update_number,
    wide,
)
from ddltrace.experiments.technique import STATE_PREFIX

_MOMENTUM = STATE_PREFIX + "momentum"
_RIGHT = STATE_PREFIX + "right"

_Owned = tuple[dict[str, Any], torch.nn.Parameter]


class LowRankMomentumPolicy(OwnUpdates):
    """Exchanges factors of momentum before every update, and updates by them."""

    def __init__(self, context: StepContext, frequency: Dion) -> None:
        super().__init__(context)
        self._dion = frequency
        self._collectives = LibraryCollectives(context.group)

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer) -> bool:
        """Performs the whole step; the job's optimizer updates nothing."""
        owned = self.owned(optimizer)
        matrices = [each for each in owned if is_hidden_matrix(each[1], self.context.outer)]
        others = [each for each in owned if not is_hidden_matrix(each[1], self.context.outer)]
        with Coding("encode", _bytes(owned)) as coding:
            momenta = [self._momentum(optimizer, parameter) for _, parameter in matrices]
            rights = [self._right(optimizer, parameter) for _, parameter in matrices]
            lefts = [momentum @ right for momentum, right in zip(momenta, rights, strict=True)]
            gradients = [_gradient(parameter) for _, parameter in others]
            first = joined([*lefts, *gradients])
            coding.bytes_out = first.nbytes
        lefts_and_gradients = self._average("left factors and gradients", owned, first)
        with Coding("encode", _bytes(matrices)) as coding:
            parts = split(lefts_and_gradients, [*lefts, *gradients])
            lefts = [orthonormal(left) for left in parts[: len(lefts)]]
            rights = [m.t() @ left for m, left in zip(momenta, lefts, strict=True)]
            second = joined(rights)
            coding.bytes_out = second.nbytes
        second = self._average("right factors", matrices, second)
        with Coding("decode", first.nbytes + second.nbytes) as coding:
            factors = zip(momenta, lefts, split(second, rights), strict=True)
            for own, (momentum, left, right) in zip(matrices, factors, strict=True):
                self._update(optimizer, own, momentum, left, right)
            for own, gradient in zip(others, parts[len(lefts) :], strict=True):
                _update_by_adam(optimizer, own, gradient)
            coding.bytes_out = _bytes(owned)
        return False

    def _momentum(self, optimizer: Optimizer, parameter: torch.nn.Parameter) -> torch.Tensor:
        """This rank's momentum with its gradient, as a matrix."""
        # Contiguous, also for a weight in channels-last order: its matrix has to be a view.
        like = wide(parameter).contiguous()
        momentum = kept_buffer(optimizer.state[parameter], _MOMENTUM, like)
        if parameter.grad is not None:
            momentum.add_(dense_gradient(parameter))
        return momentum.flatten(1)

    def _right(self, optimizer: Optimizer, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The right factor of the last step; drawn at first, the same on all ranks."""
        state = optimizer.state[parameter]
        if _RIGHT not in state:
            _, columns, rank = self._dion.sides(parameter.shape)
            generator = torch.Generator().manual_seed(columns)
            drawn = torch.randn(columns, rank, generator=generator)
            state[_RIGHT] = drawn.to(wide(parameter))
        right: torch.Tensor = state[_RIGHT]
        return right

    def _average(self, name: str, owned: Sequence[_Owned], vector: torch.Tensor) -> torch.Tensor:
        if not vector.numel():
            return vector
        with carrying(name, [parameter for _, parameter in owned]):
            work = self._collectives.all_reduce(vector)
        work.wait()
        return vector.div_(self._collectives.size())

    def _update(
        self,
        optimizer: Optimizer,
        own: _Owned,
        momentum: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
    ) -> None:
        group, parameter = own
        momentum.addmm_(left, right.t(), alpha=self._dion.momentum - 1)
        # A column of zeros has no direction: it stays, and moves nothing.
        right = right / torch.linalg.vector_norm(right, dim=0).clamp(min=1e-30)
        optimizer.state[parameter][_RIGHT] = right
        rate, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
        rows, columns, _ = self._dion.sides(parameter.shape)
        update = (left @ right.t()).mul_(rate * (rows / columns) ** 0.5)
        parameter.mul_(1 - rate * decay)
        parameter.sub_(update.view(parameter.shape).to(parameter.dtype))


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(wide(parameter))
    return wide(dense_gradient(parameter))


def _update_by_adam(optimizer: Optimizer, own: _Owned, gradient: torch.Tensor) -> None:
    group, parameter = own
    state = optimizer.state[parameter]
    direction = adam_direction(state, update_number(state), group, wide(parameter), gradient)
    parameter.sub_(direction.mul_(float(group["lr"])).to(parameter.dtype))


def _bytes(owned: Sequence[_Owned]) -> int:
    return sum(parameter.nbytes for _, parameter in owned)
