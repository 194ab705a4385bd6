"""What DDP launches in every step, recorded without Python, is what Python would have recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal
from support.jobs import Done, at_once, on_ranks, run, traced
from support.sampling import sampled
from support.traces import SAME_OF_MESSAGES, last_of_messages

from ddltrace.tracer.native import build as native_build
from ddltrace.tracer.trace.event_reader import read_events
from ddltrace.tracer.trace.run_reader import read_run

pytestmark = pytest.mark.skipif(
    native_build.compiler() is None, reason="no C++ compiler on this machine"
)


@dataclass
class Recorded:
    """A job of `known.py` and its trace."""

    done: Done
    trace: Path

    def events(self, rank: int) -> pd.DataFrame:
        info = next(info for info in read_run(self.trace).ranks if info.rank == rank)
        assert info.errors == []
        table, lost = read_events(self.trace, info.segment)
        assert lost == 0
        return table.to_pandas()

    def messages(self, rank: int) -> pd.DataFrame:
        """In the order of their launch."""
        frame = last_of_messages(self.events(rank))
        return frame.sort_values(["group", "seq"]).reset_index(drop=True)

    def without_python(self) -> list[int]:
        """Of each rank: how many messages C++ has recorded."""
        lines = [x for x in self.done.stdout.splitlines() if x.startswith("without Python")]
        return [int(line.split()[-1]) for line in lines]


def record(
    tmp_path: Path, way: str, steps: int, *options: str, native: bool = True, fails: bool = False
) -> Recorded:
    """With what is compiled or without."""
    trace = tmp_path / f"trace-{native}"
    command = on_ranks("known.py", way, str(steps))
    done = run(traced(trace, command, *options), cwd=tmp_path, DDLTRACE_NATIVE=str(int(native)))
    assert (done.status != 0) == fails, done.stderr
    return Recorded(done, trace)


@pytest.mark.long
@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "steps"), sampled([("alone", 40), ("beside", 40), ("full", 1800)], 2)
)
def test_the_same_is_recorded_as_by_python(tmp_path: Path, way: str, steps: int) -> None:
    native, plain = at_once(
        lambda: record(tmp_path, way, steps),
        lambda: record(tmp_path, way, steps, native=False),
    )
    assert plain.without_python() == []
    # Most messages of C++, from the moment PyTorch has reported the buckets; or all that fit.
    assert min(native.without_python()) > (4096 if way == "full" else steps)
    assert native.done.losses() == plain.done.losses()
    # Recording never pauses unless --measure-cost asks for it.
    assert set(range(steps)) <= set(native.messages(0).step.dropna())
    for rank in (0, 1):
        found, expected = native.messages(rank), plain.messages(rank)
        assert_frame_equal(found[SAME_OF_MESSAGES], expected[SAME_OF_MESSAGES])
        assert (found.start_ns >= found.enqueue_ns).all()
        assert (found.end_ns > found.start_ns).all()
        assert set(found[found.name.str.startswith("bucket")].seam) == {"dispatcher"}
        # Of the memory of a bucket, but the job's own: it was waited for by the job.
        own = found[(found.op == "all_reduce") & ~found.name.str.startswith("bucket")]
        events = native.events(rank)
        assert set(own.id) <= set(events[events.kind == "wait"].parent)


def test_what_is_not_to_be_recorded_is_counted(tmp_path: Path) -> None:
    """Where a step is left out to measure the cost, numbering continues."""
    recorded = record(tmp_path, "alone", 260, "--measure-cost", "40")
    assert min(recorded.without_python()) > 3 * 200
    first, second = (recorded.messages(rank)[SAME_OF_MESSAGES] for rank in (0, 1))
    assert_frame_equal(first, second)
    steps = first[first.step < 260].groupby("step").size()
    assert len(steps) == 240
    assert steps.iloc[20:].nunique() == 1  # what one step sends does not change
    # As many numbers are missing as the steps had that were left out.
    assert first.seq.max() + 1 - len(first) == 20 * steps.iloc[-1]


@pytest.mark.long
def test_a_rank_that_dies_leaves_what_it_was_in(tmp_path: Path) -> None:
    recorded = record(tmp_path, "stops", 60, fails=True)
    found = recorded.messages(0)
    last = found[found.status == "open"]
    assert list(last.name) == ["bucket 0"]
    assert list(last.step) == [59]
    assert list(last.phase) == ["backward"]
    assert list(last.seq) == [found.seq.max()]
    assert recorded.messages(1).seq.max() == found.seq.max() - 1
