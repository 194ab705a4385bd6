"""Facts about each batch of an event file: its steps, and when its first event began.

They are in the custom metadata of the batch, so that a reader of some steps can leave out the other
batches of a file without reading them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.tracer.trace.stream_frames import metadata_of_message

_KEY: Final = b"ddltrace.batch"


@dataclass(frozen=True)
class BatchFacts:
    """Facts about one batch.

    Attributes:
        rows: Number of events.
        first_step: Lowest number of a step; None if no event is of a step.
        last_step: Highest number of a step.
        stepless: Number of events that are of no step.
        first_ns: The earliest start, on the process's clock; None if there are no events.
    """

    rows: int
    first_step: int | None
    last_step: int | None
    stepless: int
    first_ns: int | None

    def overlaps(self, steps: range) -> bool:
        """Whether there may be events of some steps."""
        if self.first_step is None or self.last_step is None:
            return False
        return self.first_step < steps.stop and self.last_step >= steps.start

    def is_after(self, steps: range) -> bool:
        """Whether there are events of steps, all of which are later than some steps."""
        return self.first_step is not None and self.first_step >= steps.stop


class BatchChoice(NamedTuple):
    """Which batches of a file are read.

    Attributes:
        most: At most this many, evenly spread over the file; None for all.
        steps: Only those with events of these steps, and those after the first of them that have
            events of no step; None for all.
        later_stepless: Whether `steps` includes events of no step up to the end of the file; else
            only those before the first batch whose steps are all later.
    """

    most: int | None = None
    steps: range | None = None
    later_stepless: bool = True

    @property
    def is_part(self) -> bool:
        """Whether batches may be left out."""
        return bool(self.most) or self.steps is not None

    def numbers(self, facts: Sequence[BatchFacts | None]) -> set[int]:
        """The numbers of the chosen batches of a file.

        Args:
            facts: The facts about each batch, in the order of the file; None if they are not known,
                which counts as having events of every step.
        """
        count = len(facts)
        is_few = self.most is None or count <= self.most
        numbers = set(range(count)) if is_few else evenly_spread(count, self.most or 0)
        if self.steps is None:
            return numbers
        return set(self._of_steps(facts, sorted(numbers), self.steps))

    def _of_steps(
        self, facts: Sequence[BatchFacts | None], numbers: Iterable[int], steps: range
    ) -> Iterator[int]:
        began = ended = False
        for number in numbers:
            batch = facts[number]
            if batch is None or batch.overlaps(steps):
                began = True
                yield number
                continue
            ended = ended or batch.is_after(steps)
            if began and batch.stepless > 0 and (self.later_stepless or not ended):
                yield number


def evenly_spread(count: int, most: int) -> set[int]:
    """Numbers of at most `most` of `count` batches, the first and the last among them."""
    return set(np.unique(np.linspace(0, count - 1, most).round().astype(int)).tolist())


def facts_metadata(batch: pa.RecordBatch) -> dict[bytes, bytes]:
    """The custom metadata of a batch of events."""
    steps = pc.min_max(batch["step"])
    facts = BatchFacts(
        rows=batch.num_rows,
        first_step=steps["min"].as_py(),
        last_step=steps["max"].as_py(),
        stepless=batch["step"].null_count,
        first_ns=pc.min(batch["start_ns"]).as_py(),
    )
    return {_KEY: json.dumps(asdict(facts)).encode()}


def read_facts(header: bytes | memoryview) -> BatchFacts | None:
    """Reads what `facts_metadata` returns; None if it is missing or damaged.

    Args:
        header: The header of the batch's message, with the eight bytes before it.
    """
    try:
        value = json.loads(metadata_of_message(header)[_KEY])
        facts = BatchFacts(**value)
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    counts = (facts.rows, facts.stepless)
    optional = (facts.first_step, facts.last_step, facts.first_ns)
    if any(type(count) is not int for count in counts):
        return None
    if any(type(number) is not int for number in optional if number is not None):
        return None
    return facts
