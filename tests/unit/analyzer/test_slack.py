from __future__ import annotations

import statistics

import pytest

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.events.event_columns import Columns
from ddltrace.analyzer.joined.trace_scans import scan_part
from ddltrace.analyzer.slack import RankSlack, find_margins, slack_rows


@pytest.fixture
def lagging(build):
    """Two ranks meet at 40 and end at 60: rank 1 comes there at 40, rank 0 at 10."""
    built = build(2)
    for rank, ready in ((0, 10), (1, 40)):
        one = built[rank]
        one.step = 0
        one.add("phase", 0, ready, name="forward")
        one.wait(ready, 50, one.message("all_reduce", ready, 50, seq=0, bytes=4))
        one.add("phase", 50, 60 - 3 * rank, name="optimizer")
        one.whole_step(0, 0, 60 - 3 * rank)
    return built.trace()


def _slack(trace, rank, kind, name=None):
    """The slack (us) of the events of a kind and name; None where it is not known."""
    scan = scan_part(trace.of_rank(rank), with_timeline=False)
    events = trace.events(rank)
    margins = find_margins(analyze_in_full(trace), rank)
    slack_ns, known = RankSlack(margins, scan).of(Columns(events))
    return [
        ns / 1e3 if is_known else None
        for ns, is_known, row in zip(slack_ns, known, events.to_pylist(), strict=True)
        if row["kind"] == kind and name in (None, row["name"])
    ]


def test_work_before_a_wait_may_take_as_long_as_the_last_arriver(lagging):
    assert _slack(lagging, 0, "phase", "forward") == [30]
    assert _slack(lagging, 1, "phase", "forward") == [0]


def test_what_ends_the_step_has_no_slack_and_what_ends_before_it_has(lagging):
    assert _slack(lagging, 0, "phase", "optimizer") == [0]
    assert _slack(lagging, 1, "phase", "optimizer") == [3]


def test_events_outside_of_steps_have_none(build):
    built = build(1)
    built[0].add("phase", 0, 10, name="forward")
    assert _slack(built.trace(), 0, "phase") == [None]


def test_a_message_that_nobody_waits_for_yet_may_end_when_the_wait_does(build):
    built = build(1)
    one = built[0]
    one.step = 0
    first = one.message("all_reduce", 0, 10, seq=0, bytes=4)
    one.add("phase", 0, 30, name="backward")
    second = one.message("all_reduce", 20, 40, seq=1, bytes=4)
    one.wait(30, 40, second)
    one.whole_step(0, 0, 50)
    assert first != second
    assert _slack(built.trace(), 0, "message") == [30, 0]


def test_a_part_alone_saves_no_more_than_its_lead(lagging):
    parts = {(part.rank, part.name): part for part in lagging.analyze().critical_path}
    forward = parts[1, "forward"]
    assert forward.us == pytest.approx(40)
    assert forward.alone_us == pytest.approx(30)  # then rank 0, which comes at 10, decides
    update = parts[0, "optimizer"]
    assert update.us == pytest.approx(10)
    assert update.alone_us == pytest.approx(3)
    assert parts[0, "all_reduce"].alone_us == pytest.approx(10)


def test_parts_of_one_rank_save_what_they_take(build):
    """Backward is divided by a gradient: what remains of it does not save the gradient's part."""
    built = build(1)
    weight, one = built.tensor("weight", 4), built[0]
    for step in range(4):
        begin, one.step = 100 * step, step
        one.add("phase", begin, begin + 50, name="backward", phase="backward")
        one.add("gradient", begin + 20, begin + 20, tensors=[weight])
        one.add("phase", begin + 50, begin + 60, name="optimizer", phase="optimizer")
        one.whole_step(step, begin, begin + 60)
    parts = {part.name: part for part in built.trace().analyze().critical_path}
    assert parts["weight.grad"].us == pytest.approx(20)
    assert parts["backward"].us == pytest.approx(30)
    for part in parts.values():
        assert part.alone_us == pytest.approx(part.us)


def test_the_slack_of_a_name_is_the_smallest_of_a_step_and_the_median_over_steps(build):
    """The later of two forward passes in a step has the smaller slack."""
    built = build(2)
    for step, late in enumerate((30, 20, 10, 10)):
        begin = 100 * step
        for rank, ready in ((0, begin + 10), (1, begin + 10 + late)):
            one = built[rank]
            one.step = step
            one.add("phase", begin, begin + 4, name="forward")
            one.add("phase", begin + 4, ready, name="forward")
            meet = begin + 10 + late
            one.wait(ready, meet + 5, one.message("all_reduce", ready, meet + 5, seq=step, bytes=4))
            one.whole_step(step, begin, begin + 90)
    trace = built.trace()
    analyzed = analyze_in_full(trace)
    steady = [row.step for row in analyzed.analysis.steps if row.steady]
    rows = {(row.rank, row.kind, row.name): row for row in slack_rows(trace, analyzed)}
    expected = [(30, 20, 10, 10)[step] for step in steady]
    forward = rows[0, "phase", "forward"]
    assert forward.steps == len(steady)
    assert forward.slack_us == pytest.approx(statistics.median(expected))
    assert forward.smallest_us == pytest.approx(min(expected))
    assert forward.us == pytest.approx(10)
    assert rows[1, "phase", "forward"].slack_us == 0
    assert (0, "message", "all_reduce") in rows
