"""Random-k sparsification with indices from a shared seed (Stich et al., arXiv 1809.07599)."""

from __future__ import annotations

from dataclasses import dataclass

from ddltrace.experiments.codecs.description import (
    CodecDescription,
    ExchangeForm,
    check_density,
    kept_elements,
)
from ddltrace.experiments.technique import technique


@technique(
    "volume",
    "randomk",
    "the same random elements on all ranks",
    "Sparsified SGD with Memory, arXiv 1809.07599",
)
@dataclass(frozen=True)
class RandomK(CodecDescription):
    """The same random elements on all ranks, so that no index travels.

    Values are scaled by n / k, which makes the result unbiased; with ``feedback`` they are
    sent as they are.

    Attributes:
        density: Share of the elements that is sent.
    """

    density: float = 0.01

    def __post_init__(self) -> None:
        check_density(self.density)

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """A value for each element that is kept."""
        return element_bytes * kept_elements(elements, self.density)

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """All-reduce: value i means the same element on every rank."""
        return "all_reduce"
