"""PowerSGD: Vogels, Karimireddy & Jaggi, NeurIPS 2019, arXiv 1905.13727."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ddltrace.experiments.codecs.codec import (
    Codec,
    CodecDescription,
    ExchangeForm,
    Payload,
    as_bytes,
    view_as,
)
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.technique import technique
from ddltrace.tracer.errors import UsageError


@technique(
    "volume",
    "powersgd",
    "low-rank factors of each matrix; use with feedback",
    "PowerSGD, arXiv 1905.13727",
    needs=("whole tensors: no schedule that cuts them",),
)
@dataclass(frozen=True)
class PowerSgd(CodecDescription):
    """A gradient matrix as the product of two thin ones, by one warm-started power iteration.

    A tensor is the matrix of its first dimension by all others. Tensors that would not shrink
    to 1 / `min_compression` (all vectors among them) are sent as they are. The paper's method
    is ``powersgd+feedback``.

    Attributes:
        rank: Columns of the two factors.
        start: Steps in which gradients are averaged as they are first.
        min_compression: Smallest ratio for which a tensor is compressed, as in PyTorch's hook.
    """

    whole_tensors: ClassVar[bool] = True
    rank: int = 1
    start: int = 0
    min_compression: float = 2.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError("rank must be at least 1")
        if self.start < 0:
            raise ValueError("start must be a number of steps")
        if not 0 < self.min_compression < math.inf:
            raise ValueError("min_compression must be a positive number")

    @property
    def opening_steps(self) -> int:
        """The exchanges of gradients as they are."""
        return self.start

    def factors(self, shape: Sequence[int]) -> tuple[int, int, int] | None:
        """Rows, columns and rank with which a tensor is sent; None if it is sent as it is.

        Args:
            shape: Shape of the tensor.
        """
        if len(shape) < 2 or 0 in shape:
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(rows, columns, self.rank)
        if (rows + columns) * rank * self.min_compression >= rows * columns:
            return None
        return rows, columns, rank

    def wire_bytes_of_shape(self, shape: Sequence[int], element_bytes: int = 4) -> int:
        """Bytes of both factors, or of the tensor where it is sent as it is.

        Args:
            shape: Shape of the tensor.
            element_bytes: Size of one element, in bytes.
        """
        factors = self.factors(shape)
        if factors is None:
            return math.prod(shape) * element_bytes
        rows, columns, rank = factors
        return (rows + columns) * rank * element_bytes

    def codec(self, seed: int | None) -> Codec:
        """All ranks start from the same factors: they have the same seed."""
        return PowerSgdCodec(self, seed=seed or 0)

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """Bytes of the most nearly square matrix of this many elements.

        The size depends on the tensor's shape: see `wire_bytes_of_shape`.
        """
        rows = next((r for r in range(math.isqrt(elements), 0, -1) if elements % r == 0), 1)
        return self.wire_bytes_of_shape((rows, elements // rows), element_bytes)

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """Two all-reduces, one for each factor: both are linear in the gradient."""
        return "all_reduce"


class PowerSgdCodec(Codec):
    """Sends factors P (orthonormal) and Q whose product P Q^T approximates a matrix.

    A matrix with an infinite or NaN element decodes to NaN; the iteration continues from the Q of
    the last finite matrix.
    """

    def __init__(self, description: PowerSgd, *, seed: int) -> None:
        super().__init__(description)
        self._parameters = description
        # The numbers that PyTorch's PowerSGDState draws for its first bucket.
        drawn = int(np.random.RandomState(seed).randint(1_000_000_000))
        self._generator = torch.Generator().manual_seed(drawn)
        self.factors: dict[Hashable, torch.Tensor] = {}

    def payload_bytes(
        self, shape: Sequence[int], dtype: torch.dtype, *, key: Hashable = None
    ) -> int:
        """Bytes of both factors, or of the tensor if it is sent unchanged."""
        return self._parameters.wire_bytes_of_shape(shape, dtype.itemsize)

    def start(self, matrix: torch.Tensor, rank: int, key: Hashable) -> torch.Tensor:
        """P = M Q with the Q of the previous step, not yet orthonormal: linear in M.

        Args:
            matrix: M, rows x columns.
            rank: Columns of P and Q.
            key: Key of the tensor's state.

        Returns:
            P, rows x rank.

        Raises:
            UsageError: The key is that of a matrix of another shape.
        """
        q = self.factors.get(key)
        if q is None:
            drawn = torch.randn(matrix.shape[1], rank, generator=self._generator)
            q = orthonormal(drawn.to(device=matrix.device, dtype=matrix.dtype))
            self.factors[key] = q
        if q.shape != (matrix.shape[1], rank):
            raise UsageError(
                f"the codec keeps the factor of a matrix of {q.shape[0]} columns under the key "
                f"{key!r}, and this one has {matrix.shape[1]}: give each tensor a key of its own"
            )
        return matrix @ q

    def remember(self, q: torch.Tensor, key: Hashable) -> None:
        """Keeps the averaged Q = M^T P for the next step, if it is finite.

        Args:
            q: Columns x rank.
            key: Key of the tensor's state.
        """
        if bool(q.isfinite().all()):
            self.factors[key] = orthonormal(q)

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        factors = self._parameters.factors(shape)
        if factors is None:
            return Payload(as_bytes(flat.clone()), shape, flat.dtype)
        rows, columns, rank = factors
        work = _work_type(flat)
        matrix = flat.view(rows, columns).to(work)
        p = orthonormal(self.start(matrix, rank, key))
        q = matrix.t() @ p
        self.remember(q, key)
        both = torch.cat([p.reshape(-1), q.reshape(-1)]).to(flat.dtype)
        return Payload(as_bytes(both), shape, flat.dtype)

    def _decode(self, payload: Payload) -> torch.Tensor:
        values = view_as(payload.data, payload.dtype)
        factors = self._parameters.factors(payload.shape)
        if factors is None:
            return values.clone()
        rows, columns, rank = factors
        values = values.to(_work_type(values))
        p, q = values[: rows * rank].view(rows, rank), values[rows * rank :].view(columns, rank)
        return (p @ q.t()).reshape(-1).to(payload.dtype)


def _work_type(values: torch.Tensor) -> torch.dtype:
    return values.dtype if values.dtype == torch.float64 else torch.float32


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns of a matrix.

    Args:
        matrix: Rows x rank, float32 or float64, no more columns than rows.

    Returns:
        Rows x rank; NaN throughout if an element is infinite or NaN.
    """
    # Householder reflections stay orthonormal where columns depend on each other, as those of
    # the gradient of a small batch do; Gram-Schmidt does not.
    basis: torch.Tensor = torch.linalg.qr(matrix).Q
    return basis
