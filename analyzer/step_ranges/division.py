"""Divides the steps of a long trace into ranges that are analyzed one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.analyzer.trace.step_selection import StepSelection

_PARTS: Final = 4
"""A range takes this part of the memory that an analysis may take: the work of more ranges would be
shared by more workers, but a range costs some milliseconds for each rank, however few its events
are."""


def steps_in_ranges(trace: Trace, wanted: range | None = None) -> StepSelection | None:
    """The steps that are analyzed in ranges; None if they are analyzed at once.

    Args:
        trace: The trace.
        wanted: The steps that were asked for; None for all.
    """
    long = trace.step_selection
    selection = None if long is None else long.in_ranges(wanted)
    return None if selection is None else replace(selection, ranges=len(divide(selection)))


def divide(selection: StepSelection) -> list[range]:
    """Divides all steps of a trace.

    The division depends on the trace and on the memory limit only, not on the engine: so the
    results do not depend on it either. The first step is a range of its own: it is warm-up, often
    the only one, and the others are not known before all steps were measured.

    Args:
        selection: Has the steps of the trace and what is kept of each.

    Returns:
        Ranges of at least one step, ascending, that contain all steps.
    """
    limit = selection.most_bytes / _PARTS
    first, kept = [0], 0.0
    for place, size in enumerate(selection.sizes.tolist()):
        if place and (place == 1 or kept + size > limit):
            first.append(place)
            kept = 0.0
        kept += size
    numbers = np.append(selection.numbers, selection.steps.stop)
    starts = [int(numbers[place]) for place in [*first, len(selection.numbers)]]
    return [range(start, stop) for start, stop in pairwise(starts)]
