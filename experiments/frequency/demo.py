"""DeMo, decoupled momentum optimization: Peng, Quesnelle & Kingma, arXiv 2411.19870."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ddltrace.experiments.codecs.codec import as_bytes, view_as
from ddltrace.experiments.codecs.codec_exchange import gather_bytes
from ddltrace.experiments.frequency.frequency import (
    Exchanged,
    Frequency,
    OwnUpdates,
    StepContext,
    StepPolicy,
)
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.messages.trace_marks import Coding, carrying
from ddltrace.experiments.technique import STATE_PREFIX, technique

if TYPE_CHECKING:
    from torch.optim import Optimizer

_STATE = STATE_PREFIX + "momentum"
_NAME = "momentum coefficients"

_LARGEST_CHUNK = 128  # an index within a chunk travels in 16 bits
_VALUE_AND_INDEX = 4 + 2


@technique(
    "frequency",
    "demo",
    "exchanges the largest DCT coefficients of local momentum, updates by their sign",
    "DeMo, arXiv 2411.19870",
    needs=("a learning rate for updates of size 1", "no codec beside it"),
)
@dataclass(frozen=True)
class Demo(Frequency):
    """Each rank keeps its momentum; only its largest DCT coefficients are exchanged.

    m <- beta m + g; q are the k largest coefficients of each chunk of m; m <- m - IDCT(q); the
    update is the sign of the IDCT of the average of q, each coefficient over the ranks that sent
    it, as in the authors' code (github.com/bloc97/DeMo). It replaces the job's optimizer, whose
    learning rate and weight decay it uses.

    Attributes:
        chunk: Side of a chunk, at most; a dimension is cut into pieces of its largest divisor
            up to this.
        k: Coefficients of a chunk that are sent.
        beta: Decay of the momentum.
    """

    exchanges: ClassVar[Exchanged] = "momentum"
    chunk: int = 64
    k: int = 32
    beta: float = 0.999

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= _LARGEST_CHUNK:
            raise ValueError(f"chunk must be between 1 and {_LARGEST_CHUNK}")
        if self.k < 1:
            raise ValueError("k must be at least 1")
        if not 0 <= self.beta < 1:
            raise ValueError("beta must be at least 0 and below 1")

    def policy(self, context: StepContext) -> StepPolicy:
        """Updates by signs."""
        return DecoupledMomentumPolicy(context, self)

    def sides(self, shape: Sequence[int]) -> tuple[int, int, int, int]:
        """How a tensor is divided: rows and columns of its matrix, and of a chunk.

        Args:
            shape: Shape of the tensor; the matrix is its first dimension by all others, and a
                vector is one row.
        """
        rows, columns = (
            (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        )
        return rows, columns, _divisor(rows, self.chunk), _divisor(columns, self.chunk)

    def kept(self, shape: Sequence[int]) -> tuple[int, int]:
        """Number of chunks of a tensor, and of the coefficients that each sends.

        Args:
            shape: Shape of the tensor.
        """
        rows, columns, height, width = self.sides(shape)
        if rows * columns == 0:
            return 0, 0
        return rows * columns // (height * width), min(self.k, height * width)

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of one rank's coefficients: a float32 value and a 16-bit index for each.

        Args:
            shape: Shape of the tensor.
        """
        chunks, kept = self.kept(shape)
        return chunks * kept * _VALUE_AND_INDEX


def _divisor(size: int, limit: int) -> int:
    """The largest divisor of a size that is not above the limit."""
    return next(d for d in range(min(max(size, 1), limit), 0, -1) if size % d == 0)


class DecoupledMomentumPolicy(OwnUpdates):
    """Exchanges coefficients of momentum before every update, and updates by their sign."""

    def __init__(self, context: StepContext, frequency: Demo) -> None:
        super().__init__(context)
        self._demo = frequency

    def before_update(self, optimizer: Optimizer) -> bool:
        """Performs the whole step; the job's optimizer updates nothing."""
        owners = self.owned(optimizer)
        parameters = [parameter for _, parameter in owners]
        with Coding("encode", sum(p.numel() * 4 for p in parameters)) as coding:
            pieces = [self._extract(optimizer, parameter) for parameter in parameters]
            data = torch.cat([piece for pair in zip(*pieces, strict=True) for piece in pair])
            coding.bytes_out = data.numel()
        with carrying(_NAME, parameters):
            work, received = gather_bytes(data, self.context.collectives)
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
