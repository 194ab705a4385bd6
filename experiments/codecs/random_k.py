"""Random-k sparsification with indices from a shared seed (Stich et al., arXiv 1809.07599)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ddltrace.experiments.codecs.codec import (
    Codec,
    CodecDescription,
    ExchangeForm,
    Payload,
    as_bytes,
    check_density,
    is_finite,
    kept_elements,
    view_as,
)
from ddltrace.experiments.lazy_torch import torch
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

    def codec(self, seed: int | None) -> Codec:
        """All ranks select the same elements: they have the same seed."""
        return RandomKCodec(self, seed=seed or 0)

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """A value for each element that is kept."""
        return element_bytes * kept_elements(elements, self.density)

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """All-reduce: value i means the same element on every rank."""
        return "all_reduce"


class RandomKCodec(Codec):
    """Sends the values at random indices, which all ranks draw alike.

    Every element is chosen with probability k / n: the tensor is cut into k strata, one element
    of each is drawn, and the strata start at a random element. The result is all NaN on the
    chosen indices if any element, chosen or not, is infinite or NaN.
    """

    def __init__(self, description: RandomK, *, seed: int, scaled: bool = True) -> None:
        super().__init__(description)
        self._density = description.density
        self._seed = seed
        self._scaled = scaled
        self._draws: dict[Hashable, int] = {}

    def with_feedback(self) -> Codec:
        """Values are not scaled, because the residual compensates for unsent elements."""
        assert isinstance(self.description, RandomK)
        return RandomKCodec(self.description, seed=self._seed, scaled=False)

    def indices(self, elements: int, draw: int, device: torch.device) -> torch.Tensor:
        """The chosen elements of one draw.

        Args:
            elements: Number of elements of the tensor.
            draw: Number of the draw; equal numbers give equal indices.
            device: Device of the result.

        Returns:
            Distinct indices, int64.
        """
        count = kept_elements(elements, self._density)
        generator = torch.Generator().manual_seed((self._seed << 32) + draw)
        borders = torch.arange(count + 1) * elements // count
        sizes = borders[1:] - borders[:-1]
        inside = (torch.rand(count, generator=generator, dtype=torch.float64) * sizes).long()
        first = int(torch.randint(elements, (), generator=generator))
        return ((borders[:-1] + inside + first) % elements).to(device)

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        draw = self._draws.get(key, 0)
        self._draws[key] = draw + 1
        values = flat[self.indices(flat.numel(), draw, flat.device)]
        if self._scaled:
            values = values * (flat.numel() / values.numel())
        if not is_finite(flat):
            values = torch.full_like(values, torch.nan)
        return Payload(as_bytes(values), shape, flat.dtype, draw)

    def _decode(self, payload: Payload) -> torch.Tensor:
        values = view_as(payload.data, payload.dtype)
        result = torch.zeros(payload.elements, dtype=payload.dtype, device=values.device)
        result[self.indices(payload.elements, payload.draw, values.device)] = values
        return result
