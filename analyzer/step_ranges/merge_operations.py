"""Merges the tables of kernels and operators of ranges of steps, see `merge`."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

from ddltrace.analyzer.measures.measured import Measured
from ddltrace.analyzer.measures.operation_rows import (
    MAX_SHAPES,
    KernelRow,
    OperationOfRank,
    OperationOfShapes,
    OperatorRow,
)
from ddltrace.analyzer.step_ranges.keyed_sums import KeyedSums

_OWN: Final = ("self_us", "device_us", "self_device_us")


class _Parts:
    """Sums of the runs of operations by a second key: their rank, or the shapes of their inputs."""

    def __init__(self, second: str) -> None:
        self._second = second
        self._sums: KeyedSums[tuple[Hashable, Any]] = KeyedSums(3)

    def add(self, row: KernelRow | OperatorRow, entries: tuple[Any, ...]) -> None:
        keys = [((row.name, row.kind), getattr(entry, self._second)) for entry in entries]
        self._sums.add(
            keys,
            [
                (entry.count, entry.total_us, entry.count * getattr(entry, "p95_us", 0.0))
                for entry in entries
            ],
        )

    def by_operation(self) -> dict[Hashable, list[tuple[Any, int, float, float]]]:
        """Operation -> second key, count, total and 95th percentile of each entry."""
        found: dict[Hashable, list[tuple[Any, int, float, float]]] = {}
        for (operation, second), (count, total, p95) in self._sums.items():
            entry = (second, round(count or 0), total or 0.0, (p95 or 0.0) / (count or 1))
            found.setdefault(operation, []).append(entry)
        return found


class OperationSums:
    """Merges the tables of ranges, which are added one by one."""

    def __init__(self) -> None:
        self._sums: KeyedSums[tuple[str, str]] = KeyedSums(4 + len(_OWN))
        self._extremes: dict[tuple[str, str], tuple[float, float]] = {}
        self._ranks, self._shapes = _Parts("rank"), _Parts("shapes")

    def add(self, part: Measured) -> None:
        """Adds the operations of a range."""
        rank_steps = len(part.rank_steps["step"])
        rows: list[KernelRow | OperatorRow] = [*part.kernels, *part.operators]
        self._sums.add(
            [(row.name, row.kind) for row in rows],
            [
                (
                    *(row.count, row.total_us, row.count * row.p95_us),
                    (row.per_step_us or 0.0) * rank_steps,
                    *(getattr(row, name, None) for name in _OWN),
                )
                for row in rows
            ],
        )
        for row in rows:
            self._ranks.add(row, row.ranks)
            self._shapes.add(row, row.shapes)
        for row in part.kernels:
            key = (row.name, row.kind)
            low, high = self._extremes.get(key, (row.min_us, row.max_us))
            self._extremes[key] = (min(low, row.min_us), max(high, row.max_us))

    def kernels(self, rank_steps: int) -> tuple[KernelRow, ...]:
        """One row per kernel, communication kernel or kind of copy, the longest total first.

        Args:
            rank_steps: Steps of all ranks together.
        """
        found = [(key, values) for key, values in self._rows(rank_steps) if key in self._extremes]
        whole = sum(values["total_us"] for _, values in found) or 1.0
        rows = [
            KernelRow(
                min_us=self._extremes[key][0],
                max_us=self._extremes[key][1],
                share=values["total_us"] / whole,
                **{name: value for name, value in values.items() if name not in _OWN},
            )
            for key, values in found
        ]
        return tuple(sorted(rows, key=lambda row: -row.total_us))

    def operators(self, rank_steps: int) -> tuple[OperatorRow, ...]:
        """One row per operator or runtime call, the longest self time first.

        Args:
            rank_steps: Steps of all ranks together.
        """
        rows = [
            OperatorRow(**values)
            for key, values in self._rows(rank_steps)
            if key not in self._extremes
        ]
        return tuple(sorted(rows, key=lambda row: -row.self_us))

    def _rows(self, rank_steps: int) -> list[tuple[tuple[str, str], dict[str, Any]]]:
        ranks, shapes = self._ranks.by_operation(), self._shapes.by_operation()
        found = []
        for key, (count, total, p95, in_steps, *own) in self._sums.items():
            runs, time = round(count or 0), total or 0.0
            of_shapes = sorted(shapes.get(key, ()), key=lambda entry: -entry[2])
            values = {
                "name": key[0],
                "kind": key[1],
                "count": runs,
                "total_us": time,
                "mean_us": time / runs,
                "p95_us": (p95 or 0.0) / runs,
                "per_step_us": (in_steps or 0.0) / rank_steps if rank_steps else None,
                "ranks": tuple(
                    OperationOfRank(rank, times, sum_us, sum_us / times, p95_us)
                    for rank, times, sum_us, p95_us in sorted(ranks.get(key, ()))
                ),
                "shapes": tuple(
                    OperationOfShapes(shape, times, sum_us, sum_us / times)
                    for shape, times, sum_us, _ in of_shapes[:MAX_SHAPES]
                ),
            }
            found.append((key, values | dict(zip(_OWN, own, strict=True))))
        return found
