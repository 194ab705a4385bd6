"""Dion, distributed orthonormalized updates: Ahn & Xu, arXiv 2504.05295."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.frequency.frequency import Exchanged, Frequency
from ddltrace.experiments.technique import technique


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

    def sides(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Rows, columns and rank of the factors of a matrix.

        Args:
            shape: Shape of the tensor; the matrix is its first dimension by all others.
        """
        rows, columns = shape[0], math.prod(shape[1:])
        return rows, columns, min(self.rank, rows, columns)
