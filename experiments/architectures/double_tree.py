"""Two trees: Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 2009."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddltrace.experiments.architectures.base import Architecture
from ddltrace.experiments.architectures.transfers import (
    Ownership,
    Reduction,
    Round,
    Transfer,
    side_by_side,
    without_empty,
)
from ddltrace.experiments.technique import technique


@technique(
    "architecture",
    "double_tree",
    "two binary trees, each for one half: 4 (p - 1) messages of n / 2",
    "Sanders et al., Parallel Computing 2009",
)
@dataclass(frozen=True)
class DoubleTree(Architecture):
    """Two binary trees, one for each half; an inner rank of one is a leaf of the other.

    p ranks, n elements: 4 (p - 1) messages of n / 2 elements. Halves are not cut further, so the
    trees run at the same time, but levels of one tree do not overlap.
    """

    def reduce(self, ranks: Sequence[int], elements: int) -> Reduction:
        """Each tree sums its half at its root."""
        trees = [_Tree(order, start, stop) for order, start, stop in _halves(ranks, elements)]
        return Reduction(
            without_empty(side_by_side(tree.rounds_up() for tree in trees)),
            tuple(
                Ownership(tree.start, tree.stop, tree.root)
                for tree in trees
                if tree.start < tree.stop
            ),
        )

    def spread(self, ranks: Sequence[int], elements: int) -> tuple[Round, ...]:
        """The same trees, downwards."""
        trees = [_Tree(order, start, stop) for order, start, stop in _halves(ranks, elements)]
        return without_empty(side_by_side(tree.rounds_down() for tree in trees))


def _halves(ranks: Sequence[int], elements: int) -> list[tuple[list[int], int, int]]:
    """The order of the ranks in each tree, and the slice that the tree sums.

    A tree's inner ranks stand at even places, counted from 1. The second order moves each of
    them to an odd place: mirrored if the number of ranks is even, else by one place.
    """
    first = list(ranks)
    second = first[::-1] if len(first) % 2 == 0 else first[1:] + first[:1]
    half = elements // 2
    return [(first, 0, half), (second, half, elements)]


class _Tree:
    """An in-order binary tree: at place i, the level is the number of trailing zeros of i."""

    def __init__(self, order: Sequence[int], start: int, stop: int) -> None:
        self._order, self.start, self.stop = order, start, stop
        self._root = 1 << (len(order).bit_length() - 1)

    @property
    def root(self) -> int:
        """The rank that gets the sum."""
        return self._order[self._root - 1]

    def rounds_up(self) -> tuple[Round, ...]:
        """A rank sends when it has received from its children."""
        heights: dict[int, int] = {}
        # Lower levels first: a place's children have fewer trailing zeros than the place.
        for place in sorted(range(1, len(self._order) + 1), key=lambda place: place & -place):
            heights.setdefault(place, 0)
            if place != self._root:
                parent = self._parent(place)
                heights[parent] = max(heights.get(parent, 0), heights[place] + 1)
        return tuple(
            tuple(
                self._transfer(place)
                for place, height in sorted(heights.items())
                if height == level and place != self._root
            )
            for level in range(heights[self._root])
        )

    def rounds_down(self) -> tuple[Round, ...]:
        """The same transfers, backwards."""
        return tuple(
            tuple(Transfer(t.target, t.source, t.start, t.stop, False) for t in transfers)
            for transfers in reversed(self.rounds_up())
        )

    def _parent(self, place: int) -> int:
        lowest = place & -place
        parent = place + lowest if place // lowest % 4 == 1 else place - lowest
        # The tree of the next power of two has places that this one lacks.
        return parent if parent <= len(self._order) else self._parent(parent)

    def _transfer(self, place: int) -> Transfer:
        target = self._order[self._parent(place) - 1]
        return Transfer(self._order[place - 1], target, self.start, self.stop, True)
