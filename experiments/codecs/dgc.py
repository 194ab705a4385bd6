"""Deep Gradient Compression: Lin et al., ICLR 2018, arXiv 1712.01887."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.codecs.description import (
    CodecDescription,
    ExchangeForm,
    check_density,
    kept_elements,
)
from ddltrace.experiments.technique import technique

_WARMUP_STAGES = 4


@technique(
    "volume",
    "dgc",
    "top-k of local momentum with masking, clipping and warm-up",
    "Deep Gradient Compression, arXiv 1712.01887",
    needs=("SGD; the codec takes over its momentum",),
)
@dataclass(frozen=True)
class Dgc(CodecDescription):
    """Top-k of locally accumulated momentum: u <- m u + g, v <- v + u, the top k of v is sent.

    It replaces the optimizer's momentum.

    Attributes:
        density: Share of the elements that is sent after the warm-up.
        momentum: The factor m of the momentum correction; by default that of the job's
            optimizer, and 0.9 where there is no job.
        masking: Whether u is zeroed where v was sent (momentum factor masking).
        clip: The local gradient's norm is clipped at this threshold divided by the square root
            of the number of ranks, tensor by tensor; 0 clips nothing.
        warmup: Steps in which the density falls from 25 % by a factor of 4, four times.
    """

    takes_momentum: ClassVar[bool] = True
    optimizers: ClassVar[tuple[str, ...] | None] = ("SGD", "RMSprop")
    density: float = 0.001
    momentum: float | None = None
    masking: bool = True
    clip: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError("momentum must be at least 0 and below 1")
        if not 0 <= self.clip < math.inf:
            raise ValueError("clip must be 0 or a positive number")
        if self.warmup < 0:
            raise ValueError("warmup must be a number of steps")

    @property
    def opening_steps(self) -> int:
        """The exchanges in which the density falls."""
        return self.warmup

    @property
    def keeps_residual(self) -> bool:
        """Unsent values stay in v."""
        return True

    def density_at(self, step: int) -> float:
        """Share of the elements that is sent in a step.

        Args:
            step: Number of exchanges before this one.

        Returns:
            25, 6.25, 1.5625 and 0.390625 % in the quarters of the warm-up, never less than the
            final density, which holds from then on.
        """
        if step >= self.warmup:
            return self.density
        stage = step * _WARMUP_STAGES // self.warmup
        return max(self.density, 0.25 ** (stage + 1))

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """A 32-bit index and a value for each element that is kept, after the warm-up."""
        return (4 + element_bytes) * kept_elements(elements, self.density)

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """All-gather: the ranks keep different elements, so payloads cannot be summed."""
        return "all_gather"
