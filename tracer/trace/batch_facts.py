"""Facts about each batch of an event file: its steps, and when its first event began.

They are in the custom metadata of the batch, so that a reader of some steps can leave out the other
batches of a file in a store without reading them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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


def read_facts(metadata: Mapping[bytes, bytes]) -> BatchFacts | None:
    """Reads what `facts_metadata` returns; None if it is missing or damaged."""
    try:
        value = json.loads(metadata[_KEY])
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
