"""Top-k sparsification: Aji & Heafield, "Sparse Communication for Distributed Gradient
Descent" (Gradient Dropping), EMNLP 2017."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddltrace.experiments.codecs.description import (
    CodecDescription,
    ExchangeForm,
    check_density,
    kept_elements,
)

if TYPE_CHECKING:
    from ddltrace.experiments.codecs.kernels.codec import Codec


@dataclass(frozen=True)
class TopK(CodecDescription):
    """The elements of largest magnitude as pairs of index and value.

    The paper's method is ``topk+feedback``, which keeps what was not sent.

    Attributes:
        density: Share of the elements that is sent.
    """

    density: float = 0.01

    def __post_init__(self) -> None:
        check_density(self.density)

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """A 32-bit index and a value for each element that is kept."""
        return (4 + element_bytes) * kept_elements(elements, self.density)

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """All-gather: the ranks keep different elements, so payloads cannot be summed."""
        return "all_gather"

    def make(self, *, seed: int | None = None) -> Codec:
        """Exact selection."""
        from ddltrace.experiments.codecs.kernels.top_k import TopKCodec

        return TopKCodec(self)
