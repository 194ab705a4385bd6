"""Deep Gradient Compression's momentum correction and selection."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from ddltrace.experiments.codecs.description import kept_elements
from ddltrace.experiments.codecs.dgc import Dgc
from ddltrace.experiments.codecs.kernels.codec import Codec, Payload, check_elements, is_finite
from ddltrace.experiments.codecs.kernels.largest import largest
from ddltrace.experiments.codecs.kernels.sparse import add_sparse, densified, sparse_payload

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


class DgcCodec(Codec):
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

    def _decode(self, payload: Payload) -> torch.Tensor:
        return densified(payload)

    def add_to(self, total: torch.Tensor, payload: Payload, factor: float = 1.0) -> None:
        """Adds the elements that were sent."""
        add_sparse(total, payload, factor)
