"""DeMo, decoupled momentum optimization: Peng, Quesnelle & Kingma, arXiv 2411.19870."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.frequency.frequency import Exchanged, Frequency
from ddltrace.experiments.technique import technique

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
