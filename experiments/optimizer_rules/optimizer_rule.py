"""The base class of rules that update parameters in place of the job's optimizer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.technique import STATE_PREFIX

if TYPE_CHECKING:
    from torch.optim import Optimizer

_STEP: Final = STATE_PREFIX + "step"
_MEAN: Final = STATE_PREFIX + "mean"
_SQUARE: Final = STATE_PREFIX + "square"


class OptimizerRule(ABC):
    """Updates parameters from their averaged gradients."""

    def for_model(self, model: torch.nn.Module) -> OptimizerRule:
        """The rule for the parameters of a model; by default this one, which needs no layers.

        Args:
            model: The model that the job trains.
        """
        del model
        return self

    @abstractmethod
    def update(
        self, optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Updates some parameters of one group in place.

        Args:
            optimizer: The job's optimizer. State of a parameter belongs into
                ``optimizer.state[parameter]``, under keys that begin with `STATE_PREFIX`, so that
                the job's checkpoints hold it.
            group: Its settings: learning rate, weight decay and the like.
            parameters: Those to update; ``grad`` of each is the average over the ranks.
        """


def check_warmup(warmup: int) -> None:
    """Raises ValueError unless the warm-up is a number of updates."""
    if warmup < 0:
        raise ValueError("warmup must be a number of steps")


def warmup_share(step: int, warmup: int) -> float:
    """The share of the learning rate that holds in an update.

    Goyal et al., arXiv 1706.02677, section 2.2.

    Args:
        step: Number of the update, from 1.
        warmup: Updates until all of it holds.
    """
    return min(1.0, step / warmup) if warmup else 1.0


def update_number(state: dict[str, Any]) -> int:
    """Number of this update of a parameter, from 1."""
    state[_STEP] = int(state.get(_STEP, 0)) + 1
    return int(state[_STEP])


def kept_buffer(state: dict[str, Any], name: str, like: torch.Tensor) -> torch.Tensor:
    """A tensor of a parameter's state; zeros at first."""
    buffer: torch.Tensor | None = state.get(name)
    if buffer is None:
        buffer = state[name] = torch.zeros_like(like)
    return buffer


def dense_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient of a parameter, dense."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as float32, or float64 if it is; not to be changed."""
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def adam_direction(
    state: dict[str, Any],
    count: int,
    group: dict[str, Any],
    weight: torch.Tensor,
    gradient: torch.Tensor,
) -> torch.Tensor:
    """The direction of an update of AdamW: m_hat / (sqrt(v_hat) + eps) + wd w.

    Args:
        state: The parameter's state, which keeps both moments.
        count: From `update_number`.
        group: Settings of the job's optimizer; betas and eps are Adam's own where it has none.
        weight: The parameter, from `wide`.
        gradient: Its gradient, from `wide`.
    """
    first, second = map(float, group.get("betas", (0.9, 0.999)))
    eps, decay = float(group.get("eps", 1e-8)), float(group.get("weight_decay", 0.0))
    mean = kept_buffer(state, _MEAN, weight).lerp_(gradient, 1 - first)
    square = kept_buffer(state, _SQUARE, weight)
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    scale = math.sqrt(1 - second**count)
    direction = (mean / (1 - first**count)).div_(square.sqrt().div_(scale).add_(eps))
    return direction.add_(weight, alpha=decay)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of tensors as one vector: float64 if one of them is, else float32."""
    if not tensors:
        return torch.empty(0)
    dtypes = {tensor.dtype for tensor in tensors}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])


def split(vector: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of which `joined` made a vector.

    Args:
        like: Tensors with their shapes and types, in order.
    """
    parts = torch.split(vector, [tensor.numel() for tensor in like]) if like else ()
    return [
        part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, like, strict=True)
    ]
