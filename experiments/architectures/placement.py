"""Assigns the keys of a parameter server to its servers."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ddltrace.experiments.architectures.transfers import even_bounds

_NEAR_BEST: Final = 1.1
"""Factor of the least cost within which fewer pieces are taken."""


@dataclass(frozen=True)
class Key:
    """A slice of a tensor that one server stores.

    Attributes:
        tensor: Index of the tensor.
        start: First element in the tensor.
        stop: End, exclusive.
        server: Number of the server, from 0.
    """

    tensor: int
    start: int
    stop: int
    server: int


@dataclass(frozen=True)
class Placement:
    """Keys on servers.

    Attributes:
        keys: All keys, by tensor and start.
        loads: Elements on each server.
    """

    keys: tuple[Key, ...]
    loads: tuple[int, ...]

    @property
    def skew(self) -> float:
        """Elements of the fullest server over the mean: 1 if all are equal; 1 for no elements."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0

    def describe(self) -> str:
        """The keys and the skew in one line."""
        total = sum(self.loads) or 1
        shares = ", ".join(f"{100 * load / total:.1f} %" for load in self.loads)
        return (
            f"keys: {len(self.keys)}, servers: {len(self.loads)}, skew {self.skew:.3f} "
            f"(largest load / mean); shares of the elements: {shares}"
        )

    def to_json(self) -> dict[str, object]:
        """The number of keys, the loads in elements and the skew."""
        return {"keys": len(self.keys), "loads": list(self.loads), "skew": self.skew}


def place(sizes: Mapping[int, int], servers: int, latency: float = 0.0) -> Placement:
    """Distributes tensors over servers so that the busiest one is done early.

    Tensors are whole, or cut into even pieces of at most a server's fair share of all elements, or
    of 1/2, 1/4 or 1/8 of it. A piece costs its elements, and the latency of a message. The largest
    piece goes to the server with the least cost, and so on (longest processing time first: Graham,
    1969). Of the placements whose busiest server costs at most a tenth more than that of the best,
    the one with the fewest pieces is taken.

    Args:
        sizes: Elements of each tensor by its index.
        servers: How many servers there are.
        latency: Elements that a link carries in the time by which a message is delayed.
    """
    share = -(-sum(sizes.values()) // servers)
    largest = [max(sizes.values(), default=1), *(share // divisor for divisor in (1, 2, 4, 8))]
    found = [_place_pieces(sizes, servers, max(1, size), latency) for size in sorted(largest)[::-1]]
    least = min(cost for cost, _ in found)
    return next(placement for cost, placement in found if cost <= _NEAR_BEST * least)


def _place_pieces(
    sizes: Mapping[int, int], servers: int, largest: int, latency: float
) -> tuple[float, Placement]:
    """The cost of the busiest server, and the placement of pieces of at most the largest size."""
    pieces: list[tuple[int, int, int]] = []
    for tensor, elements in sizes.items():
        count = -(-elements // largest)
        bounds = even_bounds(elements, max(1, count))
        pieces += [(tensor, *ends) for ends in itertools.pairwise(bounds) if elements]
    loads = [0] * servers
    idlest = [(0.0, server) for server in range(servers)]
    keys = []
    for tensor, start, stop in sorted(pieces, key=lambda piece: (piece[1] - piece[2], piece)):
        cost, server = heapq.heappop(idlest)
        loads[server] += stop - start
        heapq.heappush(idlest, (cost + stop - start + latency, server))
        keys.append(Key(tensor, start, stop, server))
    ordered = tuple(sorted(keys, key=lambda key: (key.tensor, key.start)))
    return max(idlest)[0], Placement(ordered, tuple(loads))


def keys_of_slices(
    placement: Placement, slices: Sequence[tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """The keys that a message holds.

    Args:
        placement: The servers of all tensors.
        slices: (tensor, start, stop) in the order in which they lie in the message.

    Returns:
        (first element in the message, end, server) of each key or part of a key.
    """
    by_tensor: dict[int, list[Key]] = {}
    for key in placement.keys:
        by_tensor.setdefault(key.tensor, []).append(key)
    found = []
    offset = 0
    for tensor, start, stop in slices:
        for key in by_tensor.get(tensor, ()):
            first, end = max(start, key.start), min(stop, key.stop)
            if first < end:
                found.append((offset + first - start, offset + end - start, key.server))
        offset += stop - start
    return found
