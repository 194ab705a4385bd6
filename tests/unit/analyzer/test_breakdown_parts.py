"""The parts into which the dashboard splits a rank's steps, made of the analyzer's measures."""

import random

import pytest

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.dashboard.rank_breakdowns import PARTS, rank_breakdowns

KINDS = ("layer", "kernel", "copy", "data", "message", "phase")


def test_without_steps_it_is_over_the_whole_trace(build):
    builder = build(1)
    builder[0].add("phase", 0, 70, name="forward")
    builder[0].add("copy", 60, 100, lane="stream-0", name="Memcpy")
    (found,) = rank_breakdowns(analyze_in_full(builder.trace()))
    assert found.steps == 0
    assert found.parts_us == dict.fromkeys(PARTS, 0) | {"compute": 70, "copies": 30}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("device", [False, True])
def test_parts_sum_to_the_step_on_every_rank(build, seed, device):
    rng = random.Random(seed)
    builder = build(2)
    for rank in range(2):
        one = builder[rank]
        for step in range(3):
            one.step = step
            begin = 300 * step
            for number in range(rng.randrange(12)):
                start = begin + rng.randrange(260)
                end = start + rng.randrange(1, 40)
                kind = rng.choice(KINDS)
                if kind == "message":
                    one.message("all_reduce", start, end, seq=number, bytes=4)
                elif kind == "phase":
                    one.add(kind, start, end, name="optimizer")
                elif kind in ("kernel", "copy"):
                    if device:
                        one.add(kind, start, end, lane="stream-0", name="k")
                else:
                    one.add(kind, start, end, name="x")
            if device:
                one.add("kernel", begin, begin + 1, lane="stream-0", name="k")
            else:
                one.add("layer", begin, begin + 1, name="x")
            one.whole_step(step, begin, begin + 300)
    analyzed = analyze_in_full(builder.trace())
    steps = sum(row.steady for row in analyzed.analysis.steps)
    found = rank_breakdowns(analyzed)
    assert [row.rank for row in found] == [0, 1]
    for row in found:
        assert row.steps == steps
        assert set(row.parts_us) == set(PARTS)
        assert min(row.parts_us.values()) >= 0
        assert sum(row.parts_us.values()) == pytest.approx(300)
