"""PowerSGD: Vogels, Karimireddy & Jaggi, NeurIPS 2019, arXiv 1905.13727."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.codecs.description import CodecDescription, ExchangeForm
from ddltrace.experiments.technique import technique


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

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """Bytes of the most nearly square matrix of this many elements.

        The size depends on the tensor's shape: see `wire_bytes_of_shape`.
        """
        rows = next((r for r in range(math.isqrt(elements), 0, -1) if elements % r == 0), 1)
        return self.wire_bytes_of_shape((rows, elements // rows), element_bytes)

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """Two all-reduces, one for each factor: both are linear in the gradient."""
        return "all_reduce"
