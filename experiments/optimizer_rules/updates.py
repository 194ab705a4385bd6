"""The torch code of the optimizer axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ddltrace.experiments.optimizer_rules.lamb import Lamb
from ddltrace.experiments.optimizer_rules.lars import Lars, warmup_share
from ddltrace.experiments.optimizer_rules.optimizer_rule import OptimizerRule
from ddltrace.experiments.technique import STATE_PREFIX

_STEP = STATE_PREFIX + "step"
_MOMENTUM = STATE_PREFIX + "momentum"
_MEAN = STATE_PREFIX + "mean"
_SQUARE = STATE_PREFIX + "square"
_DEFAULT_MOMENTUM = 0.9


def create_optimizer_rule(description: Lars | Lamb | None) -> OptimizerRule | None:
    """Creates the rule of a description; None for the job's own optimizer.

    Args:
        description: The strategy's optimizer technique.
    """
    if description is None:
        return None
    return LarsRule(description) if isinstance(description, Lars) else LambRule(description)


class LarsRule(OptimizerRule):
    """Implements `Lars`; momentum is kept in float32 for 16-bit parameters."""

    def __init__(self, description: Lars) -> None:
        self._lars = description

    @torch.no_grad()
    def update(
        self, optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Updates each parameter as a layer of its own."""
        momentum = self._lars.momentum
        if momentum is None:
            momentum = float(group.get("momentum", _DEFAULT_MOMENTUM))
        decay = float(group.get("weight_decay", 0.0))
        for parameter in parameters:
            state = optimizer.state[parameter]
            rate = float(group["lr"]) * warmup_share(_count(state), self._lars.warmup)
            weight, gradient = _wide(parameter), _wide(_dense(parameter))
            weight_norm, gradient_norm = (
                torch.linalg.vector_norm(weight),
                torch.linalg.vector_norm(gradient),
            )
            ratio = self._lars.eta * weight_norm / (gradient_norm + decay * weight_norm)
            zero = (weight_norm == 0) | (gradient_norm == 0)
            ratio = torch.where(zero, torch.ones_like(ratio), ratio)
            step = gradient.add(weight, alpha=decay).mul_(rate * ratio)
            if momentum:
                velocity = _buffer(state, _MOMENTUM, weight)
                step = velocity.mul_(momentum).add_(step)
            parameter.sub_(step.to(parameter.dtype))


class LambRule(OptimizerRule):
    """Implements `Lamb`; both moments are kept in float32 for 16-bit parameters."""

    def __init__(self, description: Lamb) -> None:
        self._lamb = description

    @torch.no_grad()
    def update(
        self, optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Updates each parameter as a layer of its own."""
        first, second = map(float, group.get("betas", (0.9, 0.999)))
        eps, decay = float(group.get("eps", 1e-8)), float(group.get("weight_decay", 0.0))
        for parameter in parameters:
            state = optimizer.state[parameter]
            count = _count(state)
            rate = float(group["lr"]) * warmup_share(count, self._lamb.warmup)
            weight, gradient = _wide(parameter), _wide(_dense(parameter))
            mean = _buffer(state, _MEAN, weight).lerp_(gradient, 1 - first)
            square = _buffer(state, _SQUARE, weight)
            square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
            scale = math.sqrt(1 - second**count)
            update = (mean / (1 - first**count)).div_(square.sqrt().div_(scale).add_(eps))
            update.add_(weight, alpha=decay)
            weight_norm, update_norm = (
                torch.linalg.vector_norm(weight),
                torch.linalg.vector_norm(update),
            )
            zero = (weight_norm == 0) | (update_norm == 0)
            trust = torch.where(zero, torch.ones_like(weight_norm), weight_norm / update_norm)
            trust = trust.clamp(self._lamb.trust_min, self._lamb.trust_max)
            parameter.sub_(update.mul_(rate * trust).to(parameter.dtype))


def _count(state: dict[str, Any]) -> int:
    """Number of this update of a parameter, from 1."""
    state[_STEP] = int(state.get(_STEP, 0)) + 1
    return int(state[_STEP])


def _buffer(state: dict[str, Any], name: str, like: torch.Tensor) -> torch.Tensor:
    buffer: torch.Tensor | None = state.get(name)
    if buffer is None:
        buffer = state[name] = torch.zeros_like(like)
    return buffer


def _dense(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as float32, or float64 if it is; not to be changed."""
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor
