from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sampling import all_cases

from ddltrace.analyzer.analysis import analyze_in_full


def _pieces(trace, step=0):
    return [
        (piece.rank, piece.category, piece.name, piece.start_ns // 1000, piece.end_ns // 1000)
        for piece in analyze_in_full(trace).paths[step]
    ]


def test_a_wait_leads_to_the_last_arriver(build):
    built = build(2)
    for rank, arrival, end in ((0, 10, 34), (1, 25, 32)):
        one = built[rank]
        one.step = 0
        one.add("phase", 0, arrival, name="forward")
        message = one.message("all_reduce", arrival, 30, seq=0, bytes=4)
        one.wait(arrival, 30, message)
        one.add("phase", 30, end, name="optimizer")
        one.whole_step(0, 0, end)
    assert _pieces(built.trace()) == [
        (1, "compute", "forward", 0, 25),
        (0, "transfer", "all_reduce", 25, 30),
        (0, "update", "optimizer", 30, 34),
    ]


def test_the_thread_that_trains_is_followed(build):
    """Ray trains in another thread than the main one, which may do something, too."""
    built = build(1)
    one = built[0]
    one.add("layer", 0, 1, name="Model")
    for step in range(2):
        one.step, at = step, 100 * step + 5
        one.add("phase", at, at + 60, name="forward", lane="thread-1")
        message = one.message("all_reduce", at + 60, at + 90, seq=step, bytes=4)
        one.wait(at + 60, at + 90, message, lane="thread-1")
        one.add("layer", at + 50, at + 70, name="Model")
        one.whole_step(step, at, at + 90, lane="thread-1")
    assert _pieces(built.trace())[-2:] == [
        (0, "compute", "forward", 5, 65),
        (0, "transfer", "all_reduce", 65, 95),
    ]


@pytest.mark.parametrize("names_message", [True, False])
def test_when_all_had_come_the_whole_wait_is_transfer(build, names_message):
    built = build(2)
    for rank, arrival in ((0, 5), (1, 8)):
        one = built[rank]
        one.step = 0
        one.add("phase", 0, 20, name="backward")
        message = one.message("all_reduce", arrival, 30, seq=0, bytes=4)
        one.wait(20, 30, message if names_message else None)
        one.whole_step(0, 0, 30 + rank)
    assert _pieces(built.trace()) == [
        (1, "compute", "backward", 0, 20),
        (1, "transfer", "all_reduce", 20, 30),
        (1, "host", None, 30, 31),
    ]


@pytest.mark.parametrize("names_message", [True, False])
def test_a_message_that_stands_in_a_queue_waits_for_those_before_it(build, names_message):
    """Small buckets, enqueued while the first is under way, and waited for all together."""
    built = build(2)
    for rank, delay in ((0, 0), (1, 3)):
        one = built[rank]
        one.step = 0
        one.add("phase", 0, 75, name="backward")
        for seq in range(3):
            enqueued = 1000 * (10 + delay + seq)
            start, end = 10 + delay + 20 * seq, 30 + 20 * seq
            message = one.message(
                "all_reduce", start, end, seq=seq, bytes=4, tensors=[seq], enqueue_ns=enqueued
            )
        named = {} if names_message else {"name": "backward"}
        one.wait(12 + delay, 70, message if names_message else None, **named)
        one.whole_step(0, 0, 75)
    pieces = _pieces(built.trace())
    # Rank 1's first message is the last to come; from then on they are sent one by one.
    assert pieces == [
        (1, "compute", "backward", 0, 13),
        (1, "transfer", "all_reduce tensor 0", 13, 33),
        (1, "transfer", "all_reduce tensor 1", 33, 53),
        (1, "transfer", "all_reduce tensor 2", 53, 70),
        (1, "compute", "backward", 70, 75),
    ]


def test_a_wait_in_whose_middle_the_path_comes_is_not_taken_for_compute(build):
    """The trace does not show why rank 1, which was blocked, began its message only then."""
    built = build(2)
    for rank, start in ((0, 20), (1, 40)):
        one = built[rank]
        one.step = 0
        one.add("phase", 0, 70, name="backward")
        message = one.message("all_reduce", start, 60, seq=0, bytes=4, enqueue_ns=10_000)
        one.wait(12, 60, message)
        one.whole_step(0, 0, 70)
    assert _pieces(built.trace()) == [
        (1, "compute", "backward", 0, 12),
        (1, "wait", None, 12, 40),
        (1, "transfer", "all_reduce", 40, 60),
        (1, "compute", "backward", 60, 70),
    ]


def test_a_pipeline_is_followed_from_receive_to_send(build):
    built = build(3)
    # Rank r computes for 10 us as soon as it has received, then sends on, which takes 5 us.
    for rank in range(3):
        one = built[rank]
        one.step = 0
        begin = 15 * rank
        if rank:
            receive = one.message("recv", 0, begin, peer=rank - 1, tag=0, seq=0, out_bytes=4)
            one.wait(0, begin, receive)
        one.add("layer", begin, begin + 10, name=f"stage{rank}")
        if rank < 2:
            one.message("send", begin + 10, begin + 15, peer=rank + 1, tag=0, seq=0, bytes=4)
        one.whole_step(0, 0, begin + 10)
    assert _pieces(built.trace()) == [
        (0, "compute", "stage0", 0, 10),
        (1, "transfer", "recv", 10, 15),
        (1, "compute", "stage1", 15, 25),
        (2, "transfer", "recv", 25, 30),
        (2, "compute", "stage2", 30, 40),
    ]


def test_backward_is_named_by_the_gradients_it_makes(build):
    built = build(1)
    first, second = built.tensor("b", 4), built.tensor("a", 4)
    one = built[0]
    one.step = 0
    one.add("phase", 0, 10, name="forward")
    one.add("layer", 2, 8, name="net")
    one.add("layer", 3, 5, name="net.fc")
    one.add("phase", 10, 30, name="backward")
    one.add("gradient", 16, 16, tensors=[first])
    one.add("gradient", 24, 24, tensors=[second])
    one.whole_step(0, 0, 30)
    assert _pieces(built.trace()) == [
        (0, "compute", "forward", 0, 2),
        (0, "compute", "net", 2, 3),
        (0, "compute", "net.fc", 3, 5),
        (0, "compute", "net", 5, 8),
        (0, "compute", "forward", 8, 10),
        (0, "compute", "b.grad", 10, 16),
        (0, "compute", "a.grad", 16, 24),
        (0, "compute", "backward", 24, 30),
    ]


def test_a_wait_for_a_message_of_a_lost_rank_stays_unexplained(build):
    built = build(2)
    one = built[0]
    one.step = 0
    one.add("phase", 0, 10, name="forward")
    one.wait(10, 20, one.message("all_reduce", 10, 20, seq=0, bytes=4))
    one.wait(22, 25, None)
    one.whole_step(0, 0, 25)
    assert _pieces(built.trace()) == [
        (0, "compute", "forward", 0, 10),
        (0, "wait", "all_reduce", 10, 20),
        (0, "host", None, 20, 22),
        (0, "wait", None, 22, 25),
    ]


def test_the_walk_goes_on_before_the_rank_s_own_step(build):
    built = build(2)
    # Rank 1's step begins at 20, that of rank 0 at 0: rank 1's earlier events explain the rest.
    built[0].whole_step(0, 0, 30)
    one = built[1]
    one.add("data", 5, 12, name="next batch")
    one.step = 0
    one.add("phase", 20, 40, name="forward")
    one.whole_step(0, 20, 40)
    assert _pieces(built.trace()) == [
        (1, "idle", None, 0, 5),
        (1, "data", "next batch", 5, 12),
        (1, "host", None, 12, 20),
        (1, "compute", "forward", 20, 40),
    ]


def test_on_a_device_an_exposed_message_is_followed_and_a_gap_is_the_host_s(build):
    built = build(2)
    for rank, arrival in ((0, 20), (1, 45)):
        one = built[rank]
        one.step = 0
        one.add("host", 0, 15, name="aten::linear")
        one.add("kernel", 5, 20, lane="stream-7", name="gemm")
        one.message("all_reduce", arrival, 50, lane="stream-9", seq=0, bytes=4)
        one.whole_step(0, 0, 50 + rank)
    built[1].add("kernel", 30, 45, lane="stream-7", name="gelu")
    assert _pieces(built.trace()) == [
        (1, "host", "aten::linear", 0, 5),
        (1, "compute", "gemm", 5, 20),
        (1, "host", None, 20, 30),
        (1, "compute", "gelu", 30, 45),
        (1, "transfer", "all_reduce", 45, 50),
        (1, "host", None, 50, 51),
    ]


_TIMES = st.tuples(st.integers(0, 60), st.integers(0, 30))
_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ("forward", "backward", "optimizer", "layer", "data", "kernel", "copy", "wait")
        ),
        _TIMES,
    ),
    max_size=12,
)
_MESSAGES = st.lists(
    st.tuples(st.sampled_from(("all_reduce", "broadcast", "send", "recv")), _TIMES, st.booleans()),
    max_size=6,
)


@settings(
    deadline=None, max_examples=150 if all_cases() else 60, suppress_health_check=list(HealthCheck)
)
@given(st.lists(st.tuples(_EVENTS, _MESSAGES, _TIMES), min_size=1, max_size=3))
def test_whatever_the_events_parts_sum_to_the_whole(build_class, ranks):
    with tempfile.TemporaryDirectory() as folder:
        built = build_class(Path(folder) / "trace", len(ranks))
        for rank, (events, messages, (begin, length)) in enumerate(ranks):
            one = built[rank]
            one.step = 0
            numbers = []
            for number, (op, (start, size), is_open) in enumerate(messages):
                end = None if is_open else start + size
                peer = (rank + 1) % len(ranks)
                numbers.append(one.message(op, start, end, seq=number, bytes=4, peer=peer, tag=0))
            for i, (kind, (start, size)) in enumerate(events):
                if kind == "wait":
                    one.wait(start, start + size, numbers[i % len(numbers)] if numbers else None)
                elif kind in ("kernel", "copy"):
                    one.add(kind, start, start + size, lane=f"stream-{i % 2}", name="k")
                elif kind in ("layer", "data"):
                    one.add(kind, start, start + size, name="x")
                else:
                    one.add("phase", start, start + size, name=kind)
            one.whole_step(0, begin, begin + length + 1)
        analyzed = analyze_in_full(built.trace())
    analysis = analyzed.analysis
    (row,) = analysis.steps
    path = analyzed.paths[0]
    assert (path.start[1:] == path.end[:-1]).all()
    assert (path.end > path.start).all()
    assert sum(path.totals_ns().values()) == round(row.wall_us * 1000)
    steps = analysis.rank_steps
    parts = sum(steps[name] for name in ("compute_ns", "exposed_ns", "copy_ns", "idle_ns"))
    known = ~np.isnan(steps["compute_ns"])
    assert parts[known] == pytest.approx(steps["wall_ns"][known])
    due = sum(cause.direct_us + cause.propagated_us for cause in analysis.root_causes)
    assert due == pytest.approx(analysis.waiting.total_us)
    for rank_row in analysis.ranks:
        if rank_row.wait_us is not None:
            assert rank_row.wait_us + rank_row.transfer_us <= rank_row.comm_us + 1e-6
