"""Selects the steps of a long trace that are analyzed: as many as fit in a bounded memory.

The memory of an analysis grows with events and messages. If a trace has hundreds of millions of
them, only the last steps, which contain the end of the run, or the requested steps are analyzed;
the others are skipped. The report states this.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ddltrace.analyzer.events.event_columns import NULL, Gathered, IntArray, changes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from ddltrace.analyzer.trace.align import RankClock
    from ddltrace.tracer.trace.batch_facts import BatchFacts
    from ddltrace.tracer.trace.run_info import RankInfo, RunInfo

Result = TypeVar("Result")

MOST_BYTES: Final = 4 << 30
"""Memory that what is kept of the analyzed steps may take, about, unless the user sets a limit."""

_EVENT_BYTES: Final = 70
"""What an analysis takes at its peak for an event of a deep model: measured."""
_MESSAGE_BYTES: Final = 500

_PARTS: Final = 4
"""A range takes this part of the memory that an analysis may take: the work of more ranges would be
shared by more workers, but a range costs some milliseconds for each rank, however few its events
are."""

_LATEST_NS: Final = np.iinfo(np.int64).max

RULE_ASKED: Final = "the steps that were asked for"
RULE: Final = "the last steps, as many as are analyzed at once"
RULE_ALL: Final = "all steps"


class Countable(Protocol):
    """A trace whose events can be counted."""

    run: RunInfo

    @property
    def clocks(self) -> Mapping[str, RankClock]:
        """Segment name -> how that process's times are aligned."""

    def first_step(self, info: RankInfo) -> int:
        """The number from which the steps of a process's events count in this trace."""

    def map_processes(
        self, task: Callable[[Any], Result], infos: Sequence[RankInfo], doing: str
    ) -> Iterator[Result]:
        """Executes a task for each of some processes; it is called with a `ProcessEvents`."""


class ProcessEvents(Protocol):
    """A trace of one process."""

    run: RunInfo

    def read_columns(self, info: RankInfo, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Some columns of a process's events as it recorded them."""


class InStore(Countable, Protocol):
    """A trace that may lie in a store."""

    def batch_facts(self, info: RankInfo) -> list[BatchFacts] | None:
        """The facts about each batch of a process's file in a store."""


@dataclass(frozen=True)
class StepSelection:
    """The analyzed steps of a trace that is too long to be analyzed as a whole.

    Attributes:
        steps: The steps to analyze.
        rule: How they were chosen.
        whole: All steps that the trace has.
        events: How many events the trace has.
        origin_ns: The earliest time of the whole trace, on rank 0's clock.
        numbers: The numbers of all its steps, ascending.
        sizes: What is kept of each in an analysis, bytes.
        is_too_long: Whether the trace is too long to be analyzed as a whole; else it lies in a
            store, and only the steps that were asked for are read.
        most_bytes: Memory that what is kept of the analyzed steps may take, about.
        ranges: In how many ranges the steps are analyzed; 0 if at once.
        last_steps: Segment name of each process -> the last step of which it recorded an event.
    """

    steps: range
    rule: str
    whole: range
    events: int
    origin_ns: int
    numbers: IntArray = field(repr=False)
    sizes: npt.NDArray[np.float64] = field(repr=False)
    is_too_long: bool = True
    most_bytes: int = MOST_BYTES
    ranges: int = 0
    last_steps: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def note(self) -> str | None:
        """Returns the note for the report; None if the report has what was asked for."""
        if not self.is_too_long:
            return None
        too_many = f"{self.events:,} events are too many to analyze at once"
        if self.ranges:
            return (
                f"{too_many}: steps {_ends(self.steps)} were analyzed in {self.ranges} ranges and "
                "merged; medians over messages are within 0.5 % (at once: --memory-limit SIZE)"
            )
        return (
            f"{too_many}: of steps {_ends(self.whole)}, {_ends(self.steps)} are analyzed "
            "(all: ddltrace analyze)"
        )

    @property
    def with_neighbours(self) -> range:
        """The steps and one more on both sides: ranks are not in the same step at the same time."""
        return range(self.steps.start - 1, self.steps.stop + 1)

    def requested(self, steps: range) -> StepSelection:
        """The steps that were asked for, of the same trace."""
        return replace(self, steps=steps, rule=RULE_ASKED)

    def last(self, times: int = 1) -> StepSelection:
        """The last steps that fit in the memory, one at least.

        Args:
            times: Memory of the task, as a multiple of that of an analysis.
        """
        sizes = np.cumsum(self.sizes[::-1]) * times
        fit = int(np.searchsorted(sizes, self.most_bytes, side="right"))
        return replace(
            self, steps=range(int(self.numbers[-max(fit, 1)]), self.whole.stop), rule=RULE
        )


def select_in_store(trace: InStore, steps: range) -> StepSelection | None:
    """Selects steps of a trace in a store, so that the other steps are not read.

    Args:
        steps: The steps that were asked for.

    Returns:
        The selection; None for a local trace, and if the files do not say where their steps are.
    """
    first_ns, lows, highs, events = [], [], [], 0
    for info in trace.run.ranks:
        facts = trace.batch_facts(info)
        if facts is None:
            return None
        events += sum(batch.rows for batch in facts)
        starts = [batch.first_ns for batch in facts if batch.first_ns is not None]
        if starts:
            clock = trace.clocks[info.segment]
            first_ns.append(int(clock.apply(np.array([min(starts)], np.int64))[0]))
        number = trace.first_step(info)
        lows += [number + batch.first_step for batch in facts if batch.first_step is not None]
        highs += [number + batch.last_step for batch in facts if batch.last_step is not None]
    if not lows or not first_ns:
        return None
    whole = range(min(lows), max(highs) + 1)
    return StepSelection(
        steps=steps,
        rule=RULE_ASKED,
        whole=whole,
        events=events,
        origin_ns=min(first_ns),
        numbers=np.arange(whole.start, whole.stop),
        sizes=np.zeros(len(whole)),
        is_too_long=False,
    )


def select_steps(trace: Countable, most_bytes: int | None = None) -> StepSelection | None:
    """Returns the last steps of a long trace, as many as fit in the memory.

    Args:
        most_bytes: Memory that what is kept of them may take, about; by default `MOST_BYTES`.

    Returns:
        The selection; None for a trace that is analyzed as a whole.
    """
    most_bytes = MOST_BYTES if most_bytes is None else most_bytes
    counts = [info.events for info in trace.run.ranks]
    if None not in counts and sum(filter(None, counts)) * _MESSAGE_BYTES <= most_bytes:
        return None
    parts = []
    counted = trace.map_processes(_count, trace.run.ranks, "counting events")
    for info, part in zip(trace.run.ranks, counted, strict=True):
        first_ns = int(trace.clocks[info.segment].apply(np.array([part.first_ns], np.int64))[0])
        step = np.where(part.step == NULL, NULL, part.step + trace.first_step(info))
        parts.append(part._replace(first_ns=first_ns if part.events else _LATEST_NS, step=step))
    if not parts:
        return None
    sizes = np.concatenate([part.size for part in parts])
    if int(sizes.sum()) <= most_bytes:
        return None
    numbers, place = np.unique(np.concatenate([part.step for part in parts]), return_inverse=True)
    sizes = np.bincount(place, weights=sizes)[numbers != NULL]
    numbers = numbers[numbers != NULL]
    if not len(numbers):
        return None
    events, origin = sum(part.events for part in parts), min(part.first_ns for part in parts)
    whole = range(int(numbers[0]), int(numbers[-1]) + 1)
    last_steps = {
        info.segment: int(part.step.max())
        for info, part in zip(trace.run.ranks, parts, strict=True)
        if (part.step != NULL).any()
    }
    chosen = StepSelection(
        whole,
        RULE,
        whole,
        events,
        origin,
        numbers,
        sizes,
        most_bytes=most_bytes,
        last_steps=last_steps,
    )
    return chosen.last()


def steps_in_ranges(
    selection: StepSelection | None, wanted: range | None = None
) -> StepSelection | None:
    """The steps that are analyzed in ranges.

    Args:
        selection: Of a trace that is not read as a whole, the steps that are.
        wanted: The steps that were asked for; None for all.

    Returns:
        The selection; None if the steps are analyzed at once.
    """
    if selection is None or not selection.is_too_long:
        return None
    if wanted is None:
        found = replace(selection, steps=selection.whole, rule=RULE_ALL)
    else:
        chosen = (selection.numbers >= wanted.start) & (selection.numbers < wanted.stop)
        if selection.sizes[chosen].sum() <= selection.most_bytes:
            return None
        numbers, sizes = selection.numbers[chosen], selection.sizes[chosen]
        steps = range(int(numbers[0]), int(numbers[-1]) + 1)
        found = replace(selection, steps=steps, rule=RULE_ASKED, numbers=numbers, sizes=sizes)
    return replace(found, ranges=len(divide(found)))


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


def _ends(steps: range) -> str:
    return f"{steps.start} to {steps.stop - 1}"


class _Count(NamedTuple):
    """Counts of the records of a process.

    Attributes:
        events: All its events.
        first_ns: When the earliest began, on the clock of the process.
        step: Numbers of steps, in the order of recording; one may occur many times.
        size: Bytes that are kept of the events in each.
    """

    events: int
    first_ns: int
    step: IntArray
    size: IntArray


def _count(trace: ProcessEvents) -> _Count:
    (info,) = trace.run.ranks
    events, first_ns = 0, _LATEST_NS
    step, size = Gathered(np.int64), Gathered(np.int64)
    for batch in trace.read_columns(info, ("start_ns", "kind", "step")):
        if not batch.num_rows:
            continue
        events += batch.num_rows
        first_ns = min(first_ns, int(batch["start_ns"].to_numpy().min()))
        number = batch["step"].fill_null(NULL).to_numpy().astype(np.int64)
        is_message = pc.equal(batch["kind"], "message").to_numpy(zero_copy_only=False)
        kept = np.where(is_message, _MESSAGE_BYTES, _EVENT_BYTES)
        begins = np.flatnonzero(changes(number))
        step.add(number[begins])
        size.add(np.add.reduceat(kept, begins))
    return _Count(events, first_ns, step.values(), size.values())
