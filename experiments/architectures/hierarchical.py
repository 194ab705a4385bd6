"""Two levels: inside each host, then between hosts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ddltrace.experiments.architectures.base import AnyArchitecture, Architecture
from ddltrace.experiments.architectures.double_tree import DoubleTree
from ddltrace.experiments.architectures.halving_doubling import HalvingDoubling
from ddltrace.experiments.architectures.mesh import Mesh
from ddltrace.experiments.architectures.parameter_server import ParameterServer
from ddltrace.experiments.architectures.ring import Ring
from ddltrace.experiments.architectures.transfers import Round, moved, side_by_side
from ddltrace.experiments.architectures.tree import Tree
from ddltrace.experiments.technique import technique

Level = Literal["ring", "halving_doubling", "tree", "double_tree", "mesh", "ps"]

LEVELS: Final[dict[str, Architecture]] = {
    "ring": Ring(),
    "halving_doubling": HalvingDoubling(),
    "tree": Tree(),
    "double_tree": DoubleTree(),
    "mesh": Mesh(),
    "ps": ParameterServer(sharded=True),
}


@technique(
    "architecture",
    "hierarchical",
    "reduces inside each host, all-reduces between hosts, spreads inside each host",
    "Horovod's hierarchical all-reduce, arXiv 1802.05799",
)
@dataclass(frozen=True)
class Hierarchical(AnyArchitecture):
    """Reduce inside each host, all-reduce between hosts, spread inside each host.

    Each slice is summed between hosts by those ranks, one on each host, that have the slice's
    sum inside their host. So with a ring inside, all ranks of a host send to other hosts, and a
    host with p ranks sends each element once. Hosts may have different numbers of ranks.

    Attributes:
        inner: Architecture inside a host.
        outer: Architecture between hosts.
        ranks_per_host: Consecutive ranks that count as one host; by default those that have the
            same host name.
    """

    inner: Level = "ring"
    outer: Level = "ring"
    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_host is not None and self.ranks_per_host < 1:
            raise ValueError("ranks_per_host must be at least 1")

    def plan(
        self,
        hosts: Sequence[Sequence[int]],
        elements: int,
        across: Callable[[Sequence[int], int], tuple[Round, ...]] | None = None,
    ) -> tuple[Round, ...]:
        """The rounds of a whole all-reduce.

        Args:
            hosts: The ranks on each host, at least one each.
            elements: Number of elements of the vector.
            across: Makes the rounds between one rank of each host, for a number of elements; by
                default those of `outer`.
        """
        inner = LEVELS[self.inner]
        across = across or LEVELS[self.outer].plan
        reductions = [inner.reduce(ranks, elements) for ranks in hosts]
        bounds = sorted({owner.start for r in reductions for owner in r.owners} | {elements})
        between = []
        positions = [0] * len(hosts)
        for start, stop in itertools.pairwise(bounds):
            owners = []
            for host, reduction in enumerate(reductions):
                while reduction.owners[positions[host]].stop <= start:
                    positions[host] += 1
                owners.append(reduction.owners[positions[host]].rank)
            between.append(moved(across(owners, stop - start), start))
        return (
            *side_by_side(reduction.rounds for reduction in reductions),
            *side_by_side(between),
            *side_by_side(inner.spread(ranks, elements) for ranks in hosts),
        )


def hosts_of(ranks: Sequence[int], size: int) -> list[list[int]]:
    """Ranks in groups of `size` neighbours; the last group may be smaller."""
    return [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]
