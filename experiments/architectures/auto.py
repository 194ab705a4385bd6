"""Chooses an architecture for each size of message by the measured links between ranks."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ddltrace.experiments.architectures.base import AnyArchitecture
from ddltrace.experiments.architectures.hierarchical import LEVELS, Hierarchical
from ddltrace.experiments.architectures.transfers import Round
from ddltrace.experiments.technique import technique

_GAP: Final = 1.5
"""Minimum ratio of costs between links of different levels of the network."""
_PROBE_BYTES: Final = 1 << 20
"""Size of the message by whose cost links are compared."""
_FLAT: Final = ("ring", "halving_doubling", "tree", "double_tree", "mesh")
_OF_THREE: Final = ("ring", "tree", "mesh")
"""Architectures of which plans of three levels are made: all would be too many to compare."""
_LEVELS: Final = 2
"""Groupings of ranks at most: hosts and racks."""
_SIZES: Final = tuple(1 << exponent for exponent in range(10, 27, 2))


@technique(
    "architecture",
    "auto",
    "measures the links, groups ranks into hosts, and takes the cheapest plan for each size",
    "alpha-beta model: Hockney, Parallel Computing 1994",
)
@dataclass(frozen=True)
class Auto(AnyArchitecture):
    """Measures the links, groups ranks into hosts and racks, and takes the cheapest plan."""


@dataclass(frozen=True)
class Choice:
    """The choice for one size.

    Attributes:
        name: The architecture, as in a strategy's spec.
        cost_us: Cost of its plan over the measured links, in microseconds.
    """

    name: str
    cost_us: float


class Links:
    """Measured links between ranks, and the hosts and plans derived from them."""

    def __init__(
        self, alpha_us: Sequence[Sequence[float]], beta: Sequence[Sequence[float]]
    ) -> None:
        """Stores the measurements.

        Args:
            alpha_us: Latency from rank i to rank j in microseconds.
            beta: Microseconds for each byte from rank i to rank j.
        """
        self._alpha_us, self._beta = alpha_us, beta
        self._ranks = list(range(len(alpha_us)))

    @property
    def latency_bytes(self) -> float:
        """Bytes that a link carries in the time of its latency: the median of all; 0 without."""
        ratios = [
            self._alpha_us[a][b] / self._beta[a][b]
            for a, b in itertools.combinations(self._ranks, 2)
        ]
        return statistics.median(ratios) if ratios else 0.0

    @cached_property
    def _levels(self) -> list[list[list[int]]]:
        """Groupings of the ranks, from the smallest groups on: those of hosts, then of racks.

        Costs of links of one level are alike; between levels there is a gap. The two largest gaps
        count.
        """
        costs = sorted(self._pair_cost(a, b) for a, b in itertools.combinations(self._ranks, 2))
        gaps = [(high / low, low) for low, high in itertools.pairwise(costs) if low > 0]
        largest = sorted(gap for gap in gaps if gap[0] >= _GAP)[-_LEVELS:]
        levels: list[list[list[int]]] = []
        for _, limit in sorted(largest, key=lambda gap: gap[1]):
            groups = self._groups(limit)
            nested = not levels or all(
                any(set(small) <= set(group) for group in groups) for small in levels[-1]
            )
            if 1 < len(groups) < len(self._ranks) and nested and groups not in levels:
                levels.append(groups)
        return levels

    def _groups(self, limit: float) -> list[list[int]]:
        """Ranks whose links to each other all cost at most as much as the limit."""
        groups: list[list[int]] = []
        for rank in self._ranks:
            near = [g for g in groups if all(self._pair_cost(rank, r) <= limit for r in g)]
            if near:
                near[0].append(rank)
            else:
                groups.append([rank])
        return groups

    @property
    def hosts(self) -> list[list[int]]:
        """Ranks whose links to each other are clearly cheaper than those to the others."""
        return self._levels[0] if self._levels else [self._ranks]

    @property
    def racks(self) -> list[list[list[int]]]:
        """Hosts whose links to each other are clearly cheaper than those to other hosts."""
        if len(self._levels) < _LEVELS:
            return [self.hosts]
        return [[host for host in self.hosts if set(host) <= set(rack)] for rack in self._levels[1]]

    @cached_property
    def order(self) -> list[int]:
        """An order of the ranks in which neighbours have cheap links: hosts one after another."""
        order: list[int] = []
        left = [rank for host in self.hosts for rank in host]
        groupings = self._levels or [[self._ranks]]
        while left:
            # Within a host, then within a rack: the cheapest link from the last rank.
            near: list[int] = []
            for groups in groupings:
                group = next((g for g in groups if order and order[-1] in g), [])
                near = near or [rank for rank in left if rank in group]
            near = near or left
            nearest = min(near, key=lambda r: (self._pair_cost(order[-1], r) if order else 0, r))
            order.append(nearest)
            left.remove(nearest)
        return order

    def plan(self, name: str, elements: int) -> tuple[Round, ...]:
        """The rounds of an architecture on these ranks.

        Args:
            name: As in `Choice`.
            elements: Number of elements of the vector.
        """
        if name in LEVELS:
            return LEVELS[name].plan(self.order, elements)
        levels: Any = [part.partition("=")[2] for part in name.partition(":")[2].split(",")]
        if len(levels) == _LEVELS:
            return Hierarchical(*levels).plan(self.hosts, elements)
        inner, middle, outer = levels
        between = Hierarchical(middle, outer)
        places = iter(range(len(self.hosts)))
        in_order = [host for rack in self.racks for host in rack]
        racks = [[next(places) for _ in rack] for rack in self.racks]

        def across(owners: Sequence[int], count: int) -> tuple[Round, ...]:
            return between.plan([[owners[place] for place in rack] for rack in racks], count)

        return Hierarchical(inner).plan(in_order, elements, across)

    def choose(self, elements: int, element_bytes: int) -> Choice:
        """The architecture whose plan costs least.

        Args:
            elements: Number of elements of the vector.
            element_bytes: Size of one element.
        """
        choices = [
            Choice(name, self.cost_us(self.plan(name, elements), element_bytes))
            for name in self._candidates()
        ]
        return min(choices, key=lambda choice: choice.cost_us)

    def cost_us(self, rounds: Iterable[Round], element_bytes: int) -> float:
        """Cost of a plan: the sum over rounds of the longest time that a rank sends or receives.

        Args:
            rounds: The plan.
            element_bytes: Size of one element.
        """
        total = 0.0
        for transfers in rounds:
            busy: dict[tuple[str, int], float] = {}
            for t in transfers:
                cost = self._alpha_us[t.source][t.target]
                cost += t.elements * element_bytes * self._beta[t.source][t.target]
                for end in (("out", t.source), ("in", t.target)):
                    busy[end] = busy.get(end, 0.0) + cost
            total += max(busy.values(), default=0.0)
        return total

    def describe(self) -> str:
        """Describes the groups and the choice for each range of sizes, in one line."""
        racks = " | ".join(
            "; ".join(",".join(map(str, host)) for host in rack) for rack in self.racks
        )
        parts = [f"from {s // 1024} KiB {c.name} ({c.cost_us:.0f} us)" for s, c in self.choices]
        by = "ranks by host" + (" and rack (|)" if len(self.racks) > 1 else "")
        return f"{by}: {racks}; {', '.join(parts)}"

    @cached_property
    def choices(self) -> list[tuple[int, Choice]]:
        """From which number of bytes on what is chosen."""
        found: list[tuple[int, Choice]] = []
        for size in _SIZES:
            choice = self.choose(size // 4, 4)
            if not found or choice.name != found[-1][1].name:
                found.append((size, choice))
        return found

    def to_json(self) -> dict[str, Any]:
        """Groups, measured links and choices, as JSON values."""
        return {
            "hosts": self.hosts,
            "racks": self.racks,
            "latency_us": [list(row) for row in self._alpha_us],
            "us_per_byte": [list(row) for row in self._beta],
            "choices": [
                {"from_bytes": size, "name": choice.name, "cost_us": choice.cost_us}
                for size, choice in self.choices
            ],
        }

    def _candidates(self) -> list[str]:
        if len(self.hosts) == 1:
            return list(_FLAT)
        two_levels = [
            f"hierarchical:inner={inner},outer={outer}" for inner in _FLAT for outer in _FLAT
        ]
        if len(self.racks) == 1:
            return [*_FLAT, *two_levels]
        three_levels = [
            f"hierarchical:inner={inner},middle={middle},outer={outer}"
            for inner, middle, outer in itertools.product(_OF_THREE, repeat=3)
        ]
        return [*_FLAT, *two_levels, *three_levels]

    def _pair_cost(self, a: int, b: int) -> float:
        return max(
            self._alpha_us[i][j] + _PROBE_BYTES * self._beta[i][j] for i, j in ((a, b), (b, a))
        )
