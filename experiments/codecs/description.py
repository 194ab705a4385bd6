"""The pure description of a codec: parameters, wire size, suitable exchange.

This module uses no torch, processes or clocks. The engine encodes with the kernel that
`ddltrace.experiments.codecs.kernels.make_codec` chooses; a replay uses the sizes of the same
objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

ExchangeForm = Literal["all_reduce", "all_gather", "all_to_all"]
"""How encoded tensors are averaged over p ranks. ``all_reduce``: payloads are summed as they
are. ``all_gather``: every rank gets every payload, (p - 1) payloads sent by each rank.
``all_to_all``: every rank averages one shard of the tensor, encodes the average again, and an
all-gather distributes it; 2 (p - 1) / p payloads sent by each rank, two encodings."""


class CodecDescription(ABC):
    """A pure description of one way to shorten a tensor for the wire.

    Attributes:
        whole_tensors: Whether it encodes whole tensors only, not slices of them.
        takes_momentum: Whether it accumulates the momentum of the job's optimizer.
        gives_votes: Whether its payloads are votes, which have no scale.
        optimizers: Optimizers of ``torch.optim`` with which it works; None for all.
    """

    whole_tensors: ClassVar[bool] = False
    takes_momentum: ClassVar[bool] = False
    gives_votes: ClassVar[bool] = False
    optimizers: ClassVar[tuple[str, ...] | None] = None

    @property
    def opening_steps(self) -> int:
        """Exchanges at the start in which it does something else than from then on."""
        return 0

    @abstractmethod
    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """Size of one encoded tensor.

        Args:
            elements: Number of elements of the tensor.
            element_bytes: Size of one element before encoding, in bytes.

        Returns:
            Bytes of the payload on the wire.
        """

    @abstractmethod
    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """The exchange that suits the codec on this many ranks.

        Args:
            elements: Number of elements of the tensor.
            world_size: Number of ranks.

        Returns:
            The form that the codec's own formula chooses.
        """

    @property
    def alignment(self) -> int:
        """Elements that are encoded together: shards of a tensor start at multiples."""
        return 8

    @property
    def keeps_residual(self) -> bool:
        """Whether the codec adds unsent values to the next step's gradient."""
        return False

    @property
    def second_pass(self) -> CodecDescription:
        """The codec of averages in the second pass of ``all_to_all``; by default this codec."""
        return self

    def sent_bytes(self, elements: int, world_size: int, element_bytes: int = 4) -> int:
        """Bytes that one rank sends to average one tensor, without framing.

        Args:
            elements: Number of elements of the tensor.
            world_size: Number of ranks.
            element_bytes: Size of one element before encoding, in bytes.

        Returns:
            The bytes of the chosen exchange: a ring for ``all_reduce``, direct messages for
            the others.
        """
        if world_size < 2:
            return 0
        form = self.exchange(elements, world_size)
        if form == "all_gather":
            return (world_size - 1) * self.wire_bytes(elements, element_bytes)
        if form == "all_to_all":
            shard = shard_elements(elements, world_size, self.alignment)
            return 2 * (world_size - 1) * self.wire_bytes(shard, element_bytes)
        return 2 * (world_size - 1) * self.wire_bytes(elements, element_bytes) // world_size


def shard_elements(elements: int, world_size: int, alignment: int) -> int:
    """Elements of the shard that one rank averages; the last shard is padded with zeros.

    Args:
        elements: Number of elements of the tensor.
        world_size: Number of ranks.
        alignment: Shards are multiples of this many elements.
    """
    blocks = -(-elements // (world_size * alignment))
    return blocks * alignment


def packed_bytes(elements: int, bits: int) -> int:
    """Bytes of `elements` codes of `bits` bits each, packed."""
    return -(-elements * bits // 8)


def kept_elements(elements: int, density: float) -> int:
    """Number of elements that a sparse codec keeps: at least one of a tensor that has any."""
    return min(elements, max(1, round(density * elements)))


def check_density(density: float) -> None:
    """Raises ValueError unless the density is a share of the elements."""
    if not 0 < density <= 1:
        raise ValueError("density must be above 0 and at most 1")
