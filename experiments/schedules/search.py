"""Schedules whose parameters are found by measuring the job's own steps."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np


class Search(Protocol):
    """Proposes parameters and learns how long steps took with them. It knows no clock."""

    @property
    def points(self) -> int:
        """How many parameters it measures."""
        ...

    def propose(self) -> Sequence[float] | None:
        """The parameters to measure next; None when the search is over."""
        ...

    def observe(self, values: Sequence[float], seconds: float) -> None:
        """Learns the mean duration of steps with some parameters."""
        ...

    def best(self) -> Sequence[float]:
        """The parameters with the shortest steps so far."""
        ...


class GridSearch:
    """Measures every candidate once."""

    def __init__(self, candidates: Sequence[Sequence[float]]) -> None:
        self.points = len(candidates)
        self._left = list(candidates)
        self._seen: list[tuple[float, Sequence[float]]] = []

    def propose(self) -> Sequence[float] | None:
        """The next candidate."""
        return self._left.pop(0) if self._left else None

    def observe(self, values: Sequence[float], seconds: float) -> None:
        """Keeps the measurement."""
        self._seen.append((seconds, values))

    def best(self) -> Sequence[float]:
        """The fastest candidate."""
        return min(self._seen, key=lambda seen: seen[0])[1]


class BayesianSearch:
    """Expected improvement under a Gaussian process over the logarithms of the parameters.

    Snoek et al., "Practical Bayesian Optimization of Machine Learning Algorithms", 2012.
    """

    def __init__(
        self, first: Sequence[float], grid: Sequence[Sequence[float]], points: int
    ) -> None:
        """Begins a search.

        Args:
            first: The parameters to begin with.
            grid: All parameters that may be proposed.
            points: How many to measure.
        """
        self._first = tuple(first)
        self._grid = [tuple(values) for values in grid]
        self.points = min(points, len(self._grid))
        self._seen: list[tuple[float, tuple[float, ...]]] = []
        self._random = random.Random(0)

    def propose(self) -> Sequence[float] | None:
        """The point with the largest expected improvement; the first few are spread out."""
        tried = {values for _, values in self._seen}
        left = [values for values in self._grid if values not in tried]
        if len(self._seen) >= self.points:
            return None
        if not self._seen:
            return self._first
        if len(self._seen) < 4:
            return self._random.choice(left)
        return left[int(self._expected_improvements(left).argmax())]

    def observe(self, values: Sequence[float], seconds: float) -> None:
        """Keeps the measurement."""
        self._seen.append((seconds, tuple(values)))

    def best(self) -> Sequence[float]:
        """The fastest point."""
        return min(self._seen)[1]

    def _expected_improvements(self, points: Sequence[tuple[float, ...]]) -> np.ndarray[Any, Any]:
        import numpy as np
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern

        seconds = np.array([duration for duration, _ in self._seen])
        scale = float(seconds.std()) or 1.0
        model = GaussianProcessRegressor(
            Matern(length_scale=2.0, nu=2.5), alpha=1e-2, optimizer=None
        )
        model.fit(_logarithms([v for _, v in self._seen]), (seconds - seconds.mean()) / scale)
        mean, deviation = model.predict(_logarithms(points), return_std=True)
        deviation = np.maximum(deviation, 1e-9)
        gain = (seconds.min() - seconds.mean()) / scale - mean
        z = gain / deviation
        density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        share = np.array([(1 + math.erf(value / math.sqrt(2))) / 2 for value in z])
        improvements: np.ndarray[Any, Any] = gain * share + deviation * density
        return improvements


def _logarithms(points: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[math.log2(value) for value in point] for point in points]
