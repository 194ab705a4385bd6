"""What can be saved on hosts whose processors are busy: `analyzer/measures/processor_time.py`."""

from __future__ import annotations

import numpy as np
import pytest

from ddltrace.analyzer.measures.processor_time import HostUse, host_uses
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.trace.counters import COUNTERS, CounterRows, Reading
from ddltrace.tracer.trace.stream_writer import StreamWriter
from ddltrace.tracer.trace.trace_files import counters_name, segment_name

RANKS, STEPS, STEP_US = 3, 8, 10_000


@pytest.mark.parametrize(
    ("used_us", "like_others", "most_us"),
    [
        # Four ranks of 30 ms on two processors need 60 of the 100 ms.
        ((30, 30, 30, 30), (), 40),
        ((30, 30, 30, 30), (3,), 40),
        # Rank 3 computes 20 ms longer: they are part of the fault, and end with it.
        ((30, 30, 30, 50), (), 30),
        ((30, 30, 30, 50), (3,), 40),
        # It uses less than the others, as it sleeps; their median is 30, its 20 stay.
        ((30, 25, 35, 20), (3,), 45),
        # All as the others: 40, 40, 40, 50 become 40 each.
        ((40, 40, 40, 50), (0, 1, 2, 3), 20),
        # More than the processors can do in a step, by the error of the readings.
        ((60, 60, 60, 30), (), 0),
        # A rank without others has nothing to be like.
        ((90,), (0,), 55),
    ],
)
def test_what_can_be_saved(
    used_us: tuple[int, ...], like_others: tuple[int, ...], most_us: int
) -> None:
    host = HostUse(100.0, dict(enumerate(map(float, used_us))), processors=2)
    assert host.most_saved_us(like_others) == pytest.approx(most_us)


def written(build, *, processors=None, used_us=2500, last_reading=STEPS - 1):
    """Three ranks; each step of 10 ms of rank 2 begins with 6 ms in which it fetches data.

    2 ms of compute, 1 ms of transfer and 1 ms of update make the rest, so 6 ms would be saved.

    Args:
        build: The fixture.
        processors: Of the host; None for counters without them.
        used_us: Processor time of each process in a step.
        last_reading: The last step of which there is a reading.
    """
    built = build(RANKS)
    for rank in range(RANKS):
        one = built[rank]
        for step in range(STEPS):
            begin = step * STEP_US
            one.step = step
            compute = begin + 6000 if rank == 2 else begin
            if rank == 2:
                one.add("data", begin, compute, name="batch")
            one.add("phase", compute, compute + 2000, name="forward", phase="forward")
            number = one.message("all_reduce", compute + 2000, begin + 9000, seq=step, bytes=4)
            one.wait(compute + 2000, begin + 9000, number)
            one.add("phase", begin + 9000, begin + 10_000, name="optimizer", phase="optimizer")
            one.whole_step(step, begin, begin + STEP_US)
    path = built.write()
    for rank in range(RANKS):
        segment = segment_name(rank=rank, attempt=0, pid=100 + rank)
        stream = StreamWriter(path / f"{counters_name(segment)}.arrows", COUNTERS)
        rows = [
            (1000 * (step + 1) * STEP_US, step, Reading("process_cpu_time", step * used_us / 1e6))
            for step in range(last_reading + 1)
        ]
        if rank == 0 and processors is not None:
            rows.append((1000, 0, Reading("host_processors", processors)))
        stream.write(CounterRows().batch(rows))
        stream.close()
    return open_trace(path)


def saved(trace):
    """The savings of the straggler in all places that show them."""
    analysis = trace.analyze()
    cause, straggler = analysis.root_causes[0], analysis.stragglers[0]
    assert (cause.rank, cause.activity, straggler.rank) == (2, "data", 2)
    finding = analysis.findings[0]
    assert finding.rank == 2
    places = (cause.saves_us, straggler.saves_us, analysis.savings.imbalance_us, finding.saves_us)
    return [round(us) for us in places]


def test_enough_processors_change_nothing(build):
    assert saved(written(build, processors=2)) == [6000] * 4


def test_a_step_takes_what_its_ranks_need_of_the_processors(build):
    # Three times 2.5 ms on one processor: of 10 ms, 2.5 can be saved.
    assert saved(written(build, processors=1)) == [2500] * 4


def test_without_the_number_of_processors_nothing_is_concluded(build):
    assert saved(written(build)) == [6000] * 4


def test_readings_of_few_steps_say_nothing(build):
    # From the reading at the end of step 0 to that of step 3: three of seven steady steps.
    trace = written(build, processors=1, last_reading=3)
    assert saved(trace) == [6000] * 4


def test_the_readings_of_a_host(build):
    (host,) = host_uses(written(build, processors=4, used_us=3000), np.arange(2, STEPS))
    assert host.processors == 4
    assert host.step_us == pytest.approx(STEP_US)
    assert host.used_us == pytest.approx({0: 3000, 1: 3000, 2: 3000})
