"""Dion, distributed orthonormalized updates: Ahn & Xu, arXiv 2504.05295."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ddltrace.experiments.codecs.power_sgd import orthonormal
from ddltrace.experiments.frequency.frequency import (
    Exchanged,
    Frequency,
    OwnUpdates,
    StepContext,
    StepPolicy,
)
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.messages.trace_marks import Coding, carrying
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
from ddltrace.experiments.technique import STATE_PREFIX, technique

if TYPE_CHECKING:
    from torch.optim import Optimizer

_MOMENTUM = STATE_PREFIX + "momentum"
_RIGHT = STATE_PREFIX + "right"

_Owned = tuple[dict[str, Any], "torch.nn.Parameter"]


@technique(
    "frequency",
    "dion",
    "exchanges low-rank factors of local momentum, updates by orthonormal ones",
    "Dion, arXiv 2504.05295",
    needs=("a learning rate for AdamW", "no codec beside it"),
)
@dataclass(frozen=True)
class Dion(Frequency):
    """Each rank keeps its momentum of a matrix; only two factors of low rank are exchanged.

    B = M + G; P is an orthonormal basis of the average of B Q, R the average of B^T P;
    M <- B - (1 - momentum) P R^T; Q is R with columns of length 1, and the weights move by
    lr sqrt(rows / columns) P Q^T. Embeddings, the last linear layer and all that is not a matrix
    have averaged gradients and AdamW. It replaces the job's optimizer, whose learning rate, weight
    decay, betas and eps it uses where it has them.

    Attributes:
        rank: Columns of the factors, at most a side of the matrix.
        momentum: Decay of what the factors hold of the momentum.
    """

    exchanges: ClassVar[Exchanged] = "momentum"
    rank: int = 16
    momentum: float = 0.95

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError("rank must be at least 1")
        if not 0 <= self.momentum < 1:
            raise ValueError("momentum must be at least 0 and below 1")

    def policy(self, context: StepContext) -> StepPolicy:
        """Updates by factors."""
        return LowRankMomentumPolicy(context, self)

    def sides(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Rows, columns and rank of the factors of a matrix.

        Args:
            shape: Shape of the tensor; the matrix is its first dimension by all others.
        """
        rows, columns = shape[0], math.prod(shape[1:])
        return rows, columns, min(self.rank, rows, columns)


class LowRankMomentumPolicy(OwnUpdates):
    """Exchanges factors of momentum before every update, and updates by them."""

    def __init__(self, context: StepContext, frequency: Dion) -> None:
        super().__init__(context)
        self._dion = frequency
        self._collectives = context.collectives

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
