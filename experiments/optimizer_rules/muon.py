"""Muon: orthogonalized momentum for matrices (K. Jordan, 2024, kellerjordan.github.io/posts/muon).

The scale of updates is that of Liu et al., arXiv 2502.16982, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.optimizer_rules.optimizer_rule import (
    OptimizerRule,
    adam_direction,
    dense_gradient,
    kept_buffer,
    update_number,
    wide,
)
from ddltrace.experiments.technique import STATE_PREFIX, technique

if TYPE_CHECKING:
    from torch.optim import Optimizer

_MOMENTUM: Final = STATE_PREFIX + "momentum"
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial that the iteration applies to the singular values."""

_RMS: Final = 0.2
"""Root mean square of an update of AdamW, to which updates are scaled."""


@technique(
    "optimizer",
    "muon",
    "orthogonalized momentum for the matrices of hidden layers, AdamW for the rest",
    "Muon, kellerjordan.github.io/posts/muon; arXiv 2502.16982",
    needs=("a learning rate for AdamW",),
)
@dataclass(frozen=True)
class Muon(OptimizerRule):
    """Updates a matrix by its momentum with all singular values near 1.

    b <- m b + (1 - m) g; u = g + m (b - g) is orthogonalized by five steps of a Newton-Schulz
    iteration; w <- (1 - lr wd) w - 0.2 sqrt(max(rows, columns)) lr u. Embeddings, the last linear
    layer and all that is not a matrix are updated by AdamW; a convolution's weight is a matrix of
    its output channels. Learning rate and weight decay, and AdamW's betas and eps, are those of
    the job's optimizer, where it has them.

    Attributes:
        momentum: The factor m.
        steps: Steps of the iteration.
    """

    momentum: float = 0.95
    steps: int = 5

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError("momentum must be at least 0 and below 1")
        if not 1 <= self.steps <= 100:
            raise ValueError("steps must be between 1 and 100")

    def for_model(self, model: torch.nn.Module) -> OptimizerRule:
        """The rule that leaves the model's embeddings and its last linear layer to AdamW."""
        return _MuonOfModel(self.momentum, self.steps, outer_weights(model))

    def update(
        self, optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Updates each parameter."""
        with torch.no_grad():
            rate, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
            for parameter in parameters:
                state = optimizer.state[parameter]
                count = update_number(state)
                weight, gradient = wide(parameter), wide(dense_gradient(parameter))
                if not is_hidden_matrix(parameter, self._outer):
                    update = adam_direction(state, count, group, weight, gradient)
                    parameter.sub_(update.mul_(rate).to(parameter.dtype))
                    continue
                kept = kept_buffer(state, _MOMENTUM, weight).lerp_(gradient, 1 - self.momentum)
                update = gradient.lerp(kept, self.momentum).flatten(1)
                scale = _RMS * max(update.shape) ** 0.5
                update = orthogonalized(update, self.steps).mul_(rate * scale)
                parameter.mul_(1 - rate * decay)
                parameter.sub_(update.view(parameter.shape).to(parameter.dtype))

    @property
    def _outer(self) -> frozenset[int]:
        return frozenset()


@dataclass(frozen=True)
class _MuonOfModel(Muon):
    """The rule for one model.

    Attributes:
        outer: From `outer_weights`.
    """

    outer: frozenset[int] = frozenset()

    @property
    def _outer(self) -> frozenset[int]:
        return self.outer


def outer_weights(model: torch.nn.Module) -> frozenset[int]:
    """The weights of a model's embeddings and of its last linear layer, by their `id`."""
    nn = torch.nn
    layers = list(model.modules())
    outer = [each.weight for each in layers if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    outer += [each.weight for each in layers if isinstance(each, nn.Linear)][-1:]
    return frozenset(map(id, outer))


def is_hidden_matrix(parameter: torch.nn.Parameter, outer: frozenset[int]) -> bool:
    """Whether updates of a parameter are orthogonalized.

    Args:
        outer: Those that are not, from `outer_weights`.
    """
    return parameter.dim() > 1 and parameter.numel() > 0 and id(parameter) not in outer


def orthogonalized(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """A matrix with the same singular vectors, and singular values between about 0.7 and 1.2.

    Args:
        matrix: Two dimensions. Singular values far below the largest stay smaller.
        steps: Steps of the iteration.
    """
    first, third, fifth = _COEFFICIENTS
    turned = matrix.shape[0] > matrix.shape[1]
    x: torch.Tensor = matrix.t() if turned else matrix
    x = x / torch.linalg.matrix_norm(x).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.t()
        x = first * x + (third * gram + fifth * gram @ gram) @ x
    return x.t().contiguous() if turned else x
