"""Deep Gradient Compression: Lin et al., ICLR 2018, arXiv 1712.01887."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from ddltrace.experiments.codecs.codec import (
    Codec,
    CodecDescription,
    ExchangeForm,
    Payload,
    check_density,
    check_elements,
    is_finite,
    kept_elements,
)
from ddltrace.experiments.codecs.sparse import SparseCodec, largest, sparse_payload
from ddltrace.experiments.lazy_torch import dist, torch
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

    def codec(self, seed: int | None) -> Codec:
        """The largest elements of accumulated momentum."""
        return DgcCodec(self)

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """A 32-bit index and a value for each element that is kept, after the warm-up."""
        return (4 + element_bytes) * kept_elements(elements, self.density)

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """All-gather: the ranks keep different elements, so payloads cannot be summed."""
        return "all_gather"


_DEFAULT_MOMENTUM: Final = 0.9


@dataclass
class Accumulated:
    """The state of one tensor.

    Attributes:
        momentum: u, flat.
        unsent: v, flat.
        step: Number of encodings so far.
    """

    momentum: torch.Tensor
    unsent: torch.Tensor
    step: int = 0


class DgcCodec(SparseCodec):
    """Sends the largest elements of the accumulated momentum.

    Both accumulations are float32 for 16-bit tensors. A tensor with an infinite or NaN element
    is sent as NaN in all chosen places, and is accumulated nowhere.

    Attributes:
        ranks: Number of ranks for the clipping; that of the default process group.
        momentum: The factor of the momentum correction.
        state: State by the key of the tensor.
    """

    def __init__(self, description: Dgc) -> None:
        super().__init__(description)
        self._parameters = description
        initialized = dist.is_available() and dist.is_initialized()
        self.ranks = dist.get_world_size() if initialized else 1
        own = description.momentum
        self.momentum = _DEFAULT_MOMENTUM if own is None else own
        self.state: dict[Hashable, Accumulated] = {}

    def take_momentum(self, momentum: float) -> None:
        """Takes the momentum of the job's optimizer, unless the spec gives another.

        Args:
            momentum: The factor.
        """
        if self._parameters.momentum is None:
            self.momentum = momentum

    @property
    def residual(self) -> torch.Tensor | None:
        """v of the tensor that has no key, flat; None before it was encoded."""
        state = self.state.get(None)
        return None if state is None else state.unsent

    def payload_bytes(
        self, shape: Sequence[int], dtype: torch.dtype, *, key: Hashable = None
    ) -> int:
        """Bytes of the next payload: more during the warm-up."""
        elements = math.prod(shape)
        if elements == 0:
            return 0
        state = self.state.get(key)
        density = self._parameters.density_at(0 if state is None else state.step)
        return (4 + dtype.itemsize) * kept_elements(elements, density)

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        state = self.state.get(key)
        if state is None:
            wide = flat.float() if flat.dtype.itemsize < 4 else flat
            state = self.state[key] = Accumulated(torch.zeros_like(wide), torch.zeros_like(wide))
        check_elements(state.unsent.numel(), flat, key)
        count = kept_elements(flat.numel(), self._parameters.density_at(state.step))
        state.step += 1
        if not is_finite(flat):
            indices = torch.arange(count, device=flat.device)
            return sparse_payload(torch.full_like(flat, torch.nan), indices, shape)
        if self._parameters.clip:
            limit = self._parameters.clip / math.sqrt(self.ranks)
            norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
            if norm > limit:
                flat = flat * (limit / norm)
        state.momentum.mul_(self.momentum).add_(flat)
        state.unsent.add_(state.momentum)
        indices = largest(state.unsent, count)
        payload = sparse_payload(state.unsent.to(flat.dtype), indices, shape)
        state.unsent[indices] = 0
        if self._parameters.masking:
            state.momentum[indices] = 0
        return payload
