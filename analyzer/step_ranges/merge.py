"""Merges the measures of ranges of steps into those of all their steps.

Counts, bytes, times and the values of single steps are sums and lists, and as exact as if all steps
had been measured at once. Medians and percentiles over messages are those of `Distribution`, within
0.5 %. For a parameter, a median is the median of those of the ranges; a 95th percentile of a kernel
or operator is their mean. Means per step are means over the ranges, weighted by their steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ddltrace.analyzer.measures.measure import Found
from ddltrace.analyzer.measures.steps import RULE, RULE_ONE, Steps, count_warmup
from ddltrace.analyzer.model import COMPUTED


class RangeMerger:
    """Merges what all measures found in ranges of steps, which are added in any order."""

    def __init__(self) -> None:
        self._ranges: list[Found] = []
        self._mergers = {each.name: each.merge() for each in COMPUTED if each.merge is not None}

    def first_steady_step(self, others: Sequence[Found]) -> int | None:
        """Number of the first step that is not warm-up.

        Args:
            others: Ranges that have not been added yet.

        Returns:
            The number; None if no step was completed.
        """
        ranges = [*self._ranges, *others]
        number = np.concatenate([each.steps.number for each in ranges])
        if len(number) < 2:
            return int(number[0]) if len(number) else None
        walls = np.concatenate([each.steps.end - each.steps.start for each in ranges])
        messages = np.concatenate([each.messages for each in ranges])
        size = np.concatenate([each.bytes for each in ranges])
        order = np.argsort(number)
        return int(number[order][count_warmup(walls[order], messages[order], size[order])])

    def add(self, found: Found) -> None:
        """Adds a range."""
        of = {"all"}
        if len(found.steps):
            of |= {"steps", "steady"} if found.steps.steady.all() else {"steps"}
            self._ranges.append(replace(found, parts={}))
        for measure in COMPUTED:
            if measure.of in of:
                self._mergers[measure.name].add(found.parts[measure.name], found.steps)

    def result(self) -> Found:
        """What was found in all ranges; there is a completed step."""
        number = np.concatenate([each.steps.number for each in self._ranges])
        order = np.argsort(number)
        return Found(
            steps=_all_steps([each.steps for each in self._ranges]),
            messages=np.concatenate([each.messages for each in self._ranges])[order],
            bytes=np.concatenate([each.bytes for each in self._ranges])[order],
            parts={name: merger.result() for name, merger in self._mergers.items()},
        )


def as_warmup(found: Found) -> Found:
    """What was found in a range whose steps are warm-up."""
    steps = replace(found.steps, steady=np.zeros(len(found.steps), dtype=bool))
    return replace(found, steps=steps)


def _all_steps(parts: Sequence[Steps]) -> Steps:
    columns = ("number", "start", "end", "last_rank", "lead", "ranks", "steady")
    values = {name: np.concatenate([getattr(part, name) for part in parts]) for name in columns}
    order = np.argsort(values["number"])
    rule = RULE if len(order) > 1 else RULE_ONE
    return Steps(**{name: column[order] for name, column in values.items()}, rule=rule)
