"""DeMo."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.optim import Optimizer

from ddltrace.experiments.codecs.codec import as_bytes, view_as
from ddltrace.experiments.codecs.forms.base import Coding, gather_bytes
from ddltrace.experiments.collectives.base import LibraryCollectives
from ddltrace.experiments.frequency.demo import Demo
from ddltrace.experiments.frequency.policies.step_policy import OwnUpdates, StepContext
from ddltrace.experiments.messages.trace_marks import carrying
from ddltrace.experiments.technique import STATE_PREFIX

_STATE = STATE_PREFIX + "momentum"
_NAME = "momentum coefficients"


class DecoupledMomentumPolicy(OwnUpdates):
    """Exchanges coefficients of momentum before every update, and updates by their sign."""

    def __init__(self, context: StepContext, frequency: Demo) -> None:
        super().__init__(context)
        self._demo = frequency

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer) -> bool:
        """Performs the whole step; the job's optimizer updates nothing."""
        owners = self.owned(optimizer)
        parameters = [parameter for _, parameter in owners]
        with Coding("encode", sum(p.numel() * 4 for p in parameters)) as coding:
            pieces = [self._extract(optimizer, parameter) for parameter in parameters]
            data = torch.cat([piece for pair in zip(*pieces, strict=True) for piece in pair])
            coding.bytes_out = data.numel()
        with carrying(_NAME, parameters):
            work, received = gather_bytes(data, LibraryCollectives(self.context.group))
        if work is not None:
            work.wait()
        with Coding("decode", received.numel()) as coding:
            self._update(owners, received)
            coding.bytes_out = sum(p.numel() * 4 for p in parameters)
        return False

    def _extract(
        self, optimizer: Optimizer, parameter: torch.nn.Parameter
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Removes the largest coefficients from a parameter's momentum; returns values and
        indices."""
        state: dict[str, Any] = optimizer.state[parameter]
        momentum = state.get(_STATE)
        if momentum is None:
            momentum = state[_STATE] = torch.zeros_like(parameter, dtype=torch.float32)
        momentum.mul_(self._demo.beta)
        if parameter.grad is not None:
            gradient = parameter.grad
            momentum.add_(gradient.to_dense() if gradient.is_sparse else gradient)
        _, kept = self._demo.kept(parameter.shape)
        coefficients = transformed(momentum, self._demo)
        chosen = coefficients.abs().topk(kept, dim=1, sorted=False).indices
        values = coefficients.gather(1, chosen)
        sent = torch.zeros_like(coefficients).scatter_(1, chosen, values)
        momentum.sub_(transformed_back(sent, parameter.shape, self._demo))
        return as_bytes(values.reshape(-1)), as_bytes(chosen.to(torch.int16).reshape(-1))

    def _update(self, owners: list[tuple[Any, Any]], received: torch.Tensor) -> None:
        sizes = [math.prod(self._demo.kept(parameter.shape)) for _, parameter in owners]
        value_at, index_at = 0, 4 * sum(sizes)
        for (group, parameter), size in zip(owners, sizes, strict=True):
            chunks, kept = self._demo.kept(parameter.shape)
            total = transformed(torch.zeros_like(parameter, dtype=torch.float32), self._demo)
            senders = torch.zeros_like(total)
            for data in received:
                values = view_as(data[value_at : value_at + 4 * size], torch.float32)
                indices = view_as(data[index_at : index_at + 2 * size], torch.int16).long()
                indices, values = indices.view(chunks, kept), values.view(chunks, kept)
                total.scatter_add_(1, indices, values)
                senders.scatter_add_(1, indices, torch.ones_like(values))
            total.div_(senders.clamp_(min=1))
            direction = transformed_back(total, parameter.shape, self._demo)
            missing = direction.isnan()
            update = direction.sign_().masked_fill_(missing, torch.nan).to(parameter.dtype)
            rate = float(group["lr"])
            parameter.mul_(1 - rate * float(group.get("weight_decay", 0.0)))
            parameter.sub_(update, alpha=rate)
            value_at += 4 * size
            index_at += 2 * size


def transformed(tensor: torch.Tensor, demo: Demo) -> torch.Tensor:
    """The orthonormal two-dimensional DCT-II of each chunk of a tensor.

    Args:
        tensor: float32, of any shape.
        demo: Determines how the tensor is divided into chunks.

    Returns:
        Chunks x coefficients.
    """
    rows, columns, height, width = demo.sides(tensor.shape)
    chunks = tensor.reshape(rows // height if height else 0, height, columns // width, width)
    chunks = chunks.transpose(1, 2).reshape(-1, height, width)
    left, right = _basis(height, tensor.device), _basis(width, tensor.device)
    return (left @ chunks @ right.t()).reshape(chunks.shape[0], height * width)


def transformed_back(coefficients: torch.Tensor, shape: torch.Size, demo: Demo) -> torch.Tensor:
    """The inverse of `transformed`.

    Args:
        coefficients: Chunks x coefficients.
        shape: Shape of the tensor.
        demo: Determines how the tensor is divided into chunks.
    """
    rows, columns, height, width = demo.sides(shape)
    left, right = _basis(height, coefficients.device), _basis(width, coefficients.device)
    chunks = left.t() @ coefficients.view(-1, height, width) @ right
    chunks = chunks.view(rows // height, columns // width, height, width).transpose(1, 2)
    return chunks.reshape(shape)


@functools.cache
def _basis(size: int, device: torch.device) -> torch.Tensor:
    """The orthonormal DCT-II matrix: coefficients x samples."""
    places = torch.arange(size, dtype=torch.float64, device=device)
    angles = math.pi * (places.view(1, -1) + 0.5) * places.view(-1, 1) / size
    basis = torch.cos(angles) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis.to(torch.float32)
