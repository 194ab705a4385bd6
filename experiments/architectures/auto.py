"""Chooses an architecture for each size of message by the measured links between ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ddltrace.experiments.architectures.hierarchical import LEVELS, Hierarchical
from ddltrace.experiments.architectures.transfers import Round

_GAP: Final = 1.5
"""Minimum ratio of costs between links of different levels of the network."""
_PROBE_BYTES: Final = 1 << 20
"""Size of the message by whose cost links are compared."""
_FLAT: Final = ("ring", "halving_doubling", "tree", "double_tree", "mesh")
_SIZES: Final = tuple(1 << exponent for exponent in range(10, 27, 2))


@dataclass(frozen=True)
class Auto:
    """Measures the links, groups ranks into hosts and racks, and takes the cheapest plan."""

    @property
    def forms(self) -> tuple[str, ...]:
        """Sums only."""
        return ("all_reduce",)


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

    @cached_property
    def hosts(self) -> list[list[int]]:
        """Ranks whose links to each other are clearly cheaper than those to the others."""
        costs = sorted(self._pair_cost(a, b) for a, b in itertools.combinations(self._ranks, 2))
        gaps = [(high / low, low) for low, high in itertools.pairwise(costs) if low > 0]
        ratio, limit = max(gaps, default=(1.0, 0.0))
        if ratio < _GAP:
            return [self._ranks]
        groups: list[list[int]] = []
        for rank in self._ranks:
            near = [g for g in groups if all(self._pair_cost(rank, r) <= limit for r in g)]
            if near:
                near[0].append(rank)
            else:
                groups.append([rank])
        return groups if len(groups) < len(self._ranks) else [self._ranks]

    @cached_property
    def order(self) -> list[int]:
        """An order of the ranks in which neighbours have cheap links: hosts one after another."""
        order: list[int] = []
        left = [rank for host in self.hosts for rank in host]
        while left:
            # Within a host and to the next one: the cheapest link from the last rank.
            host = next((h for h in self.hosts if order and order[-1] in h), None)
            near = [rank for rank in left if host is not None and rank in host] or left
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
        inner, _, outer = name.removeprefix("hierarchical:inner=").partition(",outer=")
        return Hierarchical(inner, outer).plan(self.hosts, elements)  # type: ignore[arg-type]

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
        hosts = "; ".join(",".join(map(str, host)) for host in self.hosts)
        former, parts = "", []
        for size in _SIZES:
            choice = self.choose(size // 4, 4)
            if choice.name != former:
                parts.append(f"from {size // 1024} KiB {choice.name} ({choice.cost_us:.0f} us)")
                former = choice.name
        return f"ranks by host: {hosts}; {', '.join(parts)}"

    def _candidates(self) -> list[str]:
        if len(self.hosts) == 1:
            return list(_FLAT)
        two_levels = [
            f"hierarchical:inner={inner},outer={outer}" for inner in _FLAT for outer in _FLAT
        ]
        return [*_FLAT, *two_levels]

    def _pair_cost(self, a: int, b: int) -> float:
        return max(
            self._alpha_us[i][j] + _PROBE_BYTES * self._beta[i][j] for i, j in ((a, b), (b, a))
        )
