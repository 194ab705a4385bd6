"""Tensors of equal length in one message, which a codec processes together.

The parts of a message, or their shards, are the rows of a matrix for each length: a codec's
cost for a small tensor is the number of its calls, which grows neither with the number of ranks
nor with the number of parameters of the same length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ddltrace.experiments.codecs.codec import Codec


@dataclass(frozen=True)
class Piece:
    """A tensor in the elements of a message.

    Attributes:
        key: Key of the tensor's state.
        start: Index of its first element in the message.
        stop: Exclusive.
        rank: The rank that averages it, if it is a rank's shard.
    """

    key: Hashable
    start: int
    stop: int
    rank: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Equals:
    """Tensors of equal length.

    Attributes:
        elements: Number of elements of each.
        members: Their indices in the list of pieces, in the order of the message's elements.
        keys: The keys of their state.
        ranges: Start and stop (exclusive) of the stretches of the message that they fill.
    """

    elements: int
    members: tuple[int, ...]
    keys: tuple[Hashable, ...]
    ranges: tuple[tuple[int, int], ...]

    def rows(self, payload: torch.Tensor) -> torch.Tensor:
        """The tensors as a matrix.

        Args:
            payload: The elements of the message.

        Returns:
            Tensors x elements; a view if they are neighbours.
        """
        parts = [payload[start:stop] for start, stop in self.ranges]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(-1, self.elements)


def equals_of(pieces: Sequence[Piece], chosen: Iterable[int] | None = None) -> tuple[Equals, ...]:
    """Groups pieces by their length.

    Args:
        pieces: Pieces of one message, each with at least one element.
        chosen: Indices of the pieces to group; by default all.

    Returns:
        One group for each length.
    """
    members: defaultdict[int, list[int]] = defaultdict(list)
    indices = range(len(pieces)) if chosen is None else chosen
    for index in sorted(indices, key=lambda index: pieces[index].start):
        members[pieces[index].elements].append(index)
    return tuple(
        Equals(
            elements,
            tuple(of_length),
            tuple(pieces[index].key for index in of_length),
            _joined([(pieces[index].start, pieces[index].stop) for index in of_length]),
        )
        for elements, of_length in members.items()
    )


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def fill(result: torch.Tensor, groups: Sequence[Equals], rows: Sequence[torch.Tensor]) -> None:
    """Puts tensors back to their places.

    Args:
        result: The elements of the message, which are filled.
        groups: Groups that cover all of them.
        rows: The tensors of each group, of the same type as `result`.
    """
    parts: list[tuple[int, torch.Tensor]] = []
    for group, matrix in zip(groups, rows, strict=True):
        lengths = [stop - start for start, stop in group.ranges]
        starts = [start for start, _ in group.ranges]
        parts += zip(starts, torch.split(matrix.reshape(-1), lengths), strict=True)
    if parts:
        torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])], out=result)


def in_order(
    groups: Sequence[Equals], encoded: Sequence[Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """The bytes of each piece, from the bytes of each member of each group."""
    found = {
        index: data
        for group, of_group in zip(groups, encoded, strict=True)
        for index, data in zip(group.members, of_group, strict=True)
    }
    return [found[index] for index in sorted(found)]


def joined_bytes(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Payloads behind each other.

    Args:
        parts: The bytes of each.
        like: A tensor on the device, used if there is no payload.
    """
    if parts:
        return torch.cat(list(parts))
    return torch.empty(0, dtype=torch.uint8, device=like.device)


def sum_of_ranks(
    codec: Codec,
    received: torch.Tensor,
    places: Sequence[tuple[int, int]],
    elements: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Adds up what all ranks sent for some tensors of equal length.

    Args:
        codec: Decodes.
        received: Ranks x bytes.
        places: First byte and last (exclusive) of each tensor's payload, equal on all ranks.
        elements: Number of elements of each tensor.
        dtype: Type of their elements.

    Returns:
        Tensors x elements, from `Codec.sum_rows`.
    """
    parts = [received[:, start:stop] for start, stop in places]
    if len({part.shape for part in parts}) > 1:  # during DGC's warm-up
        return torch.cat([codec.sum_rows(part.unsqueeze(0), elements, dtype) for part in parts])
    together = parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
    return codec.sum_rows(together, elements, dtype)
